"""Every public name says what it is: whatever stands in an ``__all__`` has a docstring, constants one below them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "shardkit", ROOT / "tools" / "shardkit_tools", ROOT / "trainer" / "shardkit_trainer")
MODULES = sorted(path for folder in PACKAGES for path in folder.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Methods(NamedTuple):
    """What a class inherits, and which of its own methods are documented."""

    bases: tuple[str, ...]
    documented: frozenset[str]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def last_name(node: ast.expr) -> str:
    """``b`` of ``a.b[C]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def methods(node: ast.ClassDef) -> Iterator[Function]:
    yield from (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.fixture(scope="module")
def classes() -> dict[str, Methods]:
    """All classes by name; a method that overrides a documented one needs no text of its own."""
    found: dict[str, Methods] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                documented = frozenset(one.name for one in methods(node) if ast.get_docstring(one))
                known = found.get(node.name, Methods((), frozenset()))
                bases = (*known.bases, *map(last_name, node.bases))
                found[node.name] = Methods(bases, known.documented | documented)
    return found


def inherits(name: str, method: str, classes: dict[str, Methods]) -> bool:
    known = classes.get(name)
    return known is not None and any(
        method in classes[base].documented or inherits(base, method, classes)
        for base in known.bases
        if base in classes
    )


def public_names(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(last_name(one) == "__all__" for one in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def assigned(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [one.id for one in node.targets if isinstance(one, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def undocumented(tree: ast.Module, classes: dict[str, Methods]) -> Iterator[str]:
    public = public_names(tree)
    if not ast.get_docstring(tree):
        yield "the module itself"
    for place, node in enumerate(tree.body):
        following = tree.body[place + 1] if place + 1 < len(tree.body) else None
        yield from (one for one in assigned(node) if one in public and not is_text(following))
        if (
            not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            or node.name not in public
        ):
            continue
        if not ast.get_docstring(node):
            yield node.name
        for method in methods(node) if isinstance(node, ast.ClassDef) else ():
            says_itself = method.name.startswith(("_", "test_")) or any(
                last_name(one) in ("setter", "overload") for one in method.decorator_list
            )
            if not (says_itself or ast.get_docstring(method) or inherits(node.name, method.name, classes)):
                yield f"{node.name}.{method.name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_public_name_is_documented(path: Path, classes: dict[str, Methods]) -> None:
    missing = list(undocumented(ast.parse(path.read_text()), classes))
    assert not missing, f"{name_of(path)}: without a docstring: {', '.join(missing)}"


def test_packages_name_what_is_there() -> None:
    """What a package re-exports is documented where it is made: it comes from a module that is walked above."""
    for folder in PACKAGES:
        for path in sorted(folder.rglob("__init__.py")):
            tree = ast.parse(path.read_text())
            here = {name for node in tree.body for name in assigned(node)}
            here |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom | ast.Import):
                    here |= {(one.asname or one.name).partition(".")[0] for one in node.names}
            lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
            missing = public_names(tree) - here
            assert lazy or not missing, f"{name_of(path)}: {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""M."""\n__all__ = ["A"]\nA = 1\n', ["A"]),
        ('"""M."""\n__all__ = ["A"]\nA = 1\n"""One."""\n', []),
        ('"""M."""\n__all__ = ["A"]\nA: int = 1\nB = 2\n"""Of B."""\n', ["A"]),
        ('__all__ = ["f"]\ndef f(): ...\n', ["the module itself", "f"]),
        (
            '"""M."""\n__all__ = ["C"]\nclass C:\n    """C."""\n    def m(self): ...\n    def _n(self): ...\n',
            ["C.m"],
        ),
        ('"""M."""\n__all__ = ["C"]\nclass C(Store):\n    """C."""\n    def head(self): ...\n', []),
        ('"""M."""\n__all__ = []\ndef f(): ...\nA = 1\n', []),
    ],
)
def test_what_is_missing_is_found(text: str, expected: list[str], classes: dict[str, Methods]) -> None:
    known = {**classes, "C": Methods(("Store",), frozenset())} if "C(Store)" in text else classes
    assert list(undocumented(ast.parse(text), known)) == expected
