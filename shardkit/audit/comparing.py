"""Compare two runs: find the first step at which they consumed different samples, and the reasons."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.plans import Leg, RunPlan, legs
from shardkit.audit.run_record import RunRecord
from shardkit.dataset import Dataset

_STEPS_AT_ONCE = 256
_SHOWN = 8


@dataclass
class Comparison:
    """Result of comparing two runs, A and B.

    Attributes:
        steps: (end of A's steps, end of B's steps).
        compared: number of steps that both runs consumed.
        diverges: the first step at which they consumed different samples; None if they never did.
        cells: (lane, slot, sample of A, sample of B) of the first differing places of that step.
        reasons: explanations of the difference, the strongest first.
        manifests: numbers and examples of shards in only one dataset, if the manifests differ.
        settings: differing plan settings: name → [value in A, value in B].
        content: (samples of the first common step with equal content, samples read), if the manifests differ.
    """

    steps: tuple[int, int]
    compared: int = 0
    diverges: int | None = None
    cells: list[tuple[int, int, int, int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    manifests: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    content: tuple[int, int] | None = None

    @property
    def is_equal(self) -> bool:
        """Return True if both runs consumed the same samples at every common step."""
        return self.diverges is None


def compare_runs(
    a: RunRecord, b: RunRecord, plans_a: dict[int, RunPlan], plans_b: dict[int, RunPlan]
) -> Comparison:
    """Compare the samples that two runs consumed.

    Where both runs followed the same plan of the same manifest, step digests are compared. Elsewhere the samples of
    both plans are compared, with recorded substitutions: by number if the manifests are equal, by key if they differ.
    """
    mine, theirs = (
        [leg for leg in legs(run, plans) if leg.is_branch] for run, plans in ((a, plans_a), (b, plans_b))
    )
    ends = (mine[-1].end if mine else 0, theirs[-1].end if theirs else 0)
    result = Comparison(ends)
    if not mine or not theirs:
        result.reasons.append("a run has no steps")
        return result
    result.compared = max(0, min(ends) - max(mine[0].first, theirs[0].first))
    shared = (
        (left, right, max(left.first, right.first), min(left.end, right.end))
        for left in mine
        for right in theirs
    )
    left, right = mine[0], theirs[0]
    for one, other, first, end in shared:
        if first < end and (step := _first_difference(one, other, first, end)) is not None:
            left, right, result.diverges = one, other, step
            break
    _say_differences(left, right, result)
    if result.diverges is not None:
        _show_cells(left, right, result.diverges, result)
    return result


def _has_same_plan(left: Leg, right: Leg) -> bool:
    names = [
        [
            (event["manifest"], event["plan"])
            for event in leg.record.plans
            if event["number"] == leg.records[0]["plan"]
        ]
        for leg in (left, right)
    ]
    return bool(names[0]) and names[0] == names[1]


def _first_difference(left: Leg, right: Leg, first: int, end: int) -> int | None:
    """Return the first of the steps [first, end) in which two legs differ; None if it is unknown, or there is none."""
    if _has_same_plan(left, right):
        digests = (leg.records["digest"][first - leg.first : end - leg.first] for leg in (left, right))
        return _first_unequal(first, *digests)
    if left.plan is None or right.plan is None:
        return None
    if left.plan.plan.global_batch != right.plan.plan.global_batch:
        return first
    by_key = left.plan.dataset.manifest.id != right.plan.dataset.manifest.id
    for begin in range(first, end, _STEPS_AT_ONCE):
        last = min(end, begin + _STEPS_AT_ONCE)
        mine, theirs = (leg.consumed(begin, last).reshape(last - begin, -1) for leg in (left, right))
        if by_key:
            mine, theirs = _keys(left.plan.dataset, mine), _keys(right.plan.dataset, theirs)
        if (step := _first_unequal(begin, mine, theirs)) is not None:
            return step
    return None


def _first_unequal(first: int, left: NDArray[Any], right: NDArray[Any]) -> int | None:
    """Return the number of the first unequal row; row 0 has the number `first`."""
    unequal = np.flatnonzero((left != right).any(axis=1))
    return first + int(unequal[0]) if len(unequal) else None


def _keys(dataset: Dataset, samples: NDArray[np.int64]) -> NDArray[Any]:
    """Return the keys of samples, in the same shape. Empty slots (-1) have an empty key."""
    numbers, inverse = np.unique(samples, return_inverse=True)
    known = np.array([dataset.key(one) if one >= 0 else "" for one in numbers.tolist()], dtype=object)
    return known[inverse].reshape(samples.shape)


# ---- reasons of the difference


def _say_differences(left: Leg, right: Leg, result: Comparison) -> None:
    one, other, step = left.plan, right.plan, result.diverges
    if step is not None and _has_same_plan(left, right):
        is_substituted = left.substitutions(step, step + 1) != right.substitutions(step, step + 1)
        result.reasons.append(
            "samples were substituted in one run and not, or otherwise, in the other" if is_substituted
            else "the plan is the same, and one of the ledgers records other samples: run shardkit audit on both"
        )  # fmt: skip
    if one is None or other is None:
        result.reasons.append("a plan cannot be made again, so that only digests can be compared")
        return
    mine, theirs = one.plan.settings.canonical(), other.plan.settings.canonical()
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            result.settings[name] = [mine.get(name), theirs.get(name)]
            result.reasons.append(
                f"another plan: {name} is {mine.get(name)} in A and {theirs.get(name)} in B"
            )
    if one.dataset.manifest.id != other.dataset.manifest.id:
        _say_manifests(one.dataset, other.dataset, result)
        result.content = _equal_content(one, other, max(left.first, right.first))
        if result.content[0] == result.content[1] > 0:
            result.reasons.append(
                f"rebuilt data: another manifest, and the {result.content[1]} samples of the first step that were read "
                "have equal content in equal order"
            )
        else:
            shards = result.manifests
            result.reasons.insert(
                0, f"another manifest: {shards['only_a']} shards are in A alone, {shards['only_b']} in B alone, "
                f"{shards['shared']} in both",
            )  # fmt: skip


def _say_manifests(one: Dataset, other: Dataset, result: Comparison) -> None:
    mine = {one.table.digest_text(shard) for shard in range(len(one.table))}
    theirs = {other.table.digest_text(shard) for shard in range(len(other.table))}
    result.manifests = {
        "a": one.manifest.id,
        "b": other.manifest.id,
        "only_a": len(mine - theirs),
        "only_b": len(theirs - mine),
        "shared": len(mine & theirs),
        "examples_a": sorted(mine - theirs)[:_SHOWN],
        "examples_b": sorted(theirs - mine)[:_SHOWN],
        "samples": [len(one), len(other)],
    }


def _equal_content(one: RunPlan, other: RunPlan, step: int) -> tuple[int, int]:
    """Return (samples of a step with equal content at equal places, samples read)."""
    left, right = one.plan.step(step).ravel(), other.plan.step(step).ravel()
    pairs = [(a, b) for a, b in zip(left.tolist(), right.tolist(), strict=False) if a >= 0 and b >= 0]
    equal = sum(_content(one.dataset, a) == _content(other.dataset, b) for a, b in pairs)
    return equal, len(pairs)


def _content(dataset: Dataset, sample: int) -> str:
    payloads = dataset.schema.encode(dataset[sample], where=f"sample {sample}")
    return hashlib.sha256(b"".join(len(one).to_bytes(8, "little") + one for one in payloads)).hexdigest()


def _show_cells(left: Leg, right: Leg, step: int, result: Comparison) -> None:
    if left.plan is None or right.plan is None:
        return
    one, other = left.plan.plan, right.plan.plan
    if (one.lanes, one.cell_size) != (other.lanes, other.cell_size):
        return
    mine, theirs = (leg.consumed(step, step + 1).ravel() for leg in (left, right))
    for place in np.flatnonzero(mine != theirs)[:_SHOWN].tolist():
        lane, slot = divmod(place, one.cell_size)
        result.cells.append((lane, slot, int(mine[place]), int(theirs[place])))
