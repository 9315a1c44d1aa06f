"""Decisions of a mixer while a loader delivers steps (SPEC.md §11).

Each rank adds the losses that its trainer notes. In the middle of a stage the ranks send their sums of the stage before
to the leader, which decides the next stage, journals the decision and publishes it. Ranks communicate through a torch
store, without collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.documents import decode_plain, encode
from shardkit.errors import ConfigurationError, NotFoundError, StateError, UsageError
from shardkit.ledger import Ledger, merge_journals
from shardkit.ledger.decisions import (
    DECISION,
    LossSums,
    MixHistory,
    apply_decisions,
    recorded_decisions,
    recorded_sums,
)
from shardkit.ledger.losses import Losses
from shardkit.loader.agreement import Exchange
from shardkit.plan import Mixer, Plan

__all__ = ["Mixing", "make_mixing"]

_MAX_BYTES = 1 << 26
_POLL_S = 0.1  # of a thread that reads ahead


class Mixing:
    """One rank's part of mixing.

    The decisions of `plan` grow here. `exchange` connects all ranks; it is None if no messages are needed.
    """

    def __init__(
        self, mixer: Mixer, plan: Plan, run: Path, rank: int, world: int, exchange: Exchange | None
    ) -> None:
        self._mixer, self._plan, self._run, self._rank, self._world = mixer, plan, run, rank, world
        self._exchange = exchange
        self._leads = (rank if exchange is None else exchange.rank) == 0  # one process decides
        self._every, self._strata = mixer.every, len(plan.population.strata)
        self._changed = threading.Condition()
        self._seeks = 0  # part of the keys
        self.seek(0)

    def _begin(self, step: int, losses: list[LossSums]) -> None:
        self._first = step
        self._history = MixHistory(self._mixer, self._plan)
        for one in losses:
            self._history.add(one)
        self._noted: dict[int, LossSums] = {}  # by step
        self._recorded: dict[int, LossSums] = {}  # by stage: losses of the steps before `_first`

    def seek(self, step: int) -> None:
        """Continue at a step, with all recorded decisions and the losses that were recorded before it.

        Raises:
            StateError: the run directory does not hold them.
        """
        self._seeks += 1
        ledger, _ = merge_journals(self._run)
        decisions = recorded_decisions(ledger.event_documents(), self._plan.digest)
        needed = self._made_before(step)
        if len(decisions) < needed:
            raise StateError(
                f"{self._run} has {len(decisions)} decisions of the mixer before step {step}, expected {needed}; "
                "resume in the directory of the run, and at a step that it has reached"
            )
        with self._changed:
            apply_decisions(self._plan, decisions)
            self._begin(step, [one.losses for one in decisions])
            if step and self._leads and self._mixer.needs_losses:
                self._read_recorded(ledger, step, len(decisions))
            self._changed.notify_all()

    def _made_before(self, step: int) -> int:
        """Return the number of decisions that are made before a step is delivered."""
        stage, inside = divmod(step, self._every)
        return max(0, stage - (inside <= self._every // 2))

    def _read_recorded(self, ledger: Ledger, step: int, decided: int) -> None:
        """Add the losses that earlier starts noted in the stages that are still to be evaluated."""
        try:
            losses = Losses(ledger)
        except NotFoundError:
            losses = None
        for first in range(decided * self._every, step, self._every):
            end = min(step, first + self._every)
            found, count = (None, 0) if losses is None else recorded_sums(losses, self._plan, first, end)
            if found is None or count != (end - first) * self._plan.global_batch:
                raise StateError(
                    f"{self._run} has the losses of {count} samples of steps {first} to {end - 1}, expected those of "
                    f"all {(end - first) * self._plan.global_batch}; the mixer decides by them: resume at an earlier "
                    "step"
                )
            self._recorded[first // self._every] = found

    def note(self, step: int, samples: Int64s, losses: NDArray[np.float32]) -> None:
        """Add the losses of this rank's part of a step, one per row."""
        if step < max(self._first, (self._plan.mixture.decided - 2) * self._every):
            return  # losses of a stage that has been used, or that an earlier start noted
        found = LossSums.of(self._plan.grid.order.strata_of(samples), losses, self._strata)
        with self._changed:
            self._noted[step] = found

    def delivered(self, step: int, record: Callable[..., None]) -> bool:
        """Decide or learn the weights of the next stage if this step is the middle of one; return True if so.

        Called for every step in order, when it is delivered. Its decision is passed to ``record`` before it is used.

        Raises:
            UsageError: losses of the stage before have not been noted.
            RunError: another rank has not come to this step in time.
        """
        stage, inside = divmod(step, self._every)
        if inside != self._every // 2 or not stage:
            return False
        if self._plan.mixture.decided > stage + 1:
            if self._leads and self._world > 1 and self._mixer.needs_losses:
                # a rank of another machine may not have seen the newest entries of the journal when it went back
                self._send(f"decision/{stage}", list(self._plan.mixture.masses(stage + 1)))
            return False
        own = self._own_losses(stage - 1, step) if self._mixer.needs_losses else LossSums.none(self._strata)
        if not self._leads and self._mixer.needs_losses:
            self._send(f"losses/{stage}/{self._rank}", [one.tolist() for one in own])
            weights = self._receive(f"decision/{stage}", 0, step)
            with self._changed:
                self._plan.decide(weights)
                self._changed.notify_all()
            return True
        if self._mixer.needs_losses:
            for rank in range(1, self._world):
                sums, counts = self._receive(f"losses/{stage}/{rank}", rank, step)
                own += LossSums(np.array(sums, dtype=np.int64), np.array(counts, dtype=np.int64))
        with self._changed:
            decision = self._history.decide(own)
            if self._leads:
                record(step, DECISION, plan=self._plan.digest, **decision.details)
            self._changed.notify_all()
        if self._mixer.needs_losses and self._world > 1:
            self._send(f"decision/{stage}", list(decision.weights))
        return True

    def _own_losses(self, stage: int, now: int) -> LossSums:
        """Return the sum of this rank's losses of a stage, on the leader including the losses of earlier starts."""
        steps = range(max(self._first, stage * self._every), (stage + 1) * self._every)
        with self._changed:
            missing = [step for step in steps if step not in self._noted]
            if missing:
                raise UsageError(
                    f"the mixer needs the losses of steps {steps[0]} to {steps[-1]}, and step {missing[0]} has none "
                    f"when step {now} is delivered: call loader.note(batch, losses) after each step, and take at most "
                    f"{self._every // 2} steps ahead"
                )
            found = self._recorded.pop(stage, LossSums.none(self._strata))
            for step in steps:
                found += self._noted.pop(step)
        return found

    def decided_after(self, step: int, is_stopped: Callable[[], bool]) -> int:
        """Wait until a step is decided; return the first step that is not, or the step itself if stopped."""
        with self._changed:
            while (end := self._plan.decided or 0) <= step and not is_stopped():
                self._changed.wait(_POLL_S)
        return max(end, step)

    # ---- messages

    def _send(self, name: str, value: object) -> None:
        assert self._exchange is not None, "several ranks have one"
        self._exchange.put(f"{self._seeks}/{name}", encode(value))

    def _receive(self, name: str, rank: int, step: int) -> Any:
        assert self._exchange is not None, "several ranks have one"
        data = self._exchange.get(
            f"{self._seeks}/{name}", rank, late=f"has not come to step {step}",
            advice="ranks with a mixer must take the same steps",
        )  # fmt: skip
        return decode_plain(data, max_bytes=_MAX_BYTES)


def make_mixing(mixer: Mixer, plan: Plan, run: Path | None, rank: int, world: int, store: Any) -> Mixing:
    """Return this rank's part of mixing.

    All processes must make their loaders in the same order, as for the comparison at the start.

    Raises:
        ConfigurationError: there is no run directory, or ranks cannot communicate.
    """
    if run is None:
        raise ConfigurationError("mixer= records its decisions in the run directory: pass run= with it")
    exchange = None
    if world > 1 and store is not None:
        # an earlier loader of these ranks has left its keys in the store
        made = store.add(f"shardkit/mixing/loaders/{rank}", 1)
        exchange = Exchange(store, rank, world, prefix=f"shardkit/mixing/{made}/")
    elif world > 1:
        exchange = Exchange.of_process_group("mixing")
        if exchange is None and mixer.needs_losses:
            raise ConfigurationError(
                f"mixer= with {world} ranks needs torch.distributed to be initialised: they talk through its "
                "store; or pass store= with rank= and world="
            )
    return Mixing(mixer, plan, run, rank, world, exchange)
