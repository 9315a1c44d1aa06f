"""Schemas: the fields of a sample by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from shardkit.errors import FormatError, SampleError, SchemaError
from shardkit.ranges import shown

from .fields import FieldType, decode_payload, encode_value

MAX_FIELDS = 256

MAX_FIELD_NAME = 200  # characters

KEY_FIELD = "__key__"
"""Name of the column of keys in an Arrow shard."""

RESERVED_NAMES = frozenset({"step", "samples", KEY_FIELD})
"""Names that batches and shards use themselves; fields cannot have them."""

# Control characters, line ends, bidirectional marks, lone surrogates, and the mark of a URL.
_UNFIT = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|://")


class Schema(Mapping[str, FieldType]):
    """Immutable, ordered mapping of field names to types."""

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        _check_names(list(fields))
        self._fields = dict(fields)
        self._ordered = tuple(fields.items())

    @classmethod
    def parse(cls, fields: Mapping[str, object] | Schema) -> Schema:
        """Return the schema of a mapping such as ``{"image": "bytes", "label": "int64"}``.

        Raises:
            SchemaError: A name or type is not valid.
        """
        if isinstance(fields, Schema):
            return fields
        if not isinstance(fields, Mapping):
            raise SchemaError(f"a schema is a mapping of field names to types, got {type(fields).__name__}")
        parsed: dict[str, FieldType] = {}
        for name, text in fields.items():
            try:
                parsed[name] = text if isinstance(text, FieldType) else FieldType.parse(text)
            except SchemaError as error:
                raise SchemaError(f"field {name!r}: {error}") from None
        return cls(parsed)

    def to_json(self) -> list[list[str]]:
        """Return ``[[name, type], …]`` in order; JSON objects would lose the order."""
        return [[name, str(kind)] for name, kind in self._ordered]

    @classmethod
    def from_json(cls, value: object) -> Schema:
        """Return the schema written by `to_json`.

        Raises:
            FormatError: `value` is not a list of valid fields.
        """
        if not isinstance(value, list) or len(value) > MAX_FIELDS:
            raise FormatError(f"schema: expected a list of at most {MAX_FIELDS} [name, type] pairs")
        fields: dict[str, str] = {}
        for pair in value:
            if not (
                isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            ):
                raise FormatError(f"schema: {pair!r:.100} is no [name, type] pair")
            if pair[0] in fields:
                raise FormatError(f"schema: field {pair[0]!r} appears twice")
            fields[pair[0]] = pair[1]
        try:
            return cls.parse(fields)
        except SchemaError as error:
            raise FormatError(f"schema: {error}") from None

    def encode(self, sample: Mapping[str, object], *, where: str) -> tuple[bytes, ...]:
        """Return the canonical payloads of `sample` in the order of `stored`.

        str is encoded as UTF-8, json as canonical JSON, numbers as little-endian bytes in C order.

        Args:
            sample: A value for every field; optional fields may be missing or None.
            where: Name of the sample in messages.

        Raises:
            SampleError: A field is missing or unknown, or a value does not fit its type.
        """
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise SampleError(f"{where}: {shown(sample)} is no mapping of field to value; give a dict")
        if len(sample) != len(self._fields) or any(name not in sample for name in self._fields):
            self._refuse_fields(sample, where)
        if self.stored is self:
            return tuple([encode_value(kind, sample[name], where, name) for name, kind in self._ordered])
        payloads: list[bytes] = []
        for name, kind in self._ordered:
            value = sample.get(name)
            is_absent = kind.optional and value is None
            payloads.append(
                bytes(kind.item_bytes or 0) if is_absent else encode_value(kind, value, where, name)
            )
            if kind.optional:
                payloads.append(b"\0" if is_absent else b"\1")
        return tuple(payloads)

    def _refuse_fields(self, sample: Mapping[str, object], where: str) -> None:
        missing = [name for name, kind in self._ordered if name not in sample and not kind.optional]
        unknown = [str(name) for name in sample if name not in self._fields]
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        if parts:
            raise SampleError(f"{where}: fields {' and '.join(parts)}; the schema has {', '.join(self)}")

    def decode(self, payloads: Sequence[bytes | memoryview]) -> dict[str, object]:
        """Return the values of canonical payloads: Python scalars, str, bytes, parsed JSON and new, writable arrays.

        Raises:
            FormatError: A payload is not valid for its type.
        """
        if len(payloads) != len(self.stored):
            raise FormatError(f"a sample of {len(payloads)} payloads, expected {len(self.stored)}")
        payload_of = dict(zip(self.stored, payloads, strict=True))
        return {
            name: None
            if kind.optional and not payload_of[presence_of(name)][0]
            else decode_payload(kind, payload_of[name], name)
            for name, kind in self._ordered
        }

    @cached_property
    def stored(self) -> Schema:
        """The stored columns; the schema itself if no field is optional.

        Each optional field is followed by a bool column, named by `presence_of`, that is true where the field has a
        value. The payload of a missing value is zeros, or empty if sizes vary.
        """
        if not any(kind.optional for _, kind in self._ordered):
            return self
        columns: dict[str, FieldType] = {}
        for name, kind in self._ordered:
            columns[name] = kind
            if kind.optional:
                columns[presence_of(name)] = FieldType("scalar", "bool")
        made = Schema.__new__(Schema)  # skips the check of names: a presence column contains a NUL
        made.__dict__.update(_fields=columns, _ordered=tuple(columns.items()), stored=made)
        return made

    def position(self, name: str) -> int:
        """Return the position of field `name` in schema order.

        Raises:
            SchemaError: The field is unknown.
        """
        try:
            return self._positions[name]
        except KeyError:
            raise SchemaError(
                f"field {name!r} is unknown; the fields are {', '.join(self._fields)}"
            ) from None

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self._fields)}

    def __getitem__(self, name: str) -> FieldType:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        """Compare names, types and order: the order is part of the bytes."""
        return self._ordered == other._ordered if isinstance(other, Schema) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ordered)

    def __repr__(self) -> str:
        return f"Schema({ {name: str(kind) for name, kind in self._ordered} })"


def presence_of(name: str) -> str:
    """Return the name of the stored bool column that marks the values of an optional field."""
    return f"{name}\0"


def _check_names(names: Sequence[object]) -> None:
    if not 0 < len(names) <= MAX_FIELDS:
        raise SchemaError(f"a schema has 1 to {MAX_FIELDS} fields, got {len(names)}")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_FIELD_NAME or _UNFIT.search(name):
            raise SchemaError(
                f"field name {name!r:.80}: expected 1 to {MAX_FIELD_NAME} characters, none of them a control character "
                "or half of one, and no ://"
            )
        if name in RESERVED_NAMES:
            raise SchemaError(f"field name {name!r} is reserved for batches; call it {name}_")
