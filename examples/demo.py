"""Build, verify, train, kill, resume, audit, damage and repair a dataset, in 30 seconds to two minutes.

    python examples/demo.py [--dir DIR]

The data are the source text of Python's standard library and scikit-learn's digits: the demo downloads nothing and
needs no server. It runs real commands and shows their output.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

import shardkit
from shardkit.errors import MissingDependency, RunError, ShardkitError
from shardkit.ledger import read_journal
from shardkit.plan.permutation import order
from shardkit.telemetry import read_run
from shardkit_tools.console import count_text

_TEXT_BYTES = 4_000_000
_STEPS = 80
_KILL_AFTER = 45
_PATIENCE_S = 300  # longest wait for a step; a busy machine may take minutes to begin

_CONFIG = """\
[run]
directory = "runs/gpt"
steps = {steps}
[data]
dataset = "data/stdlib"
global_batch = 16
lanes = 8
[model]
kind = "gpt"
field = "text"
context = 64
layers = 2
heads = 4
width = 64
[optimizer]
lr = 3e-3
[schedule]
warmup = 10
[checkpoint]
every = 20
[log]
every = 20
"""

_DIGITS = """\
[run]
directory = "runs/digits"
epochs = 4
[data]
dataset = "data/digits@train"
global_batch = 64
lanes = 8
[model]
kind = "classifier"
width = 16
[optimizer]
lr = 3e-3
[schedule]
warmup = 10
[evaluation]
dataset = "data/digits@val"
[log]
every = 40
"""


def tell(story: Narration) -> None:
    """Tell all chapters."""
    (story.directory / "source").mkdir()
    _build(story)
    _digits(story)
    story.chapter("Show and verify", "What is in it, and is every byte still the byte that was written?")
    story.command("show", "data/stdlib", show=24)
    story.command("verify", "data/stdlib")
    story.command("verify", "data/digits")
    _train(story)
    story.chapter(
        "Prove it",
        "What every step consumed, as the ranks recorded it through kill and resume, against the plan.",
    )
    story.command("audit", "runs/gpt")
    story.command("audit", "trace", "runs/gpt", "--step", "60", show=6)
    plan = shardkit.open(story.directory / "data" / "stdlib").plan(global_batch=16, lanes=8)
    story.command("audit", "trace", "runs/gpt", "--sample", str(plan.step(60).ravel()[0]))
    story.chapter(
        "Images too", "A small residual network on the digits; every validation sample counted exactly once."
    )
    (story.directory / "digits.toml").write_text(_DIGITS)
    story.command("train", "digits.toml", "--nproc", "2")
    _damage(story)


def _build(story: Narration) -> None:
    story.chapter(
        "Build", "The standard library's own source text becomes shards, balanced by top-level package."
    )
    source = story.directory / "source" / "stdlib.jsonl"
    rows, megabytes = write_stdlib_lines(source, _TEXT_BYTES), source.stat().st_size / 1e6
    story.say(f"  {rows:,} pieces of text, {megabytes:.1f} MB, from this Python's own standard library")
    story.command(
        "build", "source/stdlib.jsonl", "data/stdlib", "--format", "arrow", "--compression", "zstd",
        "--stratify", "package", "--shard-size", "512KiB", "--block-size", "32KiB",
        "--location", "mirror=data/mirror", "--copies", "2", "--mode", "sync",
    )  # fmt: skip


def _digits(story: Narration) -> None:
    story.chapter("Write from Python", "scikit-learn's handwritten digits, balanced by class, in tar shards.")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependency("the demo needs scikit-learn; run: pip install scikit-learn") from None
    story.quote(
        'schema = {"image": "uint8[8,8]", "label": "int64"}\n'
        'with shardkit.create("data/digits", schema, stratify="label", split={"train": 0.8, "val": 0.2}) as writer:\n'
        "    for image, label in zip(images, labels):\n"
        '        writer.add({"image": image, "label": label})'
    )
    digits, root = load_digits(), str(story.directory / "data" / "digits")
    schema, split = {"image": "uint8[8,8]", "label": "int64"}, {"train": 0.8, "val": 0.2}
    with shardkit.create(
        root, schema, stratify="label", split=split, shard_size="512KiB", block_size="32KiB"
    ) as writer:
        for image, label in zip(digits.images.astype(np.uint8), digits.target.tolist(), strict=True):
            writer.add({"image": image, "label": label})
    story.say(f"  → {writer.manifest.id}")
    story.command("ls", "data/digits")


def _train(story: Narration) -> None:
    story.chapter("Train on 2 processes, kill one", "A byte-level GPT; rank 1 gets SIGKILL in the middle.")
    (story.directory / "gpt.toml").write_text(_CONFIG.format(steps=_STEPS))
    process = story.start("train", "gpt.toml", "--nproc", "2")
    killed = _kill_rank(story.directory / "runs" / "gpt", process)
    output, _ = process.communicate(timeout=_PATIENCE_S)
    story.quote("\n".join(line for line in output.splitlines() if line.startswith(("step", "resum"))))
    story.say(
        f"  killed rank 1 (process {killed}) with SIGKILL; the run ended with exit code {process.returncode}",
        "red",
    )
    story.chapter(
        "Resume on 1 process",
        "Another world size; the same samples in the same order from the last checkpoint.",
    )
    story.command("train", "gpt.toml", "--nproc", "1")


def _kill_rank(run: Path, process: subprocess.Popen[str]) -> int:
    """Kill rank 1 with SIGKILL once its journal is past step `_KILL_AFTER`; return its process id."""
    newest, advanced = -1, time.monotonic()
    while time.monotonic() - advanced < _PATIENCE_S:
        for path in (run / "journal").glob("00001-*.cells"):
            steps = [record.step for record in read_journal(path)]
            if steps and steps[-1] >= _KILL_AFTER:
                victim = read_run(run).ranks[1][-1].pid
                os.kill(victim, signal.SIGKILL)
                return victim
            if steps and steps[-1] > newest:
                newest, advanced = steps[-1], time.monotonic()
        if process.poll() is not None:
            output = process.stdout.read() if process.stdout else ""
            raise RunError(f"training ended before it could be killed:\n{output}")
        time.sleep(0.02)
    process.kill()
    raise RunError(f"training made no step for {_PATIENCE_S} s after step {newest}; its files are in {run}")


def _damage(story: Narration) -> None:
    story.chapter("Flip a bit, watch it heal", "One bit of one shard, as a disk or a bad cable would.")
    root = story.directory / "data" / "stdlib"
    before, _ = _one_epoch(root)
    ds = shardkit.open(str(root))
    path = root / ds.reader.shard_name(1)
    position = int(ds.reader.index(1).block_offset[3]) + 1000
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 0b0000_0100
    path.chmod(0o644)
    path.write_bytes(damaged)
    story.say(f"  flipped one bit of byte {position:,} of {path.name[:16]}…")
    story.command("verify", "data/stdlib", expect=(4,))
    after, failovers = _one_epoch(root)
    if after != before or not failovers:
        raise RunError("an epoch over the damaged shard was another than before, or the damage was not met")
    story.say(
        f"  an epoch all the same: {len(after):,} samples, each as it was before; "
        f"{count_text(failovers, 'block')} came from the mirror"
    )
    story.command("repair", "data/stdlib")
    story.command("verify", "data/stdlib")


def _one_epoch(root: Path) -> tuple[list[str], int]:
    """Return all texts of an epoch, and the number of blocks that came from another location."""
    ds = shardkit.open(str(root))
    with ds.loader(ds.plan(global_batch=16, lanes=8), tensors=False) as loader:
        texts = [text for batch in loader for text in batch["text"]]
        return texts, int(loader.stats().get("remote_failovers", 0))


# Folders that are not the library itself: tests, installed packages, generated tables.
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__", "ensurepip",
             "lib-dynload"}  # fmt: skip
_PIECE = 2048  # characters


def write_stdlib_lines(path: Path, limit_bytes: int) -> int:
    """Write ``{"text": …, "package": …}`` lines to `path`; return their number."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [one for one in sorted(root.rglob("*.py")) if not _LEFT_OUT & {*one.relative_to(root).parts}]
    rows = written = 0
    with path.open("w", encoding="utf-8") as out:
        for file in (files[place] for place in order(0, len(files))):
            inside, text = file.relative_to(root), file.read_text(encoding="utf-8", errors="replace")
            package = inside.parts[0] if len(inside.parts) > 1 else "modules"
            for begin in range(0, len(text), _PIECE):
                piece = text[begin : begin + _PIECE]
                out.write(json.dumps({"text": piece, "package": package}, ensure_ascii=False) + "\n")
                rows += 1
            written += len(text)
            if written >= limit_bytes:
                break
    return rows


