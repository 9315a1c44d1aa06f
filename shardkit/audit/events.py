"""Check the events of a ledger, and the entries of a journal, against each other.

None may contradict, repeat or undo another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardkit.errors import FormatError
from shardkit.ledger import MASKED, SUBSTITUTED, setting_differences
from shardkit.ledger.bindings import AMENDMENT, CONFIGURATION, DEALT, active_amendments, is_applied
from shardkit.ledger.decisions import DECISION
from shardkit.ledger.journal import CELLS, EVENT, META, JournalFile
from shardkit.telemetry.records import json_object

Event = dict[str, Any]


def contradictions(events: Iterable[Event], steps: Sequence[int]) -> Iterator[tuple[Event, str]]:
    """Yield (event, description of the error) for each event that breaks a rule of SPEC.md, "Events", of the ledger."""
    history = _History(steps)
    for event in events:
        text = history.add(event)
        if text:
            yield event, text


class _History:
    """State accumulated from the events so far."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps
        self.plans: list[tuple[str, str]] = []  # (manifest, plan digest) by number
        self.starts: list[Event] = []  # start events by number
        self.newest: dict[object, Event] = {}  # of each kind, checkpoint name or set of nodes
        # start → step of the newest checkpoint; nothing may be added about earlier steps
        self.sealed: dict[int, int] = {}
        # (start, rank) → lowest step that the rank went back to after that checkpoint
        self.lowest: dict[tuple[int, int], int] = {}
        self.merged = 0  # number of steps in the ledger at the newest checkpoint
        self.rewinds: dict[tuple[int, int, int], int] = {}  # (start, rank, worker) → number of rewinds
        self.seen: set[tuple[object, ...]] = set()  # identities of the events that may occur only once
        # amendments of the plan, undos of them, and the plans, starts and switches that apply them
        self.amendments: list[Event] = []
        self.decided: dict[str, int] = {}  # digest of a plan with a mixer → its first undecided stage
        self.losses = 0  # number of records of losses that events cover
        self._rules: dict[str, Callable[[Event], str]] = {
            "plan": self._plan,
            "start": self._start,
            "assignment": self._assignment,
            "fork": self._fork,
            "conflict": self._conflict,
            "checkpoint": self._checkpoint,
            "configuration": self._configuration,
            "dealt": self._deal,
            "amendment": self._amendment,
            "undo": self._undo,
            "switch": self._switch,
            "losses": self._losses,
        }

    def add(self, event: Event) -> str:
        """Add the next event. Return a description of its error, or an empty string."""
        return self._rules.get(event["kind"], self._journal_entry)(event)

    def _conflict(self, event: Event) -> str:
        if event["before"] == event["now"]:
            return "names one digest twice"
        return self._of_start(event, []) or self._late(event)

    def _plan(self, event: Event) -> str:
        pair = (event["manifest"], event["plan"])
        if event["number"] != len(self.plans) or pair in self.plans:
            return "introduces a plan that is known, or skips a number"
        self.plans.append(pair)
        self.amendments.append(event)
        return ""

    def _start(self, event: Event) -> str:
        if event["start"] != len(self.starts):
            return f"is of start {event['start']}, and {len(self.starts)} is the next one"
        if (
            not event["ranks"]
            or not event["workers"]
            or event["repeats"] != max(0, event["reached"] - event["step"])
        ):
            return "contradicts itself"
        self.starts.append(event)
        self.amendments.append(event)
        return ""

    def _of_start(self, event: Event, ranks: list[int]) -> str:
        """Return an error unless the event belongs to a known start that has these ranks."""
        if event["start"] >= len(self.starts):
            return f"is of start {event['start']}, which no event introduces"
        if max(ranks, default=0) >= self.starts[event["start"]]["ranks"]:
            return f"names rank {max(ranks)} of a start of {self.starts[event['start']]['ranks']} ranks"
        return ""

    def _assignment(self, event: Event) -> str:
        end = 0
        for _, first, count in event["lanes"]:
            if first != end or not count:
                return "does not give every lane one rank"
            end += count
        before = self.newest.get("assignment")
        if before is not None and (before["start"], before["lanes"]) == (event["start"], event["lanes"]):
            return "repeats the assignment before it"
        self.newest["assignment"] = event
        return self._of_start(event, [rank for rank, *_ in event["lanes"]]) or self._late(event)

    def _fork(self, event: Event) -> str:
        at, step = event["record"], event["step"]
        if not 0 < at < len(self._steps) or self._steps[at] != step or self._steps[at - 1] < step:
            return f"is not in the records: record {at} does not leave a branch at step {step}"
        if ("fork", at) in self.seen or event["plan"] >= len(self.plans):
            return "repeats a fork, or names a plan that is not known"
        self.seen.add(("fork", at))
        self.merged = min(self.merged, step)
        return self._of_start(event, [])

    def _checkpoint(self, event: Event) -> str:
        before = self.newest.get(("name", event["name"]))
        expected = None if before is None else before["checkpoint"]
        if event.get("replaces") != expected:
            return (
                f"binds the name {event['name']} again, which the ledger has bound to {short(expected)} before"
                if expected
                else f"replaces a checkpoint {event['name']} that the ledger never had"
            )
        self.newest["name", event["name"]] = event
        if event["merged"] < self.merged:
            return f"is of {event['merged']} steps, and the ledger had {self.merged} before it"
        self.merged = event["merged"]
        sealed = min(event["step"], event["merged"])
        self.sealed = dict.fromkeys(range(len(self.starts)), sealed)
        self.lowest.clear()
        return ""

    def _late(self, event: Event, ranks: Sequence[int] | None = None) -> str:
        """Return an error if a checkpoint after the event's step was recorded before the event."""
        start = event["start"]
        lowest = [
            step for (one, rank), step in self.lowest.items() if one == start and (not ranks or rank in ranks)
        ]
        is_late = event["step"] < min([*lowest, self.sealed.get(start, 0)])
        return "was added after the checkpoint that follows its step" if is_late else ""

    def _configuration(self, event: Event) -> str:
        settings, before = json_object(event["settings"]), self.newest.get(CONFIGURATION)
        if settings is None:
            return "holds settings that are no JSON object"
        if moved := self._check_position(event):
            return moved
        self.newest[CONFIGURATION] = event
        changed = {key: (old, new) for key, old, new in event["changed"]}
        if not set(event["allowed"]) <= set(changed):
            return "allows changes that it does not name"
        if before is None:
            return "names changes, and no settings are recorded before it" if changed else ""
        if before["run"] != event["run"]:
            return f"records the run.json {short(event['run'])}, and the one before it {short(before['run'])}"
        if before["settings"] == event["settings"]:
            return "repeats the settings before it"
        old = json_object(before["settings"]) or {}
        differing = {key for key, was, now in setting_differences(old, settings) if None not in (was, now)}
        if not differing <= set(changed):
            return f"does not name changes: {', '.join(sorted(differing - set(changed)))}"
        return ""

    def _deal(self, event: Event) -> str:
        place = (DEALT, event["lanes"], *event["nodes"])
        before = self.newest.get(place)
        self.newest[place] = event
        if moved := self._check_position(event):
            return moved
        if len(event["owners"]) != event["lanes"] or max(event["owners"], default=0) >= len(event["nodes"]):
            return "does not give every lane one rank"
        return "repeats what was dealt before" if before and before["owners"] == event["owners"] else ""

    def _amendment(self, event: Event) -> str:
        self.amendments.append(event)
        skipped = event["skip"]
        changes_nothing = skipped is event["weights"] is event["excluded"] is None
        if event["number"] != sum(one["kind"] == AMENDMENT for one in self.amendments) - 1:
            return "skips a number"
        if (
            event["resume_from"] > event["from_step"]
            or (skipped is not None and skipped <= event["from_step"])
            or changes_nothing != (event["plan"] == event["parent"])
        ):
            return "contradicts itself"
        return self._check_position(event)

    def _undo(self, event: Event) -> str:
        active = active_amendments(self.amendments)
        self.amendments.append(event)
        if not active or active[-1].number != event["number"]:
            return "undoes an amendment that was not the newest one in force"
        if is_applied(active[-1], self.amendments[:-1]):
            return "undoes an amendment that a start had applied"
        return self._check_position(event)

    def _switch(self, event: Event) -> str:
        active = {one.number: one for one in active_amendments(self.amendments)}
        if event["number"] not in active or is_applied(active[event["number"]], self.amendments):
            return "applies an amendment that is not in force, or was applied before"
        self.amendments.append(event)
        return self._check_position(event)

    def _losses(self, event: Event) -> str:
        if event["first"] != self.losses or event["end"] <= event["first"]:
            return "does not continue the losses that an event before it covers"
        self.losses = event["end"]
        return self._check_position(event)

    def _check_position(self, event: Event) -> str:
        """Return an error if the event's step is before the step of the newest checkpoint."""
        if event["step"] >= self.merged:
            return ""
        return f"is of step {event['step']}, and the ledger had {self.merged} steps before it: it was moved"

    def _journal_entry(self, event: Event) -> str:
        kind, start, rank, step = event["kind"], event["start"], event["rank"], event["step"]
        wrong = self._of_start(event, [rank, *event.get("owner", ())])
        if wrong:
            return wrong
        if kind == "rewind":
            number = self.rewinds.get((start, rank, event["worker"]), 0)
            workers = self.starts[start]["workers"]
            if step >= event["reached"] or event["number"] != number or event["worker"] >= workers:
                return "does not go back, or is not the next one of its rank"
            if event["reached"] + workers - 1 < self.merged:
                return f"goes back from step {event['reached']}, and the ledger had {self.merged} before it"
            self.rewinds[start, rank, event["worker"]] = number + 1
            self.lowest[start, rank] = min(step, self.lowest.get((start, rank), step))
            self.seen = {one for one in self.seen if one[:2] != (start, rank)}
            return ""
        if kind == DECISION:
            stage = self.decided.get(event["plan"], 2)
            if event["stage"] != stage:
                return f"is about stage {event['stage']}, and stage {stage} is the next one to be decided"
            self.decided[event["plan"]] = stage + 1
        if kind == "decoders" and self.newest.setdefault((kind, start), event)["made_by"] != event["made_by"]:
            return "names other decoders than one before it in the same start"
        if self._late(event, [rank]):
            return self._late(event, [rank])
        identity = (start, rank, step, *_subject(event), event.get("number"))
        if identity in self.seen:
            return "is a second one about the same thing"
        self.seen.add(identity)
        return ""


