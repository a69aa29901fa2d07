#!/usr/bin/env bash
# Run a command on several "nodes" at once, all of them on this machine:
#
#     examples/nodes.sh 2 COMMAND [ARGUMENTS]
#
# A node here is a network namespace: it has the host name node0, node1 and so on, its own address
# and loopback, and one cable to a switch. So only the network joins the nodes: an address or a port
# that works only within one machine fails here as between two machines. Files, cores and memory are
# shared. Everything disappears with the last process. It needs Linux, iproute2, and root or the
# right to make user namespaces.
set -euo pipefail

node() { # in a separate process: node NUMBER SWITCH HOSTS COMMAND...
    local name=node$1 address=10.0.0.$(($1 + 1)) switch=$2 hosts=$3
    shift 3
    hostname "$name"
    mount --bind "$hosts" /etc/hosts
    ip link set lo up
    ip link add eth0 type veth peer name "$name" netns "$switch"
    nsenter --target "$switch" --net ip link set "$name" master switch up
    ip address add "$address/24" dev eth0
    ip link set eth0 up
    exec "$@" > >(exec sed -u "s/^/[$name] /") 2>&1
}

if [[ ${1:-} == --node ]]; then
    shift
    node "$@"
fi
if [[ ! ${1:-} =~ ^[1-9][0-9]?$ || $# -lt 2 ]]; then
    echo "usage: examples/nodes.sh NODES COMMAND [ARGUMENTS]" >&2
    exit 2
fi
if [[ ! ${NODES_SWITCH:-} ]]; then # first, a namespace for the switch
    as_root=()
    [[ $(id -u) == 0 ]] || as_root=(--user --map-root-user)
    for program in ip unshare nsenter; do
        command -v $program >/dev/null || { echo "examples/nodes.sh: no $program" >&2; exit 3; }
    done
    if ! unshare "${as_root[@]}" --net --mount true; then
        echo "examples/nodes.sh: no right to make namespaces: run it as root" >&2
        exit 3
    fi
    NODES_SWITCH=1 exec unshare "${as_root[@]}" --net --mount "$BASH" "$0" "$@"
fi

nodes=$1
shift
ip link add switch type bridge
ip link set switch up
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
{
    echo "127.0.0.1 localhost"
    for ((n = 0; n < nodes; n++)); do echo "10.0.0.$((n + 1)) node$n"; done
} >"$hosts"

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM
for ((n = 0; n < nodes; n++)); do
    unshare --net --uts --mount "$BASH" "$0" --node "$n" $$ "$hosts" "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    one=0
    wait "$pid" || one=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal has ended `wait`, but not the process
        one=0
        wait "$pid" || one=$?
    done
    ((code >= one)) || code=$one
done
exit "$code"
