"""Makes the files beside it, with shardkit 0.1 (commit c6184f7) and nothing later::

    PYTHONPATH=$CHECKOUT:$CHECKOUT/tools:$CHECKOUT/trainer python tests/golden/0.1/make.py

Every version of shardkit opens, verifies, resumes, heals and audits what is here (tests/compat/test_golden_0_1.py), so
the files are never made again; this says how they were made. All work is done below one folder with names relative to
it, so that what is recorded of places holds in whatever folder the archives are unpacked. Where 0.1 records absolute
paths all the same (places of copies, and of adopted tars beside their relative ones), the test says where they are now
with the options that are there for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from shardkit.testing.servers import moto, s3_environment  # type: ignore[import-not-found]  # noqa: E402
from shardkit.torch.export import export_safetensors  # type: ignore[import-not-found]  # noqa: E402
from values import digest_batch, digest_samples, digest_steps  # noqa: E402

import shardkit  # noqa: E402
import shardkit_tools  # noqa: E402
from shardkit.audit import audit_run  # noqa: E402
from shardkit.dataset import commit_parts  # noqa: E402
from shardkit.storage import Repository  # noqa: E402
from shardkit_tools.main import run as command_line  # noqa: E402

SCHEMA = {
    "blob": "bytes",
    "label": "int64",
    "name": "str",
    "vector": "float32[3]",
    "tokens": "int32[*]",
    "meta": "json",
}
FORMATS: dict[str, dict[str, Any]] = {
    "tar": {"format": "tar", "shard_size": "64KiB"},
    "tar-zstd": {"format": "tar", "compression": "zstd:3", "shard_size": "64KiB"},
    "arrow": {"format": "arrow", "shard_size": "6KiB"},
    "arrow-zstd": {"format": "arrow", "compression": "zstd", "shard_size": "6KiB"},
}
ROWS = 180
BATCH = 24

PLANS: dict[str, dict[str, Any]] = {
    "defaults": {"global_batch": BATCH},
    "seeded": {"global_batch": BATCH, "seed": 5, "remainder": "short"},
    "lanes": {"global_batch": BATCH, "lanes": 6, "window_blocks": 3, "seed": 7},
    "weighted": {"global_batch": BATCH, "lanes": 4, "weights": {"0": 3}, "seed": 1},
}
"""Settings of the plans whose digests, first steps and loader states are kept."""

RUN = {
    "data.dataset": "data/tokens", "data.global_batch": 8, "data.lanes": 4, "data.seed": 3,
    "model.kind": "gpt", "model.field": "tokens", "model.context": 8, "model.vocabulary": 24, "model.layers": 1,
    "model.heads": 2, "model.width": 8, "optimizer.lr": 0.01, "run.steps": 8, "run.seed": 11, "checkpoint.every": 2,
    "checkpoint.keep": 2, "log.every": 1, "log.telemetry_s": 0, "log.peak_flops": 1e9, "parallel.timeout_s": 120.0,
}  # fmt: skip
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel.strategy": "ddp"}),
    "zero1": (2, {"parallel.strategy": "zero1"}),
    "zero2": (2, {"parallel.strategy": "zero2"}),
    "zero3": (2, {"parallel.strategy": "zero3"}),
    "hybrid": (4, {"parallel.strategy": "zero3", "parallel.shard_ranks": 2}),
    "hybrid-zero2": (4, {"parallel.strategy": "zero2", "parallel.shard_ranks": 2}),
    "local": (2, {"parallel.sync_every": 2}),
    "topk": (2, {"parallel.reduction": "topk", "parallel.density": 0.2, "optimizer.name": "sgd"}),
    "powersgd": (2, {"parallel.reduction": "powersgd", "parallel.rank": 2}),
    "int8": (2, {"parallel.reduction": "int8"}),
    "bf16": (2, {"parallel.reduction": "bf16"}),
    "exact-ddp": (2, {"parallel.exact": "int64"}),
    "exact-zero1": (2, {"parallel.exact": "int64", "parallel.strategy": "zero1"}),
    "exact-zero2": (2, {"parallel.exact": "int64", "parallel.strategy": "zero2", "model.dropout": 0.1}),
    "exact-fp64": (2, {"parallel.exact": "fp64"}),
    "sgd-half": (2, {"optimizer.name": "sgd", "parallel.precision": "bf16"}),
}
"""Ranks and settings; each run was stopped in the fourth of eight steps."""

MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {"data.stages": "[{from_step=2, global_batch=4}]"}),
    "stages-weighted": (2, {"data.stages": "[{from_step=2, weights={a=2}}, {from_step=5, global_batch=4}]"}),
    "killed": (2, {"checkpoint.asynchronous": "false"}),
    "whole": (
        1,
        {"evaluation.dataset": "data/tokens@val", "log.telemetry_s": 0.05, "log.price_per_hour": 2.5},
    ),
    "parts": (1, {"data.dataset": '""', "data.parts": '{one="data/tokens", two="data/more"}'}),
}
"""Runs that were taken to their end on 0.1: a killed one among them, whose ledger explains a fork."""


def main() -> None:
    """Make everything."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        os.chdir(folder)
        expected: dict[str, Any] = {"made_with": made_with(), "plans": PLANS}
        expected["datasets"] = make_datasets()
        expected["half"] = make_half_done()
        expected["bucket"] = make_bucket()
        expected["loaders"] = make_loaders()
        expected["runs"] = make_runs()
        for name in sorted(os.listdir()):
            if os.path.isdir(name):
                pack(name, out)
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def made_with() -> dict[str, str]:
    """What the bits of floating-point numbers may depend on, where kernels are those of every processor."""
    return {
        "shardkit": shardkit.__version__, "torch": torch.__version__, "numpy": np.__version__,
        "machine": platform.machine(), "python": platform.python_version(),
    }  # fmt: skip


