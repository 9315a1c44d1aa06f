#!/bin/bash
# A training run on machines that one can log in to: shardkit train on each, over plain ssh.
#
#   ./ssh/train.sh run.toml node-1 node-2 node-3
#   ./ssh/train.sh run.toml node-1 -- run.epochs=4    # what follows -- is for shardkit train
#
# Every machine has the same environment at $VENV, mounts the run directory, and sees the same CONFIG path. Ctrl-C here
# saves a checkpoint everywhere and stops; the same command, with other machines, continues from there.
set -euo pipefail

usage='usage: train.sh CONFIG NODE… [-- OPTION…]'
config=${1:?$usage}
shift
nodes=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do nodes+=("$1"); shift; done
[ ${#nodes[@]} -gt 0 ] || { echo "$usage" >&2; exit 2; }
[ $# -eq 0 ] || shift
options=$([ $# -eq 0 ] || printf '%q ' "$@")
VENV=${VENV:-/opt/shardkit}
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
PORT=${PORT:-29500}
CACHE=${CACHE:-/var/cache/shardkit}

pids=()
# When its ssh ends, the remote side of the pseudo terminal gets SIGHUP; its ranks then save and end.
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM

for node in "${nodes[@]}"; do
    ssh -tt -o BatchMode=yes "$node" \
        "$VENV/bin/shardkit train '$config' 'data.cache=$CACHE' data.cache_size=800GiB" \
        "--nproc=$RANKS_PER_NODE --nnodes=${#nodes[@]} --rendezvous=${nodes[0]}:$PORT --max-restarts=20 $options" \
        </dev/null > >(sed -u "s/^/$node: /") 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
