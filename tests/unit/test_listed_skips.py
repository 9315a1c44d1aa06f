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

@pytest.mark.xfail(strict=True, reason="known")
def test_known():
    raise AssertionError

def test_runs():
    pass
"""
DEVICE = {
    "test": r"unit/test_it\\.py::test_device(\\[.*\\])?",
    "reason": "no such device",
    "because": "there is none",
}
MARKED = {"test": r"unit/test_it\\.py::test_marked", "reason": "hot", "because": "it is summer"}


def run(
    folder: Path, listed: list[dict[str, str]], ci: str, suite: str = SUITE, *more: str
) -> tuple[int, str]:
    """Exit code and output of a suite under this repository's conftest and such a list."""
    (folder / "unit").mkdir(parents=True)
    shutil.copy(CONFTEST, folder)
    lines = "\n".join("[[skip]]\n" + "".join(f'{k} = "{v}"\n' for k, v in entry.items()) for entry in listed)
    (folder / "allowed_skips.toml").write_text(lines)
    (folder / "unit" / "test_it.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more], cwd=folder, capture_output=True,
        text=True, env={**os.environ, "CI": ci}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_skip_that_is_not_listed_fails_on_ci_and_is_named(tmp_path: Path, workers: str) -> None:
    code, told = run(tmp_path, [DEVICE], "true", SUITE, "-n", workers)
    assert code == 1, told
    assert "unit/test_it.py::test_marked was skipped: too hot" in told
    assert "allowed_skips.toml" in told
    assert "1 passed, 2 skipped, 1 xfailed, 1 error" in told


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "listed"), [("true", [DEVICE, MARKED]), ("false", [])])
def test_what_is_listed_is_skipped_and_elsewhere_every_test(
    tmp_path: Path, ci: str, listed: list[dict[str, str]]
) -> None:
    code, told = run(tmp_path, listed, ci)
    assert code == 0, told
    assert "1 passed, 3 skipped, 1 xfailed" in told


def test_a_listed_test_must_skip_for_the_listed_reason(tmp_path: Path) -> None:
    code, told = run(tmp_path, [{**DEVICE, "reason": "no room"}, MARKED], "1")
    assert code == 1
    assert "test_device[1] was skipped: no such device: /dev/x" in told
    assert "test_device[2] was skipped" in told


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_module_that_skips_all_of_its_tests_is_no_exception(tmp_path: Path, workers: str) -> None:
    suite = "import pytest\npytest.importorskip('no_such_package')\ndef test_one(): pass\n"
    code, told = run(tmp_path, [], "true", suite, "-n", workers)
    assert code != 0
    assert "unit/test_it.py was skipped: could not import 'no_such_package'" in told


def test_the_list_of_this_repository_is_short_and_says_why() -> None:
    import tomllib

    listed = tomllib.loads(CONFTEST.with_name("allowed_skips.toml").read_text()).get("skip", [])
    assert len(listed) <= 10
    assert all(set(entry) == {"test", "reason", "because"} and all(entry.values()) for entry in listed)
