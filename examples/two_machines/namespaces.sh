#!/bin/sh
# Two machines on one: two network namespaces with a cable between them, a process in each. Needs root and iproute2.
#   examples/two_machines/namespaces.sh PYTHON MODEL TEXT
set -eu

python=$1
here=$(cd "$(dirname "$0")" && pwd)
first="lowbit-$$-a" second="lowbit-$$-b"
ip netns add "$first"
trap 'ip netns del "$first"; ip netns del "$second" 2>/dev/null || true' EXIT
ip netns add "$second"
ip link add eth0 netns "$first" type veth peer name eth0 netns "$second"
address() { # NAMESPACE ADDRESS
  ip -n "$1" addr add "$2/24" dev eth0
  ip -n "$1" link set lo up
  ip -n "$1" link set eth0 up
}
address "$first" 10.77.0.1
address "$second" 10.77.0.2

rank() { # NAMESPACE RANK MODEL TEXT
  GLOO_SOCKET_IFNAME=eth0 ip netns exec "$1" "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
    --node-rank "$2" --master-addr 10.77.0.1 "$here/generate.py" "$3" "$4" --compare
}
rank "$second" 1 "$2" "$3" &
rank "$first" 0 "$2" "$3"
wait $!
