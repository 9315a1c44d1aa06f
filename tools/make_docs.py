"""The documentation as a site: pages laid out, built strictly, every link followed.

    python tools/make_docs.py            # build/docs/site/index.html is the start
    python tools/make_docs.py --check    # builds nothing: links, tables, and pages that the site leaves out

Pages keep their paths, so that their links hold on the site as they do in the repository. A guide's page is made of
its program: what its docstring says, its code, and what it prints.
"""

from __future__ import annotations

import ast
import contextlib
import html.parser
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "docs"
SETTINGS = ROOT / "zensical.toml"
GUIDES = ROOT / "examples" / "guides"
COMMAND_HELP = "docs/command_help.md"
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
PICTURE = re.compile(r'<(?:img|source)\b[^>]*?\bsrc(?:set)?="([^"]+)"')
RULE = re.compile(r"\|(?: *:?-+:? *\|)+")
SEPARATOR = re.compile(r"(?<!\\)\|")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


# ---- the pages


def listed_pages() -> list[str]:
    """Return the pages of the site's navigation, in its order; paths below the repository."""

    def below(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for one in entry.values() if isinstance(entry, dict) else entry:
                yield from below(one)

    return list(below(settings()["nav"]))


def settings() -> dict[str, Any]:
    """Return the settings of the site."""
    found: dict[str, Any] = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["project"]
    return found


def program_of(page: str) -> Path | None:
    """The guide that a page is made of."""
    program = (ROOT / page).with_suffix(".py")
    return program if program.parent == GUIDES and program.exists() else None


def links_of(text: str) -> list[str]:
    """Targets of a page's links to this repository."""
    plain = FENCED.sub("", text)
    return [link for link in LINK.findall(plain) + PICTURE.findall(plain) if not urlsplit(link).scheme]


def anchors_of(text: str) -> set[str]:
    """Names of headings as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.*?)\s*$", FENCED.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


# ---- checking, without building


def markdown_files() -> list[Path]:
    """Return the Markdown files of the repository, or of an unpacked sdist."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = found.stdout.split() or [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md") if ".venv" not in path.parts
    ]
    return [ROOT / name for name in names if (ROOT / name).exists()]


def dead_links(page: Path) -> Iterator[str]:
    """Yield the links of a page to missing files, folders without a README, and missing headings."""
    text = page.read_text(encoding="utf-8")
    for link in links_of(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / unquote(name)).resolve() if name else page
        if target.is_dir():
            target /= "README.md"
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link} leads nowhere"
        elif (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text(encoding="utf-8"))
        ):
            yield f"{page.relative_to(ROOT)}: {link}: no such heading"


def broken_tables(page: Path) -> Iterator[str]:
    """Yield the tables of a page whose rule has another number of columns than their head: they are shown as text."""
    lines = FENCED.sub(
        lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8")
    ).splitlines()
    for number, (head, rule) in enumerate(itertools.pairwise(lines), 1):
        if RULE.fullmatch(rule.strip()) and _columns(head) != _columns(rule):
            yield f"{page.relative_to(ROOT)}:{number}: {_columns(head)} columns, but {_columns(rule)} in the rule below"


def _columns(line: str) -> int:
    return len(SEPARATOR.split(line.strip().strip("|")))


def left_out() -> Iterator[str]:
    """Pages that the navigation names and that are not there, and the other way round."""
    listed = set(listed_pages())
    there = {str(path.relative_to(ROOT)) for path in markdown_files()}
    belong = {name for name in there if name.endswith("SPEC.md") or name.startswith("docs/")}
    belong |= {f"{program.relative_to(ROOT).with_suffix('')}.md" for program in GUIDES.glob("*.py")}
    belong -= {"examples/guides/guide_shell.md"}
    for name in sorted(belong - listed):
        yield f"{SETTINGS.relative_to(ROOT)}: {name} is missing in nav"
    for name in sorted(listed - there - {COMMAND_HELP}):
        if program_of(name) is None:
            yield f"{SETTINGS.relative_to(ROOT)}: {name} does not exist"


# ---- laying out


def guide_page(program: Path, printed: str) -> str:
    """Return the page of a guide: the docstring of its program, its output, and the program without the docstring."""
    source = program.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = said.partition("\n")
    code = source.split('"""', 2)[2].strip()
    return (
        f"# {title.rstrip('.')}\n{rest}\n\n## What it prints\n\n```console\n{printed.rstrip()}\n```\n\n"
        f"## The program\n\n```python\n{code}\n```\n"
    )


