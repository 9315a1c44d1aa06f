"""Counters of the loader's stages: plain numbers that cost nanoseconds, always on."""

from __future__ import annotations

__all__ = ["LoaderCounts"]


class LoaderCounts:
    """Of the current or last loop. Times are seconds; every field is one key of `Loader.stats`."""

    __slots__ = (
        "computed_s",
        "consumer_wait_s",
        "gather_s",
        "last_wait_s",
        "load_wait_s",
        "plan_s",
        "samples",
        "stalls",
        "steps",
        "substitutions",
        "transform_s",
    )

    def __init__(self) -> None:
        self.computed_s = 0.0  # the rank's own part of steps, where the loop says when it is done
        self.consumer_wait_s = 0.0  # the trainer waited in `next`
        self.gather_s = 0.0
        self.last_wait_s = 0.0  # of the step handed out last
        self.load_wait_s = 0.0  # gathering waited for blocks
        self.plan_s = 0.0
        self.samples = 0
        self.stalls = 0  # reports of the watchdog
        self.steps = 0
        self.substitutions = 0  # rows replaced or masked
        self.transform_s = 0.0  # decoding and transforms, as the assembling thread sees them
