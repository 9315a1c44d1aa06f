"""Count the files, functions, calls and file-to-file hops of eight common operations.

    python tools/bench/walks.py            # a table; --json; --files WAY lists the files of one way

Counts Python calls into the project's own packages on all threads (sys.setprofile), in one process, on small generated
data. With equal behaviour, fewer files and hops make an operation easier to follow. The numbers hardly vary between
runs. ARCHITECTURE.md lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

OWN = ("shardkit", "shardkit_tools", "shardkit_trainer")


class Walk:
    """Count calls inside the context."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.calls = self.hops = 0

    def note(self, frame: FrameType, event: str, _arg: object) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in OWN or frame.f_code.co_name == "<module>":
            return
        self.calls += 1
        self.files.add(module)
        self.functions.add((module, frame.f_code.co_qualname))
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back is not None else ""
        self.hops += caller != module and caller.partition(".")[0] in OWN

    def __enter__(self) -> Walk:
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def command(*words: str) -> Callable[[], None]:
    def run() -> None:
        from shardkit_tools.main import run as main

        with quiet(), contextlib.suppress(SystemExit):
            main(list(words))

    return run


def pictures(folder: Path) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    for label in ("cat", "dog", "emu"):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(
                folder / label / f"{number}.jpg"
            )


TRAIN = """[run]
directory = "{run}"
steps = 2
[data]
dataset = "{data}"
global_batch = 16
lanes = 4
[model]
kind = "classifier"
width = 4
[optimizer]
lr = 1e-3
"""


def ways(base: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    import shardkit

    source, root, mirror = base / "photos", str(base / "root"), str(base / "mirror")
    pictures(source)
    yield (
        "build: 60 pictures to a version",
        command("build", str(source), root, "--stratify", "label", "-j", "1"),
    )

    found: dict[str, Any] = {}

    def open_it() -> None:
        found["ds"] = shardkit.open(root)

    yield "open a version", open_it

    def plan_it() -> None:
        found["plan"] = found["ds"].plan(global_batch=16, lanes=4)

    yield "make a plan", plan_it
    yield "one cell of the plan", lambda: found["plan"].cell(step=1, lane=2)

    def first_batch() -> None:
        with found["ds"].loader(found["plan"], rank=0, world=1) as loader:
            next(iter(loader))

    yield "first batch, from a folder", first_batch
    yield "a tag", command("tag", root, "v1")
    command("place", root, "--location", f"m={mirror},domain=x", "--copies", "2")()
    command("replicate", root)()
    victim = max(Path(root, "objects").rglob("*.*"), key=lambda path: path.stat().st_size)
    os.chmod(victim, 0o644)
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 1
    victim.write_bytes(data)
    yield "repair one flipped bit", command("repair", root)
    digits = str(base / "digits")
    draw = np.random.default_rng(0)
    with (
        quiet(),
        shardkit.create(digits, schema={"image": "uint8[8,8]", "label": "int64"}, stratify="label") as writer,
    ):
        for number in range(64):
            writer.add({"image": draw.integers(0, 16, (8, 8), dtype=np.uint8), "label": number % 4})
    config = base / "run.toml"
    config.write_text(TRAIN.format(run=base / "run", data=digits))
    yield "train two steps", command("train", str(config))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--files", metavar="WAY", help="begin of a way's name: list its files")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for _, way in ways(Path(folder)):
            way()  # a first run, so that calls at import do not count
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways(Path(folder)):
            with Walk() as walk:
                way()
            rows[name] = {"files": len(walk.files), "functions": len(walk.functions),
                          "calls": walk.calls, "hops": walk.hops}  # fmt: skip
            if options.files and name.startswith(options.files):
                print("\n".join(sorted(walk.files)))
                return
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'way':36}{'files':>7}{'functions':>11}{'calls':>9}{'hops':>8}")
    for name, row in rows.items():
        print(f"{name:36}{row['files']:7}{row['functions']:11}{row['calls']:9}{row['hops']:8}")


if __name__ == "__main__":
    main()