class Narration:
    """Prints chapters and runs real `shardkit` commands in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.console = Console(highlight=False)
        self._chapter = 0
        self._started = time.monotonic()

    def chapter(self, title: str, why: str) -> None:
        """Begin a chapter: print a rule with its number, and one sentence."""
        self._chapter += 1
        elapsed = time.monotonic() - self._started
        self.console.print()
        self.console.print(Rule(Text(f"{self._chapter}  {title}", style="bold"), align="left"))
        self.console.print(Text(f"{why}  [{elapsed:.0f} s]", style="dim"))

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def command(self, *arguments: str, expect: Sequence[int] = (0,), show: int | None = None) -> None:
        """Run `shardkit ARGUMENTS…` as a separate process and print its output."""
        process = self.start(*arguments)
        output, _ = process.communicate()
        self.quote(output, show)
        if process.returncode not in expect:
            raise RunError(
                f"shardkit {shlex.join(arguments)} ended with exit code {process.returncode}; see above"
            )
        if process.returncode:
            self.say(f"  (exit code {process.returncode})", "dim")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `shardkit ARGUMENTS…` without waiting; its output goes to the pipe."""
        self.say(f"$ shardkit {shlex.join(arguments)}", "bold cyan")
        width = str(max(60, self.console.width - 2))  # of the terminal, minus the indent
        return subprocess.Popen(
            [sys.executable, "-m", "shardkit_tools", *arguments], cwd=self.directory, text=True,
            env={**os.environ, "COLUMNS": width, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def quote(self, output: str, show: int | None = None) -> None:
        """Print a command's output, indented; at most `show` lines."""
        lines = output.rstrip("\n").splitlines()
        for line in lines if show is None else lines[:show]:
            self.console.print(Text(f"  {line}"), soft_wrap=True)
        if show is not None and len(lines) > show:
            self.say(f"  … {len(lines) - show} more lines", "dim")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument(
        "--dir", type=Path, help="work in this empty folder and keep it; default: a temporary one"
    )
    given: Path | None = options.parse_args().dir
    if given is not None and given.exists() and any(given.iterdir()):
        options.error(f"{given} is not empty; name a new folder with --dir, or leave it out")
    folder = Path(tempfile.mkdtemp(prefix="shardkit-demo-")) if given is None else given
    folder.mkdir(parents=True, exist_ok=True)
    narration = Narration(folder.resolve())
    try:
        tell(narration)
    except ShardkitError as error:
        raise SystemExit(f"demo: {error}") from None
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)
    place = "To keep the files: python examples/demo.py --dir DIR" if given is None else f"Files: {folder}"
    narration.say(f"\nDone: every check above was made just now, on this machine. {place}", "bold green")


if __name__ == "__main__":
    main()
