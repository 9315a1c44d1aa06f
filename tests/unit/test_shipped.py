"""What is installed is used: every module is reached from what users import or run, or is a suite for authors."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "shardkit", ROOT / "tools" / "shardkit_tools", ROOT / "trainer" / "shardkit_trainer")
MODULES = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in PACKAGES
    for path in folder.rglob("*.py")
}
STARTS = (
    *(name for name in MODULES if name.endswith(".__main__") or name.startswith("shardkit_tools.commands.")),
    *("shardkit", "shardkit.torch", "shardkit.audit", "shardkit_trainer"),
    *(
        "shardkit.testing.store_conformance",
        "shardkit.testing.memory_store",
        "shardkit.integrations.transformers",
        "shardkit.integrations.lightning",
        "shardkit.integrations.webdataset",
        "shardkit.integrations.torchtitan",
        "shardkit.integrations.trackers",
        "shardkit.integrations.opentelemetry",
        "shardkit.formats.canonical_json",
    ),
)


def used_by(name: str) -> set[str]:
    """Modules that a module imports or names, and the packages around it."""
    found = {name.rsplit(".", 1)[0]} if "." in name else set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = [*name.split("."), *(["__init__"] if MODULES[name].stem == "__init__" else [])]
            around = here[: -node.level] if node.level else []
            source = ".".join([*around, node.module or ""]).strip(".")
            found |= {source, *(f"{source}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & MODULES.keys()


def test_nothing_is_installed_that_only_tests_use() -> None:
    reached: set[str] = set()
    ahead = set(STARTS)
    while ahead:
        name = ahead.pop()
        reached.add(name)
        ahead |= used_by(name) - reached
    assert sorted(MODULES.keys() - reached) == []
