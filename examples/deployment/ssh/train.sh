#!/bin/bash
# A training run on machines that one can log in to: torchrun on each, over plain ssh.
#
#   ./ssh/train.sh run.toml node-1 node-2 node-3
#
# Every machine has the same environment at $VENV, mounts the run directory, and sees the same CONFIG path. Ctrl-C here
# saves a checkpoint everywhere and stops; the same command, with other machines, goes on from there.
set -euo pipefail

usage='usage: train.sh CONFIG NODE…'
config=${1:?$usage}
shift
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
VENV=${VENV:-/opt/shardkit}
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
PORT=${PORT:-29500}
CACHE=${CACHE:-/var/cache/shardkit}
run=$(date +%s)
first=$1
nodes=$#

pids=()
# When its ssh ends, the remote side of the pseudo terminal gets SIGHUP; torchrun then stops its ranks, which save.
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM

for node in "$@"; do
    ssh -tt -o BatchMode=yes "$node" \
        "OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $VENV/bin/python -m torch.distributed.run" \
        "--nnodes=$nodes --nproc-per-node=$RANKS_PER_NODE --rdzv-backend=c10d --rdzv-id=$run" \
        "--rdzv-endpoint=$first:$PORT --max-restarts=20 --shutdown-timeout=60" \
        "-m shardkit_trainer '$config' 'data.cache=$CACHE' data.cache_size=800GiB" \
        </dev/null > >(sed -u "s/^/$node: /") 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
