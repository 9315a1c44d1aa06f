"""The architecture page is what the code is, and every public name says what it is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardkit.errors import MissingDependency

ROOT = Path(__file__).parents[2]
REDRAW = "run: python tools/draw_architecture.py"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "draw_architecture", ROOT / "tools" / "draw_architecture.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_drawn_from_the_code(drawing: Any) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert drawing.drawn(page) == page, REDRAW


def test_the_arrows_are_the_imports_that_import_linter_sees() -> None:
    """Counted by another program than the one that draws them."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("shardkit")
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[?(\w+)\]?(?:\([^)]*\))? \| .* \| ([\w, –]+) \|$", page, re.MULTILINE)
    library = {name: set(re.findall(r"\w+", others)) for name, others in rows}
    assert len(library) > 10
    for name in (child.partition(".")[2] for child in graph.find_children("shardkit")):
        if name == "__main__":
            continue
        modules = {f"shardkit.{name}", *graph.find_descendants(f"shardkit.{name}")}
        found = {other for module in modules for other in graph.find_modules_directly_imported_by(module)}
        below = {other.split(".")[1] for other in found if other.startswith("shardkit.")} - {name}
        assert library[name] == below, f"{name}; {REDRAW}"


FOLDERS = {"shardkit": ROOT, "shardkit_tools": ROOT / "tools", "shardkit_trainer": ROOT / "trainer"}


def modules_of(package: str) -> list[str]:
    """Names, from the files: nothing is imported while tests are collected."""
    folder = FOLDERS[package]
    paths = (path.relative_to(folder).with_suffix("") for path in (folder / package).rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths if "peers" not in path.parts}
    return sorted(name for name in names if not name.endswith((".__main__", ".worker", ".plan_peers")))


@pytest.mark.parametrize("package", FOLDERS)
def test_public_names_have_docstrings(package: str) -> None:
    for name in modules_of(package):
        try:
            check_docstrings(importlib.import_module(name))
        except (ImportError, MissingDependency) as error:
            if (getattr(error, "name", None) or "").partition(".")[0] in FOLDERS:
                raise  # only a package of others may be absent


def check_docstrings(module: ModuleType) -> None:
    name = module.__name__
    assert module.__doc__, f"{name} has no docstring"
    source = inspect.getsource(module)
    for public in getattr(module, "__all__", ()):
        thing = getattr(module, public)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
            generated = (own or "").startswith(f"{public}(")  # what dataclasses put in place of one
            assert own, f"{name}.{public} has no docstring"
            assert not generated, f"{name}.{public} has no docstring but what @dataclass made"
        assert re.search(rf"\b{public}\b", source), f"{name}.{public} comes from nowhere"
