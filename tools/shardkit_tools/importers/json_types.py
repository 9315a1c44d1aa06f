"""Types of the fields of JSON objects: inferred from all rows or the first ones, and checked on the rest.

    int → int64 (uint64 if a value needs it)       float → float64, which also takes exact ints
    string → str    true, false → bool             object, list → json

Two of these types in one field are an error that names both rows: the user decides how to resolve it, and
``--schema field=json`` always works. Rows are looked at by column; a row that does not fit is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import EllipsisType, NoneType
from typing import Any

from shardkit.errors import ShardkitError, SourceError
from shardkit.extras import shell_word
from shardkit.formats.sample_columns import EXACT_INTEGER, LARGEST_INT64, is_exact
from shardkit_tools.importers.protocol import MIXED
from shardkit_tools.importers.source_files import LeftOut

SCAN_ROWS = 100_000
"""Number of rows, in source order, for inferring the schema of a large source: the same for any number of jobs."""

_WORDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_KINDS = {bool: "bool", int: "int64", float: "float64", str: "str", dict: "json", list: "json"}
_TYPES: dict[str, set[type]] = {
    "bool": {bool},
    "int64": {int},
    "uint64": {int},
    "float64": {int, float},
    "str": {str},
    "json": {dict, list},
}
_MIN_INT64, _MAX_UINT64 = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class _FieldFacts:
    """Facts about one field: its type so far, and the row that it was inferred from."""

    kind: str
    where: str
    value: object
    # integers and their rows, for messages; "" if there is none
    unsigned: str = ""  # one that needs uint64
    negative: str = ""
    inexact: str = ""  # one that float64 would change

    def learn(self, name: str, values: Sequence[Any], where_of: Callable[[object], str]) -> _FieldFacts:
        """Return the facts with more values; of an error on types, the row is right if there is one value."""
        known, types = self, set(map(type, values))
        for kind in map(_KINDS.__getitem__, types):
            if kind != known.kind:
                if {kind, known.kind} != {"int64", "float64"}:
                    raise SourceError(
                        f"{where_of(values[0])}: field {name!r} is {_short(values[0])}, but {_short(self.value)} in "
                        f"{self.where}; make them alike, or pass --schema {shell_word(name)}=json"
                    )
                known = replace(known, kind="float64")
        if int not in types:
            return known
        integers = values if types == {int} else [value for value in values if type(value) is int]
        low, high = min(integers), max(integers)
        if low < _MIN_INT64 or high > _MAX_UINT64:
            raise SourceError(
                f"{where_of(values[0])}: field {name!r} is {values[0]}, which no 64-bit integer holds; write it as a "
                f"string, or pass --schema {shell_word(name)}=json"
            )
        if not known.negative and low < 0:
            known = replace(known, negative=f"{low} in {where_of(low)}")
        if not known.unsigned and high > LARGEST_INT64:
            known = replace(known, unsigned=f"{high} in {where_of(high)}")
        if not known.inexact and max(-low, high) > EXACT_INTEGER:
            found = next((value for value in integers if not is_exact(value)), None)
            known = known if found is None else replace(known, inexact=f"{found} in {where_of(found)}")
        return known

    def conclude(self, name: str) -> str:
        """Return the type that holds all values."""
        word = shell_word(name)
        if self.kind == "float64" and self.inexact:
            raise SourceError(
                f"field {name!r} holds {self.inexact}, which float64 would change, and numbers with a fraction; write "
                f"the numbers as strings, or pass --schema {word}=json"
            )
        if self.kind != "int64" or not self.unsigned:
            return self.kind
        if self.negative:
            raise SourceError(
                f"field {name!r} holds {self.negative}, and {self.unsigned}; no integer type holds both: pass --schema "
                f"{word}=json, or write them as strings"
            )
        return "uint64"


class TypeInference:
    """Finds types that hold every row.

    Args:
        given: field → type from the user; its values are not looked at.
        bad: gets the errors of rows that do not fit the rows before them.
        unchecked: a field whose values have no common type is `MIXED`.
    """

    def __init__(self, given: Mapping[str, str], bad: LeftOut, *, unchecked: bool) -> None:
        self._given, self._bad, self._unchecked = given, bad, unchecked
        self._facts: dict[str, _FieldFacts] = {}
        self._valued: dict[str, int] = {}  # field, in order → number of rows with a value other than null
        self._mixed = set[str]()
        self.rows = 0

    @property
    def valued(self) -> set[str]:
        """Fields with a value other than null."""
        return {name for name, count in self._valued.items() if count}

    @property
    def json_fields(self) -> Collection[str]:
        """Fields that are json without the user's saying so."""
        return [name for name, known in self._facts.items() if known.kind == "json"]

    def add(self, rows: Sequence[Any], name_of: Callable[[int], str]) -> None:
        """Learn from rows of JSON objects, among which may be errors.

        Raises:
            SourceError: A row is an error, or does not fit the rows before it; unless rows are skipped.
        """
        try:
            self._learn(rows, name_of)
            return
        except SourceError as error:
            if len(rows) == 1:
                self._bad.add(error)
                return
        half = len(rows) // 2  # a row that does not fit is found by bisection
        self.add(rows[:half], name_of)
        self.add(rows[half:], lambda number: name_of(half + number))

    def _learn(self, rows: Sequence[Any], name_of: Callable[[int], str]) -> None:
        """Learn from all rows, by column, or from none if one does not fit."""
        for row in rows:
            if isinstance(row, ShardkitError):
                raise row
        learned, counts = dict[str, _FieldFacts](), dict[str, int]()
        for name in dict.fromkeys(chain.from_iterable(rows)):
            values = [value for row in rows if (value := row.get(name)) is not None]
            counts[name] = len(values)
            if not values or name in self._given or name in self._mixed:
                continue
            known = self._facts.get(name)
            if known is None:
                first = next(number for number, row in enumerate(rows) if row.get(name) is not None)
                known = _FieldFacts(_KINDS[type(values[0])], name_of(first), values[0])

            def where_of(value: object, name: str = name) -> str:
                return name_of(next(number for number, row in enumerate(rows) if row.get(name) is value))

            try:
                learned[name] = known.learn(name, values, where_of)
            except SourceError:
                if self._bad.allowed or not self._unchecked or len(rows) > 1:
                    raise
                self._mixed.add(name)
        self._facts |= learned
        self.rows += len(rows)
        for name, count in counts.items():
            self._valued[name] = self._valued.get(name, 0) + count

    def types(self) -> dict[str, str]:
        """Return field → type text; optional if a row lacks the field or has null; json if it is null in every row."""
        types = {}
        for name, count in self._valued.items():
            found = MIXED if name in self._mixed else self._conclude(name)
            types[name] = self._given.get(name) or found + "?" * (count < self.rows and found != MIXED)
        return types

    def _conclude(self, name: str) -> str:
        known = self._facts.get(name)
        try:
            return known.conclude(name) if known is not None else "json"
        except SourceError:
            if not self._unchecked:
                raise
            return MIXED


