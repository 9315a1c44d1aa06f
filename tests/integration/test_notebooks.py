"""The notebooks run from top to bottom in an empty folder and print the text that is stored in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
NEEDS = {"pictures": ("PIL", "torch"), "text": ("PIL", "tokenizers")}


def printed(notebook: Any) -> list[str]:
    """Text that each cell prints; pages and pictures are left out, because they depend on versions of libraries."""
    outputs = [cell.get("outputs", ()) for cell in notebook.cells]
    return ["".join(one["text"] for one in found if one.output_type == "stream") for found in outputs]


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NEEDS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_notebook_runs_and_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    shown = printed(notebook)
    assert sum(map(bool, shown)) > 3
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(notebook) == shown
