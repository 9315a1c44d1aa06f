"""The site, its words and its examples are what the code is.

In SPECs and pages of docs, *emphasis* marks a term, and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit_tools.main import COMMANDS, run

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


def test_dead_links_of_built_pages_are_found(making: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="here">x</h1><a href="other.html#part">1</a><a href="#here">2</a><a href="https://example.org">3</a>'
        '<a href="other.html#nowhere">4</a><source srcset="dark.svg"><img src="missing.png"><a href="folder/">5</a>'
    )
    (tmp_path / "other.html").write_text('<p id="part"></p>')
    found = [line.partition(": ")[2] for line in making.dead_links_of_site(tmp_path)]
    assert found == ["other.html#nowhere", "dark.svg", "missing.png", "folder/"]


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


def test_a_guide_that_lacks_a_package_is_shown_without_its_output(
    making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "guides"
    folder.mkdir()
    missing, broken = folder / "missing.py", folder / "broken.py"
    missing.write_text("import no_such_package_anywhere\n")
    broken.write_text("import shardkit.no_such_module\n")
    monkeypatch.setattr(making, "ROOT", tmp_path)
    assert "no_such_package_anywhere" in making.printed_by(missing)
    with pytest.raises(SystemExit, match="no_such_module"):
        making.printed_by(broken)


def test_a_broken_table_is_found(making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n| a \\| b | c |\n|:---|---:|\n\n```\n| a | b |\n|---|\n```\n\n"
        "|  | b | c |\n|---|---|\n"
    )
    assert list(making.broken_tables(page)) == ["page.md:13: 3 columns, but 2 in the rule below"]


# ---- docs/words.md has the project's terms: those that pages emphasise, and those that users meet as names of classes


GLOSSARY = ROOT / "docs" / "words.md"
EMPHASIS = re.compile(r"(?<![*\w])\*([A-Za-z][A-Za-z -]*)\*(?![*\w])")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
ORDINARY = {"texts", "use", "table"}  # names of classes that are also words of every sentence
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


def class_terms() -> set[str]:
    """Names of the classes that packages export, as words: `FailureDomain` → "failure domain"."""
    exported: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            listed = re.search(r"__all__ = \[(.*?)\]", path.read_text(encoding="utf-8"), re.DOTALL)
            exported |= set(re.findall(r'"([A-Z][a-z]\w*)"', listed[1] if listed else ""))
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() for name in exported}


@pytest.fixture(scope="module")
def help_pages() -> str:
    out = io.StringIO()
    for name in (name for _, names in COMMANDS for name in names):
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.suppress(SystemExit),
        ):
            patch.setenv("COLUMNS", "500")
            run([name, "--help"])
    return out.getvalue().lower()


@functools.cache
def texts() -> dict[str, str]:
    """All docstrings and all texts of raised errors of the packages."""
    found: dict[str, list[str]] = {"messages": [], "docstrings": []}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                found["messages"] += [
                    one.value
                    for one in ast.walk(node)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
            elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found["docstrings"].append(ast.get_docstring(node) or "")
    return {kind: " ".join(each).lower() for kind, each in found.items()}


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


def test_classes_that_help_pages_and_messages_name_have_entries(help_pages: str) -> None:
    terms = defined(GLOSSARY.read_text(encoding="utf-8")) | ORDINARY
    commands = {name for _, names in COMMANDS for name in names}
    shown = help_pages + texts()["messages"]
    met = [term for term in sorted(class_terms() - commands) if occurs(term, shown)]
    assert len(met) > 20
    missing = [
        term
        for term in met
        if not is_defined(term, terms) and not all(is_defined(one, terms) for one in term.split())
    ]
    assert missing == []


def test_every_entry_is_used_and_has_one_meaning(help_pages: str) -> None:
    text = GLOSSARY.read_text(encoding="utf-8")
    cells = [term.strip() for cell in first_cells(text) for term in cell.split(",")]
    assert len(cells) > 80
    assert sorted({term for term in cells if cells.count(term) > 1}) == []
    shown = " ".join([help_pages, *texts().values()])
    shown += " ".join(prose(path) for path in pages()).lower()
    assert [term for term in cells if not occurs(term, shown)] == []


def test_a_term_without_an_entry_is_found() -> None:
    terms = defined("| term | meaning |\n|---|---|\n| hand, deck | run of *cards* |\n")
    assert terms == {"hand", "deck", "cards"}
    assert emphasised("A *hand* of **five** a*b*c, *Full Houses* and `*code*`".replace("`*code*`", "")) == {
        "hand",
        "full houses",
    }
    assert is_defined("hands", terms)
    assert not is_defined("full houses", terms)
    assert list(
        first_cells("| term | x |\n|---|---|\n| one | 1 |\n| two | 2 |\n\n| other |\n|---|\n| no |\n")
    ) == [
        "one",
        "two",
    ]


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