def check_rows(
    rows: Sequence[Any], types: Mapping[str, str], given: Collection[str], name_of: Callable[[int], str]
) -> list[Any]:
    """Return rows of JSON objects, each that does not have the inferred types replaced by an error."""
    checked, objects = list(rows), [{} if isinstance(row, ShardkitError) else row for row in rows]

    def refuse(row: int, why: str) -> None:
        if checked[row] is objects[row]:  # otherwise it is an error already
            checked[row] = SourceError(f"{name_of(row)}: {why}")

    for name, kind in types.items():
        values = [row.get(name, ...) for row in objects]
        for row, why in _misfits(name, kind, values, is_given=name in given):
            refuse(row, why)
    if not types.keys() >= set().union(*objects):
        for row, one in enumerate(objects):
            added = next((name for name in one if name not in types), None)
            if added is not None:
                refuse(
                    row,
                    f"has the field {added!r}, which no row has that types were inferred from (the first {SCAN_ROWS}); "
                    f"say its type, such as --schema {shell_word(added)}=str?, or leave it out: --drop "
                    f"{shell_word(added)}",
                )
    return checked


def _misfits(name: str, kind: str, values: Sequence[Any], *, is_given: bool) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) of the values that a field does not have; a missing one is an ellipsis.

    Values of a type that the user gives are encoded later, so that they need only be there.
    """
    plain = kind.removesuffix("?")
    absent = {NoneType, EllipsisType} if kind.endswith("?") else set()
    types = set(map(type, values)) - absent
    may_be_inexact = int in types and plain in ("float64", "uint64")
    if EllipsisType not in types and (is_given or (types <= _TYPES[plain] and not may_be_inexact)):
        return
    word = shell_word(name)
    unseen = (
        f"and {kind} was inferred from the rows before it; give it a value, leave the row out, or pass --schema "
        f"{word}={kind}?"
    )
    for row, value in enumerate(values):
        if type(value) in absent:
            continue
        if value is ...:
            yield row, f"the field {name!r} is missing, {unseen}"
        elif is_given or (type(value) in _TYPES[plain] and _holds(plain, value)):
            continue
        elif value is None:
            yield row, f"field {name!r} is null, {unseen}"
        else:
            better = "float64" if isinstance(value, float) else "json"
            why = f"field {name!r} is {_short(value)}, but {kind} was inferred from the rows before it"
            yield row, f"{why}; mend the row, or pass --schema {word}={better}"


def _holds(plain: str, value: object) -> bool:
    """Return False if a type changes an integer."""
    if type(value) is not int or plain == "int64":  # beyond int64, the schema refuses it
        return True
    return 0 <= value <= _MAX_UINT64 if plain == "uint64" else is_exact(value)


def _short(value: object) -> str:
    text = repr(value)
    return f"{_WORDS[type(value)]} ({text if len(text) <= 40 else text[:37] + '…'})"
