"""Check the decisions of a mixer: against the recorded losses, and by computing them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from shardkit.audit.run_record import RunRecord, consecutive
from shardkit.credentials import redact
from shardkit.errors import FormatError, IntegrityError, NotFoundError, PlanError, UsageError
from shardkit.ledger.decisions import (
    DECISION,
    Decision,
    DecisionLines,
    MixHistory,
    apply_decisions,
    recorded_sums,
)
from shardkit.ledger.ledger import StepRecords
from shardkit.ledger.losses import Losses, former_losses, read_losses
from shardkit.plan import Mixer, Plan
from shardkit.plan.mixers import MixFunction, find_mixer
from shardkit.plan.plan import plan_of

_SHOWN = 5


def has_decisions(record: RunRecord, number: int, plan: Plan) -> bool:
    """Apply the recorded decisions to a plan with a mixer.

    Returns:
        False if no such mixer exists, the decisions do not fit, or recorded steps lack theirs.
    """
    text, every = plan.settings.mixer, plan.settings.mix_every
    if plan.decided is None or text is None or every is None:
        return True
    try:
        find_mixer(text, every)
        _check_steps(record, plan)
        apply_decisions(plan, _lines(record, plan).at(_branch_end(record)))
    except (IntegrityError, PlanError) as error:
        record.add("violated", DECISION, f"plan {plan.digest[:12]}…", str(error))
        return False
    for records, fork, _ in ranges(record):
        if int(records[0]["plan"]) == number:
            last, known = (
                int(records[-1]["step"]),
                (plan if fork is None else abandoned_plan(record, plan, fork, records)).decided or 0,
            )
            if last >= known:
                record.add(
                    "violated", DECISION, f"step {known}",
                    f"the run went on to step {last}, and no decision of the mixer about steps from {known} on is "
                    "recorded: it was removed",
                )  # fmt: skip
                return False
    return True


def ranges(record: RunRecord) -> Iterator[tuple[StepRecords, int | None, bool]]:
    """Yield (records, fork, is_branch) of each range of steps under one plan.

    The fork is the index of the event that abandoned the records; None for records on the branch.
    """
    for one in consecutive(record.branch):
        yield one, None, True
    records, gone = record.records, ~np.isin(record.records["check"], record.branch["check"])
    left_by = np.full(len(records), -1)
    for place, event in reversed(list(enumerate(record.events))):  # the first fork that left a record counts
        if event["kind"] == "fork":
            before = np.arange(len(records)) < event["record"]
            left_by[gone & before & (records["step"] >= event["step"])] = place
    for place in np.unique(left_by[gone]).tolist():
        for one in consecutive(records[gone & (left_by == place)]):
            yield one, place if place >= 0 else None, False


def abandoned_plan(record: RunRecord, plan: Plan, fork: int, records: StepRecords) -> Plan:
    """Return the plan that abandoned records followed: with the decisions made before the run went back.

    `fork` is the place in the events of the fork that abandoned the consecutive records.
    """
    if plan.decided is None:
        return plan
    start = record.events[fork]["start"]
    back = max(place for place in record.returns if place < fork and record.events[place]["start"] == start)
    return _plan_before(record, plan, back, int(records[-1]["step"]) + 1)


def former_plans(record: RunRecord, plan: Plan, step: int) -> Iterator[Plan]:
    """Yield the plans that an incomplete or abandoned record of a step may have followed.

    Without a mixer there is one. With a mixer there is one for each time the run went back, with the decisions before,
    and the present one; plans that had not decided the step are left out.
    """
    if plan.decided is None:
        yield plan
        return
    for one in (
        plan, *(_plan_before(record, plan, back, step + 1) for back in (len(record.events), *reversed(record.returns)))
    ):  # fmt: skip
        if step < (one.decided or 0):
            yield one


def is_superseded(record: RunRecord, plans: Iterable[Plan], conflict: Mapping[str, Any]) -> bool:
    """Return True if a cell was recorded twice because the run went back and its mixer decided otherwise."""
    step, lane = conflict["step"], conflict["lane"]
    return any(
        former.cell_digest(step, lane) == conflict["before"]
        for plan in plans
        if plan.decided is not None and lane < plan.lanes
        for former in former_plans(record, plan, step)
    )


def _branch_end(record: RunRecord) -> int:
    return int(record.branch["step"].max()) + 1 if len(record.branch) else 0


def _lines(record: RunRecord, plan: Plan, back: int | None = None) -> DecisionLines:
    """Return the decisions about a plan that were recorded before a place in the events."""
    back = len(record.events) if back is None else back
    found = record.lines.get((plan.digest, back))
    if found is None:
        reached = [] if record.ledger is None else record.ledger.state.start.reached
        here = record.events[back] if back < len(record.events) else {}
        now = here["reached"] if here.get("kind") == "rewind" else None
        found = record.lines[plan.digest, back] = DecisionLines(
            record.events[:back], plan.digest, reached, now
        )
    return found


def _plan_before(record: RunRecord, plan: Plan, back: int, step: int) -> Plan:
    """Return a plan with the decisions on the way to a step, recorded before a place in the events; made once."""
    decisions = _lines(record, plan, back).at(step)
    found = record.former_plans.get(id(decisions))  # `record.lines` holds the list
    if found is None:
        found = record.former_plans[id(decisions)] = plan_of(plan.settings, plan.population)
        apply_decisions(found, decisions)
    return found


def check_decisions(
    record: RunRecord, plans: Mapping[int, Plan], function: MixFunction | None = None
) -> None:
    """Check that decisions were made from the recorded losses, by the mixer that the plan names.

    `plans` have the decisions. `function` belongs to a `FunctionMixer`.

    Raises:
        UsageError: the function is given, and no plan of the run names a function.
    """
    if function is not None and plans and all(_is_settled(plan) for plan in plans.values()):
        raise UsageError(
            f"{record.path}: no function of yours decided weights in this run; leave --mixer out"
        )
    for plan in plans.values():
        text, every = plan.settings.mixer, plan.settings.mix_every
        if text is None or every is None:
            continue
        # others are of abandoned steps whose losses have been noted again
        decisions = _lines(record, plan).at(_branch_end(record))
        mixer = find_mixer(text, every, function)
        name, _, without_losses = text.partition(" ")
        needs_losses = not without_losses if mixer is None else mixer.needs_losses
        _check_sums(record, plan, decisions if needs_losses else [])
        _check_drawn(record, plan, decisions)
        if mixer is None or mixer.text != text:
            record.add(
                "unknown", DECISION, text,
                f"{len(decisions)} decisions of this function were not computed again: pass it with --mixer {name}",
            )  # fmt: skip
            continue
        try:
            wrong = _wrong_decisions(plan, mixer, decisions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a function may call sys.exit()
            if function is None:
                raise
            record.add(
                "unknown", DECISION, text,
                f"the function failed ({type(error).__name__}: {redact(str(error))[:200]}), so its decisions were not "
                "computed again: fix it, and audit the run again",
            )  # fmt: skip
            continue
        for stage, problem in wrong[:_SHOWN]:
            record.add("violated", DECISION, f"stage {stage}", problem)
        if not wrong:
            record.add(
                "note", DECISION, text, f"{len(decisions)} decisions, each computed again from the losses"
            )


def _is_settled(plan: Plan) -> bool:
    """Return True if the weights of a plan follow without a function of the user."""
    text, every = plan.settings.mixer, plan.settings.mix_every
    return text is None or every is None or find_mixer(text, every) is not None


def _check_steps(record: RunRecord, plan: Plan) -> None:
    """Check that each decision was made in the middle of the stage before its own.

    A decision that says a later step would be taken for one of an abandoned branch, which is not computed again.
    """
    every = plan.mixture.every
    decisions = (one for one in record.events if one["kind"] == DECISION and one["plan"] == plan.digest)
    places = ((one["stage"], one["step"], (one["stage"] - 1) * every + every // 2) for one in decisions)
    for stage, step, expected in islice((one for one in places if one[1] != one[2]), _SHOWN):
        record.add(
            "violated", DECISION, f"stage {stage}",
            f"says that it was made at step {step}, and the mixer decides this stage at step {expected}: the event was "
            "changed",
        )  # fmt: skip


def _check_drawn(record: RunRecord, plan: Plan, decisions: list[Decision]) -> None:
    """Check the numbers of drawn samples in decisions against their weights."""
    fresh = plan_of(plan.settings, plan.population)
    for one in decisions:
        fresh.decide(one.weights)
        drawn = tuple(fresh.mixture.drawn_in(one.stage).tolist())
        if drawn != one.drawn:
            record.add(
                "violated", DECISION, f"stage {one.stage}",
                f"says that {_short(one.drawn)} samples were drawn, and it was {_short(drawn)}",
            )  # fmt: skip
            return  # later numbers include this one


def _wrong_decisions(plan: Plan, mixer: Mixer, decisions: list[Decision]) -> list[tuple[int, str]]:
    """Return (stage, error) of each decision that the mixer would not make."""
    fresh, wrong = plan_of(plan.settings, plan.population), []
    history = MixHistory(mixer, fresh)
    for one in decisions:
        history.add(one.losses)
        try:
            weights = history.weights_of(one.stage)
        except PlanError as error:
            weights = ()
            wrong.append((one.stage, str(error)))
        if weights and weights != one.weights:
            text = (
                f"has the weights {_short(one.weights)}, and the mixer decides {_short(weights)} by the losses before: "
                "the decision was changed, or another mixer made it"
            )
            wrong.append((one.stage, text))
        fresh.decide(one.weights)
    return wrong


def _short(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


def _check_sums(record: RunRecord, plan: Plan, decisions: list[Decision]) -> None:
    """Check the sums of losses in decisions against the losses that ranks noted."""
    every, wrong, missing = plan.mixture.every, list[int](), 0
    try:
        losses: Losses | None = read_losses(record.path, record.loss_legs()) if decisions else None
    except (NotFoundError, FormatError):  # `check_losses` reports files that are damaged
        losses = None
    for one in decisions:
        first = (one.stage - 2) * every
        try:
            found, count = (None, 0) if losses is None else recorded_sums(losses, plan, first, first + every)
        except FormatError:
            found, count = None, 0
        if found is None or count < every * plan.global_batch:
            missing += 1
        elif not one.losses.equals(found) and (len(wrong) >= _SHOWN or not _were_read(record, plan, one)):
            wrong.append(one.stage)
    for stage in wrong[:_SHOWN]:
        record.add(
            "violated", DECISION, f"stage {stage}",
            f"was decided by other losses than those of steps {(stage - 2) * every} to {(stage - 1) * every - 1}: the "
            "decision or the losses were changed",
        )  # fmt: skip
    if missing:
        record.add(
            "note", DECISION, f"{missing} of {len(decisions)} decisions",
            "the losses that they were made from are not all there",
        )  # fmt: skip


def _were_read(record: RunRecord, plan: Plan, decision: Decision) -> bool:
    """Return True if the start that made a decision read these losses; a later one may have noted others."""
    times = {one["start"]: one["time"] for one in record.events if one["kind"] == "start"}
    since = times.get(decision.start, 0)
    before = min((time for start, time in times.items() if start > decision.start), default=1 << 63)
    first = (decision.stage - 2) * plan.mixture.every
    end = first + plan.mixture.every
    for losses in former_losses(record.path, record.loss_legs(), first, end, since=since, before=before):
        with suppress(FormatError):
            if recorded_sums(losses, plan, first, end)[0].equals(decision.losses):
                return True
    return False
