"""The trainer stays what it is said to be: small enough to read in an evening."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

TRAINER = Path(__file__).parents[2] / "trainer" / "shardkit_trainer"
MODULES = sorted(TRAINER.glob("*.py"))
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def code_lines(source: str) -> int:
    """Lines that hold something else than a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_code_lines_are_counted() -> None:
    lines = ['"""A module."""', "", "# why", "def f(", "    a: int,  # bytes", ") -> str:", '    """One."""']
    source = "\n".join([*lines, '    return """x', 'y"""', ""])
    assert code_lines(source) == 5


def test_the_whole_is_as_long_as_the_specification_says() -> None:
    stated = re.search(r"([0-9],[0-9]{3}) lines of code", (TRAINER / "SPEC.md").read_text())
    assert stated is not None
    found = sum(code_lines(path.read_text()) for path in MODULES)
    assert abs(int(stated[1].replace(",", "")) - found) <= 0.02 * found, found


def test_no_function_and_no_module_is_long() -> None:
    for path in MODULES:
        source = path.read_text()
        assert len(source.splitlines()) <= 550, path.name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 40, f"{path.name}: {node.name}"
