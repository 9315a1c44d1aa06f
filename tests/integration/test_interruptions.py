"""The interruption benchmark finds known faults of a broken loader, and none of shardkit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.interruptions import page
from bench.interruptions.chart import answers
from bench.interruptions.scenarios import QUESTIONS

ROOT = Path(__file__).parents[2]


def measured(adapter: str, folder: Path, *scenarios: str) -> dict[str, Any]:
    """Return the runs of an adapter with one seed, by scenario."""
    out = folder / "result.json"
    program = ROOT / "tools" / "bench" / "interruptions" / "measure.py"
    command = [
        sys.executable,
        str(program),
        adapter,
        "--data",
        str(folder),
        "--out",
        str(out),
        "--seeds",
        "1",
    ]
    done = subprocess.run([*command, "--scenarios", *scenarios], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {key: runs["0"] for key, runs in json.loads(out.read_text())["runs"].items()}


def test_known_faults_are_counted(tmp_path: Path) -> None:
    """Three resumes lose 3 samples, repeat 2 and exchange two steps of 24 samples each."""
    runs = measured("broken", tmp_path, "same", "ranks", "killed", "epoch_end")
    faults = {
        "answer": "wrong",
        "lost": 9,
        "repeated": 6,
        "fewer": 0,
        "tail": 0,
        "moved": 144,
        "equal_steps": 159,
        "steps": 168,
    }
    assert runs["same"] == runs["ranks"] == runs["killed"] == faults
    # Two resumes; the one at the end of the epoch has no step left in which its faults could be.
    assert runs["epoch_end"] == faults | {"lost": 3, "repeated": 2, "moved": 48, "equal_steps": 165}


@pytest.mark.slow
def test_shardkit_is_exact(tmp_path: Path) -> None:
    runs = measured("shardkit_loader", tmp_path, "ranks", "killed")
    assert {run["answer"] for run in runs.values()} == {"exact"}
    assert {run["equal_steps"] for run in runs.values()} == {168}


def test_readme_names_the_loaders_that_are_exact_in_every_question() -> None:
    exact = {
        result["label"].split(",")[0]
        for result in page.read_results()
        if all(list(answers(result, key)) == ["exact"] for key in QUESTIONS)
    }
    described = re.search(r'<img alt="([^"]*)"', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert described is not None
    named = {result["label"].split(",")[0] for result in page.read_results()}
    assert {name for name in named if name in described[1]} == exact
