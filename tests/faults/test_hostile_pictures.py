"""Mutated pictures: each a picture or a FormatError, no crash, no more memory than the pixel limit's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills import drill_count

MAX_PIXELS = 1_000_000


@pytest.mark.drill
@pytest.mark.timeout(0)
def test_ten_thousand_mutated_files_are_pictures_or_typed_errors() -> None:
    count = drill_count(10_000)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("picture_hostile.py")), str(count), str(MAX_PIXELS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["picture"] + found["error"] == count
    assert min(found["picture"], found["error"]) > count // 10
    # decoding a picture of the limit came first: what is beyond its memory is a picture beyond the limit
    assert found["grown_bytes"] < 16 * MAX_PIXELS
