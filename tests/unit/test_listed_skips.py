"""On CI a skipped test is a failed one unless it is listed: the rule of tests/conftest.py, on suites made for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SUITE = """
import unittest
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_device(n):
    pytest.skip("no such device: /dev/x")

@pytest.mark.skipif(True, reason="too hot")
def test_marked():
    raise AssertionError

@pytest.mark.skipif(True, reason="too cold")
def test_listed_with_another_reason():
    raise AssertionError

@pytest.mark.xfail(strict=True, reason="known")
def test_known():
    raise AssertionError

def test_runs():
    pass
"""
MODULE = "import pytest\npytest.importorskip('no_such_package')\ndef test_one(): pass\n"
LIST = r"""
[[skip]]
test = "unit/test_it\\.py::test_device(\\[.*\\])?"
reason = "no such device"
because = "there is none"
[[skip]]
test = "unit/test_it\\.py::test_listed_with_another_reason"
reason = "too hot"
because = "it is summer"
"""


def run(folder: Path, ci: str, *more: str) -> tuple[int, str]:
    """Exit code and output of two modules under this repository's conftest and that list."""
    (folder / "unit").mkdir()
    shutil.copy(CONFTEST, folder)
    (folder / "allowed_skips.toml").write_text(LIST)
    (folder / "unit" / "test_it.py").write_text(SUITE)
    (folder / "unit" / "test_module.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more], cwd=folder, capture_output=True,
        text=True, env={**os.environ, "CI": ci}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_skip_that_is_not_listed_with_its_reason_fails_on_ci_and_is_named(tmp_path: Path) -> None:
    """In a worker, from which reports travel."""
    code, told = run(tmp_path, "true", "-n", "1", "--continue-on-collection-errors")
    assert code == 1, told
    assert "unit/test_it.py::test_marked was skipped: too hot" in told
    assert "test_listed_with_another_reason was skipped: too cold" in told
    assert "unit/test_module.py was skipped: could not import 'no_such_package'" in told
    assert "allowed_skips.toml" in told
    assert "1 passed, 2 skipped, 1 xfailed, 3 errors" in told


def test_the_list_of_this_repository_is_short_and_says_why() -> None:
    import tomllib

    listed = tomllib.loads(CONFTEST.with_name("allowed_skips.toml").read_text()).get("skip", [])
    assert len(listed) <= 10
    assert all(set(entry) == {"test", "reason", "because"} and all(entry.values()) for entry in listed)
