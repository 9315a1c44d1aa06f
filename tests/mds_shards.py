"""Write MDS as Streaming's MDSWriter lays it out."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["write_shards"]


def write_shards(
    folder: Path,
    columns: Mapping[str, tuple[str, int | None]],
    shards: Sequence[Sequence[bytes]],
    compressor: Any = None,
) -> list[Path]:
    """Write encoded rows to a new folder, with zstd if there is a compressor, and return the paths of the shards.

    `columns` has the encoding of each column, and the size of its values if it is fixed.
    """
    folder.mkdir(parents=True)
    about = {
        "column_names": list(columns), "column_encodings": [one for one, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()], "format": "mds", "version": 2,
    }  # fmt: skip
    config, entries, paths = json.dumps(about).encode(), [], []
    for number, rows in enumerate(shards):
        offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(config), *map(len, rows)]).astype("<u4")
        body = struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(rows)
        paths.append(folder / f"shard.{number:05d}.mds")
        packed, raw = None, {"basename": paths[-1].name, "bytes": len(body), "hashes": {}}
        if compressor is not None:
            paths[-1], body = Path(f"{paths[-1]}.zstd"), compressor.compress(body)
            packed = {
                "basename": paths[-1].name,
                "bytes": len(body),
                "hashes": {"sha1": hashlib.sha1(body).hexdigest()},
            }
        paths[-1].write_bytes(body)
        shard: dict[str, Any] = {
            "compression": packed and "zstd:3",
            "hashes": [],
            "zip_data": packed,
            "samples": len(rows),
            "raw_data": raw,
        }
        entries.append(about | shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return paths
