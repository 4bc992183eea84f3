#!/usr/bin/env bash
# Start all vllm-ascend servers of one machine: external data parallelism, one API server per DP rank.
#
#   start_node.sh [--dry-run] TOPOLOGY prefill|decode INDEX
#
#   TOPOLOGY  2p1d, 4p1d or 5p1d: a file in topologies/
#   INDEX     which of the topology's prefill or decode machines this is, from 0
#
# Set before: MODEL (path of the weights), NIC (interface that the machines reach each other by).
# May be set: SERVED_NAME, LOG_DIR, MAX_NUM_SEQS, MAX_MODEL_LEN, KV_PIN_S, PREFIX_CACHING (of the prefillers, on or off),
# PREFILL_EXTRA, DECODE_EXTRA (further flags), DECODE_ADDITIONAL_CONFIG. Run it on the decode machines and the prefill
# machines at about the same time; it ends, and stops the servers of this machine, when one of them ends or on Ctrl-C.
# --dry-run prints the commands instead.
set -euo pipefail

fail() {
  printf 'start_node.sh: %s\n' "$1" >&2
  exit 2
}

dry_run=false
if [[ ${1-} == --dry-run ]]; then
  dry_run=true
  shift
fi
[[ $# -eq 3 ]] || fail "usage: start_node.sh [--dry-run] TOPOLOGY prefill|decode INDEX"
topology=$1 role=$2 index=$3
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
topologies=("$here"/topologies/*.sh) topologies=("${topologies[@]##*/}")
[[ -f $here/topologies/$topology.sh ]] || fail "no topology $topology; there are: ${topologies[*]%.sh}"
[[ $index =~ ^(0|[1-9][0-9]*)$ ]] || fail "INDEX $index is not a number"
# shellcheck source=topologies/4p1d.sh
source "$here/topologies/$topology.sh"

model=${MODEL:-MODEL} # the names are placeholders for a dry run
nic=${NIC:-NIC}
served_name=${SERVED_NAME:-deepseek_v3}
log_dir=${LOG_DIR:-./logs}
max_num_seqs=${MAX_NUM_SEQS:-64}     # decode.max_num_seqs in the router's YAML
max_model_len=${MAX_MODEL_LEN:-40000}
case ${PREFIX_CACHING:-on} in
  on) prefill_caching=--enable-prefix-caching ;;
  off) prefill_caching=--no-enable-prefix-caching ;;
  *) fail "PREFIX_CACHING is ${PREFIX_CACHING}; it may be on or off" ;;
esac
kv_pin_s=${KV_PIN_S:-480}            # prefill.kv_pin_s in the router's YAML
rpc_port=12321
# On a machine with 16 NPUs the Ascend transport takes random ports from 20000 to 35999: stay above. A server listens
# on its group's KV port + DP rank * TP and the TP - 1 ports after that: at most 64 per group here, so 100 keep clear.
kv_port_base=36000

