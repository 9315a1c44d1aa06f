"""A dataset of numbered rows from several sources, for tests of runs."""

from __future__ import annotations

from pathlib import Path

import shardkit

__all__ = ["write_rows"]


def write_rows(folder: Path, rows: int, sources: int = 4) -> shardkit.Dataset:
    """Write rows with the field x = n, the key ``k<n>`` and the stratum ``s<n mod sources>``; return the dataset."""
    root = str(folder / "rows")
    with shardkit.create(root, schema={"x": "int64", "source": "str"}, stratify="source") as writer:
        for n in range(rows):
            writer.add({"x": n, "source": f"s{n % sources}"}, key=f"k{n:03d}")
    return shardkit.open(root)
