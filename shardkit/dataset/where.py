"""`where="label < 5 and source in ('web', 'code')"`: a small expression language over the fields of a sample.

Parsed by Python's own parser and walked by hand: names, literals, comparisons, `in`, `and`, `or`, `not`. Nothing is
evaluated as code.
"""

from __future__ import annotations

import ast
import decimal
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.formats import Block, FixedColumn, Schema
from shardkit.formats.logical import Logical

from .field_names import parse_expression

Mask = NDArray[np.bool_]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class _Numbers(ast.NodeTransformer):
    """Literals beside a field of a `Logical` type as its numbers."""

    def __init__(self, logical: Logical | None, text: str) -> None:
        self._logical, self._text = logical, text

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:  # ast's name
        assert self._logical is not None, "only such fields have literals to read"
        value = decimal.Decimal(str(node.value)) if isinstance(node.value, float) else node.value
        try:
            return ast.Constant(self._logical.number(value))
        except ValueError as error:
            raise UsageError(f"where={self._text!r}: {node.value!r} is no {self._logical}: {error}") from None


class Where:
    """A parsed condition.

    Args:
        text: for example ``"label < 5"`` or ``"lang in ('en', 'de') and not (score < 0.5)"``.
        schema: only scalar and str fields can be compared.

    Raises:
        UsageError: not such an expression, or a field that does not exist or cannot be compared.
    """

    def __init__(self, text: str, schema: Schema) -> None:
        self.text, self._schema = text, schema
        try:
            self._tree = parse_expression(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(
                f'where={text!r} cannot be read: {error}; write for example "label < 5", and a name that is no word '
                "in backticks: \"`First Name` == 'Ada'\""
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

    def of_block(self, block: Block) -> Mask:
        """(rows,) which rows of a block fulfil the condition; one that lacks a value of a field in it does not."""
        columns: dict[str, NDArray[Any]] = {}
        present = np.ones(block.rows, np.bool_)
        for name in self.fields:
            present &= block.present(name)
            column = block.column(name)
            if isinstance(column, FixedColumn):
                columns[name] = column.values
            else:
                data = column.data.tobytes()
                borders = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
                columns[name] = np.array([str(data[a:b], "utf-8") for a, b in borders], dtype=np.str_)
        return present & self(columns)

    def __call__(self, columns: Mapping[str, NDArray[Any]]) -> Mask:
        """(n,) bool: which rows fulfil the condition. `columns` holds (n,) arrays of `fields`."""
        rows = len(next(iter(columns.values())))
        return np.broadcast_to(np.asarray(self._truth(self._tree, columns), dtype=bool), (rows,))

    def _truth(self, node: ast.expr, columns: Mapping[str, NDArray[Any]]) -> Any:
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(value, columns) for value in node.values]
            reduce = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            result = parts[0]
            for part in parts[1:]:
                result = reduce(result, part)
            return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return np.logical_not(self._truth(node.operand, columns))
        if isinstance(node, ast.Compare):
            return self._compare(node, columns)
        if isinstance(node, ast.Name):
            return columns[node.id].astype(bool)
        raise self._unreadable(node)

    def _store_literals(self, node: ast.Compare) -> None:
        """Make what is compared with a date, time or decimal the number that is stored, once for all blocks."""
        parts = [node.left, *node.comparators]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        kinds = {self._schema[name].logical for name in names} - {None}
        if len(kinds) > 1:
            raise UsageError(f"where={self.text!r}: {' and '.join(names)} are of different types")
        if kinds:
            _Numbers(kinds.pop(), self.text).visit(node)

    def _compare(self, node: ast.Compare, columns: Mapping[str, NDArray[Any]]) -> Any:
        left: Any = self._value(node.left, columns)
        result: Any = True
        for op, operand in zip(node.ops, node.comparators, strict=True):
            right = self._value(operand, columns)
            if isinstance(op, (ast.In, ast.NotIn)):
                if not isinstance(right, tuple):
                    raise self._unreadable(operand)
                found = np.isin(left, np.array(right, dtype=getattr(left, "dtype", None)))
                part = found if isinstance(op, ast.In) else ~found
            elif type(op) in _COMPARISONS:
                part = _COMPARISONS[type(op)](left, right)
            else:
                raise self._unreadable(node)
            result = np.logical_and(result, part)
            left = right
        return result

    def _value(self, node: ast.expr, columns: Mapping[str, NDArray[Any]]) -> Any:
        if isinstance(node, ast.Name):
            return columns[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand, columns)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return tuple(self._value(element, columns) for element in node.elts)
        raise self._unreadable(node)

    def _unreadable(self, node: ast.expr) -> UsageError:
        return UsageError(
            f"where={self.text!r}: {ast.unparse(node)!r} is not understood; names, literals, comparisons, in, and, "
            "or, not are"
        )
