"""The architecture page is what the code is."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
