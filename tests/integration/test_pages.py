"""Pages of docs from top to bottom in an empty folder: commands end as a page says and print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.object_stores import moto, s3_environment

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each command of a console block, its exit code, and the lines that the page shows of its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        command, _, remark = line.partition("#")
        code = re.search(r"exit code (\d+)", remark)
        yield command.strip(), int(code[1]) if code else 0, shown


def shape(line: str) -> str:
    """Return a line without what differs between machines: sizes, times, rates, digests and widths."""
    line = re.sub(r"sha256:[0-9a-f]+…?|\b[0-9a-f]{16,}\b", "DIGEST", line)
    line = re.sub(r"[\d.]+ (?:[KMG]i)?B(?:/s)?\b|[\d.]+ m?s\b", "AMOUNT", line)
    return " ".join(line.split())


def test_shape_keeps_counts_and_drops_measurements() -> None:
    assert shape("read  366 KiB in 300 ms, 1.19 MiB/s") == "read AMOUNT in AMOUNT, AMOUNT"
    assert shape("split val    48 samples, sha256:e513e1225e0e…") == "split val 48 samples, DIGEST"
    assert shape("epoch 0  552 samples of 552") != shape("epoch 0  551 samples of 552")


def run_page(page: Path, folder: Path, **variables: str) -> int:
    """Run the commands of a page in a folder, in order, and return their number."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    } | variables
    ran = 0
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        if language != "console":
            continue
        for command, code, shown in commands(text):
            done = subprocess.run(
                shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
            printed = iter([shape(line) for line in done.stdout.splitlines()])
            for line in shown:
                if line != "…":
                    expected = shape(line.removeprefix("…"))
                    assert any(one.endswith(expected) for one in printed), f"{command}: {line}\n{done.stdout}"
            ran += 1
    return ran


@pytest.mark.parametrize(
    ("page", "packages", "number"),
    [
        ("tutorial", ("torch", "PIL"), 8),
        ("dataloader_workers", ("torch",), 3),
        ("transforms", ("torch",), 3),
        ("own_stores_and_sources", ("fsspec",), 6),
        ("upgrades", (), 6),
        ("trackers", ("mlflow",), 2),
        ("training_programs", ("accelerate", "transformers", "pytorch_lightning"), 7),
    ],
)
def test_a_page_runs_and_prints_what_it_shows(
    page: str, packages: tuple[str, ...], number: int, tmp_path: Path
) -> None:
    for package in packages:
        pytest.importorskip(package)
    assert run_page(DOCS / f"{page}.md", tmp_path) == number


def test_the_page_of_object_stores_runs_on_a_bucket(tmp_path: Path) -> None:
    for package in ("moto", "obstore", "boto3", "PIL"):
        pytest.importorskip(package)
    with moto("my-bucket") as endpoint:
        assert run_page(DOCS / "object_stores.md", tmp_path, **s3_environment(endpoint)) == 5
