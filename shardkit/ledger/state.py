"""Contents of `state.json`: what a merge continues from, besides the records and events of the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import Meta, Struct, field

from shardkit.documents import seal, unseal
from shardkit.errors import FormatError, IntegrityError
from shardkit.ledger.events import Count

MAX_STATE: Final = 1 << 30
"""Maximum size of `state.json` in bytes."""

Peak: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Check: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Conflict: TypeAlias = tuple[int, bytes, bytes]
"""(lane, earlier digest, new digest) of a cell that was recorded twice with different digests."""


class JournalPlace(NamedTuple):
    """The end of the merged entries of a journal file."""

    end: Count  # offset of the first byte after them
    check: Check  # checksum of the last of them, in hex
    repeated: Count  # number of steps that the rank had repeated by then
    start: Count  # number of the start that the file belongs to


class StartState(Struct, forbid_unknown_fields=True):
    """The newest start of the run; its event follows with its first entry."""

    number: int = -1  # number of the start, counted from 0
    # plan digest, number of ranks and number of workers, common to all attempts of the start
    shape: list[str | int] = []
    members: list[list[int]] = []  # (rank, worker) of each attempt of the start
    reached: list[int] = []  # for each start, the step after the highest recorded step


class PendingStep(Struct, forbid_unknown_fields=True):
    """The cells known so far of one attempt at a step that is not in the tree."""

    plan: Count  # number of the plan
    step: Count  # number of the step
    start: Count  # number of the start that recorded the first cells
    cells: bytearray  # cell digests, 16 bytes per lane
    rows: list[int]  # number of rows per lane; -1 if the cell is unknown
    ranks: list[int]  # rank that recorded the cell, per lane; -1 if the cell is unknown
    missing: int  # number of unknown cells
    recorded_by: list[tuple[int, int, int]]  # (start time, rank, worker) of each process that recorded cells

    def __post_init__(self) -> None:
        lanes = len(self.ranks)
        if (len(self.cells), len(self.rows), self.missing) != (16 * lanes, lanes, self.rows.count(-1)):
            raise ValueError("its cells, rows and ranks are of different numbers of lanes")

    @classmethod
    def empty(cls, plan: int, step: int, start: int, lanes: int) -> PendingStep:
        return cls(plan, step, start, bytearray(16 * lanes), [-1] * lanes, [-1] * lanes, lanes, [])

    def put(
        self, by: tuple[int, int, int], lanes: Sequence[int], rows: Sequence[int], digests: bytes
    ) -> list[Conflict]:
        """Add cells of a process (`recorded_by`), digests packed, and return those whose known digest differed.

        Raises:
            FormatError: the plan has no such lane.
        """
        if not lanes:
            return []
        if max(lanes) >= len(self.rows):
            raise FormatError(
                f"journal: step {self.step} names lane {max(lanes)} of a plan of {len(self.rows)} lanes"
            )
        self.recorded_by.append(by)
        rank = by[1]
        first, last = lanes[0], lanes[-1] + 1
        if last - first == len(lanes) and self.rows[first:last] == [-1] * len(lanes):
            # the common case: consecutive lanes, first recording
            self.cells[16 * first : 16 * last] = digests
            self.rows[first:last], self.ranks[first:last] = rows, [rank] * len(lanes)
            self.missing -= len(lanes)
            return []
        conflicts = []
        for place, lane in enumerate(lanes):
            before, now = self.cell(lane), digests[16 * place : 16 * place + 16]
            if before is None:
                self.missing -= 1
            elif before != now:
                conflicts.append((lane, before, now))
            self.cells[16 * lane : 16 * lane + 16] = now
            self.rows[lane], self.ranks[lane] = rows[place], rank
        return conflicts

    def cell(self, lane: int) -> bytes | None:
        """Return the digest of a cell, or None if it is unknown."""
        return None if self.rows[lane] < 0 else bytes(self.cells[16 * lane : 16 * lane + 16])

    def known_cells(self) -> Iterator[tuple[int, bytes]]:
        for lane in range(len(self.rows)):
            digest = self.cell(lane)
            if digest is not None:
                yield lane, digest

    def conflicts_with(self, older: Iterable[PendingStep]) -> Iterator[Conflict]:
        """Yield the cells for which earlier attempts recorded another digest."""
        for one in older:
            for lane, before in one.known_cells():
                now = self.cell(lane)
                if now is not None and now != before:
                    yield lane, before, now

    def owners(self) -> list[list[int]]:
        """Return runs of consecutive lanes of one rank: [rank, first lane, number of lanes]."""
        runs, first = list[list[int]](), 0
        for rank, lanes in groupby(self.ranks):
            runs.append([rank, first, len(list(lanes))])
            first += runs[-1][2]
        return runs


class LedgerState(Struct, forbid_unknown_fields=True, tag_field="format", tag="shardkit-ledger/1"):
    """Contents of `state.json`: the committed sizes, and what a merge needs that records and events do not say."""

    records: Count = 0  # number of step records in `steps`, including abandoned branches
    # (step, record) pairs; in the current branch, the steps from `step` on are stored from `record` on
    branch: list[tuple[Count, Count]] = []
    peaks: list[Peak] = []  # peaks of the tree of steps
    events: Count = 0  # number of events
    events_bytes: Count = 0  # committed bytes of `events`
    events_peaks: list[Peak] = []  # peaks of the tree of events
    losses: Count = 0  # number of records of losses
    loss_values: Count = 0  # number of losses in them
    journals: dict[str, JournalPlace] = {}  # by name of the file
    start: StartState = field(default_factory=StartState)  # the newest start of the run
    pending: list[PendingStep] = []  # recorded steps that are not in the tree

    def __post_init__(self) -> None:
        ends = [*(step for step, _ in self.branch[1:]), self.next_step]
        for (step, record), end in zip(self.branch, ends, strict=False):
            if not 0 <= end - step <= self.records - record:
                raise ValueError("its branch is not in the records")
        sizes = (self.next_step - self.first, self.peaks), (self.events, self.events_peaks)
        if any(size.bit_count() != len(peaks) for size, peaks in sizes):
            raise ValueError("its trees are of other sizes than the records and events")

    @property
    def first(self) -> int:
        """Step of the first leaf of the tree of steps."""
        return self.branch[0][0] if self.branch else 0

    @property
    def next_step(self) -> int:
        """The step after the last leaf, to which the last record belongs."""
        return self.branch[-1][0] + self.records - self.branch[-1][1] if self.branch else 0

    def to_bytes(self) -> bytes:
        return seal(self) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerState:
        """Decode and validate the contents of `state.json`."""
        where = "ledger/state.json"
        try:
            return unseal(cls, data.removesuffix(b"\n"), where, max_bytes=MAX_STATE)
        except (FormatError, IntegrityError) as error:
            raise IntegrityError(f"{where} is damaged: {error}; restore it from a copy") from error
