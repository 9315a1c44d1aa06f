"""docs/words.md has the project's terms: those that pages emphasise, and those that users meet as names of classes.

In SPECs and pages of docs, *emphasis* marks a term, and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit_tools.main import COMMANDS, run

ROOT = Path(__file__).parents[2]
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
