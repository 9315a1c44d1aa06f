"""No two files of what is shipped import each other, by whatever way round."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / "tools" / "import_circles.py"


def test_no_file_imports_itself_by_way_of_others() -> None:
    done = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "import shardkit.one",
        "from shardkit import one",
        "from .one import x",
        "from . import one",
        "from ..one import x",
    ],
)
def test_a_circle_is_found_however_its_imports_are_written(tmp_path: Path, line: str) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(CHECK, tmp_path / "tools")
    package = tmp_path / "shardkit"
    inner = package / "inner" if line.startswith("from ..") else package
    inner.mkdir(parents=True)
    for folder in {package, inner}:
        (folder / "__init__.py").touch()
    two = f"shardkit.{'inner.' if inner != package else ''}two"
    (package / "one.py").write_text(f"def f():\n    import {two}\n")
    (inner / "two.py").write_text(f"{line}\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "tools" / CHECK.name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "circle of 2 files" in done.stdout) == (1, True), done.stdout + done.stderr