def printed_by(program: Path) -> str:
    """Standard output of a guide, run in a temporary folder; a line instead if a package of it is not installed."""
    private = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_") and name != "BUCKET"
    }
    done = subprocess.run(
        [sys.executable, str(program)], env={**private, "COLUMNS": "110", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    missing = re.findall(r"^ModuleNotFoundError: No module named '([\w.]+)'", done.stderr, re.MULTILINE)
    if missing and missing[-1].partition(".")[0] not in ("shardkit", "shardkit_tools", "shardkit_trainer"):
        print(f"{program.relative_to(ROOT)} was not run: {missing[-1]} is not installed", file=sys.stderr)
        return f"(not run here: it needs the package {missing[-1]})"
    if done.returncode:
        raise SystemExit(
            f"{program.relative_to(ROOT)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def command_pages() -> str:
    """The help page of every command."""
    from shardkit_tools.main import COMMANDS, run

    sys.argv[:1], os.environ["COLUMNS"] = ["shardkit"], "100"  # first word and width of usage lines
    parts = ["# Every command\n"]
    for topic, names in COMMANDS:
        parts.append(f"## {topic}\n")
        for name in names:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
                run([name, "--help"])
            parts.append(f"### shardkit {name}\n\n```text\n{out.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def text_of(page: str) -> str:
    """Return a page of the site as Markdown."""
    program = program_of(page)
    if page == COMMAND_HELP:
        return command_pages()
    if program is not None:
        return guide_page(program, printed_by(program))
    return (ROOT / page).read_text(encoding="utf-8")


def linked_to_pages(page: str, text: str, pages: Iterable[str]) -> str:
    """The text with links to programs and folders leading to their pages."""
    known = set(pages)

    def target(match: re.Match[str]) -> str:
        name, hash_, anchor = match[0].partition("#")
        if urlsplit(name).scheme or not name:
            return match[0]
        there = os.path.normpath(os.path.join(os.path.dirname(page), name))
        better = [f"{name}/README.md"] * (f"{there}/README.md" in known)
        better += [f"{name[:-3]}.md"] * (there.endswith(".py") and f"{there[:-3]}.md" in known)
        return f"{better[0] if better else name}{hash_}{anchor}"

    return LINK.sub(target, text)


def lay_out(folder: Path) -> None:
    """Write the pages below a new folder, with style sheets and every file that pages link to."""
    pages = listed_pages()
    shutil.rmtree(folder, ignore_errors=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(text_of, pages))
    for page, text in zip(pages, texts, strict=True):
        made = folder / page
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(linked_to_pages(page, text, pages), encoding="utf-8")
        linked = [unquote(link.partition("#")[0]) for link in links_of(made.read_text(encoding="utf-8"))]
        names = [os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in linked]
        for name in [*names, *settings()["extra_css"]]:
            if name not in pages and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)


# ---- the built site


class Page(html.parser.HTMLParser):
    """Links and link targets of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.names.add(value or "")
            elif value and (name, tag) in {
                ("href", "a"),
                ("href", "link"),
                ("src", "img"),
                ("srcset", "source"),
                ("src", "script"),
            }:
                self.links.append(value)


def dead_links_of_site(site: Path) -> Iterator[str]:
    """Links of built pages to what the site does not have, and what it would load from another host."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            known = pages.get(target)
            if not target.exists() or (
                parts.fragment and known and unquote(parts.fragment) not in known.names
            ):
                yield f"{path.relative_to(site.resolve())}: {link}"


def main(arguments: list[str]) -> None:
    """Build, or check; problems are the exit status."""
    if arguments == ["--check"]:
        pages = list(markdown_files())
        problems = [problem for page in pages for problem in (*dead_links(page), *broken_tables(page))]
        problems += left_out()
        sys.exit("\n".join(problems) or 0)
    lay_out(BUILT / "pages")
    builder = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(SETTINGS)]
    if subprocess.run(builder, check=False).returncode:
        sys.exit("the site was not built")
    sys.exit("\n".join(f"dead link: {one}" for one in dead_links_of_site(BUILT / "site")) or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
