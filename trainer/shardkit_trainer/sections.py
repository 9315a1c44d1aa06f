"""Typed sections of settings: built from raw values, checked, and described by their fields. Does not import torch."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from shardkit.errors import ConfigurationError
from shardkit.ranges import shown


def expect(*rules: tuple[bool, str]) -> None:
    """Raise `ConfigurationError` for the first (holds, message) rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise ConfigurationError(message)


class Section:
    """Base of all sections; refuses numbers out of range, in TOML and in Python alike.

    Attributes:
        SECTION: name of the section in the file.
    """

    SECTION = ""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, allowed = get_args(hint)
                setattr(self, name, allowed.check(f"{self.SECTION}.{name}", getattr(self, name), kind))


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``allowed``, otherwise raise `ConfigurationError`."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{name} = {shown(value)}: expected one of {', '.join(allowed)}{hint}")
    return value


def build(kind: type[Any], raw: Mapping[str, Any], prefix: str = "", whole: type[Any] | None = None) -> Any:
    """Build a section from raw values.

    Args:
        kind: dataclass of the section, or of the whole configuration.
        raw: values by key, as TOML or JSON gives them.
        prefix: path of the section in messages, such as ``data.``.
        whole: configuration from which messages suggest the nearest known key; None: ``kind``.

    Raises:
        ConfigurationError: an unknown key, a wrong type or a value out of range.
    """
    whole = whole or kind
    known = get_type_hints(kind, include_extras=True)
    arguments = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigurationError(f"unknown key {prefix}{key}{_nearest(whole, key, prefix)}")
        arguments[key] = _convert(known[key], value, prefix + key, whole)
    return kind(**arguments)


def _nearest(whole: type[Any], key: str, prefix: str) -> str:
    sections = get_type_hints(whole)
    everything = [f"{name}.{leaf}" for name, kind in sections.items() for leaf in get_type_hints(kind)]
    everything += sections
    same_leaf = [name for name in everything if name.rpartition(".")[2] == key]
    found = same_leaf or difflib.get_close_matches(prefix + key, everything, n=1, cutoff=0.5)
    return f"; nearest known key: {found[0]}" if found else f"; known: {', '.join(sorted(everything))}"


def _convert(hint: Any, value: Any, name: str, whole: type[Any]) -> Any:
    """Return ``value`` converted to a key's type, recursively."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return one_of(name, _to_type(str, value, name), inner)
    if origin is Annotated:
        return inner[1].check(name, value, inner[0])
    if origin is dict:
        table = _to_type(dict, value, name, "a table")
        if inner[1] is Any:
            return dict(table)
        return {k: _convert(inner[1], v, f"{name}.{k}", whole) for k, v in table.items()}
    if origin is list:
        items = _to_type(list, value, name, "a list")
        return [_convert(inner[0], one, f"{name}[{i}]", whole) for i, one in enumerate(items)]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, _to_type(dict, value, name, f"a section [{name}]"), name + ".", whole)
    return _to_type(hint, value, name)


def _to_type(kind: type[Any], value: Any, name: str, expected: str = "") -> Any:
    if type(value) is not kind:  # not isinstance: True is not an integer here
        what = expected or kind.__name__
        raise ConfigurationError(f"{name} = {shown(value)}: expected {what}, got {type(value).__name__}")
    return value


# ---- documentation


def describe(kind: type[Any], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return (key, default, allowed values, meaning) of every key, from the fields and the comments next to them."""
    rows = []
    hints, meanings = get_type_hints(kind, include_extras=True), _meanings(kind)
    for one in dataclasses.fields(kind):
        hint, name = hints[one.name], prefix + one.name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            rows += describe(hint, f"{name}.")
            continue
        default: Any = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        rows.append((name, _default_text(default), _type_text(hint), meanings.get(one.name, "")))
        if get_origin(hint) is list and dataclasses.is_dataclass(get_args(hint)[0]):
            rows += describe(get_args(hint)[0], f"{name}[].")
    return rows


def _type_text(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(inner)
    if origin is Annotated:
        return str(inner[1].text(inner[0]))
    if origin is dict:
        return "a table" if inner[1] is Any else f"a table, each {_type_text(inner[1])}"
    if origin is list and dataclasses.is_dataclass(inner[0]):
        return "a list of sections"
    if origin is list:
        return f"a list, each {_type_text(inner[0])}"
    return {str: "text", bool: "true or false"}[hint]


def _default_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in ("", {}, []) else str(value)


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Return the comment next to each field; empty if the sources are not installed."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))
