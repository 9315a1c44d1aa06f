"""`make demo` runs as a stranger would run it, and its claims hold."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_builds_trains_resumes_and_proves(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, str(DEMO), "--dir", str(place)],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "with SIGKILL" in done.stdout
    assert re.search(r"resumed at step \d+ of \d+ on 1 rank", done.stdout)
    assert "data/stdlib: damaged" in done.stdout
    assert re.search(r"each as it was before; 1 block came from\s+the mirror", done.stdout)
    assert "data/stdlib: repaired" in done.stdout
    # what it claims to have proven, proven again from the files that it left
    audit = subprocess.run(
        [sys.executable, "-m", "shardkit_tools", "audit", "runs/gpt", "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    ds = shardkit.open(str(place / "data" / "stdlib"))
    assert ds.plan(global_batch=16, lanes=8).digest in audit.stdout
    assert ds.manifest.id in audit.stdout
    assert not list((place / "data" / "stdlib" / "tmp").glob("*"))
    shards = list((place / "data" / "stdlib" / "objects").rglob("*.arrow"))
    assert shards
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.stem for path in shards)


def test_the_demo_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "keep me"
