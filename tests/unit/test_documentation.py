"""The site, its words and its examples are what the code is.

In SPECs and pages of docs, *emphasis* marks a term, and nothing else.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit

# ---- The site: every page listed and there, no link dead; a guide's page is its program and what it prints


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def making() -> Any:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dead_link_is_found(making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.md").write_text("# What *it* is: `code` (2026)\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](there.md) [b](#page) [c](there.md#what-it-is-code-2026) [d](https://example.org/x)\n"
        "```\n[e](shown-not-linked.md)\n```\n"
        "[f](missing.md) [g](there.md#missing) [h](folder) [i](#missing)\n"
        '<source media="dark" srcset="dark.svg"><img alt="a picture" src="there.md" width="9">\n'
    )
    found = [problem.split(": ", 1)[1].split()[0].rstrip(":") for problem in making.dead_links(page)]
    assert found == ["missing.md", "there.md#missing", "folder", "#missing", "dark.svg"]


def test_a_page_that_is_not_listed_is_found(making: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = making.listed_pages()
    monkeypatch.setattr(making, "listed_pages", lambda: [*pages[1:], "docs/missing.md"])
    assert list(making.left_out()) == ["zensical.toml: docs/missing.md does not exist"]
    monkeypatch.setattr(making, "listed_pages", lambda: [one for one in pages if "auditing" not in one])
    assert list(making.left_out()) == ["zensical.toml: examples/guides/auditing.md is missing in nav"]


def test_a_guide_is_shown_with_what_it_prints(making: Any) -> None:
    program = making.GUIDES / "auditing.py"
    page = making.guide_page(program, "$ shardkit audit runs/b\n  clean\n")
    assert page.startswith("# Auditing: prove which samples a run consumed")
    assert page.index("audit trace runs/mine --exclude") < page.index("  clean\n") < page.index("def main()")
    assert page.count("Anyone with the manifest can replay") == 1, "not once more at the head of the program"
    pages = making.listed_pages()
    text = "[a](auditing.py) [b](../ddp.py) [c](../deployment/README.md) [d](../operating) [e](https://x.org/a.py)"
    assert making.linked_to_pages("examples/guides/README.md", text, pages) == (
        "[a](auditing.md) [b](../ddp.py) [c](../deployment/README.md) [d](../operating/README.md) [e](https://x.org/a.py)"
    )


def test_a_broken_table_is_found(making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n| a \\| b | c |\n|:---|---:|\n\n```\n| a | b |\n|---|\n```\n\n"
        "|  | b | c |\n|---|---|\n"
    )
    assert list(making.broken_tables(page)) == ["page.md:13: 3 columns, but 2 in the rule below"]


# ---- docs/words.md has the terms that pages emphasise


GLOSSARY = ROOT / "docs" / "words.md"
EMPHASIS = re.compile(r"(?<![*\w])\*([A-Za-z][A-Za-z -]*)\*(?![*\w])")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
PACKAGES = ("shardkit", "tools/shardkit_tools", "trainer/shardkit_trainer")


def prose(path: Path) -> str:
    return CODE.sub("", path.read_text(encoding="utf-8"))


def emphasised(text: str) -> set[str]:
    return {found.lower() for found in EMPHASIS.findall(text)}


def first_cells(text: str, heading: str = "term") -> Iterator[str]:
    """First cells of the rows of tables whose first heading is `heading`."""
    for table in re.findall(rf"(?m)^\| {heading} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text):
        yield from re.findall(r"(?m)^\| (.+?) \|", table)


def defined(text: str) -> set[str]:
    """Terms of the glossary: first cells, split at commas, and terms emphasised in a meaning."""
    return {term.strip() for cell in first_cells(text) for term in cell.split(",")} | emphasised(text)


def is_defined(term: str, terms: set[str]) -> bool:
    singular = {term, term.removesuffix("s"), re.sub("ies$", "y", term), re.sub("strata$", "stratum", term)}
    return not singular.isdisjoint(terms)


def pages() -> list[Path]:
    found = [*(ROOT / "docs").rglob("*.md"), ROOT / "ARCHITECTURE.md"]
    found += [path for package in PACKAGES for path in (ROOT / package).rglob("SPEC.md")]
    return [path for path in sorted(found) if path != GLOSSARY]


def occurs(term: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(term)}(?:s|es)?\b", text) is not None


def test_emphasised_terms_have_entries() -> None:
    terms = defined(GLOSSARY.read_text(encoding="utf-8"))
    missing = {
        f"{path.relative_to(ROOT)}: {term}"
        for path in pages()
        for term in emphasised(prose(path)) | set(first_cells(prose(path)))
        if not is_defined(term, terms)
    }
    assert sorted(missing) == [], "define it in docs/words.md; use ** to stress a word that is not a term"


def test_every_entry_is_used_and_has_one_meaning() -> None:
    text = GLOSSARY.read_text(encoding="utf-8")
    cells = [term.strip() for cell in first_cells(text) for term in cell.split(",")]
    assert len(cells) > 80
    assert sorted({term for term in cells if cells.count(term) > 1}) == []
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    shown = " ".join(path.read_text(encoding="utf-8") for path in [*pages(), *sources]).lower()
    assert [term for term in cells if not occurs(term, shown)] == []


def test_a_term_without_an_entry_is_found() -> None:
    terms = defined("| term | meaning |\n|---|---|\n| hand, deck | run of *cards* |\n")
    assert terms == {"hand", "deck", "cards"}
    assert emphasised("A *hand* of **five** a*b*c, *Full Houses*") == {"hand", "full houses"}
    assert is_defined("hands", terms)
    assert not is_defined("full houses", terms)


# ---- The examples in docstrings of public names and in pages of concepts run as printed, on a small dataset of digits


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
