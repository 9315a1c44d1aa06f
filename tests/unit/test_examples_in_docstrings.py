"""The examples in docstrings of public names and in pages of concepts run as printed, on a small dataset of digits."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest

import shardkit

MODULES = {
    "shardkit.dataset.creating": 2, "shardkit.dataset.dataset": 5, "shardkit.dataset.opening": 1,
    "shardkit.dataset.samples": 3,
    "shardkit.plan.plan": 6, "shardkit.loader.loader": 4, "shardkit.loader.batch": 1,
}  # fmt: skip
"""Modules, and how many of their docstrings have examples."""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted: a dataset, a plan, a batch and a state of the first step."""
    monkeypatch.chdir(tmp_path)
    schema = {"image": "uint8[8,8]", "label": "int64"}
    with shardkit.create("data/digits", schema=schema, stratify="label") as writer:
        for number in range(200):
            writer.add({"image": [[number] * 8] * 8, "label": number % 10}, key=f"digit-{number:03d}")
    ds = shardkit.open("data/digits")
    plan = ds.plan(global_batch=20, seed=0)
    with ds.loader(plan) as loader:
        batch = next(iter(loader))
        state = loader.state_dict()
    return {"shardkit": shardkit, "ds": ds, "plan": plan, "batch": batch, "state": state}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, names: dict[str, Any]) -> None:
    module = importlib.import_module(name)
    tests = [one for one in doctest.DocTestFinder().find(module, globs=names) if one.examples]
    assert len(tests) == MODULES[name]
    for one in tests:
        report: list[str] = []
        failed = doctest.DocTestRunner(verbose=False).run(one, out=report.append, clear_globs=False).failed
        assert not failed, "".join(report)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", ["grid", "lanes"])
def test_examples_of_concepts_run(name: str, names: dict[str, Any]) -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / f"{name}.md"
    test = doctest.DocTestParser().get_doctest(page.read_text(encoding="utf-8"), names, name, str(page), 0)
    report: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False).failed
    assert test.examples
    assert not failed, "".join(report)
