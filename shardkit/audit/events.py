"""Check the events of a ledger against each other: no event may contradict, repeat or undo another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardkit.ledger import setting_differences
from shardkit.ledger.bindings import AMENDMENT, CONFIGURATION, DEALT, active_amendments, is_applied
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
    """State accumulated from the events so far.

    Attributes:
        plans: (manifest, plan digest) by number.
        starts: start events by number.
        newest: the newest event of each kind, checkpoint name or set of nodes.
        sealed: start → step of the newest checkpoint; nothing may be added about earlier steps.
        lowest: (start, rank) → lowest step that the rank went back to after that checkpoint.
        merged: number of steps in the ledger at the newest checkpoint.
        rewinds: (start, rank, worker) → number of rewinds.
        seen: identities of the events that may occur only once.
        amendments: amendments of the plan, undos of them, and the plans, starts and switches that apply them.
        losses: number of records of each file of losses that events cover.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps
        self.plans: list[tuple[str, str]] = []
        self.starts: list[Event] = []
        self.newest: dict[object, Event] = {}
        self.sealed: dict[int, int] = {}
        self.lowest: dict[tuple[int, int], int] = {}
        self.merged = 0
        self.rewinds: dict[tuple[int, int, int], int] = {}
        self.seen: set[tuple[object, ...]] = set()
        self.amendments: list[Event] = []
        self.losses: dict[str, int] = {}
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
        if not event["files"]:
            return "covers no losses"
        for name, first, end in event["files"]:
            if first != self.losses.get(name, 0) or end <= first:
                return f"does not continue the losses of {name} that an event before it covers"
            self.losses[name] = end
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
        if kind == "decoders" and self.newest.setdefault((kind, start), event)["made_by"] != event["made_by"]:
            return "names other decoders than one before it in the same start"
        if self._late(event, [rank]):
            return self._late(event, [rank])
        identity = (start, rank, step, *_identity(event))
        if identity in self.seen:
            return "is a second one about the same thing"
        self.seen.add(identity)
        return ""


def _identity(event: Event) -> tuple[object, ...]:
    if event["kind"] in ("substituted", "masked"):
        return "replaced", event["lane"], event["slot"]
    return event["kind"], event.get("location"), event.get("number")


def short(value: object) -> str:
    """Return the value as text, shortened to at most 24 characters."""
    text = str(value)
    return f"{text[:19]}…" if len(text) > 24 else text
