"""The storage side from seeds (README.md here): ``SEED=17 pytest tests/simulation`` replays one, exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.drills import DRILLS

_ROOT: Final = Path(__file__).parents[2]
_PART: Final = 120
_SEEDS: Final = 100_000 if DRILLS else 120
_SEED: Final = os.environ.get("SEED")

pytestmark = pytest.mark.filterwarnings("default")


def _run(*arguments: str, hash_seed: str = "0") -> tuple[int, str]:
    """A process of its own, in which nothing else runs: clock, files and threads of all of it are simulated."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.run", *arguments],
        cwd=_ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.parametrize("first", [int(_SEED)] if _SEED else range(0, _SEEDS, _PART))
def test_whatever_fails_the_promises_hold(first: int) -> None:
    code, told = _run("--seeds", f"{first}:{first + (1 if _SEED else _PART)}")
    assert code == 0, told


@pytest.mark.skipif(_SEED is not None, reason="one seed is replayed")
def test_a_seed_tells_the_same_story_in_every_process() -> None:
    stories = [_run("-v", "--seeds", "0:12", hash_seed=hash_seed) for hash_seed in ("1", "2")]
    assert stories[0] == stories[1]
    assert stories[0][1].count("==== faults have stopped") == 12


@pytest.mark.slow
@pytest.mark.skipif(_SEED is not None, reason="one seed is replayed")
@pytest.mark.parametrize("part", range(4))
def test_each_fault_in_the_product_is_found(part: int) -> None:
    """By the seed that found it before; by another where the product's requests have changed since."""
    code, told = _run("--check", "--part", f"{part}/4")
    assert code == 0, told
