"""An importer whose samples pass through a function and a tokenizer."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import numpy as np

from shardkit.errors import SampleError, SchemaError, ShardkitError, SourceError
from shardkit.extras import shell_word
from shardkit.formats import Schema
from shardkit_tools.importers.protocol import (
    MIXED,
    Importer,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    row_name,
)
from shardkit_tools.transforms.applied import TOKENS, AppliedFunction, TextTokenizer, find_text_field

_SAMPLES_LOOKED_AT = 64
_ROWS_LOOKED_AT = 10_000


@dataclass(eq=False)
class TransformedImporter:
    """An `Importer` that transforms the samples of another one.

    Raises:
        ConfigurationError, SchemaError: The samples cannot be transformed this way.
        SourceError, SampleError: The first samples cannot be read or transformed.
    """

    importer: Importer  # importer of the source
    function: AppliedFunction | None = None  # applied first
    tokenizer: TextTokenizer | None = None  # then applied to the text
    _: KW_ONLY
    text_field: str | None = None  # text field, if it is ambiguous
    output_types: Mapping[str, str] | None = None  # types of the output that replace the inferred ones
    skip: bool = False  # infer types from the samples without errors, and leave out samples with errors

    def __post_init__(self) -> None:
        importer, function, tokenizer = self.importer, self.function, self.tokenizer
        given = dict(self.output_types or {})
        tokens = given.pop(TOKENS, None) if tokenizer else None
        schema = importer.schema
        if function is not None:
            first = itertools.islice(self._first_samples(), _SAMPLES_LOOKED_AT)
            schema = types_of(first, importer.schema, given, skip=self.skip)
        elif given:
            raise SchemaError(
                f"--output-schema names {', '.join(given)}, which nothing makes; types of the source are given "
                "with --schema"
            )
        self._text = find_text_field(schema, self.text_field) if tokenizer else ""
        if tokenizer is not None:
            kind = tokens or f"{tokenizer.dtype}[*]" + "?" * schema[self._text].optional
            schema = Schema.parse(
                {
                    TOKENS if n == self._text else n: kind if n == self._text else str(t)
                    for n, t in schema.items()
                }
            )
        self._schema = schema

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def classes(self) -> tuple[str, ...]:
        """See `Importer`; empty if the label is gone."""
        label = self._schema.get("label")
        return self.importer.classes if label is not None and str(label) == "int64" else ()

    def files(self) -> Sequence[SourceFile]:
        return self.importer.files()

    def tasks(self) -> Sequence[SourceTask]:
        return self.importer.tasks()

    def describe(self) -> dict[str, object]:
        return self.importer.describe()

    def transforms(self) -> dict[str, object]:
        """Return the entries of the transforms in the recipe."""
        said: dict[str, object] = {}
        if self.function is not None:
            said["apply"] = self.function.describe()
        if self.tokenizer is not None:
            said["tokenizer"] = self.tokenizer.describe(self._text)
        return said

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the transforms for the build's report."""
        return () if self.tokenizer is None else (self.tokenizer.note,)

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """See `Importer`; a sample that cannot be transformed is a failure of its row."""
        for found, where in self._rows(task):
            if isinstance(found, SourceFailure):
                yield found
                continue
            try:
                samples = [self._tokenise(sample, where) for sample in self._apply(found.sample, where)]
            except SampleError as error:
                yield SourceFailure(found.source_name, found.source_row, error)
                continue
            for piece, sample in enumerate(samples):
                if sample.keys() != self._schema.keys() and (why := self._field_error(sample, where)):
                    yield SourceFailure(found.source_name, found.source_row, why)
                    continue
                key = found.key if len(samples) == 1 or found.key is None else f"{found.key}-{piece}"
                yield SourceSample(sample, key, found.source_name, found.source_row, piece)

    def _field_error(self, sample: Mapping[str, object], where: _Where) -> SampleError | None:
        """Return why a sample has other fields than the first ones; None if it only lacks optional fields."""
        added = sorted(map(str, sample.keys() - self._schema.keys()))
        missing = [n for n, kind in self._schema.items() if not kind.optional and n not in sample]
        if not added and not missing:
            return None
        name = [*added, *missing][0]
        what = (
            f"field {name!r}, which the first samples do not have"
            if added
            else f"no field {name!r}, as the first"
        )
        kind = "TYPE" if added else self._schema[name]
        advice = f"--output-schema {shell_word(f'{name}={kind}?')}"
        return SampleError(f"{where}: the sample has {what}; change the function, or give a type: {advice}")

    def _rows(self, task: SourceTask) -> Iterator[tuple[SourceSample | SourceFailure, _Where]]:
        paths = {file.name: file.path for file in task.files}
        is_seen = self.function is not None
        gaps = dict.fromkeys(name for name, kind in self.importer.schema.items() if kind.optional or is_seen)
        for found in self.importer.read(task):
            # a function gets all fields, with None for missing values
            if gaps and isinstance(found, SourceSample):
                found = replace(found, sample={**gaps, **found.sample})
            yield found, _Where(found, paths)

    def _apply(self, sample: Mapping[str, object], where: _Where) -> Iterator[Mapping[str, object]]:
        if self.function is None:
            return iter((sample,))
        return self.function(sample, where)

    def _tokenise(self, sample: Mapping[str, object], where: _Where) -> Mapping[str, object]:
        if self.tokenizer is None:
            return sample
        if self._text not in sample:
            return sample  # the schema says what is missing
        made = dict(sample)
        text = made.pop(self._text)
        has_none = text is None and self._schema[TOKENS].optional
        made[TOKENS] = None if has_none else self.tokenizer.encode(text, where)
        return made

    def _first_samples(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Yield samples to infer types from; many rows are read, because a function may drop most."""
        looked_at = 0
        made = 0
        errors: list[ShardkitError] = []
        for task in self.importer.tasks():
            try:
                for found, where in self._rows(task):
                    for sample in self._first_of(found, where, errors):
                        yield str(where), sample
                        made += 1
                    looked_at += 1
                    if made and looked_at >= _ROWS_LOOKED_AT:
                        return
            except SourceError as error:
                if not self.skip:
                    raise
                errors.append(error)
        if errors and not made:
            raise errors[0]  # every row fails: which one is not the question

    def _first_of(
        self, found: SourceSample | SourceFailure, where: _Where, errors: list[ShardkitError]
    ) -> list[Mapping[str, object]]:
        try:
            if isinstance(found, SourceFailure):
                raise found.error
            return list(self._apply(found.sample, where))
        except (SampleError, SourceError) as error:
            if not self.skip:
                raise
            errors[:] = errors or [error]
            return []


class _Where(NamedTuple):
    """A row whose name is only made when a message needs it."""

    found: SourceSample | SourceFailure
    paths: Mapping[str, str]

    def __str__(self) -> str:
        return row_name(*self)


# ---- Field types of the values that a function returns, from its first samples
#
#     bool, int, float, str, bytes                     bool, int64, float64, str, bytes
#     numpy scalar, array of one axis, of more axes    its dtype, dtype[*], dtype[shape]
#     list of ints, of numbers                         int64[*], float64[*]
#     any other list, dict                             json
#
# A field that the source also has keeps its type if the values fit.


_EMPTY = "[]"  # type of an empty list, which fits any list


def types_of(
    samples: Iterable[tuple[str, Mapping[str, object]]],
    source: Schema,
    given: Mapping[str, str],
    *,
    skip: bool = False,
) -> Schema:
    """Return the schema that holds these samples.

    Raises:
        SourceError: There are no samples.
        SchemaError: The values of a field have no common type, or `given` names an unknown field.
    """
    rows = list(samples)
    if not rows:
        raise SourceError("no sample is left after --apply; change the function or the source")
    looked_at = rows[:1] if skip else rows  # a sample that is skipped adds no field
    names = list(dict.fromkeys(name for _, row in looked_at for name in row))
    for name, kind in given.items():
        if name not in names and not kind.endswith("?"):
            raise SchemaError(
                f"--output-schema names the field {name!r}, which the samples do not have; they have "
                f"{', '.join(names)}; if later ones have it, give it an optional type: {name}={kind}?"
            )
    types = {}
    for name in names:
        values = [(where, row[name]) for where, row in rows if name in row]
        kind = given.get(name) or _field(name, values, source, skip)
        is_optional = not skip and len(values) < len(rows) and name not in given
        types[name] = kind.removesuffix("?") + "?" if is_optional else kind
    return Schema.parse({**types, **given})


def _field(name: str, values: list[tuple[str, object]], source: Schema, skip: bool) -> str:
    if name in source and source[name].kind != MIXED and _fits(name, [v for _, v in values], source, skip):
        return str(source[name])
    kind, first = _EMPTY, ""
    some = [(where, value) for where, value in values if value is not None]
    for where, value in some:
        found = _type(name, value, where)
        common = _common(kind, found)
        if common is None and skip:
            continue
        if common is None:
            raise SchemaError(
                f"field {name!r} is {kind} in {first} and {found} in {where}; make them of one type, or say which "
                f"with --output-schema {name}=…"
            )
        if common != kind:
            kind, first = common, where
    return ("json" if kind == _EMPTY else kind) + "?" * (len(some) < len(values))


def _fits(name: str, values: list[object], source: Schema, skip: bool) -> bool:
    """Return True if all values fit the type of the source's field; with `skip`, if most do."""
    alone, fitting = Schema({"value": source[name]}), 0
    for value in values:
        try:
            alone.encode({"value": value}, where="")
            fitting += 1
        except SampleError:
            if not skip:
                return False
    return not skip or 2 * fitting > len(values)


def _type(name: str, value: object, where: str) -> str:
    match value:
        case bool():
            return "bool"
        case int():
            return "int64"
        case np.generic() | np.ndarray():
            return _array_type(np.asarray(value))
        case float():
            return "float64"
        case str():
            return "str"
        case bytes() | bytearray() | memoryview():
            return "bytes"
        case list() | tuple():
            return _list_type(value)
        case dict():
            return "json"
        case dt.date() | dt.time() | dt.timedelta():
            return _time_type(value)
    if hasattr(value, "__array__"):
        return _array_type(np.asarray(value))
    raise SchemaError(
        f"{where}: field {name!r} is a {type(value).__name__}, which has no field type; return numbers, text, "
        "bytes, lists, dicts, arrays, or None"
    )


def _time_type(value: dt.date | dt.time | dt.timedelta) -> str:
    if isinstance(value, dt.datetime):
        return "timestamp[us, UTC]" if value.tzinfo else "timestamp[us]"
    return {dt.date: "date", dt.time: "time[us]"}.get(type(value), "duration[us]")


def _array_type(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
    if array.ndim == 0:
        return str(array.dtype)
    return f"{array.dtype}[{','.join(map(str, array.shape)) if array.ndim > 1 else '*'}]"


def _list_type(value: list[object] | tuple[object, ...]) -> str:
    if not value:
        return _EMPTY
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return "int64[*]"
    return "float64[*]" if kinds <= {int, float} else "json"


def _common(a: str, b: str) -> str | None:
    if a == b or b == _EMPTY:
        return a if a != _EMPTY or b == _EMPTY else b
    if a == _EMPTY:
        return b
    for whole, fraction in (("int64", "float64"), ("int64[*]", "float64[*]")):
        if {a, b} == {whole, fraction}:
            return fraction
    if "json" in (a, b) and {a, b} <= {"json", "int64[*]", "float64[*]"}:
        return "json"
    return None
