"""Compare two checkouts: the cost of building, checking, repairing, committing and reading in each.

    python tools/bench/two_trees.py OTHER [--repeats 5] [--scale 1.0] [--out results/two_trees]

`OTHER` is another checkout, installed in its own ``.venv``. Every job is a command, or a program of a few lines, that
both checkouts support. Each job runs in its own process, in turns, with a warm page cache. Processor time includes the
children of the process. A figure is this checkout's time over the other's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parents[2]
READ = """
import sys, shardkit
ds = shardkit.open(sys.argv[1])
loader = ds.loader(ds.plan(global_batch=64), tensors=False)
for epoch in range(int(sys.argv[2])):
    for batch in loader:
        batch[sys.argv[3]][0]
loader.close()
"""
OPEN = "import sys, shardkit\nfor _ in range(200): shardkit.open(sys.argv[1])\n"


class Job(NamedTuple):
    name: str
    words: tuple[str, ...]  # command line of shardkit; or "-c", a program and its arguments
    fresh: tuple[str, ...] = ()  # folders removed before the job
    flipped: str = ""  # root in which a bit is flipped before the job
    newer: tuple[str, ...] = ()  # words for a checkout whose command has the option, the first of them


def make_sources(folder: Path, scale: float) -> None:
    """Write pictures, JSON lines, CSV and tokens."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(int(2000 * scale)):
        label = folder / "pictures" / f"class{number % 10}"
        label.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((320, 240)).save(label / f"{number}.jpg")
    words = [bytes(draw.integers(97, 123, 8, dtype=np.uint8)).decode() for _ in range(4096)]
    with (folder / "lines.jsonl").open("w") as lines, (folder / "table.csv").open("w") as table:
        table.write("id,text,score\n")
        for number in range(int(200_000 * scale)):
            text = " ".join(words[place] for place in draw.integers(0, 4096, 40))
            lines.write(json.dumps({"id": number, "text": text, "score": number / 7}) + "\n")
            table.write(f"{number},{text},{number / 7}\n")
    np.save(folder / "tokens.npy", draw.integers(0, 50_000, (int(50_000 * scale), 2048), dtype=np.int32))


def jobs(source: Path, base: Path) -> Iterator[Job]:
    """Yield the jobs of each checkout, in order."""
    roots = {name: str(base / name) for name in ("pictures", "lines", "table", "tokens")}
    # formats are given, because their defaults have changed
    tar, zstd = ("--format", "tar"), ("--format", "arrow", "--compression", "zstd")
    for name, file, form in (("pictures", "", tar), ("lines", ".jsonl", zstd), ("table", ".csv", zstd)):
        words = ("build", str(source / f"{name}{file}"), roots[name], *form)
        yield Job(f"build {name}", words, fresh=(roots[name],))
    undecoded = ("build", str(source / "pictures"), str(base / "undecoded"), *tar)
    yield Job("build pictures, not decoded", undecoded, (str(base / "undecoded"),), newer=("--check", "none"))
    plain = ("--format", "arrow", "--compression", "none")
    tokens = ("build", str(source / "tokens.npy"), roots["tokens"], *plain)
    yield Job("build tokens", tokens, fresh=(roots["tokens"], str(base / "mirror")))
    for command in ("verify", "scrub"):
        yield Job(command, (command, roots["tokens"]))
    yield Job("commit (a tag)", ("tag", roots["tokens"], "v1"))
    yield Job("open, 200 times", ("-c", OPEN, roots["lines"]))
    yield Job("read tokens, 1 epoch", ("-c", READ, roots["tokens"], "1", "value"))
    yield Job("read tokens, 5 epochs", ("-c", READ, roots["tokens"], "5", "value"))
    yield Job("read pictures, 5 epochs", ("-c", READ, roots["pictures"], "5", "image"))
    yield Job("read text, 3 epochs", ("-c", READ, roots["lines"], "3", "text"))
    mirror = f"m={base / 'mirror'},domain=x"
    yield Job("place a mirror", ("place", roots["tokens"], "--location", mirror, "--copies", "2"))
    yield Job("replicate", ("replicate", roots["tokens"]))
    yield Job("repair one flipped bit", ("repair", roots["tokens"]), flipped=roots["tokens"])
    yield Job("help", ("--help",))


@functools.cache
def help_of(tree: Path, command: str) -> str:
    """Return the help of a command in a checkout."""
    words = [str(tree / ".venv" / "bin" / "shardkit"), command, "--help"]
    return subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True).stdout


def run(tree: Path, job: Job) -> tuple[float, float]:
    """Run one job in one checkout; return its (wall, processor) seconds."""
    for folder in job.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    if job.flipped:
        victim = max(Path(job.flipped, "objects").rglob("*.*"), key=lambda path: path.stat().st_size)
        victim.chmod(0o644)
        with victim.open("r+b") as file:
            file.seek(victim.stat().st_size // 3)
            byte = file.read(1)[0] ^ 1
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte]))
    binaries = tree / ".venv" / "bin"
    command = [str(binaries / ("python" if job.words[0] == "-c" else "shardkit")), *job.words]
    if job.newer and job.newer[0] in help_of(tree, job.words[0]):
        command += job.newer
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=tree, env=compiled, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{tree}: {job.name} ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[-500:]}"
        )
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sources")
    parser.add_argument("--only", help="jobs whose names hold this, after the builds and the mirror")
    parser.add_argument("--out", type=Path, help="where the figures go, without an extension")
    options = parser.parse_args()
    trees = {"this": HERE, "other": options.other.resolve()}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        make_sources(source, options.scale)
        plans = {name: list(jobs(source, Path(folder, name))) for name in trees}
        for number, job in enumerate(plans["this"]):
            always = "build" in job.name or "mirror" in job.name
            if options.only and options.only not in job.name and not always:
                continue
            figures = found.setdefault(job.name, {name: [] for name in trees})
            for _ in range(1 if "mirror" in job.name else options.repeats):
                for name, tree in trees.items():
                    figures[name].append(run(tree, plans[name][number]))
            print(f"{job.name}: {_row(figures)}", file=sys.stderr, flush=True)
    text = _page(options, found)
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def _row(figures: dict[str, list[tuple[float, float]]]) -> str:
    walls, processors = ({name: [one[at] for one in some] for name, some in figures.items()} for at in (0, 1))
    cells = []
    for seconds in (walls, processors):
        this, other = (statistics.median(seconds[name]) for name in ("this", "other"))
        least = min(seconds["this"]) / min(seconds["other"])
        cells += [f"{other:.2f}", f"{this:.2f}", f"{this / other:.2f}", f"{least:.2f}"]
    return " | ".join(cells)


def _page(options: Any, found: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    commits = [
        subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
        ).stdout.strip()
        for tree in (options.other, HERE)
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return "\n".join(
        [
            "# Two checkouts side by side",
            "",
            f"{time.strftime('%Y-%m-%d')}, {machine}: {commits[0]} (other) and {commits[1]} (this),",
            f"{options.repeats} runs of each in turns; medians of seconds, this ÷ other of them and of the fastest.",
            "",
            "| | wall, other | this | ÷ | ÷, fastest | processor, other | this | ÷ | ÷, fastest |",
            "|---|---|---|---|---|---|---|---|---|",
            *(f"| {name} | {_row(figures)} |" for name, figures in found.items()),
            "",
        ]
    )


if __name__ == "__main__":
    main()
