"""Where the code is, and how a value or a docstring is written into the face."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


def sources(*packages: str) -> list[Path]:
    """The modules of packages, as files."""
    folders = [Path(importlib.import_module(one).__path__[0]) for one in packages]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    """A source file."""
    return path.read_text(encoding="utf-8")


def _definitions(package: str, pattern: str) -> Iterator[str]:
    """Modules that define something: names are public, the files they live in are not."""
    folder = Path(importlib.import_module(package).__path__[0])
    for path in sources(package):
        if re.search(pattern, text_of(path), re.MULTILINE):
            yield ".".join([package, *path.relative_to(folder).with_suffix("").parts])


def find_dataclass(package: str, name: str) -> Any:
    """A class of settings, wherever in the package it lives."""
    found = (
        getattr(importlib.import_module(one), name) for one in _definitions(package, rf"^class {name}\b")
    )
    return next(filter(dataclasses.is_dataclass, found))


def find_function(name: str) -> list[Any]:
    """Functions of a name, wherever in `shardkit` they live."""
    return [
        getattr(importlib.import_module(one), name) for one in _definitions("shardkit", rf"^def {name}\(")
    ]


def head(text: str | None) -> str:
    """The first paragraph of a text, as one line."""
    lines = inspect.cleandoc(text or "").split("\n\n")[0].splitlines()
    return " ".join(lines) if lines else ""


def shown(value: object) -> str:
    """A default, the same in every process."""
    if isinstance(value, enum.Enum):
        return shown(value.value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
