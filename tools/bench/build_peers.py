"""Run a peer's writer in the peers' environment: python build_peers.py WRITER SOURCE OUT → JSON of seconds and CPU.

SOURCE is an ``.npy`` of token rows, or a folder of files. Imports and opening the source are not measured. The clock
stops when the writer has closed; none of these writers syncs.
"""

# mypy: ignore-errors
# the packages are optional, and only in the peers' environment
from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Source:
    """Return the rows of a file, or the files of a folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_tokens = path.endswith(".npy")
        self.rows = np.load(path, mmap_mode="r") if self.is_tokens else None
        self.files = [] if self.is_tokens else sorted(Path(path).iterdir())

    def __len__(self) -> int:
        return len(self.rows) if self.is_tokens else len(self.files)

    def __getitem__(self, number: int) -> Any:
        return np.array(self.rows[number]) if self.is_tokens else self.files[number].read_bytes()

    def values(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


def mds(source: Source, out: str, hashes: list[str]) -> Callable[[], None]:
    from streaming import MDSWriter

    kind = "ndarray:int32:2048" if source.is_tokens else "bytes"

    def work() -> None:
        with MDSWriter(out=out, columns={"value": kind}, hashes=hashes) as writer:
            for value in source.values():
                writer.write({"value": value})

    return work


def litdata(source: Source, out: str) -> Callable[[], None]:
    from litdata import optimize

    def work() -> None:
        optimize(
            _Item(source.path),
            list(range(len(source))),
            out,
            num_workers=1,
            chunk_bytes="64MB",
            verbose=False,
        )

    return work


class _Item:
    """Return one sample; `optimize` calls this function in its worker."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.source: Source | None = None

    def __call__(self, number: int) -> Any:
        self.source = self.source or Source(self.path)
        return {"value": self.source[number]}


def webdataset(source: Source, out: str) -> Callable[[], None]:
    from webdataset import TarWriter

    def work() -> None:
        os.mkdir(out)
        per_tar = max(1, len(source) // max(1, os.cpu_count() or 1))
        for first in range(0, len(source), per_tar):
            with TarWriter(f"{out}/{first:08d}.tar") as writer:
                for number in range(first, min(len(source), first + per_tar)):
                    name = "value.npy" if source.is_tokens else "value.bin"
                    writer.write({"__key__": f"{number:010d}", name: source[number]})

    return work


def grain(source: Source, out: str) -> Callable[[], None]:
    from array_record.python.array_record_module import ArrayRecordWriter

    def work() -> None:
        os.mkdir(out)
        writer = ArrayRecordWriter(f"{out}/data.array_record", "group_size:1,uncompressed")
        for value in source.values():
            writer.write(value.tobytes() if source.is_tokens else value)
        writer.close()

    return work


def hf(source: Source, out: str) -> Callable[[], None]:
    import datasets

    kind = (
        datasets.List(datasets.Value("int32"), length=2048)
        if source.is_tokens
        else datasets.Value("large_binary")
    )

    def rows() -> Iterator[dict[str, Any]]:
        for value in source.values():
            yield {"value": value}

    def work() -> None:
        datasets.disable_progress_bars()
        made = datasets.Dataset.from_generator(
            rows, features=datasets.Features({"value": kind}), cache_dir=f"{out}/cache"
        )
        assert len(made) == len(source)

    return work


def lance(source: Source, out: str) -> Callable[[], None]:
    import lance as library
    import pyarrow as pa

    kind = pa.list_(pa.int32(), 2048) if source.is_tokens else pa.large_binary()
    schema = pa.schema([("value", kind)])

    def batches() -> Iterator[Any]:
        for first in range(0, len(source), 1000):
            last = min(len(source), first + 1000)
            if source.is_tokens:
                flat = pa.array(np.ascontiguousarray(source.rows[first:last]).reshape(-1))
                column = pa.FixedSizeListArray.from_arrays(flat, 2048)
            else:
                column = pa.array([source[number] for number in range(first, last)], kind)
            yield pa.RecordBatch.from_arrays([column], schema=schema)

    return lambda: library.write_dataset(batches(), out, schema=schema) and None


WRITERS: dict[str, Callable[[Source, str], Callable[[], None]]] = {
    "mds": lambda source, out: mds(source, out, []),
    "mds-hashes": lambda source, out: mds(source, out, ["sha256", "xxh3_64"]),
    "litdata": litdata,
    "webdataset": webdataset,
    "grain": grain,
    "hf": hf,
    "lance": lance,
}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    work = WRITERS[sys.argv[1]](Source(sys.argv[2]), sys.argv[3])
    cpu, begun = _cpu(), time.perf_counter()
    work()
    print("\n" + json.dumps({"seconds": time.perf_counter() - begun, "cpu_s": _cpu() - cpu}))


if __name__ == "__main__":
    main()
