"""Losses of samples, one float32 each, as the trainer reports them (SPEC.md, "Losses").

Ranks journal them (`Journal.record_losses`), and the merge of the journals appends them to the ledger.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Bools, Float64s, Int64s
from shardkit.errors import FormatError, NotFoundError
from shardkit.ledger.ledger import LOSS_RECORD, Ledger, LossRecords, loss_check

_MOST_PASSES: Final = 1000  # numbers of losses that are looked at by `former_losses`
_READ: Final = 1 << 22  # losses that are read at once


class LossRows(NamedTuple):
    """Losses of several steps, ordered by step and place."""

    steps: Int64s  # (n,) int64
    places: Int64s  # (n,) int64 places in the grid, lane · cell_size + slot
    losses: NDArray[np.float32]  # (n,) float32


class Losses:
    """Losses of the steps that a run consumed, of all ranks and starts; where a step was repeated, the newest count.

    Losses under a plan that the run has abandoned at their step are left out.

    Args:
        ledger: with the journals merged into it.
        known: number of records of losses that are looked at, the oldest; by default all.

    Attributes:
        steps: (n,) int64, steps with losses, ascending.
        means: (n,) float64, mean loss of each of these steps.

    Raises:
        NotFoundError: the run has no losses.
    """

    def __init__(self, ledger: Ledger, known: int | None = None) -> None:
        self._ledger, self._records = ledger, ledger.loss_records()[:known]
        if not len(self._records):
            raise NotFoundError(
                f"{ledger.run} has no losses: call loader.note(batch, losses) after each step of a loader with run=…, "
                "or set log.sample_losses = true in the trainer's run file"
            )
        self._ends = np.cumsum(self._records["count"], dtype=np.int64)
        numbers = _consumed(ledger, self._records)
        # numbers of the records, by step, and within a step in the order of merging
        self._numbers = numbers[np.argsort(self._records["step"][numbers], kind="stable")]
        self._steps = self._records["step"][self._numbers]
        first = np.flatnonzero(np.diff(self._steps, prepend=-1))
        self.steps: Int64s = self._steps[first]
        totals, counts = (
            np.add.reduceat(self._records[name][self._numbers].astype(np.float64), first)
            if len(first) else np.empty(0) for name in ("total", "count")
        )  # fmt: skip
        self.means: Float64s = totals / np.maximum(1, counts)
        for step in self._repeated_steps():  # few: a restart repeats few steps
            self.means[np.searchsorted(self.steps, step)] = float(self.of_step(step)[1].mean())

    def _repeated_steps(self) -> list[int]:
        """Return the steps that have several losses of one place."""
        chosen = self._records[self._numbers]
        if not (np.diff(self._steps) <= 0).any():
            return []
        chosen = chosen[np.lexsort((chosen["place"], self._steps))]
        ends = chosen["place"].astype(np.int64) + chosen["count"]
        is_again = (np.diff(chosen["step"]) == 0) & (chosen["place"][1:] < ends[:-1])
        return [int(one) for one in np.unique(chosen["step"][1:][is_again])]

    def of_step(self, step: int) -> tuple[Int64s, NDArray[np.float32]]:
        """Return the losses of a step.

        Returns:
            (places, losses): as in `LossRows`.

        Raises:
            NotFoundError: there are no losses of this step.
            FormatError: the files were changed.
        """
        rows = self.of_steps(step, step + 1)
        if not len(rows.steps):
            raise NotFoundError(f"no losses of step {step}: loader.note(batch, losses) was not called for it")
        return rows.places, rows.losses

    def of_steps(self, first: int, end: int) -> LossRows:
        """Return the losses of steps [first, end).

        Raises:
            FormatError: the files were changed.
        """
        low, high = np.searchsorted(self._steps, [first, end]).tolist()
        numbers = self._numbers[low:high]
        chosen, losses = self._records[numbers], self._values(numbers)
        counts = chosen["count"].astype(np.int64)
        steps = np.repeat(chosen["step"], counts)
        begin = chosen["place"].astype(np.int64) - (np.cumsum(counts) - counts)
        places = np.arange(len(steps)) + np.repeat(begin, counts)
        keys = np.cumsum(np.diff(steps, prepend=-1) != 0) * (int(places.max(initial=0)) + 1) + places
        if (np.diff(keys) <= 0).any():  # repeated steps, or lanes that are not in order
            order = np.argsort(keys, kind="stable")  # the newest loss of a place is the last
            kept = order[np.diff(keys[order], append=-1) != 0]
            return LossRows(steps[kept], places[kept], losses[kept])
        return LossRows(steps, places, losses)

    def _values(self, numbers: Int64s) -> NDArray[np.float32]:
        """Return the losses of records, one after the other. Records that follow each other are read at once."""
        parts = [b""]
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []:
            begin, end = int(run[0]), int(run[-1]) + 1
            ends = [int(self._ends[begin - 1]) if begin else 0, *self._ends[begin:end].tolist()]
            data = self._ledger.loss_values(ends[0], ends[-1])
            heads = self._records[begin:end].view(f"V{LOSS_RECORD.itemsize}").tolist()
            checks = [int(self._records["check"][begin - 1]) if begin else 0]
            checks += self._records["check"][begin:end].tolist()
            places = itertools.pairwise(4 * (one - ends[0]) for one in ends)
            for number, (at, stop) in enumerate(places):
                found = loss_check(heads[number][:-8], data[at:stop], checks[number])
                if stop > len(data) or found != checks[number + 1]:
                    raise FormatError(
                        f"{self._ledger.directory}: the losses of step {self._records['step'][begin + number]} were "
                        "changed or cut; restore the files from a copy"
                    )
            parts.append(data)
        return np.frombuffer(b"".join(parts), "<f4")


def _consumed(ledger: Ledger, records: LossRecords) -> Int64s:
    """Return the numbers of the records whose step the run consumed under their plan."""
    branch = ledger.branch_records()
    if not len(branch):
        return np.empty(0, np.int64)
    at = records["step"] - int(branch[0]["step"])
    inside: Int64s = np.flatnonzero((at >= 0) & (at < len(branch)))
    is_consumed: Bools = branch["plan"][at[inside]] == records["plan"][inside]
    return inside[is_consumed]


def former_losses(ledger: Ledger, first: int, end: int) -> Iterator[Losses]:
    """Yield the losses that were known each time the run noted losses of steps [first, end) again, the newest first."""
    records = ledger.loss_records()
    numbers = np.flatnonzero((records["step"] >= first) & (records["step"] < end))
    steps, count = records["step"][numbers], np.arange(len(numbers))
    keys = (steps - first << 32) + records["place"][numbers]
    order = np.argsort(keys, kind="stable")
    begin = np.maximum.accumulate(np.where(np.diff(keys[order], prepend=-1) != 0, count, 0))
    times = np.empty_like(count)  # how often losses of the same place were noted before
    times[order] = count - begin
    goes_back = (times[1:] > 0) & ((times[1:] > times[:-1]) | (steps[1:] < steps[:-1]))
    for place in (np.flatnonzero(goes_back) + 1)[: -_MOST_PASSES - 1 : -1].tolist():
        yield Losses(ledger, int(numbers[place]))


def digest_of_losses(ledger: Ledger, records: LossRecords, first: int) -> str:
    """Return "sha256:…" over consecutive records, from number `first` on, and their losses."""
    digest = hashlib.sha256(records.tobytes())
    end = first + int(records["count"].sum(dtype=np.int64))
    for at in range(first, end, _READ):
        digest.update(ledger.loss_values(at, min(end, at + _READ)))
    return f"sha256:{digest.hexdigest()}"
