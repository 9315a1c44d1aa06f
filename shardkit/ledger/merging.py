"""Merge the journals of all ranks into one leaf per step, the same on any topology (SPEC.md, "Merging").

A *start* is one launch of the run: the ranks and workers that began together. Within a start, steps are merged in
order; if ranks have gone back, the repeated steps follow, in order as well. A step is complete when all lanes of the
plan are recorded, by any ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.documents import convert
from shardkit.errors import FormatError
from shardkit.ledger.events import PlanFacts, journaled_event
from shardkit.ledger.journal import (
    EVENT,
    LOSSES,
    META,
    Entry,
    Header,
    JournalFile,
    journal_paths,
    unpack_numbers,
)  # fmt: skip
from shardkit.ledger.ledger import Ledger, StartState, step_digest

Conflict: TypeAlias = tuple[int, bytes, bytes]
"""(lane, earlier digest, new digest) of a cell that was recorded twice with different digests."""


Place: TypeAlias = tuple[int, int, int]
"""(offset, checksum, steps that the rank had repeated) between two entries of a journal file."""


@dataclass(slots=True)
class Source:
    """A journal file in this merge."""

    file: JournalFile  # the opened file
    header: Header  # header of the file
    start: int  # number of the start that the file belongs to
    reached: Place  # end of the last entry read
    told: int = 0  # end offset of the last event or entry of losses in the ledger
    held: Place | None = None  # beginning of the first entry left for a later merge

    @property
    def name(self) -> str:
        return self.file.path.name

    @property
    def attempt(self) -> tuple[int, int, int]:
        """(start time, rank, worker), which identifies one sequence of files."""
        return self.header.started, self.header.rank, self.header.worker

    @property
    def settled(self) -> Place:
        return self.reached if self.held is None else self.held

    def hold(self, place: Place) -> None:
        """Leave the entry at `place` and all entries after it for a later merge."""
        self.held = place if self.held is None else min(self.held, place)


@dataclass(slots=True)
class PartialStep:
    """The cells known so far of one step."""

    step: int  # number of the step
    lanes: int  # number of lanes of its plan
    start: int  # number of the start that recorded the cells
    cells: bytearray = field(init=False)  # cell digests, 16 bytes per lane
    rows: list[int] = field(init=False)  # number of rows per lane; -1 if the cell is unknown
    missing: int = field(init=False)  # number of lanes whose cell is unknown
    # the attempts of ranks that recorded the cells
    recorded_by: set[tuple[int, int, int]] = field(default_factory=set)
    parts: dict[bytes, int] = field(default_factory=dict)  # packed lane numbers → rank
    places: list[tuple[Source, Place]] = field(default_factory=list)  # the journal entries of the cells

    def __post_init__(self) -> None:
        self.cells, self.rows, self.missing = bytearray(16 * self.lanes), [-1] * self.lanes, self.lanes

    def put(self, entry: Entry, rank: int) -> list[Conflict]:
        """Add the cells of a journal entry and return the cells whose known digest differed."""
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
            # the common case: consecutive lanes, first recording
            self.cells[16 * first : 16 * last] = digests
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
                conflicts.append((lane, before, now))
            self.cells[16 * lane : 16 * lane + 16] = now
            self.rows[lane] = rows[place]
        return conflicts

    def hold(self) -> None:
        """Leave the journal entries of the step for a later merge."""
        for source, place in self.places:
            source.hold(place)

    def cell(self, lane: int) -> bytes | None:
        """Return the digest of a cell, or None if it is unknown."""
        return None if self.rows[lane] < 0 else bytes(self.cells[16 * lane : 16 * lane + 16])

    def known_cells(self) -> Iterator[tuple[int, bytes]]:
        for lane in range(self.lanes):
            digest = self.cell(lane)
            if digest is not None:
                yield lane, digest

    def conflicts_with(self, older: Sequence[PartialStep]) -> Iterator[Conflict]:
        """Yield the cells for which earlier attempts at the step recorded another digest."""
        for one in older:
            for lane, before in one.known_cells():
                now = self.cell(lane)
                if now is not None and now != before:
                    yield lane, before, now

    def owners(self) -> list[list[int]]:
        """Return runs of consecutive lanes of one rank: [rank, first lane, number of lanes]."""
        runs: list[list[int]] = []
        pairs = ((lane, rank) for packed, rank in self.parts.items() for lane in unpack_numbers(packed))
        for lane, rank in sorted(pairs):
            if runs and runs[-1][0] == rank and runs[-1][1] + runs[-1][2] == lane:
                runs[-1][2] += 1
            else:
                runs.append([rank, lane, 1])
        return runs


Key = tuple[str, str, int]  # manifest, plan, step


class Merge:
    """One pass over the journal entries that are not yet in the ledger.

    Args:
        ledger: ledger to extend in memory; the caller commits it.

    Attributes:
        repeated: number of complete steps that were consumed again with equal digests.
        sources: the journal files.
        torn: (file name, bytes) of each torn tail.
        pending: recorded steps that are not in the tree, because they are incomplete or follow a gap.

    Raises:
        FormatError: a journal is damaged, or holds an entry that no rank writes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.repeated = 0
        # attempts at each incomplete step, the newest last: a start that was killed, or a rank before it went back,
        # may have recorded other cells of the step
        self._steps: dict[Key, list[PartialStep]] = {}
        self._ready: dict[int, tuple[Key, PartialStep]] = {}
        events = ledger.event_documents()
        self._plans = [(one["manifest"], one["plan"]) for one in events if one["kind"] == "plan"]
        self._started = max((one["start"] for one in events if one["kind"] == "start"), default=-1)
        assigned = next((one for one in reversed(events) if one["kind"] == "assignment"), None)
        # start and runs of lanes of the newest assignment; start and packed lanes of the step before
        self._assigned = None if assigned is None else (assigned["start"], assigned["lanes"])
        self._parts: tuple[int, list[tuple[bytes, int]]] | None = None
        self.sources = self._open_sources()
        self._whole = self._whole_starts()
        for number in sorted({source.start for source in self.sources}):
            self._merge_start(number, [one for one in self.sources if one.start == number])
        self.torn = [(one.name, one.file.torn_bytes) for one in self.sources if one.file.torn_bytes]
        ready = {key: [step] for key, step in self._ready.values()}
        self.pending: dict[Key, list[PartialStep]] = {**self._steps, **ready}
        for attempts in self.pending.values():
            for step in attempts:
                step.hold()
        for source in self.sources:
            ledger.state.journals[source.name] = (*source.settled, source.start, source.told)

    def pending_steps(self) -> list[int]:
        """Return the numbers of the recorded steps that are not in the tree, ascending."""
        return sorted({step for _, _, step in self.pending})

    def complete_behind_gap(self) -> list[int]:
        """Return the complete steps that cannot be appended because an earlier step is missing."""
        return sorted(self._ready)

    def pending_cells(self) -> Iterator[tuple[str, int, int, str]]:
        """Yield (plan, step, lane, digest in hex) of the recorded cells that no ledger record covers."""
        for (_, plan, number), attempts in sorted(self.pending.items(), key=lambda item: item[0]):
            for one in reversed(attempts):
                yield from ((plan, number, lane, digest.hex()) for lane, digest in one.known_cells())

    # ---- files and starts

    def _open_sources(self) -> list[Source]:
        known = self.ledger.state.journals
        sources, fresh = [], []
        paths = journal_paths(self.ledger.run / "journal")
        for name in set(known) - {path.name for path in paths}:
            del known[name]  # pruned after its last entry was merged
        for path in paths:
            place = known.get(path.name)
            file = JournalFile(path, None if place is None else (place[0], place[1]))
            if file.header is None or (place is None and file.is_empty):
                continue  # a start without an entry has no number: no event would introduce it
            if place is not None:
                sources.append(Source(file, file.header, place[3], place[:3], place[4]))
            else:
                fresh.append(Source(file, file.header, -1, (*file.start, 0)))
        starts = {source.attempt: source.start for source in sources}
        for source in sorted(fresh, key=lambda one: (one.attempt, one.header.part)):
            if source.attempt not in starts:
                starts[source.attempt] = self._start_of(source.header)
            source.start = starts[source.attempt]
            sources.append(source)
        return sorted(sources, key=lambda one: (one.start, one.attempt, one.header.part))

    def _whole_starts(self) -> set[int]:
        """Return the starts for which every rank and worker has a journal."""
        places: dict[int, set[tuple[int, int]]] = {}
        for source in self.sources:
            places.setdefault(source.start, set()).add((source.header.rank, source.header.worker))
        newest = self.ledger.state.start
        if newest.number >= 0:
            places[newest.number] = {(rank, worker) for rank, worker in newest.members}
        sizes = {one.start: one.header.world * one.header.workers for one in self.sources}
        return {start for start, found in places.items() if len(found) == sizes.get(start)}

    def _start_of(self, header: Header) -> int:
        """Return the start of a new attempt: the newest start, or a new one if plan, world or members do not fit."""
        newest = self.ledger.state.start
        shape: list[str | int] = [header.plan, header.world, header.workers]
        place = [header.rank, header.worker]
        if newest.shape != shape or newest.lanes != header.lanes or place in newest.members:
            newest = self.ledger.state.start = StartState(
                newest.number + 1, shape, header.lanes, [], [*newest.reached, 0]
            )
        newest.members.append(place)
        return newest.number

    # ---- one start

    def _merge_start(self, number: int, sources: list[Source]) -> None:
        by_attempt: dict[tuple[int, int, int], list[Source]] = {}
        for source in sources:
            by_attempt.setdefault(source.attempt, []).append(source)
        merged = heapq.merge(
            *map(self._entries, by_attempt.values()), key=lambda item: (item[0], item[1].header.rank)
        )
        for _, source, place, entry in merged:
            header = source.header
            if entry.kind == META:
                facts = entry.document()
                convert(PlanFacts, facts, f"journal/{source.name}")
                self._know_plan(header.manifest, header.plan, header.lanes, entry.step, facts)
                continue
            if entry.kind == LOSSES:
                if entry.end > source.told:
                    plan = self._know_plan(header.manifest, header.plan, header.lanes, entry.step, {})
                    self.ledger.add_losses(entry.step, plan, *entry.losses())
                    source.told = entry.end
                continue
            self._tell_start(number, entry.step, header)
            if entry.kind == EVENT:
                if entry.end > source.told:
                    self.ledger.add_event(
                        journaled_event(
                            entry.step, header.rank, number, entry.document(), f"journal/{source.name}"
                        )
                    )
                    source.told = entry.end
            else:
                reached = self.ledger.state.start.reached
                reached[number] = max(reached[number], entry.step + 1)
                self._add(source, place, entry, number)

    def _entries(self, parts: Sequence[Source]) -> Iterator[tuple[int, Source, Place, Entry]]:
        """Yield (number of steps taken before, file, beginning of the entry, entry) of an attempt.

        The number rises where a rank goes back: what ranks recorded before comes first.
        """
        repeated = 0
        for source in parts:
            at, check, known = source.reached
            repeated = max(repeated, known)  # a new file continues the number of the file before it
            source.reached = at, check, repeated
            for entry in source.file.entries():
                place, repeated = source.reached, repeated + entry.repeats
                source.reached = entry.end, entry.check, repeated
                yield entry.step + repeated, source, place, entry

    def _tell_start(self, number: int, step: int, header: Header) -> None:
        """Add the event of a start once, with the number of steps that earlier starts reached."""
        if number <= self._started:
            return
        self._started = number
        before = max(self.ledger.state.start.reached[:number], default=0)
        self.ledger.add_event(
            {"kind": "start", "start": number, "step": step, "ranks": header.world, "workers": header.workers,
             "reached": before, "repeats": max(0, before - step), "time": header.started}
        )  # fmt: skip

    def _know_plan(self, manifest: str, plan: str, lanes: int, step: int, facts: dict[str, Any]) -> int:
        """Return the number of a plan. Add its event the first time."""
        if (manifest, plan) not in self._plans:
            self._plans.append((manifest, plan))
            self.ledger.add_event(
                {"kind": "plan", "step": step, "number": len(self._plans) - 1, "manifest": manifest, "plan": plan,
                 "lanes": lanes, **facts}
            )  # fmt: skip
        return self._plans.index((manifest, plan))

    # ---- one step

    def _add(self, source: Source, place: Place, entry: Entry, number: int) -> None:
        header = source.header
        key = (header.manifest, header.plan, entry.step)
        attempts = self._steps.setdefault(key, [])
        newest = attempts[-1] if attempts else None
        if (
            newest is None
            or source.attempt in newest.recorded_by
            or (newest.start < number and number in self._whole)
        ):
            # A start of all ranks begins the step again, and so does a rank that went back. A start of single replaced
            # ranks adds to the known cells.
            attempts.append(PartialStep(entry.step, header.lanes, number))
        *older, step = attempts
        self._tell_conflicts(step.put(entry, header.rank), entry.step, number)
        step.places.append((source, place))
        step.recorded_by.add(source.attempt)
        if not step.missing:
            del self._steps[key]
            self._tell_conflicts(step.conflicts_with(older), entry.step, number)
            self._take(key, step)
            while (following := self._ready.pop(self.ledger.next_step, None)) is not None:
                self._take(*following)

    def _tell_conflicts(self, conflicts: Iterable[Conflict], step: int, start: int) -> None:
        for lane, before, now in conflicts:
            self.ledger.add_event(
                {"kind": "conflict", "step": step, "start": start, "lane": lane, "before": before.hex(),
                 "now": now.hex()}
            )  # fmt: skip

    def _take(self, key: Key, step: PartialStep) -> None:
        """Append a complete step to the tree, or compare it with the recorded step."""
        ledger, number = self.ledger, step.step
        if ledger.steps.size and number > ledger.next_step:
            if number in self._ready:  # under another plan
                self._ready[number][1].hold()
            self._ready[number] = (key, step)
            return
        plan = self._know_plan(key[0], key[1], step.lanes, number, {})
        digest = step_digest(key[0], key[1], number, step.cells)
        if ledger.steps.size and number < ledger.next_step:
            if number >= ledger.state.first and ledger.digest_of(number) == digest:
                self.repeated += 1
                self._note_owners(step)
                return
            # The run abandoned the steps recorded from here on. The event keeps their head.
            ledger.add_event(
                {"kind": "fork", "step": number, "record": ledger.state.records, "start": step.start, "plan": plan,
                 "abandoned": ledger.head()["steps"]}
            )  # fmt: skip
            ledger.fork(number)
        self._note_owners(step)
        ledger.append(number, sum(step.rows), plan, digest)

    def _note_owners(self, step: PartialStep) -> None:
        """Add an assignment event if the owners of lanes differ from the previous step's."""
        parts = step.start, sorted(step.parts.items())
        if parts == self._parts:  # the usual case
            return
        self._parts, owners = parts, step.owners()
        if (step.start, owners) != self._assigned:
            self._assigned = step.start, owners
            self.ledger.add_event(
                {"kind": "assignment", "step": step.step, "start": step.start, "lanes": owners}
            )


def merge_journals(run: Path) -> tuple[Ledger, Merge]:
    """Return the ledger of a run directory with the journals merged into it in memory, and the merge.

    Nothing is written.
    """
    ledger = Ledger(run)
    return ledger, Merge(ledger)
