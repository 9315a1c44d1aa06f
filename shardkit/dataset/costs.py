"""Costs of rows: one byte per row, in pieces next to the shards, for the windows of a plan (SPEC.md §15)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.expressions import CostFormula, Term
from shardkit.dataset.samples import Samples
from shardkit.errors import FormatError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import Schema
from shardkit.formats.columns import pack_columns, unpack_columns
from shardkit.manifest import CostPiece, RowCosts, ShardTable
from shardkit.plan import Costs, encode_costs
from shardkit.ranges import names_of
from shardkit.reading.blocks import BlockReader, RowMap
from shardkit.repository.repository import Repository

PIECE_ROWS: Final = 2**17
"""Most rows of a piece: a seek reads and verifies whole pieces."""

KEPT_BYTES: Final = 16 << 20
"""Most bytes of codes that a plan keeps in memory."""

_KIND: Final = "cost"
_READERS: Final = 8


def parse_costs(text: str | Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return expressions in canonical form, sorted and without duplicates."""
    texts = [text] if isinstance(text, str) and text else names_of(text, "cost")
    return tuple(sorted({CostFormula(one, schema).canonical for one in texts}))


def put_costs(
    repository: Repository,
    reader: BlockReader,
    table: ShardTable,
    schema: Schema,
    expressions: Sequence[str],
    before: Sequence[RowCosts] = (),
) -> tuple[RowCosts, ...]:
    """Write the costs of a table's rows as durable pieces, after the pieces of `before`, for a manifest to name.

    Sizes and lengths of tar shards come from their indexes; for other terms blocks are read and verified.
    """
    made, held = [], {costs.expression: costs.pieces for costs in before}
    for text in expressions:
        formula = CostFormula(text, schema)
        pieces = [*held.get(text, ())]
        for first, last in cut_pieces(table.rows, PIECE_ROWS):
            codes = _codes(reader, formula, range(first, last))
            placed = repository.put_object(write_piece(text, last - first, codes), _KIND)
            pieces.append(CostPiece(placed.digest, placed.size, last - first, len(codes)))
        made.append(RowCosts(formula.canonical, tuple(pieces)))
    return tuple(made)


def write_piece(expression: str, shards: int, codes: NDArray[np.uint8]) -> bytes:
    """Return the bytes of a piece: the same for the same codes."""
    return pack_columns(_KIND, {"expression": expression, "shards": shards}, {"code": codes})


def read_piece(repository: Repository, expression: str, piece: CostPiece) -> NDArray[np.uint8]:
    """Return the codes of a piece, (rows,) uint8, verified."""
    data = repository.get_object(piece.digest, _KIND, piece.size)
    columns = unpack_columns(data, _KIND, max_raw_bytes=piece.rows)
    codes = columns.arrays.get("code")
    if (
        columns.meta != {"expression": expression, "shards": piece.shards}
        or list(columns.arrays) != ["code"]
        or codes is None
        or codes.dtype != np.uint8
        or codes.shape != (piece.rows,)
    ):
        raise FormatError(
            f"cost {piece.digest}: its header says {str(columns.meta)[:100]}, expected {expression!r} of "
            f"{piece.rows} rows; do not trust it"
        )
    return codes


def costs_of(dataset: Samples, text: str) -> Costs:
    """Return the cost of each sample of a dataset, at least 1.

    Codes are loaded on demand: from the version's pieces if it has them, otherwise from the indexes of the
    shards if these have all terms of the expression.

    Raises:
        UsageError: The version has no pieces of the expression, and the indexes lack a term.
    """
    formula = CostFormula(text, dataset.schema)
    starts = np.concatenate(([0], np.cumsum(dataset.table.rows)))
    pieces = _pieces(dataset, formula.canonical)
    if pieces:
        first = np.cumsum([0, *(piece.rows for _, piece in pieces)])
        codes = CostCodes(dataset.rows, starts, first, partial(_read_pieces, formula.canonical, pieces))
    else:
        codes = CostCodes(dataset.rows, starts, starts, partial(_of_indexes, dataset.reader, formula))
    # load one unit, so that unreadable costs are an error now
    codes[np.zeros(min(1, len(codes)), dtype=np.int64)]
    return Costs(formula.canonical, codes)


