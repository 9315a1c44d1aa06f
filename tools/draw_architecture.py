"""Generate the part of ARCHITECTURE.md that comes from the code: packages, their purposes and their imports.

    python tools/draw_architecture.py            # rewrite ARCHITECTURE.md between its marks
    python tools/draw_architecture.py --check    # write nothing; fail if the page is out of date

Layers come from the import-linter contracts in pyproject.toml, descriptions from the first line of each package's
docstring, arrows from the imports. A test compares the file with the output of this program.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
FOLDERS = {"shardkit": "shardkit", "shardkit_tools": "tools/shardkit_tools"}
BEGIN, END = "<!-- drawn: {} -->", "<!-- /drawn -->"


def layers() -> list[list[str]]:
    """Return the packages of the library by layer, top first; packages of one layer do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [c["layers"] for c in contracts if c.get("containers") == ["shardkit"]]
    return [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in found]


def parts_of(package: str) -> grimp.ImportGraph:
    """Return the import graph of the packages and modules directly below a package."""
    graph = grimp.build_graph(package, cache_dir=None)
    for part in graph.find_children(package):
        graph.squash_module(part)
    return graph


def imports_of(graph: grimp.ImportGraph, part: str) -> list[str]:
    """Return the parts that a part imports, sorted."""
    package = part.partition(".")[0]
    return sorted(one for one in graph.find_modules_directly_imported_by(part) if one not in (package, part))


def description(package: str, name: str) -> str:
    """Return the first paragraph of a part's docstring as the text of a table cell."""
    folder = ROOT / FOLDERS[package]
    path = folder / name / "__init__.py"
    tree = ast.parse((path if path.exists() else folder / f"{name}.py").read_text(encoding="utf-8"))
    first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    return " ".join(first.split()).rstrip(".").replace("|", "\\|")


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def graph_text() -> str:
    """Return a Mermaid graph of the library's packages by layer; arrows implied by other arrows are left out."""
    graph = parts_of("shardkit")
    lines = ["```mermaid", "graph TD"]
    for name in (name for layer in layers() for name in layer):
        direct = imports_of(graph, f"shardkit.{name}")
        needed = [
            other
            for other in direct
            if not any(graph.chain_exists(via, other) for via in direct if via != other)
        ]
        lines += [f"  {name}", *(f"  {name} --> {_short(other)}" for other in needed)]
    return "\n".join([*lines, "```"])


def table_text(package: str) -> str:
    """Return a Markdown table with a row per package (in the library also per module of a layer), in layer order."""
    graph, folder = parts_of(package), ROOT / FOLDERS[package]
    packages = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    order = [name for layer in layers() for name in layer] if package == "shardkit" else packages
    lines = ["| package | what it is | imports |", "|---|---|---|"]
    for name in order:
        spec = folder / name / "SPEC.md"
        label = f"[{name}]({spec.relative_to(ROOT)})" if spec.exists() else name
        others = ", ".join(map(_short, imports_of(graph, f"{package}.{name}")))
        lines.append(f"| {label} | {description(package, name)} | {others or '–'} |")
    return "\n".join(lines)


def redraw(page: str) -> str:
    """Return the page with its generated parts replaced."""
    texts = {
        "graph": graph_text(),
        **{package: table_text(package) for package in ("shardkit", "shardkit_tools")},
    }
    for name, text in texts.items():
        begin = BEGIN.format(name)
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{END}{rest.partition(END)[2]}"
    return page


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = redraw(before)
    if after == before:
        sys.stdout.write("ARCHITECTURE.md is as the code is\n")
    elif sys.argv[1:] == ["--check"]:
        sys.exit("ARCHITECTURE.md is not as the code is; run: python tools/draw_architecture.py")
    else:
        PAGE.write_text(after, encoding="utf-8")
        sys.stdout.write("ARCHITECTURE.md was redrawn\n")
