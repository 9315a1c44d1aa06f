"""The part of ARCHITECTURE.md that is drawn from the code: packages, what each is for, and who imports whom.

    python tools/draw_architecture.py            # rewrites ARCHITECTURE.md between its marks
    python tools/draw_architecture.py --check    # writes nothing; fails where it would

Layers come from the import-linter contracts in pyproject.toml, descriptions from the first line of each package's
docstring, arrows from the imports themselves. A test compares the file with what this program would write.
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
    """Packages of the library from the top down; those of one layer do not know each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [c["layers"] for c in contracts if c.get("containers") == ["shardkit"]]
    return [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in found]


def parts_of(package: str) -> grimp.ImportGraph:
    """Who imports whom among the packages and modules right below a package."""
    graph = grimp.build_graph(package, cache_dir=None)
    for part in graph.find_children(package):
        graph.squash_module(part)
    return graph


def imported(graph: grimp.ImportGraph, part: str) -> list[str]:
    """The parts that a part imports."""
    package = part.partition(".")[0]
    return sorted(one for one in graph.find_modules_directly_imported_by(part) if one not in (package, part))


def description(package: str, name: str) -> str:
    """First sentence of a part's docstring."""
    folder = ROOT / FOLDERS[package]
    path = folder / name / "__init__.py"
    tree = ast.parse((path if path.exists() else folder / f"{name}.py").read_text(encoding="utf-8"))
    first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    return " ".join(first.split()).rstrip(".").replace("|", "\\|")


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def graph_text() -> str:
    """Mermaid: the library's packages, by layer, without the arrows that follow from others."""
    graph = parts_of("shardkit")
    lines = ["```mermaid", "graph TD"]
    for name in (name for layer in layers() for name in layer):
        direct = imported(graph, f"shardkit.{name}")
        needed = [
            other
            for other in direct
            if not any(graph.chain_exists(via, other) for via in direct if via != other)
        ]
        lines += [f"  {name}", *(f"  {name} --> {_short(other)}" for other in needed)]
    return "\n".join([*lines, "```"])


def table_text(package: str) -> str:
    """Markdown: a line per package (and, of the library, per module of its own layer), in the order of the layers."""
    graph, folder = parts_of(package), ROOT / FOLDERS[package]
    packages = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    order = [name for layer in layers() for name in layer] if package == "shardkit" else packages
    lines = ["| package | what it is | imports |", "|---|---|---|"]
    for name in order:
        spec = folder / name / "SPEC.md"
        label = f"[{name}]({spec.relative_to(ROOT)})" if spec.exists() else name
        others = ", ".join(map(_short, imported(graph, f"{package}.{name}")))
        lines.append(f"| {label} | {description(package, name)} | {others or '–'} |")
    return "\n".join(lines)


def drawn(page: str) -> str:
    """The page with its drawn parts made again."""
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
    after = drawn(before)
    if after == before:
        sys.stdout.write("ARCHITECTURE.md is as the code is\n")
    elif sys.argv[1:] == ["--check"]:
        sys.exit("ARCHITECTURE.md is not as the code is; run: python tools/draw_architecture.py")
    else:
        PAGE.write_text(after, encoding="utf-8")
        sys.stdout.write("ARCHITECTURE.md was redrawn\n")