def pack(name: str, out: Path) -> None:
    """A folder as one tar, names sorted; times are kept, for builds know their sources by them."""
    with tarfile.open(out / f"{name}.tar.xz", "w:xz", format=tarfile.PAX_FORMAT) as tar:
        tar.add(name, filter=lambda info: info if not info.name.endswith("/lock") else None)


def command(*arguments: str) -> None:
    """The command line, in this process."""
    code = 0
    before, sys.argv = sys.argv, ["shardkit", *arguments]
    try:
        code = command_line()  # type: ignore[func-returns-value,assignment]
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    sys.argv = before
    if code:
        raise SystemExit(f"{arguments}: exit code {code}")


# ---- datasets


def sample(n: int) -> dict[str, Any]:
    """Of every type, and of two rare strata."""
    return {
        "blob": hashlib.sha256(str(n).encode()).digest() * (n % 5),
        "label": n % 4 if n % 50 else 100 + n,
        "name": f"sample é {n}",
        "vector": [n, n / 2, -n],
        "tokens": list(range(n % 9)),
        "meta": {"n": n, "even": n % 2 == 0, "none": None},
    }


def write(root: str, rows: range, **settings: Any) -> None:
    """Some of the samples as a version."""
    with shardkit.create(root, SCHEMA, stratify="label", block_size="2KiB", **settings) as writer:
        for n in rows:
            writer.add(sample(n), key=f"key {n}", source=("list", n))


def make_datasets() -> dict[str, Any]:
    """Folders below ``data``, and what each of their refs holds."""
    for name, settings in FORMATS.items():
        write(f"data/{name}", range(ROWS), split={"train": 0.8, "val": 0.2}, lookup="key,name", **settings)
    write("data/tar", range(ROWS, ROWS + 20), append=True, format="tar", shard_size="64KiB", message="more")
    command("tag", "data/tar", "v1")
    command("select", "data/tar@v1", "--where", "label < 2", "--ref", "few")
    command("remove", "data/tar@main", "--rows", "3,5,100", "--reason", "a request")
    command("select", "data/arrow", "--where", "label == 3 and name != 'x'", "--ref", "threes")
    write("data/erased", range(60), format="tar", shard_size="8KiB")
    command("tag", "data/erased", "old")
    command("remove", "data/erased", "--keys", "key 7,key 30", "--reason", "a request", "--erase")
    command("merge", "data/erased", "data/tar@few", "data/merged")
    make_adopted()
    make_copies()
    make_parts()
    make_tokens()
    names = [name for name in sorted(os.listdir("data")) if name != "parts"]
    return {name: described(f"data/{name}") for name in names if name not in {"tars", "copies-mirror"}}


