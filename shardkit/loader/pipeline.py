"""From steps to batches, ahead of the trainer and in order: plan → load → gather → transform.

Two stages on at most two threads of their own beside the block loaders. The prefetcher plans groups of steps and loads
their blocks; the assembler gathers a step at a time. Where gathering is all that a step needs and takes well below a
millisecond, it runs in the trainer's own `next`: a copy into memory that this core has just freed costs less than
handing it over, and no thread fights the trainer for the interpreter. Otherwise it runs ahead on a thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from shardkit.errors import UsageError
from shardkit.loader.assembly import Assembler, BegunStep, StepBatches
from shardkit.loader.background import Background, Waits
from shardkit.loader.prefetcher import Prefetcher
from shardkit.loader.schedule import StepGroup
from shardkit.loader.statistics import LoaderCounts

__all__ = ["Pipeline", "PipelineSettings"]

_GROUPS_AHEAD = 1  # beside the one that is gathered and the one that is planned


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How far a pipeline runs ahead.

    Attributes:
        prefetch: how many finished steps may wait; 0 gathers in the trainer's own `next`.
        stall_s: the watchdog speaks after so many seconds without a batch.
        report: what it calls: (seconds, stage, the group that is waited for).
    """

    prefetch: int
    stall_s: float
    report: Callable[[float, str, StepGroup | None], None]


class Pipeline:
    """One pass over the steps of a prefetcher.

    Args:
        prefetcher: finds and loads what the steps need.
        assemble: gathers and transforms one group, in step order.
        settings: see there.
        counts: where time goes.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        assemble: Assembler,
        *,
        settings: PipelineSettings,
        counts: LoaderCounts,
    ) -> None:
        self._prefetcher, self._assemble = prefetcher, assemble
        self._settings, self._counts = settings, counts
        self._process = os.getpid()
        self._stopping = threading.Event()
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._current: StepGroup | None = None  # the group that is gathered or waited for
        self.plan_waits, self.assembly_waits = Waits(), Waits()
        self._groups = Background(
            iter(prefetcher),
            _GROUPS_AHEAD,
            name="shardkit-plan",
            waits=self.plan_waits,
            on_stall=lambda waited: self._report(waited, "plan"),
            stall_s=settings.stall_s,
            stop=self._stop,
        )
        self._ahead: Background[StepBatches] | None = None
        if settings.prefetch:
            self._ahead = Background(
                self._steps(),
                settings.prefetch,
                name="shardkit-assembly",
                waits=self.assembly_waits,
                on_stall=lambda waited: self._report(waited, "assemble"),
                stall_s=settings.stall_s,
                stop=self._stop,
            )
        self._output: Iterator[StepBatches] = self._steps() if self._ahead is None else self._ahead

    def __iter__(self) -> Iterator[StepBatches]:
        try:
            while True:
                if self._process != os.getpid():
                    raise UsageError(
                        "this loop was begun in the parent process, and its threads and blocks are there; iterate "
                        "over the loader again to begin one here"
                    )
                one = next(self._output, None)
                if one is None:
                    return
                yield one
        finally:
            self.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, or until the end."""
        return (self._ended or time.perf_counter()) - self._started

    @property
    def queued_groups(self) -> int:
        """Groups planned ahead."""
        return len(self._groups)

    @property
    def queued_steps(self) -> int:
        """Finished steps that wait for the trainer."""
        return 0 if self._ahead is None else len(self._ahead)

    @property
    def prefetch(self) -> int:
        """How many finished steps may wait; 0 where steps are gathered when they are asked for."""
        return 0 if self._ahead is None else self._ahead.depth

    @prefetch.setter
    def prefetch(self, value: int) -> None:
        if self._ahead is not None:
            self._ahead.depth = max(1, value)

    def close(self) -> None:
        """Stop the threads, drop what was made ahead; may be called twice and from any thread."""
        if self._process != os.getpid():
            return  # a forked child has none of the threads, and perhaps their locks as they were held
        self._stop()
        self._ended = self._ended or time.perf_counter()
        if self._ahead is not None:
            self._ahead.close()
        self._groups.close()
        self._output = iter(())
        self._prefetcher.end()

    def _stop(self) -> None:
        self._stopping.set()
        self._prefetcher.stop()

    # ---- stages

    def _steps(self) -> Iterator[StepBatches]:
        ahead = min(self._assemble.ahead, self._settings.prefetch)
        with contextlib.closing(self._begun_steps()) as begun:
            if ahead:
                yield from self._finished_behind(begun, ahead)
            else:
                yield from map(self._assemble.finish, begun)

    def _finished_behind(self, steps: Iterator[BegunStep], ahead: int) -> Iterator[StepBatches]:
        """Steps finished in order, while workers have the `ahead` after them."""
        begun: deque[BegunStep] = deque()
        error: Exception | None = None
        one: BegunStep | None
        try:
            while True:
                try:
                    one = next(steps, None)
                except Exception as raised:  # noqa: BLE001  raised below, after the steps before it
                    one, error = None, raised
                if one is not None:
                    begun.append(one)
                while begun and (one is None or len(begun) > ahead):
                    done = self._assemble.finish(begun[0])
                    begun.popleft()
                    yield done
                    del done  # the trainer may let go of it
                if one is None:
                    break
        finally:
            for left in begun:
                left.give_up()
        if error is not None:
            raise error

    def _begun_steps(self) -> Generator[BegunStep]:
        for blocks in self._groups:
            self._current = blocks.group
            yield from self._assemble.begin(
                blocks, self._settings.stall_s, lambda waited: self._report(waited, "load")
            )

    def _report(self, waited: float, stage: str) -> None:
        self._counts.stalls += 1
        self._settings.report(waited, stage, self._current)
