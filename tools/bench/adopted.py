"""Measure adopted files next to peers that read the same files, shuffled; adoption; opening many files.

    python tools/bench/adopted.py read --peers FOLDER --out tools/bench/results/adopted
    python tools/bench/adopted.py adopt --size 10GB
    python tools/bench/adopted.py open --files 100000

read: Parquet files of pictures and of text, a file of tokens (`.bin`) and a folder of MDS. Every reader is a process of
its own and goes once through the rows in batches, from the page cache. Readers take turns; a rate is the median over
rounds. pyarrow.dataset does not shuffle and is the limit of decoding; numpy.memmap takes permuted rows and is the limit
of copying. The digest of a reader's rows, order left out, must be the digest of the files, except of nanoGPT's loop,
which draws windows with replacement. FOLDER has the environments `litdata` and `mosaicml_streaming` of
`bench/interruptions`.

adopt: an adoption in one process, and a pass that reads the same files and computes SHA-256 twice and XXH3, which an
adoption needs (of the file, of its blocks), in seconds and in processor seconds; lines, CSV and tars have an eighth of
the bytes. open: a manifest of N adopted files, opened and planned in a new process.
"""

# mypy: ignore-errors
# the peers are optional
from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

BATCH = 64
_TABLE_READERS = ("shardkit", "datasets map", "datasets streaming", "litdata", "pyarrow.dataset")
READERS = {
    "pictures": _TABLE_READERS,
    "text": _TABLE_READERS,
    "tokens": ("shardkit", "nanoGPT's loop", "numpy.memmap"),
    "mds": ("shardkit", "streaming"),
}
_LIMITS = ("pyarrow.dataset", "numpy.memmap")
_OTHERS = {"litdata": "litdata", "streaming": "mosaicml_streaming"}  # reader → environment
_MODULES = {
    "shardkit": ("shardkit.dataset.dataset", "shardkit.loader.loader", "torch", "pyarrow.parquet"),
    "datasets map": ("datasets",),
    "datasets streaming": ("datasets",),
    "litdata": ("litdata.streaming.item_loader",),
    "pyarrow.dataset": ("pyarrow.dataset",),
    "nanoGPT's loop": ("numpy", "torch"),
    "numpy.memmap": ("numpy", "torch"),
    "streaming": ("streaming",),
}
"""Imported before a reader's time begins; opening the files belongs to it."""
_TOKENS_A_ROW = 1024
SHUFFLE_BUFFER = 1000  # rows, the default of datasets


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("read", "adopt", "open", "reader", "write-mds"))
    parser.add_argument("reader", nargs="?", help="of `reader`, which `read` starts")
    parser.add_argument("--folder", type=Path, help="scratch; default: a temporary folder")
    parser.add_argument("--workload", choices=tuple(READERS))
    parser.add_argument("--size", default="400MB", help="bytes of the files of a workload")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder of environments")
    parser.add_argument("--out", type=Path, help="path without suffix for .md and .json")
    options = parser.parse_args()
    if options.what == "reader":
        print(json.dumps(_epoch(options.reader, options.folder, options.workload)))
        return
    if options.what == "write-mds":
        write_mds(options.folder, int(options.size))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        found = {"read": _read, "adopt": _adopt, "open": _open}[options.what](Path(scratch), options)
    from bench.machine import machine_facts

    document = {"facts": machine_facts(), "what": options.what, "size": options.size, "results": found}
    text = _table(document)
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    print(text)


