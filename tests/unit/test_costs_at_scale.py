"""Seeking into a plan with costs of a billion rows reads few pieces and holds little memory."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import hashlib
import numpy as np
from shardkit.dataset.costs import PIECE_ROWS, CostCodes
from shardkit.manifest import ShardTable
from shardkit.plan import Costs, Population, make_plan
from shardkit.reading.blocks import RowMap


def peak_kib():  # not ru_maxrss, which counts the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

SHARDS, ROWS, PER_PIECE = 100_000, 10_000, PIECE_ROWS // 10_000
each = np.full(SHARDS, ROWS)
rows = RowMap(ShardTable(
    digest=np.zeros((SHARDS, 32), np.uint8), size=each, index_digest=np.zeros((SHARDS, 32), np.uint8), index_size=each,
    rows=each, selected=each, block_rows=np.full(SHARDS, 100), largest_block=each, raw_bytes=each,
    selection_digest=np.zeros((SHARDS, 32), np.uint8), segment_shard=np.arange(SHARDS),
    segment_stratum=np.zeros(SHARDS, np.int32), segment_rows=each, segment_selected=each,
), lambda shard: None)
pattern = (np.arange(4099) * 7919 % 97 + 40).astype(np.uint8)
starts, loaded = np.arange(SHARDS + 1) * ROWS, []

def load(piece):  # what a read of a piece does: so many bytes, hashed
    loaded.append(piece)
    codes = np.resize(pattern[piece % 7 :], int(first[piece + 1] - first[piece]))
    hashlib.sha256(codes).digest()
    return codes

first = np.append(np.arange(0, SHARDS, PER_PIECE) * ROWS, SHARDS * ROWS)
costs = Costs("drawn", CostCodes(rows, starts, first, load))
people = Population.of("sha256:many", ["all"], [(i, 0, ROWS) for i in range(SHARDS)], 100)
before = peak_kib()  # the imports and the tables of the dataset
plan = make_plan(people, global_batch=512, lanes=64, cost=costs)
plan.steps(1_234_567, 1_234_568, range(8, 16))
print((peak_kib() - before) // 1024, len(set(loaded)), len(first) - 1)
"""


def test_a_seek_reads_the_pieces_of_its_windows() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    grown, read, pieces = map(int, told.split())
    assert grown < 128, told  # MiB; all codes are 954
    assert read < pieces // 8, told
