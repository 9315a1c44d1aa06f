"""From WebDataset tars and MosaicML MDS shards to shardkit: adopt files in place, or build new shards.

    python examples/guides/migrating.py

**WebDataset.** Tars can be *adopted*: one pass indexes and hashes them in place (on a disk, S3 or any URL) and copies
nothing. Every later read is verified and can seek. The command prints which guarantees adopted data lacks: for example,
each stratum stays in the tars that contain it. ``shardkit build`` instead spreads the same samples over shards by
class; the new shards are tars that webdataset reads too.

**MDS.** ``shardkit build FOLDER ROOT`` reads ``index.json`` and its shards, plain or compressed, of every encoding
but pickle.

docs/coming_from.md shows how training loops change, and which features have no counterpart.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import shardkit as sk
from guide_shell import shardkit, workplace

COUNT = 300


def samples() -> Iterator[tuple[str, bytes, int]]:
    """Yield (key, bytes, label), sorted by label, as tars often are."""
    for number in range(COUNT):
        yield f"{number:06d}", bytes([number % 256]) * (200 + number), number // 100


def write_webdataset(folder: Path) -> None:
    """Write three tars of `key.bin` and `key.cls`, named as by webdataset's ShardWriter."""
    folder.mkdir()
    found = list(samples())
    for shard in range(3):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for key, data, label in found[shard * 100 : shard * 100 + 100]:
                for name, content in ((f"{key}.bin", data), (f"{key}.cls", str(label).encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def write_mds(folder: Path) -> None:
    """Write one MDS shard: number of samples, offsets, then the variable sizes and the columns of each sample."""
    folder.mkdir()
    columns = {"data": "bytes", "label": "int"}
    rows = [struct.pack("<I", len(data)) + data + struct.pack("<q", label) for _, data, label in samples()]
    config = json.dumps({"version": 2, "format": "mds", "column_names": list(columns)}).encode()
    start = 4 + 4 * (len(rows) + 1) + len(config)
    offsets = np.cumsum([start, *map(len, rows)]).astype("<u4")
    body = struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(rows)
    (folder / "shard.00000.mds").write_bytes(body)
    shard = {
        "column_names": list(columns), "column_encodings": list(columns.values()), "column_sizes": [None, 8],
        "compression": None, "format": "mds", "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(body), "hashes": {}},
        "samples": len(rows), "size_limit": 1 << 26, "version": 2, "zip_data": None,
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def first_epoch(root: str, name: str) -> tuple[list[bytes], float]:
    """Return all payloads, sorted, and the mean number of labels in a batch of 12."""
    dataset = sk.open(root)
    plan = dataset.plan(global_batch=12, lanes=4, seed=0, remainder="short")
    payloads: list[bytes] = []
    labels: list[int] = []
    with dataset.loader(plan, tensors=False, uneven=True) as loader:
        for batch in loader:
            payloads += [bytes(data) for data in batch[name]]
            labels.append(len(set(batch["label" if "label" in batch else "cls"].tolist())))
    return sorted(payloads), float(np.mean(labels))


def main() -> None:
    with workplace(__doc__):
        write_webdataset(Path("tars"))
        write_mds(Path("mds"))
        # In place: the tars remain the data, and only indexes and a manifest are written.
        shardkit("adopt", "tars", "data/adopted", "--jobs", 1)
        before = {path.name: path.stat().st_mtime_ns for path in Path("tars").iterdir()}
        # Built: spread by class over new shards; --dry-run first reports what a build would write.
        shardkit("build", "tars", "data/built", "--stratify", "label", "--jobs", 1, "--dry-run")
        shardkit("build", "tars", "data/built", "--stratify", "label", "--jobs", 1)
        shardkit("build", "mds", "data/from-mds", "--stratify", "label", "--format", "tar", "--jobs", 1)

        expected = sorted(data for _, data, _ in samples())
        for root in ("data/adopted", "data/built", "data/from-mds"):
            field = next(name for name, kind in sk.open(root).schema.items() if str(kind) == "bytes")
            payloads, labels = first_epoch(root, field)
            assert payloads == expected, "every sample once, to the last byte"
            print(f"{root}: {len(payloads)} samples, {labels:.1f} of 3 labels in a batch of 12")
        assert before == {path.name: path.stat().st_mtime_ns for path in Path("tars").iterdir()}

        # And back: shards are plain tars with WebDataset's names, so webdataset.WebDataset(urls) reads them.
        urls = shardkit("export", "data/from-mds", "--as", "urls").split()
        with tarfile.open(urls[0]) as tar:
            print("in the first shard:", ", ".join(tar.getnames()[:4]), "…")


if __name__ == "__main__":
    main()
