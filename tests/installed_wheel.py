"""Tries an installed shardkit, and nothing of the checkout: builds a dataset, reads a batch, asks what is compiled.

python tests/installed_wheel.py [--without-compiled]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import shardkit


def shell(*words: object, folder: Path) -> str:
    """Standard output of the installed command."""
    program = Path(sys.executable).with_name("shardkit")
    return subprocess.run(
        [program, *map(str, words)], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def main(*, compiled: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(f'{{"x": {n}, "label": {n % 2}}}\n' for n in range(200)))
        shell("build", "rows.jsonl", "data", "--stratify", "label", folder=folder)
        shell("verify", "data", folder=folder)
        ds = shardkit.open(folder / "data")
        with ds.loader(ds.plan(global_batch=50), rank=0, world=1, tensors=False) as loader:
            rows = [int(x) for batch in loader for x in batch["x"]]
        assert sorted(rows) == list(range(200)), "every row once"
        found = json.loads(shell("show", "--environment", "--json", folder=folder))
        assert set(found["compiled"].values()) == {compiled}, found["compiled"]
        assert found["shardkit"] == shardkit.__version__
    print(
        f"shardkit {shardkit.__version__} of {Path(shardkit.__file__).parent}, compiled modules: {compiled}"
    )


if __name__ == "__main__":
    main(compiled=sys.argv[1:] != ["--without-compiled"])
