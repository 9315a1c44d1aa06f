"""The architecture page is what the code is."""

from __future__ import annotations

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
    assert drawing.redraw(page) == page, REDRAW


def test_the_functions_that_decide_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = page.partition("## Where is it decided?")[2].partition("\n## ")[0]
    source, found = "", 0
    for name in re.findall(r"`([^`]+)`", rows):
        if "/" in name:
            source = (ROOT / name).read_text(encoding="utf-8")
        elif "." not in name:
            found += 1
            defines = rf"^(?:(?:    )?(?:def|class|static \w+) )?{name}\b"
            assert re.search(defines, source, re.MULTILINE), name
    assert found >= 14
