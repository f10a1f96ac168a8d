#!/usr/bin/env bash
# Rehearse a run on several machines on this one: two network namespaces with an address each train, under
# accelerate_configs/zero3_multi_node.yaml and without a GPU; a third one serves. Needs root, for `ip netns`.
#
#     [SERVER='command …'] [LOGS=runs/two_nodes] scripts/two_nodes.sh -m lze_trl.job.train --config RECIPE [flags]
#
# SERVER runs in the third namespace; what it serves at port 8000 is http://10.77.0.3:8000 for the nodes. Each node writes
# LOGS/node0.log and LOGS/node1.log. If a node dies, the other one is given a minute to say so, and the script fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} logs=${LOGS:-runs/two_nodes} id=${ID:-$$}
nodes=("lze-$id-0" "lze-$id-1" "lze-$id-2") net="lze-$id-net"

[ "$(id -u)" = 0 ] && command -v ip >/dev/null || {
    echo "scripts/two_nodes.sh makes network namespaces: it needs root and \`ip\` (apt-get install iproute2)" >&2
    exit 2
}
mkdir -p "$logs"

cleanup() {
    for name in "${nodes[@]}" "$net"; do
        ip netns pids "$name" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$name" 2>/dev/null || true
    done
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$net"
ip -n "$net" link add bridge type bridge
ip -n "$net" link set bridge up
for i in 0 1 2; do
    name=${nodes[$i]}
    ip netns add "$name"
    ip link add "eth0" netns "$name" type veth peer name "to$i" netns "$net"
    ip -n "$net" link set "to$i" master bridge up
    ip -n "$name" addr add "10.77.0.$((i + 1))/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" link set lo up
done

if [ -n "${SERVER:-}" ]; then
    ip netns exec "${nodes[2]}" bash -c "exec $SERVER" >"$logs/server.log" 2>&1 &
    server=$!
    for _ in $(seq 300); do
        ip netns exec "${nodes[0]}" "$python" -c \
            'import urllib.request as u; u.urlopen("http://10.77.0.3:8000/health", timeout=2)' 2>/dev/null && break
        kill -0 "$server" 2>/dev/null || { echo "The server ended: $logs/server.log" >&2; tail -5 "$logs/server.log" >&2; exit 1; }
        sleep 1
    done
fi

# Without a GPU; the flag --cpu would start every node on its own
sed 's/^use_cpu:.*/use_cpu: true/' accelerate_configs/zero3_multi_node.yaml >"$logs/accelerate.yaml"
pids=()
for rank in 0 1; do
    ip netns exec "${nodes[$rank]}" env GLOO_SOCKET_IFNAME=eth0 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
        "$python" -m accelerate.commands.launch --config_file "$logs/accelerate.yaml" \
        --num_machines 2 --num_processes 2 --machine_rank "$rank" --main_process_ip 10.77.0.1 \
        --mixed_precision no --zero3_init_flag false "$@" >"$logs/node$rank.log" 2>&1 &
    pids+=($!)
done
echo "Two nodes train, 10.77.0.1 and 10.77.0.2: $logs/node0.log, $logs/node1.log"

status=0
wait -n "${pids[@]}" || status=$?
if [ "$status" != 0 ]; then
    for _ in $(seq 60); do # the other one notices by its next collective
        kill -0 "${pids[0]}" 2>/dev/null || kill -0 "${pids[1]}" 2>/dev/null || break
        sleep 1
    done
else
    wait "${pids[@]}" || status=$?
fi
[ "$status" = 0 ] || {
    echo "A node ended with status $status. Its last lines:" >&2
    tail -n 5 "$logs"/node?.log >&2
    exit "$status"
}
