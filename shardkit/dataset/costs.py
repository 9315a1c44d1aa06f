"""`cost="bytes(text)**2"`: a small language of integers over what the indexes know of each row.

Parsed by Python's own parser and walked by hand: `bytes(FIELD)`, integers, `+`, `*`, `//`, `**`. Nothing is evaluated
as code, nothing is below zero, and nothing overflows unseen: every part grows with the sizes, so the largest sizes
bound it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.manifest import ShardTable
from shardkit.plan import Costs, encode_costs
from shardkit.plan.costs import COST_LIMIT
from shardkit.reading.blocks import BlockReader
from shardkit.reading.row_map import RowMap

__all__ = ["costs_of"]

_MOST_POWER = 4
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_WRITE = 'write for example "bytes(text)" or "bytes(text)**2 // 1024"'


class _Indexed(Protocol):
    """What costs are read from: a dataset."""

    table: ShardTable
    reader: BlockReader

    @property
    def schema(self) -> Schema: ...
    @property
    def rows(self) -> RowMap: ...


def costs_of(dataset: _Indexed, text: str) -> Costs:
    """What each sample of a dataset costs: at least 1. Reads every index, and no block.

    Raises:
        UsageError: not such an expression, no such field, a cost of 2**32 or more, or shards whose indexes hold no
            sizes of rows.
    """
    formula = _Formula(text, dataset.schema)
    parts = [np.empty(0, dtype=np.uint8)]
    for shard in range(len(dataset.table.rows)):
        rows = dataset.rows.rows_of_shard(shard)
        if not len(rows):
            continue
        index = dataset.reader.index(shard)
        if index.field_size is None:
            raise UsageError(
                f"cost={text!r}: shard {shard} is of format {index.format}, whose index holds no sizes of rows; "
                "leave cost out, or build with --format tar"
            )
        names = list(index.schema)
        sizes = {name: index.field_size[rows, names.index(name)].astype(np.int64) for name in formula.fields}
        parts.append(encode_costs(formula(sizes)))
    return Costs(formula.canonical, np.concatenate(parts))


class _Formula:
    def __init__(self, text: str, schema: Schema) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text, mode="eval").body
            # the plan's digest has it: no version of Python decides it
            self.canonical = "".join(text.split())
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise UsageError(f"cost={text!r} cannot be read: {error}; {_WRITE}") from None
        self.fields: list[str] = []
        self._check(self._tree, schema)
        if not self.fields:
            raise UsageError(f"cost={text!r} names no field; {_WRITE}")

    def __call__(self, sizes: dict[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """(n,) int64 of (n,) sizes of `fields`."""
        largest = self._value(self._tree, {name: int(column.max()) for name, column in sizes.items()})
        if largest >= COST_LIMIT:
            raise self._too_large(largest)
        costs: NDArray[np.int64] = np.maximum(1, self._value(self._tree, sizes))
        return costs

    def _check(self, node: ast.expr, schema: Schema) -> None:
        match node:
            case ast.Constant(value=int() as value) if type(value) is int and value < COST_LIMIT:
                return
            case ast.Call(func=ast.Name(id="bytes"), args=[ast.Name(id=name)], keywords=[]):
                if name not in schema:
                    raise UsageError(
                        f"cost={self.text!r}: there is no field {name!r}; the fields are {', '.join(schema)}"
                    )
                self.fields.append(name)
            case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
                self._check(left, schema)
                self._check(right, schema)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=value) as right) if value:
                self._check(left, schema)
                self._check(right, schema)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if (
                1 <= power <= _MOST_POWER
            ):
                self._check(left, schema)
            case _:
                raise UsageError(
                    f"cost={self.text!r}: {ast.unparse(node)!r} is not understood; bytes(FIELD), integers, +, *, "
                    f"// by an integer and ** up to {_MOST_POWER} are"
                )

    def _value(self, node: ast.expr, sizes: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Call(args=[ast.Name(id=name)]):
                return sizes[name]
            case ast.BinOp(left=left, op=op, right=right):
                first, second = self._value(left, sizes), self._value(right, sizes)
                value = _OPERATIONS[type(op)](first, second)
                if isinstance(value, int) and value >= 1 << 62:  # of the largest sizes: arrays would overflow
                    raise self._too_large(value)
                return value
        raise AssertionError(node)  # `_check` lets nothing else through

    def _too_large(self, value: int) -> UsageError:
        return UsageError(
            f"cost={self.text!r} may reach {value}, expected below 2**32 (2**62 on the way); divide inside it, as in "
            "(bytes(text) // 1024)**2"
        )
