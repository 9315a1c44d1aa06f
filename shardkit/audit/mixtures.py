"""Check the decisions of a mixer: against the recorded losses, and by computing them again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice

from shardkit.audit.run_record import RunRecord
from shardkit.credentials import redact
from shardkit.errors import FormatError, IntegrityError, NotFoundError, PlanError, UsageError
from shardkit.ledger.decisions import (
    DECISION,
    Decision,
    MixHistory,
    apply_decisions,
    recorded_decisions,
    recorded_sums,
)
from shardkit.ledger.losses import former_losses
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
    if text is None or every is None:
        return True
    try:
        find_mixer(text, every)
        _check_steps(record, plan)
        apply_decisions(plan, recorded_decisions(record.events, plan.digest))
    except (IntegrityError, PlanError) as error:
        record.add("violated", DECISION, f"plan {plan.digest[:12]}…", str(error))
        return False
    complete = record.records["step"][record.records["plan"] == number].tolist()
    cells = () if record.merge is None else record.merge.pending_cells()
    last = max((*complete, *(step for digest, step, *_ in cells if digest == plan.digest)), default=-1)
    known = plan.decided or 0
    if last >= known:
        record.add(
            "violated", DECISION, f"step {known}",
            f"the run went on to step {last}, and no decision of the mixer about steps from {known} on is recorded: it "
            "was removed",
        )  # fmt: skip
    return last < known


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
        decisions = recorded_decisions(record.events, plan.digest)
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
    """Check that each decision was made in the middle of the stage before its own."""
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
    losses = None
    with suppress(NotFoundError, FormatError):  # `check_losses` reports files that are damaged
        losses = record.losses() if decisions else None
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
    """Return True if these losses were noted before the run went back and noted others."""
    first = (decision.stage - 2) * plan.mixture.every
    end = first + plan.mixture.every
    assert record.ledger is not None, "its losses were read"
    for losses in former_losses(record.ledger, first, end):
        with suppress(FormatError):
            if recorded_sums(losses, plan, first, end)[0].equals(decision.losses):
                return True
    return False
