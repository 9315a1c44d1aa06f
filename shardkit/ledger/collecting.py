"""A step on its way into the ledger: the cells that ranks have recorded of it so far."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.errors import FormatError
from shardkit.ledger.journal_format import Entry

__all__ = ["Conflict", "PartialStep", "WaitingRecord", "unpack_numbers"]


class Conflict(NamedTuple):
    """A cell that was recorded twice, with different digests (hex)."""

    lane: int
    before: str
    now: str


@dataclass(slots=True)
class WaitingRecord:
    """A journal entry on its way; dropped as soon as it is settled, so that memory follows what is open."""

    entry: Entry | None
    end: tuple[int, int]  # (offset, checksum) behind it
    settled: bool = False


@dataclass(slots=True)
class PartialStep:
    """The cells of a step that are known so far.

    Attributes:
        step, lanes: which step, of how many lanes.
        start: number of the start that took it.
        cells: 16 bytes per lane.
        rows: per lane; -1 where the cell is not known.
        missing: lanes that are not known.
        parts: packed lane numbers → rank.
        records: the journal entries it is made of.
        older: what an earlier start recorded of it before it was killed.
    """

    step: int
    lanes: int
    start: int
    older: PartialStep | None = None
    cells: bytearray = field(init=False)
    rows: list[int] = field(init=False)
    missing: int = field(init=False)
    parts: dict[bytes, int] = field(default_factory=dict)
    records: list[WaitingRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells, self.rows, self.missing = bytearray(16 * self.lanes), [-1] * self.lanes, self.lanes

    def put(self, entry: Entry, rank: int) -> list[Conflict]:
        """Add the cells of a journal entry.

        Raises:
            FormatError: it names a lane that the plan does not have.
        """
        packed, packed_rows, digests = entry.cells()
        lanes, rows = unpack_numbers(packed), unpack_numbers(packed_rows)
        if not lanes:
            return []
        if max(lanes) >= self.lanes:
            raise FormatError(
                f"journal: step {self.step} names lane {max(lanes)} of a plan of {self.lanes} lanes"
            )
        self.parts[packed] = rank
        first, last = lanes[0], lanes[-1] + 1
        if last - first == len(lanes) and all(count < 0 for count in self.rows[first:last]):
            self.cells[16 * first : 16 * last] = digests  # the common case: a run of lanes, seen once
            self.rows[first:last] = rows
            self.missing -= len(lanes)
            return []
        conflicts = []
        for place, lane in enumerate(lanes):
            now = digests[16 * place : 16 * place + 16]
            before = self.cell(lane)
            if before is None:
                self.missing -= 1
            elif before != now:
                conflicts.append(Conflict(lane, before.hex(), now.hex()))
            self.cells[16 * lane : 16 * lane + 16] = now
            self.rows[lane] = rows[place]
        return conflicts

    def cell(self, lane: int) -> bytes | None:
        """Digest of a cell that is known."""
        return None if self.rows[lane] < 0 else bytes(self.cells[16 * lane : 16 * lane + 16])

    def known_cells(self) -> Iterator[tuple[int, bytes]]:
        """(lane, digest) of the cells that are known."""
        for lane in range(self.lanes):
            digest = self.cell(lane)
            if digest is not None:
                yield lane, digest

    def conflicts_with_older(self) -> list[Conflict]:
        """Cells that earlier starts recorded otherwise; forgets them."""
        found: list[Conflict] = []
        older = self.older
        while older is not None:
            for lane, before in older.known_cells():
                now = self.cell(lane)
                if now is not None and now != before:
                    found.append(Conflict(lane, before.hex(), now.hex()))
            self.records += older.records
            older = older.older
        self.older = None
        return found

    def owners(self) -> list[list[int]]:
        """Runs of lanes: [rank, first lane, lanes]."""
        runs: list[list[int]] = []
        pairs = ((lane, rank) for packed, rank in self.parts.items() for lane in unpack_numbers(packed))
        for lane, rank in sorted(pairs):
            if runs and runs[-1][0] == rank and runs[-1][1] + runs[-1][2] == lane:
                runs[-1][2] += 1
            else:
                runs.append([rank, lane, 1])
        return runs


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """u32 little-endian."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)
