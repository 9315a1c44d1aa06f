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
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
FOLDERS = {
    "shardkit": "shardkit",
    "shardkit_tools": "tools/shardkit_tools",
    "shardkit_trainer": "trainer/shardkit_trainer",
}
BEGIN, END = "<!-- drawn: {} -->", "<!-- /drawn -->"


def layers() -> list[list[str]]:
    """Packages of the library from the top down; those of one layer do not know each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [c["layers"] for c in contracts if c.get("containers") == ["shardkit"]]
    return [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in found]


def parts(package: str) -> dict[str, list[Path]]:
    """Packages and modules right below a package → their files."""
    folder = ROOT / FOLDERS[package]
    found = {
        path.name: sorted(path.rglob("*.py"))
        for path in folder.iterdir()
        if path.is_dir() and (path / "__init__.py").exists()
    }
    return found | {path.stem: [path] for path in folder.glob("*.py") if not path.stem.startswith("__")}


def imported(path: Path, package: str) -> Iterator[str]:
    """Names of the package's parts that a file imports, directly or relatively."""
    folder = ROOT / FOLDERS[package]
    here = [package, *path.relative_to(folder).with_suffix("").parts]
    if here[-1] == "__init__":
        here.pop()
        is_package = True
    else:
        is_package = False
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = here if is_package else here[:-1]
                base = ".".join([*up[: len(up) - node.level + 1], *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            steps = name.split(".")
            if steps[0] == package and len(steps) > 1:
                yield steps[1]


def edges(package: str) -> dict[str, set[str]]:
    """Part → parts that it imports."""
    found = parts(package)
    return {
        name: {other for path in paths for other in imported(path, package) if other in found} - {name}
        for name, paths in found.items()
    }


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others."""

    def reachable(start: str, seen: set[str]) -> set[str]:
        for other in graph[start]:
            if other not in seen:
                seen.add(other)
                reachable(other, seen)
        return seen

    return {
        name: {o for o in direct if not any(o in reachable(via, set()) for via in direct - {o})}
        for name, direct in graph.items()
    }


def description(package: str, name: str) -> str:
    """First sentence of a part's docstring."""
    folder = ROOT / FOLDERS[package]
    path = folder / name / "__init__.py"
    tree = ast.parse((path if path.exists() else folder / f"{name}.py").read_text(encoding="utf-8"))
    first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    return " ".join(first.split()).rstrip(".").replace("|", "\\|")


def graph_text() -> str:
    """Mermaid: the library's packages, by layer."""
    arrows = reduced(edges("shardkit"))
    lines = ["```mermaid", "graph TD"]
    for layer in layers():
        for name in layer:
            lines.append(f"  {name}")
            lines += [f"  {name} --> {other}" for other in sorted(arrows.get(name, ()))]
    return "\n".join([*lines, "```"])


def table_text(package: str) -> str:
    """Markdown: a line per package (and, of the library, per module of its own layer), in the order of the layers."""
    found, graph = parts(package), edges(package)
    order = [name for layer in layers() for name in layer] if package == "shardkit" else sorted(found)
    lines = ["| package | what it is | imports |", "|---|---|---|"]
    for name in order:
        if package == "shardkit" or len(found[name]) > 1:
            spec = ROOT / FOLDERS[package] / name / "SPEC.md"
            label = f"[{name}]({spec.relative_to(ROOT)})" if spec.exists() else name
            lines.append(
                f"| {label} | {description(package, name)} | {', '.join(sorted(graph[name])) or '–'} |"
            )
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
