"""Compare the samples of an interrupted run with the samples of the undisturbed run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

Steps = list[list[int]]
"""Samples of each step of an epoch, all ranks together."""

ANSWERS = ("exact", "reordered", "refuses", "stalls", "wrong")
"""In order of merit."""


@dataclass
class Run:
    """Samples of all steps of a run, and how the run ended."""

    epochs: list[Steps]
    refusal: dict[str, Any] | None = None  # error, phase and segment of a loader that raised or stood still
    uneven: int = 0  # steps that one rank had and another did not
    passes: list[Steps] = field(default_factory=list)  # complete passes of the validation loader


@dataclass
class Counts:
    """Differences between a run and the undisturbed run, summed over the epochs.

    Samples are compared epoch by epoch, and within an epoch step by step; the order within a step is not compared.
    """

    lost: int = 0  # samples that do not come at all
    repeated: int = 0  # times that a sample comes once more than in the undisturbed epoch, and than once
    fewer: int = 0  # times that a sample comes, but less often: fillers, or draws of a weighted source
    tail: int = 0  # samples that the undisturbed epoch drops as its remainder
    moved: int = 0  # samples that come as often, and in another step
    equal_steps: int = 0  # steps with the samples of the undisturbed run
    steps: int = 0  # steps of the undisturbed run

    @property
    def complete(self) -> bool:
        """Whether the epochs have all samples, and no more repetitions than the undisturbed ones have."""
        return self.lost <= self.tail and self.repeated <= self.fewer


def compare(undisturbed: list[Steps], run: list[Steps]) -> Counts:
    """Count the differences between two runs of the same number of epochs."""
    counts = Counts()
    for want, have in zip(undisturbed, run, strict=True):
        wanted, had = (Counter(number for step in steps for number in step) for steps in (want, have))
        counts.lost += sum(number not in had for number in wanted)
        counts.fewer += sum(
            wanted[number] - had[number] for number in wanted if 0 < had[number] < wanted[number]
        )
        counts.repeated += sum(max(0, had[number] - max(1, wanted[number])) for number in had)
        counts.tail += sum(number not in wanted for number in had)
        before, after = _steps_of(want), _steps_of(have)
        counts.moved += sum(
            len(before[number]) == len(after[number]) and before[number] != after[number]
            for number in before.keys() & after.keys()
        )
        counts.equal_steps += sum(sorted(a) == sorted(b) for a, b in zip(want, have, strict=False))
        counts.steps += len(want)
    return counts


def _steps_of(steps: Steps) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for number in step:
            found.setdefault(number, []).append(at)
    return found


def join(ranks: list[Steps]) -> tuple[Steps, int]:
    """Put the steps of all ranks together; also return by how many steps the ranks differ."""
    lengths = [len(steps) for steps in ranks]
    most = max(lengths, default=0)
    joined = [[number for steps in ranks if at < len(steps) for number in steps[at]] for at in range(most)]
    return joined, most - min(lengths, default=0)


def judge(undisturbed: Run, run: Run, validation: range | None) -> dict[str, Any]:
    """Return the answer of one run and its counts, for the results file.

    Args:
        validation: numbers of the validation samples, if a validation loader ran.
    """
    if run.refusal is not None:
        answer = "stalls" if run.refusal["phase"] == "stalls" else "refuses"
        return {"answer": answer, **run.refusal}
    counts = compare(undisturbed.epochs, run.epochs)
    found: dict[str, Any] = asdict(counts)
    if run.uneven:
        found["uneven"] = run.uneven
    bad_passes = 0
    if validation is not None:
        whole = sorted(validation)
        bad_passes = sum(sorted(n for step in steps for n in step) != whole for steps in run.passes)
        found |= {"passes": len(run.passes), "bad_passes": bad_passes}
    same = counts.equal_steps == counts.steps and [*map(len, run.epochs)] == [*map(len, undisturbed.epochs)]
    if bad_passes or not counts.complete:
        answer = "wrong"
    else:
        answer = "exact" if same else "reordered"
    return {"answer": answer, **found}
