"""Circles of files that import each other, wherever the import stands: none is allowed (`make lint`).

An import inside a function or below TYPE_CHECKING counts: what two files know of each other is one idea or needs a
third file. A name that a package gives on counts as an import of the package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["circles", "imports"]

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("shardkit", "tools/shardkit_tools", "trainer/shardkit_trainer")


def imports() -> dict[str, set[str]]:
    """Module → modules that it imports, of all that is shipped; compiled modules import nothing."""
    files: dict[str, Path] = {}
    for package in PACKAGES:
        top = ROOT / package
        for path in [*top.rglob("*.py"), *top.rglob("*.c")]:
            parts = path.relative_to(top.parent).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        name: set(_imported(name, path, files)) - {name} if path.suffix == ".py" else set()
        for name, path in files.items()
    }


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    here = [*name.split("."), "__init__"] if path.stem == "__init__" else name.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            package = here[: -node.level] if node.level else []
            module = ".".join([*package, *filter(None, [node.module])])
            names = (f"{module}.{alias.name}" for alias in node.names)
            yield from (one if one in files else module for one in names if module in files)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each reaches every other one."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            found = graph[waiting.pop()] - seen
            seen |= found
            waiting += found
        return seen

    reach = {name: reachable(name) for name in graph}
    groups = {
        tuple(sorted(o for o in reach[name] if name in reach[o])) for name in graph if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def main() -> int:
    """Name every circle; 1 where there is one."""
    graph = imports()
    found = circles(graph)
    for group in found:
        print(f"circle of {len(group)} files:")
        for name in group:
            print(f"  {name} imports {', '.join(sorted(graph[name] & set(group)))}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
