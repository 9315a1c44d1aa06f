"""A Parquet row group is read in pieces, however large it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Growth of the peak while all batches are read, in MiB.
READ = """
import re, sys
from pathlib import Path
from shardkit_tools.importers import ImportOptions
from shardkit_tools.importers.source_kinds import open_source
def peak():
    # not ru_maxrss, which begins with that of the process that started this one
    return int(re.search("VmHWM: *\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
importer = open_source(sys.argv[1], None, ImportOptions())
before = peak()
rows = sum(len(found.batch) for task in importer.tasks() for found in importer.decode(task))
print(rows, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.slow
def test_a_row_group_is_not_held_as_a_whole(tmp_path: Path) -> None:
    texts = [os.urandom(50_000).hex() for _ in range(4_000)]  # 400 MB, which no encoding makes smaller
    source = tmp_path / "one_group.parquet"
    # A page is read as a whole, and ends with such a batch.
    pq.write_table(
        pa.table({"text": texts}), source, compression="none", use_dictionary=False, write_batch_size=16
    )
    del texts
    done = subprocess.run(
        [sys.executable, "-c", READ, str(source)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows, grown = map(int, done.stdout.split())
    assert rows == 4_000
    assert grown < 200
