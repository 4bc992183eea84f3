# shellcheck shell=bash disable=SC2034
# 5P1D, 144 NPUs (16 per machine), G = 16 decode workers. The router's side is configs/5p1d.yaml.

PREFILL_HOSTS=(10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5)
DECODE_HOSTS=(10.0.1.1 10.0.1.2 10.0.1.3 10.0.1.4)

# each prefill machine is a DP group of its own; all decode machines are one
PREFILL_DP=2
PREFILL_TP=8
DECODE_DP=16
DECODE_TP=4

# first HTTP port of a machine; its ranks take the ports from there on
PREFILL_PORT=8100
DECODE_PORT=9000
