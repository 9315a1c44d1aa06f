"""Merge the journals of all ranks into one leaf per step, the same on any topology (SPEC.md, "Merging").

A *start* is one launch of the run: the ranks and workers that began together. Within a start, steps are merged in
order; if ranks have gone back, the repeated steps follow, in order as well. A step is complete when all lanes of the
plan are recorded, by any ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.documents import convert
from shardkit.errors import FormatError
from shardkit.ledger.events import PlanFacts, journaled_event
from shardkit.ledger.journal import (
    CELLS,
    EVENT,
    LOSSES,
    META,
    Entry,
    Header,
    JournalFile,
    journal_paths,
)  # fmt: skip
from shardkit.ledger.ledger import Ledger, step_digest
from shardkit.ledger.state import Conflict, JournalPlace, PendingStep, StartState


@dataclass(slots=True)
class Source:
    """A journal file in this merge."""

    file: JournalFile  # the opened file
    header: Header  # header of the file
    start: int  # number of the start that the file belongs to
    end: int  # offset of the first byte after the last entry read
    check: int  # checksum of that entry
    repeated: int = 0  # number of steps that the rank had repeated by then

    @property
    def name(self) -> str:
        return self.file.path.name

    @property
    def attempt(self) -> tuple[int, int, int]:
        """(start time, rank, worker), which identifies one sequence of files."""
        return self.header.started, self.header.rank, self.header.worker


class Merge:
    """One pass over the journal entries that are not yet in the ledger.

    Args:
        ledger: ledger to extend in memory; the caller commits it.

    Attributes:
        repeated: number of complete steps that were consumed again with equal digests.
        sources: the journal files.
        torn: (file name, bytes) of each torn tail.
        pending: recorded steps that are not in the tree, because they are incomplete or follow a gap, by (number of the
            plan, step). A start that was killed, or a rank before it went back, may have recorded other cells of a
            step: it has several attempts, the newest last.

    Raises:
        FormatError: a journal is damaged, or holds an entry that no rank writes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.repeated = 0
        self.pending: dict[tuple[int, int], list[PendingStep]] = {}
        self._ready: dict[int, int] = {}  # complete step after a gap → plan, the newest that recorded it
        events = ledger.event_documents()
        plans = [one for one in events if one["kind"] == "plan"]
        self._plans = [(one["manifest"], one["plan"]) for one in plans]
        self._lanes = [one["lanes"] for one in plans]
        self._started = max((one["start"] for one in events if one["kind"] == "start"), default=-1)
        for step in ledger.state.pending:
            if step.plan >= len(plans) or len(step.rows) != self._lanes[step.plan]:
                raise FormatError(
                    f"ledger/state.json: step {step.step} does not have the lanes of a known plan"
                )
            self.pending.setdefault((step.plan, step.step), []).append(step)
            if not step.missing and step.step > ledger.next_step:
                self._ready[step.step] = step.plan
        # start, and rank of each lane, of the newest assignment
        self._assigned = next(
            ((one["start"], [rank for rank, _, count in one["lanes"] for _ in range(count)])
             for one in reversed(events) if one["kind"] == "assignment"), None,
        )  # fmt: skip
        self.sources = self._open_sources()
        self._whole = self._whole_starts()
        for number in sorted({source.start for source in self.sources}):
            self._merge_start(number, [one for one in self.sources if one.start == number])
        self.torn = [(one.name, one.file.torn_bytes) for one in self.sources if one.file.torn_bytes]
        ledger.state.pending = [step for attempts in self.pending.values() for step in attempts]
        ledger.state.journals = {
            one.name: JournalPlace(one.end, f"{one.check:016x}", one.repeated, one.start)
            for one in self.sources
        }

    def pending_steps(self) -> list[int]:
        """Return the numbers of the recorded steps that are not in the tree, ascending."""
        return sorted({step for _, step in self.pending})

    def complete_behind_gap(self) -> list[int]:
        """Return the complete steps that cannot be appended because an earlier step is missing."""
        return sorted(self._ready)

    def pending_cells(self) -> Iterator[tuple[str, int, int, str]]:
        """Yield (plan, step, lane, digest in hex) of the recorded cells that no ledger record covers."""
        for (number, step), attempts in sorted(self.pending.items(), key=lambda item: item[0]):
            plan = self._plans[number][1]
            for one in reversed(attempts):
                yield from ((plan, step, lane, digest.hex()) for lane, digest in one.known_cells())

    # ---- files and starts

    def _open_sources(self) -> list[Source]:
        """Open the journals of the run directory. A file that was removed had been merged to its end."""
        sources, fresh = [], []
        for path in journal_paths(self.ledger.run / "journal"):
            place = self.ledger.state.journals.get(path.name)
            file = JournalFile(path, None if place is None else (place.end, int(place.check, 16)))
            if file.header is None or (place is None and file.is_empty):
                continue  # a start without an entry has no number: no event would introduce it
            if place is not None:
                sources.append(Source(file, file.header, place.start, *file.start, place.repeated))
            else:
                fresh.append(Source(file, file.header, -1, *file.start))
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
        if newest.shape != shape or place in newest.members:
            newest = StartState(newest.number + 1, shape, [], [*newest.reached, 0])
            self.ledger.state.start = newest
        newest.members.append(place)
        return newest.number

    # ---- one start

    def _merge_start(self, number: int, sources: list[Source]) -> None:
        by_attempt: dict[tuple[int, int, int], list[Source]] = {}
        for source in sources:
            by_attempt.setdefault(source.attempt, []).append(source)
        merged = heapq.merge(
            *map(_entries, by_attempt.values()), key=lambda item: (item[0], item[1].header.rank)
        )
        for _, source, entry in merged:
            header, where = source.header, f"journal/{source.name}"
            facts = {}
            if entry.kind == META:
                facts = entry.document()
                convert(PlanFacts, facts, where)
            plan = self._know_plan(header, entry.step, facts)
            if entry.kind == LOSSES:
                self.ledger.add_losses(entry.step, plan, *entry.losses())
            elif entry.kind != META:
                self._tell_start(number, entry.step, header)
            if entry.kind == EVENT:
                event = journaled_event(entry.step, header.rank, number, entry.document(), where)
                self.ledger.add_event(event)
            elif entry.kind == CELLS:
                reached = self.ledger.state.start.reached
                reached[number] = max(reached[number], entry.step + 1)
                self._add(source, entry, plan)

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

    def _know_plan(self, header: Header, step: int, facts: dict[str, Any]) -> int:
        """Return the number of the plan of a journal. Add its event the first time."""
        pair = (header.manifest, header.plan)
        if pair not in self._plans:
            self._plans.append(pair)
            self._lanes.append(header.lanes)
            self.ledger.add_event(
                {"kind": "plan", "step": step, "number": len(self._plans) - 1, "manifest": header.manifest,
                 "plan": header.plan, "lanes": header.lanes, **facts}
            )  # fmt: skip
        return self._plans.index(pair)

    # ---- one step

    def _add(self, source: Source, entry: Entry, plan: int) -> None:
        step = self._attempt(source, entry.step, plan)
        self._tell_conflicts(step.put(source.attempt, *entry.cells()), entry.step, source.start)
        if not step.missing:
            self._take(plan, entry.step)
            while (following := self._ready.pop(self.ledger.next_step, None)) is not None:
                self._take(following, self.ledger.next_step)

    def _attempt(self, source: Source, step: int, plan: int) -> PendingStep:
        """Return the oldest attempt at a step, of this start or the newest, that lacks cells of the process.

        A start of all ranks begins the step again. A start of single replaced ranks adds to the known cells.
        """
        attempts, start = self.pending.setdefault((plan, step), []), source.start
        newest = attempts[-1].start if attempts else start
        if newest >= start or start not in self._whole:
            for one in attempts:
                if one.start in (newest, start) and source.attempt not in one.recorded_by:
                    return one
        attempts.append(PendingStep.empty(plan, step, start, self._lanes[plan]))
        return attempts[-1]

    def _tell_conflicts(self, conflicts: Iterable[Conflict], step: int, start: int) -> None:
        for lane, before, now in conflicts:
            self.ledger.add_event(
                {"kind": "conflict", "step": step, "start": start, "lane": lane, "before": before.hex(),
                 "now": now.hex()}
            )  # fmt: skip

    def _take(self, plan: int, number: int) -> None:
        """Append a complete step to the tree, or compare it with the recorded step."""
        ledger = self.ledger
        if ledger.steps.size and number > ledger.next_step:
            self._ready[number] = plan
            return
        attempts = self.pending.pop((plan, number))
        at = next(at for at, one in enumerate(attempts) if not one.missing)
        step = attempts[at]
        self._tell_conflicts(step.conflicts_with(attempts[:at]), number, step.start)
        if attempts[at + 1 :]:
            self.pending[plan, number] = attempts[at + 1 :]
        digest = step_digest(*self._plans[plan], number, step.cells)
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

    def _note_owners(self, step: PendingStep) -> None:
        """Add an assignment event if the owners of lanes differ from the previous step's."""
        if (step.start, step.ranks) != self._assigned:
            self._assigned = step.start, step.ranks
            self.ledger.add_event(
                {"kind": "assignment", "step": step.step, "start": step.start, "lanes": step.owners()}
            )


def _entries(parts: Sequence[Source]) -> Iterator[tuple[int, Source, Entry]]:
    """Yield (number of steps taken before, file, entry) of an attempt.

    The number rises where a rank goes back: what ranks recorded before comes first.
    """
    repeated = 0
    for source in parts:
        repeated = max(repeated, source.repeated)  # a new file continues the number of the file before it
        for entry in source.file.entries():
            repeated += entry.repeats
            source.end, source.check, source.repeated = entry.end, entry.check, repeated
            yield entry.step + repeated, source, entry


def merge_journals(run: Path) -> tuple[Ledger, Merge]:
    """Return the ledger of a run directory with the journals merged into it in memory, and the merge.

    Nothing is written.
    """
    ledger = Ledger(run)
    return ledger, Merge(ledger)