def make_adopted() -> None:
    """Tars of somebody else, beside the root that adopted them."""
    os.makedirs("data/tars")
    for number in range(2):
        with tarfile.open(f"data/tars/{number}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for row in range(40):
                for extension, data in (
                    ("jpg", b"\xff\xd8\xff" + hashlib.sha256(bytes([number, row])).digest() * (1 + row % 5)),
                    ("cls", b"%d" % (row // 20)),
                    ("json", json.dumps({"row": row, "text": "é" * (row % 3)}).encode()),
                ):
                    info = tarfile.TarInfo(f"part{number}/s{row:03d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    command("adopt", "data/tars/0.tar", "data/tars/1.tar", "data/adopted", "--block-size", "4KiB")


def make_copies() -> None:
    """A root with parity, a place for copies, a split and a selection."""
    write("data/copies", range(50), format="tar", shard_size="4KiB", split={"train": 0.5, "val": 0.5})
    command("select", "data/copies", "--where", "label < 2", "--ref", "few")
    command(
        "place", "data/copies", "--location", "mirror=data/copies-mirror", "--copies", "2", "--parity", "4+2"
    )


def make_parts() -> None:
    """Two parts of a version that nobody has committed yet."""
    for part in range(2):
        write("data/parts", range(part * 20, part * 20 + 20), format="arrow", part=f"part-{part}")


def make_tokens() -> None:
    """What the runs read."""
    for name, rows, seed in (("tokens", 96, 1), ("more", 40, 2)):
        random = np.random.default_rng(seed)
        with shardkit.create(
            f"data/{name}", {"tokens": "int32[9]", "kind": "str"}, stratify="kind", format="arrow",
            shard_size="2KiB", block_size="256B", split={"train": 0.75, "val": 0.25},
        ) as writer:  # fmt: skip
            for n in range(rows):
                start = int(random.integers(24))
                writer.add({"tokens": [(start + n * k) % 24 for k in range(9)], "kind": "aab"[n % 3]})


def described(root: str) -> dict[str, Any]:
    """Of every ref and tag: its manifest's id, what its samples are, what its plans say."""
    repository = Repository.open(root, read_only=True)
    refs = {**repository.refs, **repository.tags}
    return {name: described_version(f"{root}@{name}", manifest) for name, manifest in sorted(refs.items())}


def described_version(url: str, manifest: str) -> dict[str, Any]:
    """See `described`."""
    ds = shardkit.open(url)
    assert ds.manifest.id == manifest
    plans = {}
    for name, settings in PLANS.items():
        if len(ds) >= 2 * settings["global_batch"] and ("weights" not in settings or "0" in ds.strata):
            plan = ds.plan(**settings)
            plans[name] = {"digest": plan.digest, "lanes": plan.lanes, "steps": digest_steps(plan, 5)}
    return {
        "manifest": manifest, "samples": len(ds), "strata": dict(ds.strata), "plans": plans,
        "digest": digest_samples(ds[n] for n in range(len(ds))),
    }  # fmt: skip


# ---- a build that was killed


KILLED_BUILD = """
import os, signal, sys
import shardkit_tools
from shardkit.storage.file_operations import FileOperations, substituted

class Dying(FileOperations):
    shards = 0
    def link(self, *arguments):
        Dying.shards += str(arguments[-1]).endswith(".tar")
        if Dying.shards == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().link(*arguments)

with substituted(Dying()):
    shardkit_tools.build(sys.argv[1], "half/root", stratify="label", shard_size="16KiB", block_size="4KiB")
"""


def make_half_done() -> dict[str, Any]:
    """A build that was killed when its third shard was to get its name; and the id that it would have had.

    Scratch knows its source by the absolute path: this one is right in whatever folder a process works.
    """
    source = "/proc/self/cwd/half/source"
    for n in range(60):
        path = Path("half/source") / "abc"[n % 3] / f"{n:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(str(n).encode()).digest() * (10 + n % 20))
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))
    settings: dict[str, Any] = {"stratify": "label", "shard_size": "16KiB", "block_size": "4KiB"}
    result = shardkit_tools.build(source, "whole", **settings)
    assert result.manifest is not None
    killed = subprocess.run([sys.executable, "-c", KILLED_BUILD, source], check=False)
    assert killed.returncode == -signal.SIGKILL
    expected = described("whole")["main"]
    shutil.rmtree("whole")
    shutil.copytree("data/parts", "finished")
    manifest = commit_parts("finished")
    shutil.rmtree("finished")
    shutil.move("data/parts", "half/parts")
    return {"source": source, "settings": settings, "main": expected, "parts": manifest.id}


# ---- a bucket, and a cache of it


def make_bucket() -> dict[str, Any]:
    """The objects of a root in a bucket as a tree, and the cache that a loader filled from it."""
    import boto3

    with moto("golden") as endpoint:
        os.environ.update(s3_environment(endpoint))
        write(
            "s3://golden/cats", range(80), format="tar", shard_size="16KiB", split={"train": 0.5, "val": 0.5}
        )
        found = described("s3://golden/cats")
        ds = shardkit.open("s3://golden/cats")
        plan = ds.plan(global_batch=BATCH, lanes=4, seed=2)
        loader = ds.loader(plan, rank=0, world=1, tensors=False, cache="cache/blocks", cache_size="64MiB")
        batches = [digest_batch(batch) for batch in loader]
        loader.close()
        client = boto3.client("s3", endpoint_url=endpoint)
        for entry in client.list_objects_v2(Bucket="golden")["Contents"]:
            path = Path("bucket") / entry["Key"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket="golden", Key=entry["Key"])["Body"].read())
        client.close()
    return {"refs": found, "plan": plan.digest, "batches": batches}


# ---- loaders


def make_loaders() -> list[dict[str, Any]]:
    """States that loaders gave after three batches, and what came next."""
    made = []
    for name in FORMATS:
        ds = shardkit.open(f"data/{name}@v1" if name == "tar" else f"data/{name}")
        for settings_name, settings in PLANS.items():
            plan = ds.plan(**settings)
            made.append({"dataset": name, "plan": settings_name, **loader_state(ds, plan, 0, 1)})
    ds = shardkit.open("data/tar@v1")
    made.append({"dataset": "tar", "plan": "lanes", **loader_state(ds, ds.plan(**PLANS["lanes"]), 1, 3)})
    return made


def loader_state(ds: Any, plan: Any, rank: int, world: int) -> dict[str, Any]:
    """A state after three batches, and digests of the three batches behind it."""
    loader = ds.loader(plan, rank=rank, world=world, tensors=False)
    following = batches_of(loader)
    for _ in range(3):
        batch = next(following)
    state = loader.state_dict(after=batch)
    then = [digest_batch(next(following)) for _ in range(3)]
    loader.close()
    return {"state": state, "then": then, "rank": rank, "world": world}


def batches_of(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


# ---- runs


def make_runs() -> dict[str, Any]:
    """Run directories below ``runs``: stopped half-way, with what the rest of each was on 0.1; and whole ones."""
    os.makedirs("runs")
    stopped = {f"runs/{name}": (n, {**RUN, **more}, ["stop", 3]) for name, (n, more) in STRATEGIES.items()}
    launch_all(stopped)
    shutil.copytree("runs", "kept")
    expected: dict[str, dict[str, Any]] = {
        name: {"at": parameters(f"runs/{name}"), "audit": audited(f"runs/{name}")} for name in STRATEGIES
    }
    # the second halves with kernels that give the same bits on every processor: they are compared with today's
    portable = json.loads((HERE.parent / "portable_kernels.json").read_text())
    launch_all({name: (2, settings, []) for name, (_, settings, _) in stopped.items()}, kernels=portable)
    for name in STRATEGIES:
        expected[name] |= {"end": parameters(f"runs/{name}"), "losses": losses(f"runs/{name}"),
                           "hash": ending(f"runs/{name}")["parameters_sha256"]}  # fmt: skip
    shutil.rmtree("runs")
    shutil.move("kept", "runs")
    launch_all({"runs/killed": (2, {**RUN, **MORE["killed"][1]}, ["die", 3])}, code=1)
    launch_all({f"runs/{name}": (n, {**RUN, **more}, []) for name, (n, more) in MORE.items()})
    make_plain_loop()
    for name in (*MORE, "plain"):
        expected[name] = {"audit": audited(f"runs/{name}")}
    return {"overrides": {name: overrides(f"runs/{name}", {**RUN, **more}) for name, (_, more) in
                          (STRATEGIES | MORE).items()}, "expected": expected}  # fmt: skip


def make_plain_loop() -> None:
    """A ledger of two loaders without the trainer."""
    ds = shardkit.open("data/tar@v1")
    plan = ds.plan(**PLANS["lanes"])
    for rank in range(2):
        loader = ds.loader(plan, rank=rank, world=2, run="runs/plain", tensors=False)
        for _ in loader:
            pass
        loader.close()


def overrides(directory: str, settings: dict[str, Any]) -> list[str]:
    """As the command line has them."""
    return [f"{key}={value}" for key, value in {"run.directory": directory, **settings}.items()]


def launch_all(
    runs: dict[str, tuple[int, dict[str, Any], list[Any]]],
    code: int = 0,
    kernels: dict[str, str] | None = None,
) -> None:
    """Take runs of one number of ranks in one launch."""
    for count in sorted({count for count, _, _ in runs.values()}):
        now = {name: {"overrides": overrides(name, settings), "end": end}
               for name, (n, settings, end) in runs.items() if n == count}  # fmt: skip
        Path("settings.json").write_text(json.dumps(now))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **(kernels or {}),
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        ranks = [sys.executable, *torchrun, str(HERE / "ranks.py"), "ends.json", "settings.json"]
        done = subprocess.run(ranks, env=environment, check=False)
        assert (done.returncode != 0) == bool(code)
        time.sleep(0.5)


def parameters(run: str) -> dict[str, Any]:
    """Of the newest checkpoint: SHA-256 of the parameters' bytes, and their norms."""
    path = Path("parameters.safetensors")
    path.unlink(missing_ok=True)
    export_safetensors(run, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    norms = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = np.frombuffer(data[8 + length + begin : 8 + length + end], np.float32)
            norms[name] = float(np.sqrt(np.square(values, dtype=np.float64).sum()))
    return {"sha256": hashlib.sha256(data[8 + length :]).hexdigest(), "norms": norms}


def losses(run: str) -> list[float]:
    """Of every step of the whole run."""
    lines = [json.loads(line) for line in (Path(run) / "metrics" / "train.jsonl").read_text().splitlines()]
    return [line["loss"] for line in sorted(lines, key=lambda line: line["step"])]


def ending(run: str) -> dict[str, Any]:
    """The event with which it ended."""
    events = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return next(event for event in reversed(events) if event["event"] in {"stop", "end"})


def audited(run: str) -> dict[str, Any]:
    """What 0.1 found."""
    audit = audit_run(run)
    return {
        "exit_code": audit.exit_code, "steps": audit.steps, "samples": audit.samples, "plan": audit.plan,
        "findings": [[one.severity, one.kind] for one in audit.findings],
    }  # fmt: skip


if __name__ == "__main__":
    main()
