#!/bin/sh
# Simulates two machines: two network namespaces with a cable between them, a process in each. Needs root and iproute2.
#   examples/two_machines/namespaces.sh PYTHON MODEL TEXT [OPTION ...]     options of generate.py
# DELAY_MS=0.5 MBIT=1000 simulate that latency and speed (cable.py); without them the cable is as fast as this machine.
set -eu

python=$1 model=$2 text=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
first="lowbit-$$-a" second="lowbit-$$-b"
ip netns add "$first"
trap 'kill $cable 2>/dev/null || true; ip netns del "$first"; ip netns del "$second" 2>/dev/null || true' EXIT
cable=
ip netns add "$second"
ip -n "$first" link set lo up
ip -n "$second" link set lo up
if [ -n "${DELAY_MS:-}${MBIT:-}" ]; then
  ip netns exec "$first" "$python" "$here/cable.py" 10.77.0.1 "$second" 10.77.0.2 "${DELAY_MS:-0}" "${MBIT:-1000}" &
  cable=$!
  until ip -n "$second" -br link show dev eth0 2>/dev/null | grep -q LOWER_UP; do
    kill -0 $cable && sleep 0.1
  done
else
  ip link add eth0 netns "$first" type veth peer name eth0 netns "$second"
  address() { # NAMESPACE ADDRESS
    ip -n "$1" addr add "$2/24" dev eth0
    ip -n "$1" link set eth0 up
  }
  address "$first" 10.77.0.1
  address "$second" 10.77.0.2
fi

rank() { # NAMESPACE RANK [OPTION ...]
  namespace=$1 rank=$2
  shift 2
  GLOO_SOCKET_IFNAME=eth0 ip netns exec "$namespace" "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
    --node-rank "$rank" --master-addr 10.77.0.1 "$here/generate.py" "$model" "$text" "$@"
}
rank "$second" 1 "$@" &
other=$!
rank "$first" 0 "$@"
wait $other
