"""One loop over a loader: each step once, in order, the next one to be looked at before; ended by whatever moves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from shardkit.errors import UsageError
from shardkit.loader.batch import Batch
from shardkit.loader.pipeline import LoaderCounts, Pipeline, StepBatches

__all__ = ["Loop", "Steps"]


class Steps:
    """The steps of a pipeline, each taken once; dropping this closes the pipeline, once it has been asked for a step.

    What the pipeline raises is raised by every later call too: an error that was met in looking ahead does not end a
    loop as if there were no more steps.

    Args:
        pipeline: over `numbers`.
        numbers: the steps.
        lanes: whose cells they are.
        counts: of the loop; a step counts when it is taken, not when it is looked at.
        to_device: makes of the steps of the pipeline those that are taken.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        numbers: range,
        lanes: list[int],
        counts: LoaderCounts,
        to_device: Callable[[Pipeline], Iterator[StepBatches]] = iter,
    ) -> None:
        self.pipeline, self.numbers, self.lanes, self.counts = pipeline, numbers, lanes, counts
        self._steps = to_device(pipeline)
        self._next: StepBatches | None = None
        self._waited_s = 0.0  # for the next one
        self._error: Exception | None = None

    def peek(self) -> StepBatches | None:
        """The next step; None where there is none, or where the pipeline was closed."""
        if self._error is not None:
            raise self._error
        if self._next is None:
            started = time.perf_counter()
            try:
                self._next = next(self._steps, None)
            except BaseException as error:
                self._error = error if isinstance(error, Exception) else _interrupted(error)
                raise
            self._waited_s = time.perf_counter() - started
        return self._next

    def take(self) -> StepBatches | None:
        """The next step, which is the trainer's from now on."""
        one, self._next = self.peek(), None
        if one is not None:
            self.counts.last_wait_s = self._waited_s
            self.counts.consumer_wait_s += self._waited_s
            self.counts.steps += 1
            self.counts.samples += len(one.samples)
        return one


class Loop(Iterator[Batch]):
    """What `iter(loader)` gives.

    Args:
        hand_out: makes the next batch of this loop the trainer's.
        finish: called when more is asked for than there is.
        steps: of the loop.
        stop: the end of its epoch.
    """

    def __init__(
        self, hand_out: Callable[[Loop], Batch], finish: Callable[[Loop], None], steps: Steps, stop: int
    ) -> None:
        self._hand_out, self._finish = hand_out, finish
        self.steps, self.stop = steps, stop
        self.left = steps.numbers  # not handed out yet
        self.ended_by: str | None = None  # what ended it before its last step

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            UsageError: the loader has begun another loop, or was moved or closed, before the last step of this one.
        """
        if not self.left:
            self._finish(self)
            raise StopIteration
        if self.ended_by is None:
            return self._hand_out(self)
        raise UsageError(
            f"this loop ended before step {self.left[0]}: {self.ended_by}. A loader has one loop at a time; to look at "
            "the next batch without leaving the loop call loader.peek()"
        )

    def close(self) -> None:
        """Leave the loop here: nothing is read for it any more; may be called twice."""
        self.ended_by = self.ended_by or "it was closed"
        self.steps.pipeline.close()

    @property
    def is_under_way(self) -> bool:
        """Whether it has a batch to hand out."""
        return bool(self.left) and self.ended_by is None


def _interrupted(error: BaseException) -> UsageError:
    return UsageError(f"this loop was interrupted by {type(error).__name__}; iterate again, or load a state")
