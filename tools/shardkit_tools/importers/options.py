"""What a user may say about a source beyond its path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardkit.errors import SchemaError, UsageError
from shardkit.formats import FieldType, Schema

__all__ = ["ImportOptions", "parse_field_types"]


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Settings that importers share.

    Attributes:
        field_types: field → type that replaces the inferred one (``--schema field=type``).
        per: "file" or "line": what one sample of a text source is.
        classes: whether the folders directly below the source are classes; None: yes where there are such
        folders.
        split_folders: whether the folders directly below the source are splits, which become refs; None: yes where all
            are named train, val, valid, validation, test or dev.
        skip_bad_rows: infer the schema from the rows that can be read, and leave out the others.
    """

    field_types: Mapping[str, str] = field(default_factory=dict)
    per: str = "file"
    classes: bool | None = None
    split_folders: bool | None = None
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        if self.per not in ("file", "line"):
            raise UsageError(f"--per is {self.per!r}; expected 'file' or 'line'")

    def schema(self, inferred: Mapping[str, str], source: str) -> Schema:
        """The inferred schema with the user's types in place of the inferred ones.

        Args:
            inferred: field → type text, in storage order.
            source: the source as the user gave it, for messages.

        Raises:
            SchemaError: a type is given for a field that the source does not have, or a field name cannot be
            stored.
        """
        for name in self.field_types:
            if name not in inferred:
                near = difflib.get_close_matches(name, inferred, n=1)
                raise SchemaError(
                    f"{source}: --schema names the field {name!r}, which the source does not have; "
                    + (f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(inferred)}")
                )
        try:
            return Schema.parse({name: self.field_types.get(name, text) for name, text in inferred.items()})
        except SchemaError as error:
            raise SchemaError(f"{source}: {error}") from error


def parse_field_types(pairs: list[str], option: str = "--schema") -> dict[str, str]:
    """Parse ``field=type`` texts as given on a command line.

    Raises:
        UsageError: a text is not of that form, or the type does not exist.
    """
    types: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(
                f"{option} {pair!r}: expected field=type, for example score=float64 or tokens=int32[*]"
            )
        FieldType.parse(text)
        types[name] = text
    return types