@dataclass(eq=False)
class CostCodes:
    """Codes by sample number, loaded on demand and cached up to `KEPT_BYTES`. Thread-safe."""

    rows: RowMap  # shard and row of each sample
    starts: NDArray[np.int64]  # (shards + 1,), rows before each shard, selected or not
    first: NDArray[np.int64]  # (units + 1,), rows before each unit; a unit is loaded as a whole
    load: Callable[[int], NDArray[np.uint8]]  # (rows,) codes of a unit

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return CostCodes, (self.rows, self.starts, self.first, self.load)  # each process loads its own codes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, samples: NDArray[np.int64], /) -> NDArray[np.uint8]:
        places = self.rows.locate(samples)
        at = self.starts[places.shard] + places.row
        unit = np.searchsorted(self.first, at, side="right") - 1
        out, order = np.empty(len(at), dtype=np.uint8), np.argsort(unit, kind="stable")
        wanted, begin = np.unique(unit[order], return_index=True)
        groups = np.split(order, begin[1:])
        # bounds the memory for units that are not cached
        for some in range(0, len(groups), _READERS):
            chosen = wanted[some : some + _READERS].tolist()
            for number, codes, mine in zip(chosen, self._units(chosen), groups[some:], strict=False):
                out[mine] = codes[at[mine] - self.first[number]]
        return out

    def _units(self, numbers: list[int]) -> list[NDArray[np.uint8]]:
        with self._lock:
            found = {number: self._kept[number] for number in numbers if number in self._kept}
            for number in found:
                self._kept.move_to_end(number)
        missing = [number for number in numbers if number not in found]
        if len(missing) > 1:
            with ThreadPoolExecutor(len(missing), thread_name_prefix="shardkit-costs") as pool:
                found |= zip(missing, pool.map(self.load, missing), strict=True)
        else:
            found |= {number: self.load(number) for number in missing}
        with self._lock:
            for number in missing:
                if number not in self._kept:
                    self._bytes += len(found[number])
                    self._kept[number] = found[number]
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return [found[number] for number in numbers]


def _read_pieces(
    expression: str, pieces: Sequence[tuple[Repository, CostPiece]], number: int
) -> NDArray[np.uint8]:
    repository, piece = pieces[number]
    return read_piece(repository, expression, piece)


def _of_indexes(reader: BlockReader, formula: CostFormula, shard: int) -> NDArray[np.uint8]:
    return _codes(reader, formula, [shard], blocks=False)


def _pieces(dataset: Samples, expression: str) -> list[tuple[Repository, CostPiece]]:
    """Return the pieces of all parts, each with its repository; none if any part lacks them."""
    found: list[tuple[Repository, CostPiece]] = []
    for part in dataset.version.parts:
        costs = next((one for one in part.manifest.costs if one.expression == expression), None)
        if costs is None:
            return []
        found += [(part.repository, piece) for piece in costs.pieces]
    return found


def _codes(
    reader: BlockReader, formula: CostFormula, shards: Sequence[int], *, blocks: bool = True
) -> NDArray[np.uint8]:
    """Return the codes of some shards, concatenated: (rows,) uint8."""

    def one(shard: int) -> NDArray[np.uint8]:
        return encode_costs(formula(_terms(reader, formula, shard, blocks=blocks)))

    if len(shards) == 1:
        return one(shards[0])
    with ThreadPoolExecutor(_READERS, thread_name_prefix="shardkit-costs") as pool:
        return np.concatenate(list(pool.map(one, shards)))


def _terms(
    reader: BlockReader, formula: CostFormula, shard: int, *, blocks: bool
) -> dict[Term, NDArray[np.int64]]:
    index, schema = reader.index(shard), formula.schema
    found = {term: term.of_index(schema[term.field], index) for term in formula.terms}
    known = {term: column for term, column in found.items() if column is not None}
    rest = [term for term in formula.terms if term not in known]
    if not rest:
        return known
    if not blocks:
        url = reader.store_of(shard).url
        raise UsageError(
            f"cost={formula.text!r} is not in the indexes of these {index.format} shards, and nobody has written it "
            f"beside them; run: shardkit rebuild {shell_word(url)} --cost {shell_word(formula.canonical)} (it writes "
            "no shard)"
        )
    fields = sorted({term.field for term in rest})
    parts: dict[Term, list[NDArray[np.int64]]] = {term: [] for term in rest}
    for number in range(index.blocks):
        block = reader.read(shard, number, keys=False, fields=fields)
        for term in rest:
            parts[term].append(term.of_block(schema[term.field], block))
    return known | {term: np.concatenate(columns) for term, columns in parts.items()}


def cut_pieces(rows: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) shards of pieces of at most `most` rows, if no single shard has more."""
    first = held = 0
    for shard, count in enumerate(rows.tolist()):
        if held and held + count > most:
            yield first, shard
            first, held = shard, 0
        held += count
    if first < len(rows):
        yield first, len(rows)
