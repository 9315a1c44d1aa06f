"""What a user says of a source: field types, which fields are taken, and under which names."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shardkit.errors import SchemaError, UsageError
from shardkit.formats import RESERVED_NAMES, FieldType, Schema

_Value = TypeVar("_Value")
_LONGEST_SHOWN = 1000  # characters of a name

MIXED = "mixed"
"""Type text of a field whose values have no common type; only a source that is not checked has such a field."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Settings that importers share.

    Attributes:
        field_types: field → type that replaces the inferred one (``--schema field=type``).
        per: "file" or "line": what one sample of a text source is.
        classes: whether the folders directly below the source are classes; None: yes where there are such folders.
        split_folders: whether the folders directly below the source are splits, which become refs; None: yes where all
            are named train, val, valid, validation, test or dev.
        skip_bad_rows: infer the schema from the rows that can be read, and leave out the others.
        columns: fields that are taken, by the names that the source has; empty: all.
        drop: fields that are left out.
        rename: field of the source → name that it gets.
        flatten: structs and objects become a field for each of their members, ``a.b.c``; those that `field_types` names
            stay whole, as maps and lists do. `columns` and `drop` may name one for all of its members.
        encoding: of CSV; "": UTF-8, or UTF-16 where the file begins with its mark.
        unchecked: rows go to a function that may mend them: values that do not fit are given as the source has them,
            None for a value that is not there, and no field name is refused.
    """

    field_types: Mapping[str, str] = field(default_factory=dict)
    per: str = "file"
    classes: bool | None = None
    split_folders: bool | None = None
    skip_bad_rows: bool = False
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    flatten: bool = False
    encoding: str = ""
    unchecked: bool = False

    def __post_init__(self) -> None:
        if self.per not in ("file", "line"):
            raise UsageError(f"--per is {self.per!r}; expected 'file' or 'line'")

    @property
    def chooses(self) -> bool:
        """Whether fields are left out or renamed."""
        return bool(self.columns or self.drop or self.rename)

    def keeps(self, name: str) -> bool:
        """Whether a field of the source is taken."""
        return not self._names(self.drop, name) and (not self.columns or self._names(self.columns, name))

    def _names(self, given: Iterable[str], name: str) -> bool:
        """Whether a field is among those given, or a member of one."""
        return name in given or (self.flatten and any(name.startswith(f"{one}.") for one in given))

    def kept(self, fields: Mapping[str, _Value]) -> Mapping[str, _Value]:
        """Fields of a sample without those that are left out."""
        return {name: value for name, value in fields.items() if self.keeps(name)} if self.chooses else fields

    def schema(self, inferred: Mapping[str, str], source: str, *, names: Iterable[str] = ()) -> Schema:
        """The inferred schema with the user's types in place of the inferred ones, without what is left out.

        Args:
            inferred: field → type text, in storage order.
            source: the source as the user gave it, for messages.
            names: of the source's other fields, which were left out already.

        Returns:
            The fields by the names that the source has; `FileImporter` renames them.

        Raises:
            SchemaError: a field is named that the source does not have, or a field name cannot be stored.
        """
        known = list(dict.fromkeys([*inferred, *names]))
        self._check_named(known, source)
        types = {name: self.field_types.get(name, one) for name, one in inferred.items() if self.keeps(name)}
        if not types:
            raise SchemaError(
                f"{source}: --columns and --drop leave no field; its fields are {', '.join(known)}"
            )
        stored = {self.rename.get(name, name): text for name, text in types.items()}
        if len(stored) < len(types):
            names_of = [self.rename.get(name, name) for name in types]
            twice = next(name for name in names_of if names_of.count(name) > 1)
            raise SchemaError(
                f"{source}: two fields would be called {twice!r}; --rename one of them otherwise"
            )
        if self.unchecked:
            kinds = {n: FieldType(MIXED) if t == MIXED else FieldType.parse(t) for n, t in types.items()}
            return SourceSchema(kinds)
        try:
            schema = Schema.parse(stored)
        except SchemaError as error:
            whole = "; --schema FIELD=json keeps an object of many keys whole" if self.flatten else ""
            raise SchemaError(f"{source}: {error}{_other_name(stored) or whole}") from error
        return SourceSchema(dict(zip(types, schema.values(), strict=True))) if self.rename else schema

    def _check_named(self, known: list[str], source: str) -> None:
        named = {
            "--schema": self.field_types,
            "--columns": self.columns,
            "--drop": self.drop,
            "--rename": self.rename,
        }
        for option, asked in named.items():
            for name in asked:
                is_struct = option in ("--columns", "--drop") and any(
                    self._names([name], one) for one in known
                )
                if name not in known and not is_struct:
                    near = difflib.get_close_matches(name, known, n=1)
                    raise SchemaError(
                        f"{source}: {option} names the field {name!r}, which the source does not have; "
                        + (f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(known)}")
                    )


class SourceSchema(Schema):
    """Fields by the names that a source has, of which not all can be stored; types may be `MIXED`."""

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        self._fields = dict(fields)
        self._ordered = tuple(fields.items())


def _other_name(names: Iterable[str]) -> str:
    """What to do about the first name that cannot be stored; nothing where all can."""
    for name in names:
        try:
            Schema.parse({name: "int64"})
        except SchemaError:
            if len(name) > _LONGEST_SHOWN:
                return "; give it another name where it comes from"
            near = re.sub(r"[^A-Za-z0-9]+", "_", name[:40]).strip("_").lower() or "field"
            near = near if near[0].isalpha() else f"field_{near}"
            near += "_" * (near in RESERVED_NAMES)
            rename, drop = shell_word(f"{name}={near}"), shell_word(name)
            return f"; give it another name, such as --rename {rename}, or leave it out: --drop {drop}"
    return ""


def shell_word(text: str) -> str:
    """Text as a shell takes it; what cannot be printed is escaped, as bash and zsh read it."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.encode("unicode_escape").decode().replace("'", r"\'")
    return "$'" + re.sub(r"\\x(?=[89a-f])", r"\\u00", escaped) + "'"


def array_note(name: str, dtype: str, dimensions: int) -> str:
    """How a field of lists of numbers, which is json where nobody says more, becomes arrays."""
    flag = shell_word(f"{name}={dtype}[{','.join('*' * dimensions)}]")
    shaped = "" if dimensions == 1 else ", where its lists are equally long"
    return f"{name} is json; --schema {flag} makes an array of each row{shaped}"


def parse_field_types(pairs: Iterable[str], option: str = "--schema") -> dict[str, str]:
    """Parse ``field=type`` texts as given on a command line.

    Raises:
        UsageError: a text is not of that form, or the type does not exist.
    """
    types = parse_pairs(pairs, option, "field=type, for example score=float64 or tokens=int32[*]")
    for text in types.values():
        FieldType.parse(text)
    return types


def parse_pairs(texts: Iterable[str], option: str, expected: str) -> dict[str, str]:
    """What stands before and behind the last equals sign of each text.

    Raises:
        UsageError: one of them is empty.
    """
    pairs = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not (name and value):
            raise UsageError(f"{option} {text!r}: expected {expected}")
        pairs[name] = value
    return pairs
