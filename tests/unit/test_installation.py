"""What is installed, what each extra brings, and what is imported only when it is needed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import MissingDependency
from shardkit.extras import install_command
from tests.command_line import typed as call

# ---- The command that messages give for an extra installs its packages, from wherever shardkit was installed


ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = (ROOT / "shardkit", ROOT / "tools" / "shardkit_tools", ROOT / "trainer" / "shardkit_trainer")


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev", "docs", "webdataset"}))
def test_the_command_names_the_packages_of_the_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{one}; extra == '{name}'" for name, listed in EXTRAS.items() for one in listed]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: ["numpy>=2.0", *lines])
    words = shlex.split(install_command(extra))
    assert words[:2] == ["pip", "install"]
    listed = {one for one in EXTRAS[extra] if not one.startswith("shardkit[")}
    assert listed <= set(words[2:])
    assert "numpy>=2.0" not in words


def test_no_text_names_an_extra_of_an_index() -> None:
    """shardkit is not on an index: a message, an example or a page with shardkit[…] cannot be followed."""
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    files += [
        path
        for folder in ("docs", "examples")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".md")
    ]
    files += [ROOT / name for name in ("README.md", "AGENTS.md", "llms.txt")]
    found = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in files
        for match in re.findall(
            r"install[^\n]{0,40}shardkit(?:\[| shardkit|$)", path.read_text(encoding="utf-8")
        )
    ]
    assert found == []


# ---- What is missing here is said with the way to get it; shells complete commands and options


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


# ---- What is installed is used: every module is reached from what users import or run, or is a suite for authors


MODULES = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in PACKAGES
    for path in folder.rglob("*.py")
}
STARTS = (
    *(name for name in MODULES if name.endswith(".__main__") or name.startswith("shardkit_tools.commands.")),
    *("shardkit", "shardkit.torch", "shardkit.audit", "shardkit_trainer"),
    *(
        "shardkit.testing.store_conformance",
        "shardkit.testing.memory_store",
        "shardkit.integrations.transformers",
        "shardkit.integrations.lightning",
        "shardkit.integrations.webdataset",
        "shardkit.integrations.torchtitan",
        "shardkit.integrations.trackers",
        "shardkit.integrations.opentelemetry",
        "shardkit.formats.canonical_json",
    ),
)


def used_by(name: str) -> set[str]:
    """Modules that a module imports or names, and the packages around it."""
    found = {name.rsplit(".", 1)[0]} if "." in name else set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = [*name.split("."), *(["__init__"] if MODULES[name].stem == "__init__" else [])]
            around = here[: -node.level] if node.level else []
            source = ".".join([*around, node.module or ""]).strip(".")
            found |= {source, *(f"{source}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & MODULES.keys()


def test_nothing_is_installed_that_only_tests_use() -> None:
    reached: set[str] = set()
    ahead = set(STARTS)
    while ahead:
        name = ahead.pop()
        reached.add(name)
        ahead |= used_by(name) - reached
    assert sorted(MODULES.keys() - reached) == []


# ---- No two files of what is shipped import each other, by whatever way round


CHECK = Path(__file__).resolve().parents[2] / "tools" / "import_circles.py"


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


# ---- A process that has not imported torch gets numpy arrays, epoch after epoch, and torch stays away


PROGRAM = """
    import sys
    import numpy as np
    import shardkit

    ds = shardkit.open(sys.argv[1])
    loader = ds.loader(ds.plan(global_batch=10, lanes=2))
    epochs = lambda: ({"x": batch["x"], "y": batch["y"]} for batch in loader)  # what from_generator calls
    first, second = list(epochs()), list(epochs())
    for batches in (first, second):
        assert all(type(batch["x"]) is np.ndarray and batch["x"].dtype == np.float32 for batch in batches)
        assert sorted(np.concatenate([batch["y"] for batch in batches]).tolist()) == list(range(40))
    assert [b["y"].tolist() for b in first] != [b["y"].tolist() for b in second]
    assert "torch" not in sys.modules
    loader.close()
"""


def test_numpy_without_torch(tmp_path: Path) -> None:
    root = str(tmp_path / "points")
    with shardkit.create(root, schema={"x": "float32[8]", "y": "int64"}) as writer:
        for n in range(40):
            writer.add({"x": np.full(8, n, dtype=np.float32), "y": n})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