def _subject(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subject of an event of a journal. A step has at most one event of a rank per subject."""
    kind = str(event.get("kind"))
    if kind in (SUBSTITUTED, MASKED):
        return "replaced", str(event.get("lane")), str(event.get("slot"))
    return kind, str(event.get("location"))


def short(value: object) -> str:
    """Return the value as text, shortened to at most 24 characters."""
    text = str(value)
    return f"{text[:19]}…" if len(text) > 24 else text


# ---- entries of a journal


def check_order(files: Iterable[JournalFile], settled: Mapping[str, tuple[int, int]]) -> None:
    """Raise FormatError unless the files of one attempt hold their entries in the order in which a rank writes them.

    The plan facts come first and only once. Steps ascend, except after a `rewind` event. An event belongs to the last
    recorded step, and no step has two events about the same thing. If the first files have been removed, the step
    before the remaining files is unknown and not checked.

    Args:
        files: files of the attempt, ordered by part and read from their beginning.
        settled: file name → (offset, checksum) at the end of the last merged entry.
    """
    last: int | None = None
    expected: int | None = None  # the step that a rewind announced
    seen: set[object] = set()
    for number, file in enumerate(files):
        borders = {file.start}
        for place, entry in enumerate(file.entries()):
            borders.add((entry.end, entry.check))
            where = f"{file.path}: the entry that ends at byte {entry.end}"
            if entry.kind == META:
                if number or place or file.header is None or file.header.part:
                    raise FormatError(f"{where} says again how the plan is made: it was put there later")
            elif entry.kind == CELLS:
                if expected not in (None, entry.step) or (
                    expected is None and last is not None and entry.step <= last
                ):
                    raise FormatError(
                        f"{where} records step {entry.step} after step {last}: it was moved or repeated"
                    )
                last, expected = entry.step, None
                seen.clear()
            elif entry.kind == EVENT:
                body = entry.document()
                kind, subject = body.get("kind"), _subject(body)
                if kind == "rewind":
                    is_there = last is None or (entry.step <= last and body.get("reached") == last + 1)
                    expected = entry.step
                else:  # a decision to move lanes is made between two steps
                    is_there = last is None or entry.step - last in ((0, 1) if kind == "rebalance" else (0,))
                if not is_there or subject in seen:
                    raise FormatError(
                        f"{where} is an event of step {entry.step} after step {last}: it was moved, repeated, or put "
                        "there by somebody else"
                    )
                seen.add(subject)
        if file.path.name in settled and settled[file.path.name] not in borders:
            raise FormatError(
                f"{file.path}: its entries are not those that are merged in the ledger: it was rewritten"
            )
        if expected is not None and not file.torn_bytes:
            raise FormatError(
                f"{file.path} ends where step {expected} was to follow: it was cut, or added to"
            )
