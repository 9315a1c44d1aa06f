"""Where a version's costs of rows lie: pieces of codes over runs of shards, by expression (SPEC.md §1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardkit.errors import FormatError

__all__ = ["COSTS", "CostPiece", "RowCosts", "costs_from_json", "costs_to_json"]

COSTS: Final = "costs"
"""Key among the build settings: what reads a manifest without knowing it has all that it needs."""

_HEX: Final = re.compile(r"[0-9a-f]{64}")
_MAX_COSTS: Final = 100
_MAX_PIECES: Final = 2**17


@dataclass(frozen=True, slots=True)
class CostPiece:
    """The codes of all rows of a run of shards: one object."""

    digest: str
    size: int
    """Bytes of the object."""
    shards: int
    """How many shards it covers: those after the shards of the pieces before it."""
    rows: int
    """Of those shards, selected or not: one byte each."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What each row of a version costs."""

    expression: str
    """Such as ``bytes(text)**2``, without spaces."""
    pieces: tuple[CostPiece, ...]
    """In shard order."""


def costs_to_json(costs: Sequence[RowCosts]) -> dict[str, list[list[object]]]:
    """What stands among the build settings."""
    return {
        one.expression: [
            [piece.digest.removeprefix("sha256:"), piece.size, piece.shards, piece.rows]
            for piece in one.pieces
        ]
        for one in costs
    }


def costs_from_json(value: object) -> tuple[RowCosts, ...]:
    """Read it again; sorted by expression.

    Raises:
        FormatError: it is not of that form.
    """
    if not isinstance(value, Mapping) or not 0 < len(value) <= _MAX_COSTS:
        raise FormatError(f"build setting {COSTS!r}: expected an object of 1 to {_MAX_COSTS} expressions")
    return tuple(RowCosts(name, _pieces(name, value[name])) for name in sorted(value))


def _pieces(expression: str, value: Any) -> tuple[CostPiece, ...]:
    if not isinstance(value, list) or len(value) > _MAX_PIECES or len(expression) > 1_000:
        raise FormatError(f"costs of {expression[:100]!r}: expected a list of at most {_MAX_PIECES} pieces")
    pieces = []
    for piece in value:
        match piece:
            case [str(digest), int(size), int(shards), int(rows)] if (
                _HEX.fullmatch(digest)
                and 0 < size < 2**32
                and 0 < shards < 2**32
                and 0 < rows < 2**42
                and not any(isinstance(number, bool) for number in piece)
            ):
                pieces.append(CostPiece(f"sha256:{digest}", size, shards, rows))
            case _:
                raise FormatError(
                    f"costs of {expression[:100]!r}: piece {str(piece)[:120]}, expected [hex, size, shards, rows]"
                )
    return tuple(pieces)
