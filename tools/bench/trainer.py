"""Measure the bundled trainer: memory, exact sums, saves, restarts, waits, stragglers, compression, curves.

    python tools/bench/trainer.py [SECTION …] [--out FILE.json]

Sections: memory exact save restarts wait straggler scaling compression curves whole; all by default, about 20 minutes.
Real ranks run on gloo. Results are printed, and written to FILE.json after each section. Results in results/ state
their date and load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import shardkit
from shardkit.stores.local import open_store
from shardkit.telemetry.records import read_documents
from shardkit_trainer.run_directory import read_steps
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.object_stores import moto, s3_environment

RANKS = Path(__file__).with_name("trainer_ranks.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
LATENCY_S = 0.05


def environment() -> dict[str, str]:
    """Return an environment with one thread per rank, in which freed memory returns to the system."""
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
           "MALLOC_ARENA_MAX": "1", "PYTHONPATH": path}  # fmt: skip
    return {**os.environ, **own}


def on_ranks(nproc: int, *arguments: str) -> Any:
    """Run a case of trainer_ranks.py on ``nproc`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}",
                   str(RANKS), str(result), *arguments]  # fmt: skip
        subprocess.run(command, env=environment(), check=True, stderr=subprocess.DEVNULL)
        return json.loads(result.read_text())


def start(nproc: int, config: Path, *, restarts: int = 0, **settings: Any) -> subprocess.Popen[bytes]:
    """Start ``shardkit train`` in its own process group."""
    overrides = [
        f"{k.replace('__', '.')}={json.dumps(v) if isinstance(v, bool) else v}" for k, v in settings.items()
    ]
    command = [sys.executable, "-m", "shardkit_tools", "train", str(config), *overrides,
               "--nproc", str(nproc), *(["--max-restarts", str(restarts)] if restarts else [])]  # fmt: skip
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)


def finish(nproc: int, config: Path, **settings: Any) -> list[dict[str, Any]]:
    """Train to the end; return the metrics of all steps."""
    process = start(nproc, config, **settings)
    if process.wait() != 0:
        raise SystemExit(f"training {settings} ended with {process.returncode}")
    return read_steps(Path(settings["run__directory"]))


def make_digits(root: Path) -> None:
    """Write scikit-learn's digits, with every fifth held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    for name, held_out in (("digits", False), ("digits-val", True)):
        schema = {"image": "uint8[8,8]", "label": "int64"}
        with shardkit.create(str(root / name), schema=schema, stratify="label") as writer:
            for i, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
                if (i % 5 == 0) == held_out:
                    writer.add({"image": image.astype(np.uint8), "label": int(label)})


def make_text(root: Path) -> None:
    """Write the standard library's source in pieces of 2,000 characters, stratified by package."""
    library = Path(sysconfig.get_path("stdlib"))
    schema = {"text": "str", "package": "str"}
    with shardkit.create(str(root / "stdlib"), schema=schema, stratify="package") as writer:
        for package in ("asyncio", "email", "http", "json", "logging", "unittest", "urllib", "xml"):
            for source in sorted((library / package).rglob("*.py")):
                text = source.read_text(encoding="utf-8", errors="replace")
                for at in range(0, len(text), 2000):
                    writer.add({"text": text[at : at + 2000], "package": package})


# --- the sections ---


def memory(_data: Path) -> dict[str, Any]:
    """Measure the bytes of a rank in units of the parameters: counted, and resident beyond the imports."""
    found: dict[str, Any] = {}
    for nproc in (2, 4):
        for strategy, exact in (
            ("ddp", "off"),
            ("zero1", "off"),
            ("zero2", "off"),
            ("zero3", "off"),
            ("ddp", "int64"),
        ):
            one = on_ranks(nproc, "memory", strategy, exact)
            rows = np.array(one["ranks"]) / one["copy"]
            name = strategy if exact == "off" else f"{strategy} exact"
            kinds = (
                "parameters",
                "gradients",
                "optimizer",
                "resident at the peak of a step",
                "resident between steps",
            )
            found[f"{nproc} ranks, {name}"] = dict(zip(kinds, rows.max(0).round(3).tolist(), strict=True))
    return found


def exact(_data: Path) -> dict[str, Any]:
    """Measure the milliseconds per step."""
    return {f"{n} ranks": {k: round(v, 1) for k, v in on_ranks(n, "exact").items()} for n in (1, 2, 4)}


def save(_data: Path) -> dict[str, Any]:
    """Measure the seconds for which a save of 300 MB blocks training."""
    found: dict[str, Any] = on_ranks(1, "save", "300")
    names = ("synchronous", "copy", "save returns", "update waits")
    middle = {name: statistics.median(found[name]) for name in names}
    share = (middle["save returns"] + middle["update waits"]) / middle["synchronous"]
    return {**found, "median": middle, "blocked, as a share of a synchronous save": round(share, 5)}


def _wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> float:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise SystemExit("nothing came")
        time.sleep(0.005)
    return time.monotonic() - started


def _rank_of(parent: int, number: int) -> int:
    """Find the process of rank `number` below `parent`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                b"-m\0shardkit_trainer\0" in path.read_bytes()
                and os.getsid(int(path.parent.name)) is not None
            ):
                found.append(int(path.parent.name))
        except OSError:
            continue
    below = [pid for pid in found if _descends(pid, parent)]
    return sorted(below)[number]


def _descends(pid: int, parent: int) -> bool:
    while pid > 1:
        if pid == parent:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def restarts(data: Path) -> dict[str, Any]:
    """Measure the seconds from SIGKILL of one of three ranks to the next step, and the number of repeated steps."""
    found: dict[str, list[dict[str, float]]] = {"torchrun": [], "cold": []}
    for repeat in range(3):
        for kind, seen in found.items():
            run = data / f"restart-{kind.replace(' ', '-')}-{repeat}"
            settings: dict[str, Any] = {
                "run__directory": run, "data__dataset": data / "stdlib", "run__steps": 100000, "data__lanes": 6,
                "data__global_batch": 12, "model__width": 64, "model__layers": 2, "model__context": 64,
                "checkpoint__every": 20, "log__telemetry_s": 0.0, "run__device": "cpu",
            }  # fmt: skip
            process = start(3, data / "empty.toml", restarts=0 if kind == "cold" else 1, **settings)

            def starts(run: Path = run) -> int:
                return sum(e["event"] == "start" for e in read_documents(run / "events.jsonl"))

            _wait_for(lambda: len(read_steps(run)) >= 50)  # noqa: B023
            before, reached = starts(), read_steps(run)[-1]["step"]
            killed = time.monotonic()
            if kind == "cold":
                os.killpg(process.pid, signal.SIGKILL)
                for pid in [
                    p
                    for p in map(int, filter(str.isdigit, os.listdir("/proc")))
                    if _descends_quietly(p, process.pid)
                ]:
                    os.kill(pid, signal.SIGKILL)
                process.wait()
                process = start(3, data / "empty.toml", **settings)
            else:
                os.kill(_rank_of(process.pid, 1), signal.SIGKILL)
            _wait_for(lambda: starts() > before)  # noqa: B023
            lines = len(read_steps(run))
            _wait_for(lambda: len(read_steps(run)) > lines)  # noqa: B023
            seconds = time.monotonic() - killed
            again = [e for e in read_documents(run / "events.jsonl") if e["event"] == "start"][-1]["step"]
            seen.append({"seconds": round(seconds, 2), "steps taken again": max(0, reached + 1 - again)})
            process.send_signal(signal.SIGTERM)
            process.wait()
    return dict(found)


def _descends_quietly(pid: int, parent: int) -> bool:
    try:
        return _descends(pid, parent)
    except (OSError, ValueError):
        return False


@contextmanager
def slow_store(data: Path) -> Iterator[str]:
    """Serve both datasets from an S3 server that delays every answer by 50 ms."""
    with moto("bench") as endpoint:
        before = dict(os.environ)
        os.environ.update(s3_environment(endpoint))
        for name in ("stdlib", "digits"):
            store = open_store(f"s3://bench/{name}")
            for path in sorted((data / name).rglob("*")):
                if path.is_file():
                    store.put_new(str(path.relative_to(data / name)), path.read_bytes())
        with FaultProxy(endpoint, lambda _request: Fault("delay", seconds=LATENCY_S)) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            try:
                yield "s3://bench"
            finally:
                os.environ.clear()
                os.environ.update(before)


def wait(data: Path) -> dict[str, Any]:
    """Measure the share of time that steps wait for data (median of 3 runs), and the first step's wait in seconds."""
    found: dict[str, Any] = {}
    with slow_store(data) as remote:
        for place, address in (("local", str(data)), ("50 ms store", remote)):
            _wait_in(found, data, place, address)
    return found


def _wait_in(found: dict[str, Any], data: Path, place: str, address: str) -> None:
    """Run each example three times: 120 steps of the GPT, every epoch of the digits."""
    for name, dataset, steps in (("stdlib_gpt", "stdlib", 120), ("digits", "digits", 0)):
        shares, firsts, waits, lengths = [], [], [], []
        for repeat in range(3):
            run = data / f"wait-{name}-{place.replace(' ', '-')}-{repeat}"
            lines = finish(1, EXAMPLES / f"{name}.toml", run__directory=run, run__steps=steps,
                           data__dataset=f"{address}/{dataset}", evaluation__dataset="")  # fmt: skip
            later = lines[1:]
            shares.append(sum(line["data_s"] for line in later) / sum(line["step_s"] for line in later))
            firsts.append(lines[0]["data_s"])
            waits += [line["data_s"] for line in later]
            lengths += [line["step_s"] for line in later]
        found[f"{name}, {place}"] = {
            "share": round(statistics.median(shares), 5), "shares": [round(share, 5) for share in shares],
            "first wait s": round(statistics.median(firsts), 4),
            "median step ms": round(1e3 * statistics.median(lengths), 2),
            "median wait ms": round(1e3 * statistics.median(waits), 3),
        }  # fmt: skip


def _asleep(data: Path, name: str, ranks: int, slow: bool, **more: Any) -> list[dict[str, Any]]:
    os.environ["SHARDKIT_BENCH_SLOW"] = f"{ranks - 1}" if slow else ""
    return finish(
        ranks, data / "empty.toml", run__directory=data / name, run__steps=80, run__device="cpu",
        data__dataset=data / "digits", data__global_batch=96, data__lanes=48, model__kind="trainer_asleep:make",
        model__width=8, model__stages=1, checkpoint__every=1000, log__telemetry_s=0.0, **more,
    )  # fmt: skip


def straggler(data: Path) -> dict[str, Any]:
    """Measure the seconds per step with one of four ranks at half speed, and 48 lanes of 10 ms sleep per cell."""
    even = _asleep(data, "even", 4, slow=False)
    static = _asleep(data, "static", 4, slow=True)
    moved = _asleep(data, "moved", 4, slow=True, parallel__rebalance=True)
    decisions = [e for e in read_documents(data / "moved" / "events.jsonl") if e["event"] == "rebalance"]
    settled = decisions[-1]["from_step"] + 1

    def middle(lines: list[dict[str, Any]]) -> float:
        return float(round(statistics.median(line["step_s"] for line in lines[settled:]), 4))

    return {
        "all ranks equal": middle(even), "static": middle(static), "rebalanced": middle(moved),
        "ideal: sleep of the slowest rank in whole lanes": 0.14, "sleep of the slowest rank, static": 0.24,
        "decisions": [{k: d[k] for k in ("step", "from_step", "moved", "before_us", "expected_us")} for d in decisions],
        "lanes of each rank": [decisions[-1]["owner"].count(rank) for rank in range(4)],
    }  # fmt: skip


def scaling(data: Path) -> dict[str, Any]:
    """Measure the samples per second at 1, 2 and 4 ranks, for cells that sleep and cells that compute."""
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    for ranks in (1, 2, 4):
        asleep = _asleep(data, f"asleep-{ranks}", ranks, slow=False)
        work = finish(
            ranks, EXAMPLES / "stdlib_gpt.toml", run__directory=data / f"work-{ranks}", run__steps=40,
            data__dataset=data / "stdlib", evaluation__dataset="",
        )  # fmt: skip
        for name, lines in (("cells of 10 ms sleep", asleep), ("GPT example", work)):
            rates = [line["samples"] / line["step_s"] for line in lines[10:]]
            found.setdefault(name, {})[f"{ranks}"] = round(statistics.median(rates), 1)
    return found


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {"reduction": "bf16"}, "int8": {"reduction": "int8"},
    "powersgd, rank 4": {"reduction": "powersgd", "rank": 4}, "topk 5 %": {"reduction": "topk", "density": 0.05},
    "topk 5 %, correction 0.9": {"reduction": "topk", "density": 0.05, "correction": 0.9},
    "local steps, H = 16": {"sync_every": 16},
}  # fmt: skip
SMALL = {
    "model__width": 64,
    "model__layers": 2,
    "model__context": 64,
    "data__global_batch": 16,
    "log__every": 100,
}


def compression(data: Path) -> dict[str, Any]:
    """Measure the bytes that a rank sends per step, and the loss of the last fifth of 250 steps on two ranks."""
    found = {}
    for number, (name, settings) in enumerate(KINDS.items()):
        more = {f"parallel__{key}": value for key, value in settings.items()}
        if "correction" in settings:
            more["optimizer__beta1"] = 0.0
        lines = finish(2, EXAMPLES / "stdlib_gpt.toml", run__directory=data / f"wire-{number}", run__steps=250,
                       data__dataset=data / "stdlib", evaluation__dataset="", **SMALL, **more)  # fmt: skip
        found[name] = {
            "KB a step": round(lines[-1]["bytes_moved"] / len(lines) / 1e3, 1),
            "loss": round(statistics.mean(line["loss"] for line in lines[-50:]), 4),
        }
    return found


def curves(data: Path) -> dict[str, Any]:
    """Record the losses of every strategy on two ranks and of one process: GPT (means of 25 steps) and classifier."""
    found: dict[str, Any] = {}
    strategies: list[tuple[str, int, dict[str, Any]]] = [("one process", 1, {})] + [
        (name, 2, {"parallel__strategy": name}) for name in ("ddp", "zero1", "zero2", "zero3")
    ] + [("exact", 2, {"parallel__exact": "int64"})]  # fmt: skip
    for name, ranks, more in strategies:
        slug = name.replace(" ", "-")
        lines = finish(ranks, EXAMPLES / "stdlib_gpt.toml", run__directory=data / f"gpt-{slug}", run__steps=200,
                       data__dataset=data / "stdlib", evaluation__dataset="", **SMALL, **more)  # fmt: skip
        losses = [line["loss"] for line in lines]
        groups = [round(statistics.mean(losses[a:b]), 3) for a, b in pairwise(range(0, 201, 25))]
        run = data / f"digits-{slug}"
        finish(ranks, EXAMPLES / "digits.toml", run__directory=run, run__epochs=8, data__dataset=data / "digits",
               evaluation__dataset=data / "digits-val", **more)  # fmt: skip
        ends = [
            line["evaluation"]
            for line in read_documents(run / "metrics" / "train.jsonl")
            if "evaluation" in line
        ]
        found[name] = {
            "gpt": groups, "digits accuracy": round(ends[-1]["accuracy"], 4), "digits loss": round(ends[-1]["loss"], 4),
        }  # fmt: skip
    return found


def whole(data: Path) -> dict[str, Any]:
    """Train the unchanged GPT example on two ranks; record means of 100 steps."""
    started = time.monotonic()
    run = data / "gpt-whole"
    settings = {"run__directory": run, "data__dataset": data / "stdlib", "evaluation__dataset": ""}
    losses = [line["loss"] for line in finish(2, EXAMPLES / "stdlib_gpt.toml", **settings)]
    means = [round(statistics.mean(losses[a:b]), 3) for a, b in pairwise(range(0, 1001, 100))]
    return {"gpt": means, "seconds": round(time.monotonic() - started)}


SECTIONS: dict[str, Callable[[Path], Any]] = {
    one.__name__: one
    for one in (memory, exact, save, restarts, wait, straggler, scaling, compression, curves, whole)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("trainer.json"))
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown sections {sorted(unknown)}; known: {', '.join(SECTIONS)}")
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        (data / "empty.toml").touch()
        make_digits(data)
        make_text(data)
        for name in options.sections or SECTIONS:
            load = os.getloadavg()[0]
            results[name] = {"load average": [round(load, 1)], **SECTIONS[name](data)}
            results[name]["load average"].append(round(os.getloadavg()[0], 1))
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, json.dumps(results[name], indent=1), flush=True)


if __name__ == "__main__":
    main()
