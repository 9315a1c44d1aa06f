"""The site: every page listed and there, no link dead; a guide's page is its program and what it prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def making() -> Any:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_leads_somewhere_and_every_page_is_listed(making: Any) -> None:
    assert [problem for page in making.markdown_files() for problem in making.dead_links(page)] == []
    assert list(making.left_out()) == []
    assert len(making.markdown_files()) > 40
    assert len(set(making.listed_pages())) == len(making.listed_pages())


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


def test_every_table_has_a_rule_of_its_width(making: Any) -> None:
    """A table whose rule has another width than its head is shown as text, here and on GitHub."""
    assert [problem for page in making.markdown_files() for problem in making.broken_tables(page)] == []


def test_a_broken_table_is_found(making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n| a \\| b | c |\n|:---|---:|\n\n```\n| a | b |\n|---|\n```\n\n"
        "|  | b | c |\n|---|---|\n"
    )
    assert list(making.broken_tables(page)) == ["page.md:13: 3 columns, but 2 in the rule below"]
