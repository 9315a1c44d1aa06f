"""Find import cycles between files; none is allowed (`make lint`).

An import inside a function or under TYPE_CHECKING counts as well: two files that import each other are one idea or
need a third file. Importing a name that a package re-exports counts as an import of the package.
"""

from __future__ import annotations

import graphlib
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"shardkit": ".", "shardkit_tools": "tools", "shardkit_trainer": "trainer"}


def main() -> int:
    """Print a cycle and return 1 if the packages have one; return 0 otherwise."""
    sys.path[:0] = [str(ROOT / folder) for folder in PACKAGES.values()]
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    # grimp reports the import of a compiled module as an import of its package
    for compiled in ROOT.glob("shardkit/*/*.c"):
        package = f"shardkit.{compiled.parent.name}"
        for importer in graph.find_modules_that_directly_import(package):
            found = graph.get_import_details(importer=importer, imported=package)
            if all(compiled.stem in one["line_contents"] for one in found):
                graph.remove_import(importer=importer, imported=package)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        print(f"circle of {len(circle) - 1} files: {' imports '.join(reversed(circle))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
