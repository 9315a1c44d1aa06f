"""The trainer stays small enough to read."""

from __future__ import annotations

import ast
from pathlib import Path

TRAINER = Path(__file__).parents[2] / "trainer" / "shardkit_trainer"


def test_no_function_and_no_module_is_long() -> None:
    for path in sorted(TRAINER.glob("*.py")):
        source = path.read_text()
        assert len(source.splitlines()) <= 500, path.name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                documented = len((ast.get_docstring(node, clean=False) or "").splitlines())
                assert (node.end_lineno or 0) - node.lineno - documented < 40, f"{path.name}: {node.name}"
