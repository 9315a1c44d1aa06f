#!/bin/bash
# A training run on machines that one can log in to: torchrun on each, over plain ssh.
#
#   ./ssh/train.sh run.toml node-1 node-2 node-3
#   ./ssh/train.sh run.toml node-1 -- --allow-changes=run.epochs    # what follows -- is the trainer's
#
# Every machine has the same environment at $VENV, mounts the run directory, and sees the same CONFIG path. Ctrl-C here
# saves a checkpoint everywhere and stops; the same command, with other machines, goes on from there.
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
run=$(date +%s)

pids=()
# When its ssh ends, the remote side of the pseudo terminal gets SIGHUP; torchrun then stops its ranks, which save.
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM

for node in "${nodes[@]}"; do
    ssh -tt -o BatchMode=yes "$node" \
        "OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $VENV/bin/python -m torch.distributed.run" \
        "--nnodes=${#nodes[@]} --nproc-per-node=$RANKS_PER_NODE --rdzv-backend=c10d --rdzv-id=$run" \
        "--rdzv-endpoint=${nodes[0]}:$PORT --max-restarts=20 --shutdown-timeout=60" \
        "-m shardkit_trainer '$config' 'data.cache=$CACHE' data.cache_size=800GiB $options" \
        </dev/null > >(sed -u "s/^/$node: /") 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
