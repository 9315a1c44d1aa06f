"""What the trainer reports of itself: counters of its stages, read by the telemetry of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .reporting import Timeline

__all__ = ["StageMeter"]

_STAGES = ("data", "prepare", "exchange", "compute", "reduce", "update", "checkpoint", "evaluation")


class StageMeter:
    """Adds up the stages of this rank's steps; a dozen additions per step, nothing else.

    Args:
        steps: of the whole run.
        place: gives the stage that the rank has entered.
    """

    def __init__(self, steps: int, place: Callable[[], str]) -> None:
        self._place, self._between, self._since = place, "", 0.0
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self._numbers = {"steps": 0.0, "cells": 0.0, "steps_in_all": float(steps)}

    def step(
        self, timeline: Timeline, *, computed_s: float, cells: int, loss: float, moved_bytes: float
    ) -> None:
        """One step is over.

        Args:
            timeline: of the step.
            computed_s: what this rank prepared and computed by itself; the rest of the computation was spent
                waiting for other ranks and counts as reduction.
            cells: that this rank worked.
            loss: of the step.
            moved_bytes: between ranks, since this process began.
        """
        seconds = self._seconds
        for name, value in timeline.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
        compute = timeline.seconds.get("compute", 0.0)
        own = min(compute, max(0.0, computed_s - timeline.seconds.get("prepare", 0.0)))
        seconds["compute"] -= compute - own
        seconds["reduce"] += compute - own
        numbers = self._numbers
        numbers["steps"] += 1
        numbers["cells"] += cells
        numbers["moved_bytes"] = moved_bytes
        numbers["loss"] = loss if math.isfinite(loss) else 0.0

    @contextmanager
    def between_steps(self, stage: str) -> Iterator[None]:
        """Something that takes its time between two steps."""
        self._since, self._between = time.perf_counter(), stage
        try:
            yield
        finally:
            self._between = ""
            self._seconds[stage] += time.perf_counter() - self._since

    def numbers(self) -> dict[str, float]:
        """For `Telemetry.add_source`."""
        found = {f"{name}_s": value for name, value in self._seconds.items()} | self._numbers
        between = self._between
        if between:  # what is under way counts already: an evaluation may outlast a window of the rules
            found[f"{between}_s"] += time.perf_counter() - self._since
        return found

    def stage(self) -> list[list[str]]:
        """For `Telemetry.add_table`: one row."""
        return [[self._between or self._place()]]
