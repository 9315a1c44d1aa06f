"""Expressions over the fields of a sample: conditions, ``label < 5``, and costs, ``bytes(text)**2``.

They are parsed by Python's parser and interpreted here; nothing is evaluated as code.
A condition has names, literals, comparisons, `in`, `and`, `or`, `not`.
A cost has integer fields by name, `bytes(FIELD)`, `len(FIELD)`, `squares(FIELD)`, integers, `+`, `*`, `//`
and `**`.
No part of a cost is negative, and every part grows with its terms: its value for the largest terms is an
upper bound, which is checked for overflow.
"""

from __future__ import annotations

import ast
import decimal
import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.formats import Block, FixedColumn, Schema, ShardIndex
from shardkit.formats.schema import FieldType
from shardkit.formats.tar_members import RAGGED_HEADER_BYTES
from shardkit.plan.costs import COST_LIMIT
from shardkit.plan.deal import ragged
from shardkit.ranges import shown

# backticks inside string literals do not quote; a backtick in a name is doubled
_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(`(?:[^`]|``)+`)""", re.DOTALL)


def parse_expression(text: str) -> ast.expr:
    """Return the tree of an expression; names in backticks, such as ``First Name``, become plain names.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: The value is not the text of an expression.
    """
    if not isinstance(text, str):
        raise ValueError("text is expected")  # noqa: TRY004
    word = "_quoted"
    while word in text:
        word += "_"
    names: dict[str, str] = {}

    def quoted_name(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        names[f"{word}{len(names)}"] = found[2][1:-1].replace("``", "`")
        return list(names)[-1]

    tree = ast.parse(_QUOTED.sub(quoted_name, text), mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return tree


def without_spaces(text: str) -> str:
    """Return an expression without spaces, except those in backticks and string literals."""
    parts = _QUOTED.split(text)
    return "".join(part if place % 3 else "".join(part.split()) for place, part in enumerate(parts) if part)


Mask = NDArray[np.bool_]

_Operand = str | int | float | tuple[str | int | float, ...] | NDArray[Any]
_LARGEST_FLOAT = float(np.finfo(np.float64).max)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class _Truth(NamedTuple):
    """Where a condition is true and where it is false, (rows,) bool each; neither where a value is missing."""

    true: Mask
    false: Mask

    def __and__(self, other: _Truth) -> _Truth:
        return _Truth(self.true & other.true, self.false | other.false)

    def __invert__(self) -> _Truth:
        return _Truth(self.false, self.true)


class Where:
    """A parsed condition.

    Missing values are treated as in SQL: a comparison with one is neither true nor false, and so is its negation.

    Args:
        text: for example ``"label < 5"`` or ``"lang in ('en', 'de') and not (score < 0.5)"``.
        schema: schema of the samples; only scalar and str fields can be compared.

    Raises:
        UsageError: The text is not a condition, or a field does not exist or cannot be compared.
    """

    def __init__(self, text: str, schema: Schema) -> None:
        self.text, self._schema = text, schema
        try:
            self._tree = parse_expression(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            said = error.msg if isinstance(error, SyntaxError) else error
            raise UsageError(
                f'where={shown(text)} cannot be read: {said}; write for example "label < 5", and a name that is no '
                "word in backticks: \"`First Name` == 'Ada'\""
            ) from None
        self.fields = sorted({node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)})
        for name in self.fields:
            if name not in schema:
                raise UsageError(
                    f"where={text!r}: there is no field {name!r}; the fields are {', '.join(schema)}"
                )
            if schema[name].kind not in ("scalar", "str"):
                raise UsageError(
                    f"where={text!r}: field {name!r} is {schema[name]}; only numbers and str are compared"
                )
        if not self.fields:
            raise UsageError(f"where={text!r} names no field; the fields are {', '.join(schema)}")
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Compare):
                self._store_literals(node)
        no_rows = {name: (self._no_values(name), np.empty(0, np.bool_)) for name in self.fields}
        self._truth(self._tree, no_rows)  # refuses what is not understood

    def of_block(self, block: Block) -> Mask:
        """Return (rows,) bool, True for rows of a block for which the condition is true."""
        columns: dict[str, tuple[NDArray[Any], Mask]] = {}
        for name in self.fields:
            column = block.column(name)
            if isinstance(column, FixedColumn):
                values = column.values
            else:
                data = column.data.tobytes()
                borders = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
                values = np.array([str(data[a:b], "utf-8") for a, b in borders], dtype=object)
            columns[name] = values, block.present(name)
        return self._truth(self._tree, columns).true

    def _no_values(self, name: str) -> NDArray[Any]:
        kind = self._schema[name]
        return np.empty(0, object if kind.kind == "str" else kind.numpy_dtype)

    def _truth(self, node: ast.expr, columns: Mapping[str, tuple[NDArray[Any], Mask]]) -> _Truth:
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                return functools.reduce(operator.and_, [self._truth(value, columns) for value in values])
            case ast.BoolOp(values=values):
                return ~functools.reduce(operator.and_, [~self._truth(value, columns) for value in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._truth(operand, columns)
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = itertools.pairwise([left, *others])
                return functools.reduce(
                    operator.and_,
                    [self._compare(op, pair, columns) for op, pair in zip(ops, pairs, strict=True)],
                )
            case ast.Name(id=name):
                column, present = columns[name]
                holds = column.astype(bool)
                return _Truth(present & holds, present & ~holds)
        raise self._unreadable(node)

    def _compare(
        self,
        op: ast.cmpop,
        pair: tuple[ast.expr, ast.expr],
        columns: Mapping[str, tuple[NDArray[Any], Mask]],
    ) -> _Truth:
        left, right = (self._value(node, columns) for node in pair)
        known = [columns[node.id][1] for node in pair if isinstance(node, ast.Name)]
        comparison = ast.Compare(left=pair[0], ops=[op], comparators=[pair[1]])
        if (
            not known
            or isinstance(left, tuple)
            or isinstance(right, tuple) != isinstance(op, ast.In | ast.NotIn)
        ):
            raise self._unreadable(comparison)
        others = right if isinstance(right, tuple) else (right,)
        if any(_is_text(left) != _is_text(other) for other in others):
            raise UsageError(
                f"where={self.text!r}: {ast.unparse(comparison)!r} compares text with a number; put quotes around "
                "text only"
            )
        if isinstance(right, tuple):
            holds = _is_in(left, right) ^ isinstance(op, ast.NotIn)
        elif type(op) in _COMPARISONS:
            holds = _COMPARISONS[type(op)](_comparable(left, right), _comparable(right, left))
        else:
            raise self._unreadable(comparison)
        present = functools.reduce(np.logical_and, known)
        return _Truth(present & holds, present & ~holds)

    def _value(self, node: ast.expr, columns: Mapping[str, tuple[NDArray[Any], Mask]]) -> _Operand:
        match node:
            case ast.Name(id=name):
                return columns[name][0]
            case ast.Constant(value=str() as text):
                return text
            case ast.Constant(value=int() | float() as number):
                return _bounded(number)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -_bounded(number)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                values = [self._value(element, columns) for element in elements]
                literals = tuple(value for value in values if isinstance(value, str | int | float))
                if len(literals) == len(values):
                    return literals
        raise self._unreadable(node)

    def _store_literals(self, node: ast.Compare) -> None:
        """Convert literals compared with a date, time or decimal to stored numbers, once for all blocks."""
        names = [part.id for part in (node.left, *node.comparators) if isinstance(part, ast.Name)]
        kinds = {logical for name in names if (logical := self._schema[name].logical) is not None}
        if len(kinds) > 1:
            raise UsageError(f"where={self.text!r}: {' and '.join(names)} are of different types")
        for logical in kinds:
            for literal in (one for one in ast.walk(node) if isinstance(one, ast.Constant)):
                value: Any = literal.value
                try:
                    literal.value = logical.number(
                        decimal.Decimal(str(value)) if type(value) is float else value
                    )
                except ValueError as error:
                    raise UsageError(f"where={self.text!r}: {value!r} is no {logical}: {error}") from None

    def _unreadable(self, node: ast.expr) -> UsageError:
        return UsageError(
            f"where={self.text!r}: {ast.unparse(node)!r} is not understood; names, literals, comparisons, in, and, "
            "or, not are"
        )


def _bounded(number: int | float) -> int | float:
    """Return a literal, or infinity for integers beyond all floats."""
    return number if number <= _LARGEST_FLOAT else np.inf


def _is_text(value: _Operand) -> bool:
    return value.dtype == object if isinstance(value, np.ndarray) else isinstance(value, str)


def _comparable(value: _Operand, other: _Operand) -> Any:
    """Return a value so that NumPy compares all of it.

    Floats become float64 if the other value is a number beyond their range; truths become numbers, because NumPy
    compares those with integers of any size; a text literal keeps NULs at its end.
    """
    if isinstance(value, str):
        return np.array(value, dtype=object)
    if isinstance(value, np.ndarray) and value.dtype.kind == "b":
        return value.view(np.uint8)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and isinstance(other, int | float):
        return value.astype(np.float64) if abs(other) > float(np.finfo(value.dtype).max) else value
    return value


def _is_in(values: Any, literals: tuple[str | int | float, ...]) -> Mask:
    """Return (n,) bool, True for values that are equal to a literal; floats as `values == literal` compares them."""
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            literals = tuple(values.dtype.type(one).item() for one in literals)
    return np.fromiter(map(set(literals).__contains__, values.tolist()), np.bool_, len(values))


_MOST_POWER = 4
_LARGEST = 1 << 62  # bound for intermediate int64 values
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_WRITE = 'write for example "bytes(text)", "length**2", "len(tokens) // 16" or "squares(boundaries)"'


class Term(NamedTuple):
    """A quantity of a field: its value, ``bytes``, ``len`` or ``squares``."""

    function: str
    field: str

    def check(self, text: str, schema: Schema) -> None:
        """Refuse a field that does not exist, or whose type does not have the quantity."""
        if self.field not in schema:
            raise UsageError(
                f"cost={text!r}: there is no field {self.field!r}; the fields are {', '.join(schema)}"
            )
        kind = schema[self.field]
        integers = kind.dtype.startswith(("int", "uint"))
        fits, expected = {
            "value": (kind.kind == "scalar" and integers, "one integer"),
            "bytes": (True, ""),
            "len": (kind.kind == "ragged", "a row of any length, such as int32[*]"),
            "squares": (kind.kind == "ragged" and integers, "a row of integers of any length"),
        }[self.function]
        if not fits:
            named = self.field if self.function == "value" else f"{self.function}({self.field})"
            raise UsageError(f"cost={text!r}: {named} is of {kind}, expected {expected}; {_WRITE}")

    def of_index(self, kind: FieldType, index: ShardIndex) -> NDArray[np.int64] | None:
        """Return (rows,) int64 from the index of a shard, or None if blocks must be read."""
        if self.function not in ("bytes", "len"):
            return None
        if kind.kind in ("scalar", "array"):
            return np.full(index.rows, _item_bytes(kind) * int(np.prod(kind.shape)), dtype=np.int64)
        if index.field_size is None or self.field not in index.schema:
            return None
        place = index.schema.position(self.field)
        sizes = index.field_size[:, place].astype(np.int64)
        has_header = index.field_is_payload is None or not index.field_is_payload[place]
        if kind.kind == "ragged" and has_header:
            sizes = np.maximum(0, sizes - RAGGED_HEADER_BYTES)
        return sizes // _item_bytes(kind) if self.function == "len" else sizes

    def of_block(self, kind: FieldType, block: Block) -> NDArray[np.int64]:
        """Return (rows,) int64 of the rows of a block; 0 for rows without a value."""
        column = block.column(self.field)
        if isinstance(column, FixedColumn):
            values = column.values
            if len(values) and (int(values.min()) < 0 or int(values.max()) >= _LARGEST):
                raise UsageError(
                    f"cost: the field {self.field!r} goes from {int(values.min())} to {int(values.max())}, expected "
                    "0 to 2**62"
                )
            return np.where(block.present(self.field), values, 0).astype(np.int64)
        sizes = column.ends - column.starts
        if self.function == "squares":
            items = column.data[ragged(column.starts, sizes)].view(np.dtype(kind.dtype).newbyteorder("<"))
            return self._squares(items, sizes // _item_bytes(kind))
        return sizes // _item_bytes(kind) if self.function == "len" else sizes.astype(np.int64)

    def _squares(self, items: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum of squared differences of neighbours for each row."""
        if len(items) and int(items.max()) >= _LARGEST:
            raise UsageError(f"cost: squares({self.field}) of {int(items.max())}, expected below 2**62")
        steps: NDArray[np.int64] = np.diff(items.astype(np.int64), prepend=np.int64(0)).astype(np.int64)
        ends = np.cumsum(counts)
        steps[(ends - counts)[counts > 0]] = 0  # the step between rows does not count
        if len(steps) and int(steps.min()) < 0:
            raise UsageError(
                f"cost: squares({self.field}) needs rows that ascend, such as borders of documents"
            )

        def sums(values: NDArray[np.int64]) -> NDArray[np.int64]:
            # The cumulative sum may wrap around; its differences are still right.
            before = np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))
            return np.asarray(before[ends] - before[ends - counts])

        longest = int(sums(steps).max(initial=0))
        if longest >= 1 << 31:
            raise UsageError(f"cost: a row of {self.field!r} goes over {longest}, expected below 2**31")
        return sums(steps**2)


class CostFormula:
    """A cost expression over the fields of a schema.

    Attributes:
        canonical: the text without spaces; part of the plan's digest.
        terms: quantities that the expression uses, in order of first use.

    Raises:
        UsageError: The text is not a cost, or a field does not exist or has an unsuitable type.
    """

    def __init__(self, text: str, schema: Schema) -> None:
        self.text = text
        try:
            self._tree = parse_expression(text)
            # from the text, not `ast.unparse`, whose output depends on the version of Python
            self.canonical = without_spaces(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(f"cost={shown(text)} cannot be read: {error}; {_WRITE}") from None
        self.schema = schema
        self.terms: dict[Term, None] = {}
        self._check(self._tree)
        if not self.terms:
            raise UsageError(f"cost={text!r} names no field; {_WRITE}")

    def __call__(self, terms: Mapping[Term, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return (n,) int64 costs, at least 1, from (n,) `terms`."""
        largest = self._value(self._tree, {term: int(column.max()) for term, column in terms.items()})
        if largest >= COST_LIMIT:
            raise self._too_large(largest)
        costs: NDArray[np.int64] = np.maximum(1, self._value(self._tree, terms))
        return costs

    def _check(self, node: ast.expr) -> None:
        match node:
            case ast.Constant(value=int() as value) if type(value) is int and value < COST_LIMIT:
                return
            case (
                ast.Name()
                | ast.Call(func=ast.Name(id="bytes" | "len" | "squares"), args=[ast.Name()], keywords=[])
            ):
                term = _term(node)
                term.check(self.text, self.schema)
                self.terms[term] = None
            case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
                self._check(left)
                self._check(right)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=value) as right) if value:
                self._check(left)
                self._check(right)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if (
                1 <= power <= _MOST_POWER
            ):
                self._check(left)
            case _:
                raise UsageError(
                    f"cost={self.text!r}: {ast.unparse(node)!r} is not understood; a field of integers, bytes(FIELD), "
                    "len(FIELD), squares(FIELD), integers, +, *, // by an integer and ** up to "
                    f"{_MOST_POWER} are"
                )

    def _value(self, node: ast.expr, terms: Mapping[Term, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Call():
                return terms[_term(node)]
            case ast.BinOp(left=left, op=op, right=right):
                first, second = self._value(left, terms), self._value(right, terms)
                value = _OPERATIONS[type(op)](first, second)
                # checked on the largest terms: arrays would overflow silently
                if isinstance(value, int) and value >= _LARGEST:
                    raise self._too_large(value)
                return value
        raise AssertionError(node)  # `_check` refuses all other nodes

    def _too_large(self, value: int) -> UsageError:
        return UsageError(
            f"cost={self.text!r} may reach {value}, expected below 2**32 (2**62 on the way); divide inside it, as in "
            "(bytes(text) // 1024)**2"
        )


def _term(node: ast.expr) -> Term:
    match node:
        case ast.Name(id=name):
            return Term("value", name)
        case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=name)]):
            return Term(function, name)
    raise AssertionError(node)


def _item_bytes(kind: FieldType) -> int:
    return np.dtype(kind.dtype).itemsize if kind.dtype else 1
