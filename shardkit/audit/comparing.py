"""Compare two runs: find the first step at which they consumed different samples, and the reasons."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.plans import RunPlan
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
        content: (samples of step 0 with equal content, samples read), if the manifests differ.
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

    If both runs began with the same manifest and plan, step digests are compared. Otherwise the samples of both plans
    are compared, with recorded substitutions: by number if the manifests are equal, by key if they differ.
    """
    ends = tuple(int(one.branch[-1]["step"]) + 1 if len(one.branch) else 0 for one in (a, b))
    first = max((int(one.branch[0]["step"]) if len(one.branch) else 0) for one in (a, b))
    result = Comparison((ends[0], ends[1]), max(0, min(ends) - first))
    one, other = _main_plan(a, plans_a), _main_plan(b, plans_b)
    _say_differences(a, b, one, other, result)
    same_names = (
        bool(a.plans) and bool(b.plans) and all(a.plans[0][n] == b.plans[0][n] for n in ("manifest", "plan"))
    )
    if same_names:
        _compare_digests(a, b, first, min(ends), result)
    elif one is not None and other is not None:
        _compare_samples(a, b, one, other, first, min(ends), result)
    if result.diverges is not None and one is not None and other is not None:
        _show_cells(a, b, one, other, result)
    return result


def _main_plan(record: RunRecord, plans: dict[int, RunPlan]) -> RunPlan | None:
    return plans.get(int(record.branch[0]["plan"])) if len(record.branch) else None


def _compare_digests(a: RunRecord, b: RunRecord, first: int, last: int, result: Comparison) -> None:
    if last <= first:
        return
    left, right = (
        one.branch["digest"][first - int(one.branch[0]["step"]) :][: last - first] for one in (a, b)
    )
    unequal = np.flatnonzero((left != right).any(axis=1))
    if len(unequal):
        result.diverges = first + int(unequal[0])
        at = (result.diverges, result.diverges + 1)
        substituted = a.substitutions(*at) != b.substitutions(*at)
        result.reasons.append(
            "samples were substituted in one run and not, or otherwise, in the other" if substituted
            else "the plan is the same, and one of the ledgers records other samples: run shardkit audit on both"
        )  # fmt: skip


def _compare_samples(
    a: RunRecord, b: RunRecord, one: RunPlan, other: RunPlan, first: int, last: int, result: Comparison
) -> None:
    by_key = one.dataset.manifest.id != other.dataset.manifest.id
    if one.plan.global_batch != other.plan.global_batch:
        if last > first:
            result.diverges = first
        return
    for begin in range(first, last, _STEPS_AT_ONCE):
        end = min(last, begin + _STEPS_AT_ONCE)
        left, right = (
            plan.consumed(run, begin, end).reshape(end - begin, -1) for run, plan in ((a, one), (b, other))
        )
        if by_key:
            left, right = _keys(one.dataset, left), _keys(other.dataset, right)
        unequal = (left != right).any(axis=1)
        if unequal.any():
            result.diverges = begin + int(np.flatnonzero(unequal)[0])
            return


def _keys(dataset: Dataset, samples: NDArray[np.int64]) -> NDArray[Any]:
    """Return the keys of samples, in the same shape. Empty slots (-1) have an empty key."""
    numbers, inverse = np.unique(samples, return_inverse=True)
    known = np.array([dataset.key(one) if one >= 0 else "" for one in numbers.tolist()], dtype=object)
    return known[inverse].reshape(samples.shape)


# ---- reasons of the difference


def _say_differences(
    a: RunRecord, b: RunRecord, one: RunPlan | None, other: RunPlan | None, result: Comparison
) -> None:
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
        result.content = _equal_content(one, other)
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


def _equal_content(one: RunPlan, other: RunPlan) -> tuple[int, int]:
    """Return (samples of step 0 with equal content at equal places, samples read)."""
    left, right = one.plan.step(0).ravel(), other.plan.step(0).ravel()
    pairs = [(a, b) for a, b in zip(left.tolist(), right.tolist(), strict=False) if a >= 0 and b >= 0]
    equal = sum(_content(one.dataset, a) == _content(other.dataset, b) for a, b in pairs)
    return equal, len(pairs)


def _content(dataset: Dataset, sample: int) -> str:
    payloads = dataset.schema.encode(dataset[sample], where=f"sample {sample}")
    return hashlib.sha256(b"".join(len(one).to_bytes(8, "little") + one for one in payloads)).hexdigest()


def _show_cells(a: RunRecord, b: RunRecord, one: RunPlan, other: RunPlan, result: Comparison) -> None:
    step = result.diverges
    assert step is not None
    if (one.plan.lanes, one.plan.cell_size) != (other.plan.lanes, other.plan.cell_size):
        return
    left, right = (run.consumed(record, step, step + 1).ravel() for record, run in ((a, one), (b, other)))
    for place in np.flatnonzero(left != right)[:_SHOWN].tolist():
        lane, slot = divmod(place, one.plan.cell_size)
        result.cells.append((lane, slot, int(left[place]), int(right[place])))
