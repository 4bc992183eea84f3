#!/usr/bin/env bash
# Wait until every server of a topology answers, then ask one of each role for its models.
#
#   wait_ready.sh TOPOLOGY [SECONDS]      (default 1800: loading the weights takes minutes)
set -euo pipefail

[[ $# -ge 1 && $# -le 2 && ${1-} != -* && ${2-0} =~ ^[0-9]+$ ]] || {
  echo "usage: wait_ready.sh TOPOLOGY [SECONDS]" >&2
  exit 2
}
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
topologies=("$here"/topologies/*.sh) topologies=("${topologies[@]##*/}")
[[ -f $here/topologies/$1.sh ]] || {
  echo "wait_ready.sh: no topology $1; there are: ${topologies[*]%.sh}" >&2
  exit 2
}
# shellcheck source=topologies/4p1d.sh
source "$here/topologies/$1.sh"
deadline=$((SECONDS + ${2:-1800}))

wait_for() {
  until curl --noproxy '*' -fsS -m 3 -o /dev/null "$1/health" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
      echo "wait_ready.sh: $1 does not answer /health" >&2
      exit 1
    fi
    sleep 5
  done
  echo "up: $1"
}

for host in "${PREFILL_HOSTS[@]}"; do
  for ((n = 0; n < PREFILL_DP; n++)); do wait_for "http://$host:$((PREFILL_PORT + n))"; done
done
for host in "${DECODE_HOSTS[@]}"; do
  for ((n = 0; n < DECODE_DP / ${#DECODE_HOSTS[@]}; n++)); do wait_for "http://$host:$((DECODE_PORT + n))"; done
done
for url in "http://${PREFILL_HOSTS[0]}:$PREFILL_PORT" "http://${DECODE_HOSTS[0]}:$DECODE_PORT"; do
  curl --noproxy '*' -fsS -m 5 "$url/v1/models"
  echo
done
