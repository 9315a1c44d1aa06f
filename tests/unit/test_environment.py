"""What is missing here is said with the way to get it; shells complete commands and options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import MissingDependency
from tests.command_line import typed as call


def test_missing_fast_modules_are_named_with_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("show")[0] == 2
    assert call("show", "--environment", "data/cats")[0] == 2
    monkeypatch.setitem(sys.modules, "shardkit.loader.block_rows", None)
    code, out, _ = call("show", "--environment")
    assert code == 0
    for words in ("block_rows", "missing", "C compiler", "pip install"):
        assert words in out
    found = json.loads(call("show", "--environment", "--json")[1])
    assert found["compiled"] == {"shardkit.loader.block_rows": False}
    assert found["extras"]["train"].keys() == {"torch"}
    assert found["shardkit"] == shardkit.__version__


def test_tensors_without_torch_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shardkit.create(tmp_path / "a", {"x": "int64"}) as writer:
        for number in range(32):
            writer.add({"x": number})
    ds = shardkit.open(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"pip install .*torch"):
        ds.loader(ds.plan(8), tensors=True)


@pytest.mark.parametrize(
    ("words", "expected"), [("shardkit expo", "export"), ("shardkit export --file", "--file-size")]
)
def test_shells_complete_commands_and_options(words: str, expected: str) -> None:
    env = os.environ | {
        "_SHARDKIT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    code = "import sys; sys.argv = ['shardkit']; from shardkit_tools.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [expected], done.stderr
