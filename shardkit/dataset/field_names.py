"""Names of fields as people write them: in lists with commas; in expressions, where some stand in backticks."""

from __future__ import annotations

import ast
import re

from shardkit.errors import UsageError

# what a literal of text holds is none; a backtick in a name is written twice
_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(`(?:[^`]|``)+`)""", re.DOTALL)


def parse_expression(text: str) -> ast.expr:
    """The tree of an expression; names in backticks, such as ``First Name``, are names in it as others are.

    Raises:
        SyntaxError, ValueError, TypeError, RecursionError, MemoryError: as `ast.parse`.
    """
    word = "_quoted"
    while word in text:
        word += "_"
    names: dict[str, str] = {}

    def replaced(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        names[f"{word}{len(names)}"] = found[2][1:-1].replace("``", "`")
        return list(names)[-1]

    tree = ast.parse(_QUOTED.sub(replaced, text), mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return tree


def without_spaces(text: str) -> str:
    """An expression without what says nothing: spaces, but for those in backticks and literals."""
    parts = _QUOTED.split(text)
    return "".join(part if place % 3 else "".join(part.split()) for place, part in enumerate(parts) if part)


def split_names(text: str) -> list[str]:
    """The names of ``a,b,"c, d"``: one with a comma in it stands in quotes, as in CSV.

    Raises:
        UsageError: quotes that do not close.
    """
    import csv  # slow to import, and rarely needed

    try:
        names = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise UsageError(f'{text!r}: {error}; expected names such as a,b,"c, d"') from None
    return list(map(str.strip, names))