case $role in
  prefill)
    hosts=("${PREFILL_HOSTS[@]}") dp=$PREFILL_DP tp=$PREFILL_TP port=$PREFILL_PORT
    local_ranks=$dp first_rank=0 # a DP group per machine
    ;;
  decode)
    hosts=("${DECODE_HOSTS[@]}") dp=$DECODE_DP tp=$DECODE_TP port=$DECODE_PORT
    local_ranks=$((dp / ${#hosts[@]}))
    first_rank=$((local_ranks * index))
    ;;
  *) fail "role $role is neither prefill nor decode" ;;
esac
((index < ${#hosts[@]})) || fail "$topology has ${#hosts[@]} $role machines, so INDEX is 0 to $((${#hosts[@]} - 1))"
host=${hosts[index]}
if ! $dry_run; then
  [[ -n ${MODEL:-} ]] || fail "set MODEL to the path of the weights"
  [[ -n ${NIC:-} ]] || fail "set NIC to the network interface, such as eth0"
  command -v vllm >/dev/null || fail "vllm is not on the PATH: run this inside the vllm-ascend container"
fi

# Which KV group this machine belongs to: every prefill machine is an engine of its own, the decode machines share one.
if [[ $role == prefill ]]; then
  engine_id=$index kv_role=kv_producer dp_address=$host
else
  engine_id=${#PREFILL_HOSTS[@]} kv_role=kv_consumer dp_address=${hosts[0]}
fi
kv_port=$((kv_port_base + 100 * engine_id))
parallel_sizes=$(printf '{"prefill": {"dp_size": %s, "tp_size": %s}, "decode": {"dp_size": %s, "tp_size": %s}}' \
  "$PREFILL_DP" "$PREFILL_TP" "$DECODE_DP" "$DECODE_TP")
kv_transfer_config=$(printf '{"kv_connector": "MooncakeConnectorV1", "kv_role": "%s", "kv_port": "%s", "engine_id": "%s", ' \
  "$kv_role" "$kv_port" "$engine_id")
kv_transfer_config+="\"kv_connector_extra_config\": $parallel_sizes}"

environment=(
  "HCCL_IF_IP=$host"
  "GLOO_SOCKET_IFNAME=$nic"
  "TP_SOCKET_IFNAME=$nic"
  "HCCL_SOCKET_IFNAME=$nic"
  "HCCL_OP_EXPANSION_MODE=AIV"
  "OMP_PROC_BIND=false"
  "OMP_NUM_THREADS=10"
  "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
  "TASK_QUEUE_ENABLE=1"
  # How long a prefiller keeps KV that no decoder has pulled. The clock starts when the prefill is done and nothing
  # extends it; the router's pool.ttl_s must stay well below. (Before vllm-ascend 0.18: VLLM_NIXL_ABORT_REQUEST_TIMEOUT.)
  "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=$kv_pin_s"
)
common=(
  --host 0.0.0.0
  --served-model-name "$served_name"
  --trust-remote-code
  --seed 1024
  --quantization ascend
  --data-parallel-size "$dp"
  --data-parallel-address "$dp_address"
  --data-parallel-rpc-port "$rpc_port"
  --tensor-parallel-size "$tp"
  --enable-expert-parallel
  --max-model-len "$max_model_len"
  --kv-transfer-config "$kv_transfer_config"
)
if [[ $role == prefill ]]; then
  environment+=("HCCL_BUFFSIZE=256")
  read -r -a extra <<<"${PREFILL_EXTRA:-}"
  common+=(
    --max-num-batched-tokens 16384
    --max-num-seqs 8
    --gpu-memory-utilization 0.9
    --enforce-eager
    --enable-prompt-tokens-details # the router learns what was cached
    "$prefill_caching"
  )
else
  environment+=("HCCL_BUFFSIZE=600")
  read -r -a extra <<<"${DECODE_EXTRA:-}"
  # With the recompute scheduler a decoder that runs out of KV blocks hands the request back ("recomputed") instead of
  # prefilling it again itself; the router resumes it, token-exact, through a prefiller.
  additional=${DECODE_ADDITIONAL_CONFIG:-'{"scheduler_config": {"recompute_scheduler_enable": true}}'}
  common+=(
    --max-num-batched-tokens 256
    --max-num-seqs "$max_num_seqs"
    --no-enable-prefix-caching # a decoder computes no prompts
    --gpu-memory-utilization 0.94
    --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
    --additional-config "$additional"
  )
fi

# Fills `command` for the n-th rank of this machine.
rank_command() {
  local n=$1 devices
  devices=$(seq -s, $((n * tp)) $(((n + 1) * tp - 1)))
  command=(
    env "${environment[@]}" "ASCEND_RT_VISIBLE_DEVICES=$devices"
    vllm serve "$model"
    --port $((port + n))
    --data-parallel-rank $((first_rank + n))
    "${common[@]}" ${extra[@]+"${extra[@]}"}
  )
}

# KV metadata and the rendezvous go between machines directly, never through a web proxy.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY

if $dry_run; then
  for ((n = 0; n < local_ranks; n++)); do
    rank_command "$n"
    printf '%q ' "${command[@]}"
    printf '\n'
  done
  exit 0
fi

mkdir -p "$log_dir"
pids=()
# shellcheck disable=SC2317 # reached through the traps
stop_all() {
  trap - EXIT INT TERM
  kill -- "${pids[@]}" 2>/dev/null || true
  wait || true
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for ((n = 0; n < local_ranks; n++)); do
  rank_command "$n"
  log=$log_dir/$role-$index-rank$((first_rank + n)).log
  "${command[@]}" >"$log" 2>&1 &
  pids+=("$!")
  printf '%s %s: DP rank %s of %s on http://%s:%s, log %s\n' \
    "$topology" "$role" $((first_rank + n)) "$dp" "$host" $((port + n)) "$log"
done
# a rank that is gone stalls its whole group at the barrier: end the others too, so that it shows
wait -n || true
fail "a server ended; its log is in $log_dir. Stopping the others of this machine."