def write_files(folder: Path, workload: str, num_bytes: int) -> None:
    """Write Parquet files as pushes to the hub have them: pictures of 100 rows per row group, texts of 1,000."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    chance, number, written = np.random.default_rng(3), 0, 0
    words = np.array([f"word{n}" for n in range(5000)])
    while written < num_bytes:
        if workload == "pictures":
            rows, group = 1000, 100
            values = {"image": [chance.bytes(int(size)) for size in chance.integers(40_000, 80_000, rows)]}
        else:
            rows, group = 20_000, 1000
            lengths = chance.integers(20, 400, rows)
            values = {"text": [" ".join(words[chance.integers(0, 5000, size)]) for size in lengths]}
        values["id"] = np.arange(number * rows, (number + 1) * rows)
        path = folder / f"train-{number:05d}.parquet"
        pq.write_table(pa.table(values), path, row_group_size=group)
        number, written = number + 1, written + path.stat().st_size


# ---- Reading


def _read(scratch: Path, options: argparse.Namespace) -> dict:
    from shardkit.ranges import parse_size

    def python_of(name: str) -> Path:
        return options.peers / _OTHERS[name] / "bin" / "python" if name in _OTHERS else Path(sys.executable)

    results = {}
    for workload, readers in READERS.items():
        folder = scratch / workload
        folder.mkdir()
        size = parse_size(options.size)
        if workload == "mds":
            writing = [__file__, "write-mds", "--folder", folder / "files", "--size", size]
            subprocess.run([str(one) for one in (python_of("streaming"), *writing)], check=True)
        else:
            {"tokens": write_tokens}.get(workload, write_files)(folder / "files", workload, size)
        _adopt_workload(folder, workload)
        rates: dict[str, list[float]] = {name: [] for name in readers}
        digests: dict[str, set[str]] = {name: set() for name in readers}
        failures: dict[str, str] = {}
        for _, name in itertools.product(range(options.repeats), readers):
            if name in failures:
                continue
            python = python_of(name)
            command = [python, __file__, "reader", name, "--folder", folder, "--workload", workload]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False,
                                  env={**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"})  # fmt: skip
            if done.returncode:
                failures[name] = (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rates[name].append(found["rows"] / found["seconds"])
            digests[name].add(found["digest"])
        truth = digests[next((name for name in readers if name in _LIMITS), readers[-1])]
        results[workload] = {
            name: {
                "rows_per_s": round(statistics.median(rates[name])),
                "range": [round(min(rates[name])), round(max(rates[name]))],
                "same_rows": digests[name] == truth,
            }
            for name in readers
            if rates[name]
        } | {name: {"failure": why} for name, why in failures.items()}
    return results


def _adopt_workload(folder: Path, workload: str) -> None:
    from shardkit_tools.adopting import adopt
    from shardkit_tools.importers import ImportOptions

    options = ImportOptions(dtype="uint16", row=_TOKENS_A_ROW) if workload == "tokens" else ImportOptions()
    adopt([folder / "files"], folder / "root", options=options)


def _epoch(name: str, folder: Path, workload: str) -> dict:
    for module in _MODULES[name]:
        importlib.import_module(module)
    field = "image" if workload == "pictures" else "text"
    batches = {
        "shardkit": _shardkit_tokens if workload == "tokens" else _shardkit,
        "datasets map": _datasets_map,
        "datasets streaming": _datasets_streaming,
        "litdata": _litdata,
        "pyarrow.dataset": _pyarrow,
        "nanoGPT's loop": _nanogpt,
        "numpy.memmap": _memmap,
        "streaming": _streaming,
    }[name](folder, field)
    rows, total = 0, 0
    started = time.perf_counter()
    for values, numbers in batches:
        rows += len(values)
        # of one value per batch: enough to notice other rows, and cheap compared with a read
        total += sum(map(int, numbers)) + sum(map(len, values))
    seconds = time.perf_counter() - started
    return {
        "rows": rows,
        "seconds": seconds,
        "digest": hashlib.sha256(f"{rows} {total}".encode()).hexdigest()[:16],
    }


def _shardkit(folder: Path, field: str):
    import shardkit

    ds = shardkit.open(folder / "root")
    plan = ds.plan(global_batch=BATCH, lanes=1, remainder="short")
    with ds.loader(plan, rank=0, world=1, tensors=False) as loader:
        for batch in loader:
            yield batch[field], batch["id"]


def _datasets_map(folder: Path, field: str):
    import datasets

    data = datasets.load_dataset("parquet", data_files=str(folder / "files/*.parquet"), split="train")
    for batch in data.shuffle(seed=0).iter(BATCH):
        yield batch[field], batch["id"]


def _datasets_streaming(folder: Path, field: str):
    import datasets

    data = datasets.load_dataset(
        "parquet", data_files=str(folder / "files/*.parquet"), split="train", streaming=True
    )
    for batch in data.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER).batch(BATCH):
        yield batch[field], batch["id"]


def _litdata(folder: Path, field: str):
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    index = folder / "files" / "index.json"
    if not index.exists():
        litdata.index_parquet_dataset(str(folder / "files"))
    data = litdata.StreamingDataset(str(folder / "files"), item_loader=ParquetLoader(), shuffle=True)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, collate_fn=list)
    for batch in loader:
        yield [row[field] for row in batch], [row["id"] for row in batch]


def _pyarrow(folder: Path, field: str):
    import pyarrow.dataset

    for batch in pyarrow.dataset.dataset(sorted(map(str, (folder / "files").glob("*.parquet")))).to_batches(
        batch_size=BATCH
    ):
        yield batch[field].to_pylist(), batch["id"].to_pylist()


def _shardkit_tokens(folder: Path, _: str):
    import numpy as np
    import torch

    import shardkit

    ds = shardkit.open(folder / "root")
    plan = ds.plan(global_batch=BATCH, lanes=1, remainder="short")
    with ds.loader(plan, rank=0, world=1, tensors=False) as loader:
        for batch in loader:
            rows = torch.from_numpy(batch["tokens"].astype(np.int64))
            yield rows, rows[:, 0]


def _nanogpt(folder: Path, _: str):
    """Draw windows as the function `get_batch` of nanoGPT does."""
    import numpy as np
    import torch

    rows = (folder / "files" / "train.bin").stat().st_size // (2 * _TOKENS_A_ROW)
    for _ in range(rows // BATCH):
        data = np.memmap(folder / "files" / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - _TOKENS_A_ROW, (BATCH,))
        windows = torch.stack(
            [torch.from_numpy(data[at : at + _TOKENS_A_ROW].astype(np.int64)) for at in starts]
        )
        yield windows, windows[:, 0]


def _memmap(folder: Path, _: str):
    import numpy as np
    import torch

    data = np.memmap(folder / "files" / "train.bin", dtype=np.uint16, mode="r").reshape(-1, _TOKENS_A_ROW)
    order = np.random.default_rng(0).permutation(len(data))
    for start in range(0, len(order), BATCH):
        rows = torch.from_numpy(data[order[start : start + BATCH]].astype(np.int64))
        yield rows, rows[:, 0]


def _streaming(folder: Path, field: str):
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(folder / "files"), shuffle=True, batch_size=BATCH)
    rows: list[dict] = []
    for row in data:
        rows.append(row)
        if len(rows) == BATCH:
            yield [one[field] for one in rows], [one["id"] for one in rows]
            rows = []
    yield [one[field] for one in rows], [one["id"] for one in rows]


# ---- Adoption and opening


def write_tokens(folder: Path, _: str, num_bytes: int) -> None:
    """Write a file of tokens as nanoGPT's scripts do."""
    import numpy as np

    folder.mkdir()
    rows = num_bytes // (2 * _TOKENS_A_ROW)
    tokens = np.random.default_rng(3).integers(0, 50_257, rows * _TOKENS_A_ROW, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")


def write_mds(folder: Path, num_bytes: int) -> None:
    """Write the texts of `write_files` as MDS."""
    import numpy as np
    from streaming import MDSWriter

    chance, words = np.random.default_rng(3), np.array([f"word{n}" for n in range(5000)])
    number = written = 0
    with MDSWriter(out=str(folder), columns={"text": "str", "id": "int"}) as out:
        while written < num_bytes:
            text = " ".join(words[chance.integers(0, 5000, chance.integers(20, 400))])
            out.write({"text": text, "id": number})
            number, written = number + 1, written + len(text)


def write_lines(folder: Path, num_bytes: int) -> None:
    """Write JSON lines of text, a number and a score."""
    import numpy as np

    folder.mkdir()
    chance, words = np.random.default_rng(3), np.array([f"word{n}" for n in range(5000)])
    with (folder / "a.jsonl").open("w") as out:
        while out.tell() < num_bytes:
            text = " ".join(words[chance.integers(0, 5000, chance.integers(20, 400))])
            out.write(json.dumps({"text": text, "id": out.tell(), "score": chance.random()}) + "\n")


def write_csv(folder: Path, num_bytes: int) -> None:
    """Write a table of a number, a score, a truth and a short text."""
    import numpy as np

    folder.mkdir()
    chance, words = np.random.default_rng(3), np.array([f"word{n}" for n in range(5000)])
    with (folder / "a.csv").open("w") as out:
        out.write("id,score,ok,text\n")
        while out.tell() < num_bytes:
            text = " ".join(words[chance.integers(0, 5000, 12)])
            out.write(
                f"{out.tell()},{chance.random()},{'true' if chance.random() < 0.5 else 'false'},{text}\n"
            )


def write_tars(folder: Path, num_bytes: int) -> None:
    """Write a tar of pictures of about 2 kB, each with a class and a caption."""
    import numpy as np

    folder.mkdir()
    chance, number = np.random.default_rng(3), 0
    with tarfile.open(folder / "a.tar", "w") as tar:
        while tar.offset < num_bytes:
            caption = json.dumps({"caption": f"picture {number}"}).encode()
            picture = chance.bytes(int(chance.integers(1000, 3000)))
            for extension, data in (("jpg", picture), ("cls", b"%d" % (number % 10)), ("json", caption)):
                member = tarfile.TarInfo(f"{number:08d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            number += 1


def _cpu_s() -> float:
    """Return the processor time of this process and its children so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _timed(work) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a call."""
    started, cpu = time.perf_counter(), _cpu_s()
    work()
    return time.perf_counter() - started, _cpu_s() - cpu


def _hash(files: Path) -> None:
    from shardkit.formats import xxh3

    for path in sorted(files.iterdir()):
        whole = hashlib.sha256()
        with path.open("rb") as stream:
            while data := stream.read(8 << 20):
                whole.update(data)
                hashlib.sha256(data).digest()
                xxh3(data)


def _adopt(scratch: Path, options: argparse.Namespace) -> dict:
    from shardkit.ranges import parse_size
    from shardkit_tools.adopting import adopt

    results = {}
    size = parse_size(options.size) // 2
    writers = {"lines": write_lines, "csv": write_csv, "small tar members": write_tars}
    for workload in ("pictures", "text", *writers):
        files, root = scratch / workload, scratch / f"{workload} root"
        if workload in writers:
            writers[workload](files, size // 8)
        else:
            write_files(files, workload, size)
        hashing, adopting = [], []
        for _ in range(options.repeats):
            hashing.append(_timed(lambda: _hash(files)))  # noqa: B023 - called here
            shutil.rmtree(root, ignore_errors=True)
            adopting.append(_timed(lambda: adopt([files], root)))  # noqa: B023
        (hash_s, hash_cpu_s), (adopt_s, adopt_cpu_s) = (
            [statistics.median(column) for column in zip(*times, strict=True)]
            for times in (hashing, adopting)
        )
        results[workload] = {
            "hash_s": round(hash_s, 2), "adopt_s": round(adopt_s, 2), "ratio": round(adopt_s / hash_s, 2),
            "hash_cpu_s": round(hash_cpu_s, 2), "adopt_cpu_s": round(adopt_cpu_s, 2),
            "cpu_ratio": round(adopt_cpu_s / hash_cpu_s, 2),
        }  # fmt: skip
    return results


OPEN = """
import sys, time, shardkit
started = time.perf_counter()
ds = shardkit.open(sys.argv[1])
opened = time.perf_counter() - started
ds.plan(global_batch=64, lanes=8)
print(opened, time.perf_counter() - started, len(ds))
"""


def _open(scratch: Path, options: argparse.Namespace) -> dict:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardkit_tools.adopting import adopt

    (scratch / "files").mkdir()
    for number in range(options.files):
        pq.write_table(pa.table({"n": [number]}), scratch / "files" / f"{number:06d}.parquet")
    started = time.perf_counter()
    adopt([scratch / "files"], scratch / "root", jobs=None)
    adopted = time.perf_counter() - started
    times = []
    for _ in range(options.repeats):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(scratch / "root")], capture_output=True, text=True, check=True
        )
        times.append([float(text) for text in done.stdout.split()])
    opened, planned, rows = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        f"{options.files} files": {
            "adopt_s": round(adopted, 1), "open_s": round(opened, 3), "open_and_plan_s": round(planned, 3),
            "rows": int(rows),
        }
    }  # fmt: skip


def _table(document: dict) -> str:
    facts = document["facts"]
    lines = [
        f"# Adopted files: {document['what']}",
        "",
        f"{facts['cpus']} × {facts['processor']}, {facts['date']}; files of {document['size']} a workload.",
        "",
    ]
    for name, result in document["results"].items():
        if document["what"] != "read":
            lines.append(f"- {name}: {json.dumps(result)}")
            continue
        lines += [f"## {name}", "", "| reader | rows a second (range) | each row once |", "|---|---|---|"]
        for reader, found in result.items():
            label = f"limit: {reader}" if reader in _LIMITS else reader
            rate = "{:,} ({:,}–{:,})".format(found["rows_per_s"], *found["range"]) if "range" in found else ""
            lines.append(
                f"| {label} | {rate or found['failure']} | {'yes' if found.get('same_rows') else 'no'} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder has a module `datasets`, too
    main()
