"""A program that loads datasets while their files are changed, and reports what it saw; see test_changing_files.py.

    python changing_files_reader.py WHERE COMPILED SEED CHANGES FOLDER…

It has processes of its own, for what it looks for can kill one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

COMPILED = ("shardkit.loader.block_rows",)
SHARDS = (".tar", ".zst", ".zstd", ".arrow", ".npy", ".npz", ".bin", ".parquet", ".jpg", ".jsonl")


def flip(data: bytearray, chance: random.Random) -> None:
    bit = chance.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8


def zero(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.choice([1, 512, 40_000]))
    data[start:stop] = bytes(stop - start)


def shift(data: bytearray, chance: random.Random) -> None:
    """What follows lies a few bytes on; the size stays."""
    start, by = chance.randrange(len(data)), chance.choice([1, 4, 8, 512])
    data[start:] = (bytes(by) + data[start:])[: len(data) - start]


def offsets(data: bytearray, chance: random.Random) -> None:
    """Some neighbouring 32-bit numbers are far larger: where they are offsets, they point outside."""
    start = chance.randrange(max(1, len(data) // 4 - 64)) * 4
    for at in range(start, min(len(data) - 4, start + 256), 4):
        data[at : at + 4] = chance.randrange(2**31).to_bytes(4, "little")


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def noise(data: bytearray, chance: random.Random) -> None:
    data[:] = chance.randbytes(len(data))


IN_PLACE = (flip, zero, shift, offsets, truncate, noise)


class Files:
    """The shards of a folder: changed at random, and put back."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance, self.lock = chance, threading.Lock()
        self.changed: set[Path] = set()
        self.made = 0
        self._folder = folder
        self._whole: dict[Path, bytes] = {}

    def look(self) -> list[Path]:
        """Those that are there; what was new is remembered as it is."""
        found = sorted(p for p in self._folder.rglob("*") if p.is_file() and _is_data(p))
        for path in found:
            if path not in self._whole:
                self._whole[path] = path.read_bytes()
        return sorted(path for path in self._whole if path.exists())

    def change(self) -> None:
        with self.lock:
            there = self.look()
            if not there:
                return
            path = self.chance.choice(there)
            number = self.chance.randrange(len(IN_PLACE) + 2)
            self.changed.add(path)
            self.made += 1
            if number == len(IN_PLACE):
                path.unlink()
            elif number > len(IN_PLACE):
                self._put(path, self._whole[self.chance.choice(there)][::-1])
            else:
                data = bytearray(path.read_bytes() or b"\0")
                IN_PLACE[number](data, self.chance)
                path.chmod(0o644)
                with path.open("r+b") as file:
                    file.truncate(len(data))
                    file.write(data)

    def restore(self) -> None:
        with self.lock:
            for path in self.changed:
                self._put(path, self._whole[path])
            self.changed.clear()

    def _put(self, path: Path, data: bytes) -> None:
        new = path.with_name(path.name + ".new")
        new.write_bytes(data)
        os.replace(new, path)


def _is_data(path: Path) -> bool:
    return path.suffix in SHARDS or "blocks" in path.parts


def facts(value: Any) -> list[bytes]:
    """A field's rows as bytes."""
    import numpy as np

    if isinstance(value, tuple):
        values, borders = value
        return [values[a:b].tobytes() for a, b in pairwise(borders)]
    if isinstance(value, list):
        return [one if isinstance(one, bytes) else str(one).encode() for one in value]
    return [row.tobytes() for row in np.asarray(value)]


def rows(batch: Any) -> dict[int, bytes]:
    names = sorted(name for name in batch if name not in ("step", "samples"))
    columns = zip(*(facts(batch[name]) for name in names), strict=True)
    digests = (hashlib.sha256(b"|".join(row)).digest() for row in columns)
    return dict(zip(batch.samples.tolist(), digests, strict=True))


def open_loader(folder: Path, where: str) -> Any:
    import shardkit

    root = str(folder / "root") if where == "local" else f"memory://{folder.name}"
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=16, lanes=2, window_blocks=3, seed=3)
    more: dict[str, Any] = {} if where == "local" else {"cache": folder / "cache", "cache_size": "64MiB"}
    return ds.loader(plan, rank=0, world=1, tensors=False, threads=2, **more)


def read(folder: Path, where: str, files: Files, truth: dict[int, bytes], seen: dict[str, int]) -> None:
    """Two loops, during which files are changed: between batches, or at any time by a thread."""
    from shardkit.errors import ShardkitError

    stop, changing = threading.Event(), files.chance.random() < 0.5

    def change() -> None:
        while not stop.wait(0.002):
            files.change()

    writer = threading.Thread(target=change)
    loader = None
    try:
        loader = open_loader(folder, where)
        if changing:
            writer.start()
        for _ in range(2):
            for batch in loader:
                seen["batches"] += 1
                seen["wrong"] += any(truth.get(sample) != row for sample, row in rows(batch).items())
                if not changing and files.chance.random() < 0.2:
                    files.change()
    except ShardkitError as error:
        names = [part for path in files.changed for part in (path.name[:12], path.name)]
        seen["errors"] += 1
        if not any(name in str(error) for name in names):
            seen["unnamed"] += 1
            print(f"names no changed file: {type(error).__name__}: {error}", flush=True)
    finally:
        stop.set()
        if changing and writer.ident is not None:
            writer.join()
        if loader is not None:
            loader.close()


def main() -> None:
    where, compiled, seed, changes, *folders = sys.argv[1:]
    if compiled == "plain":
        sys.modules.update(dict.fromkeys(COMPILED))  # type: ignore[arg-type]
    from shardkit.loader import block_loading

    block_loading._LONG_BYTES = 1000  # type: ignore[misc]  # the blobs of these datasets are short for long ones
    warnings.simplefilter("ignore")
    seen = dict.fromkeys(("changes", "batches", "errors", "wrong", "unnamed"), 0)
    for number, folder in enumerate(map(Path, folders)):
        if where == "cache":
            import fsspec

            fsspec.filesystem("memory").put(str(folder / "root"), f"/{folder.name}", recursive=True)
        truth: dict[int, bytes] = {}
        for batch in (loader := open_loader(folder, where)):
            truth |= rows(batch)
        loader.close()
        files = Files(
            folder / "cache" if where == "cache" else folder, random.Random(f"{seed} {folder.name}")
        )
        files.look()
        print(f"{folder.name}: seed {seed}", flush=True)
        wanted = int(changes) * (number + 1) // len(folders) - int(changes) * number // len(folders)
        began = time.monotonic()
        while files.made < wanted and time.monotonic() < began + 120:
            files.restore()
            read(folder, where, files, truth, seen)
        files.restore()
        seen["changes"] += files.made
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
