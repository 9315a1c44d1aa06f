"""The process-wide random generators that transforms of other libraries draw from: Python's, numpy's and torch's.

Threads share them, so what a row draws would depend on which thread comes first. Rows that have the generators for
themselves are worked with seeds of their place in the plan; elsewhere a transform that draws from them is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np

from shardkit.errors import ConfigurationError
from shardkit.plan import Place, draws

R = TypeVar("R")

_CALLS: Final = 16  # of a loop that are judged


def _torch_generator() -> Any:
    """Torch's default generator; None while torch is not imported."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _states() -> dict[str, Any]:
    """Name of each generator → its state, in a form that compares."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  the generator of others
    words = numpy["state"]["key"].tobytes()
    found: dict[str, Any] = {
        "Python's random": random.getstate(),
        "numpy.random": (words, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]),
    }
    if (generator := _torch_generator()) is not None:
        found["torch's default generator"] = generator.get_state().numpy().tobytes()
    return found


@contextmanager
def seeded(place: Place) -> Iterator[None]:
    """Seed all three from a place of the plan; afterwards each continues as if nothing had been drawn.

    The caller sees to it that no other thread draws meanwhile.
    """
    of_python, of_numpy, of_torch = draws(place, "global generators", 3)
    python, numpy, generator = random.getstate(), np.random.get_state(), _torch_generator()  # noqa: NPY002
    torch = None if generator is None else generator.get_state()
    random.seed(of_python)
    np.random.seed([of_numpy & 0xFFFF_FFFF, of_numpy >> 32])  # noqa: NPY002
    if generator is not None:
        generator.manual_seed(of_torch)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if generator is not None:
            generator.set_state(torch)


def work_seeded(place: Place, work: Callable[[], R]) -> R:
    """Call `work` with seeded generators; again if it was the first to import torch, whose generator then was not."""
    with seeded(place):
        had_torch = _torch_generator() is not None
        done = work()
    if not had_torch and _torch_generator() is not None:
        with seeded(place):
            return work()
    return done


class TrainerWaits:
    """Whether the trainer waits for the loader, and draws nothing meanwhile: ``with waits:`` around the wait."""

    def __init__(self) -> None:
        self.number = 0  # odd while it waits

    def __enter__(self) -> None:
        self.number += 1

    def __exit__(self, *error: object) -> None:
        self.number += 1


class GeneratorWatch:
    """Observes the first calls of a loop's function and refuses one that moves a global generator.

    The trainer draws from the same generators, so only calls during all of which it waits are judged. Calls may
    overlap: what moves a generator is then another call of the same function.
    """

    def __init__(self, waits: TrainerWaits, advice: str) -> None:
        self._waits, self._advice = waits, advice
        self._left, self._moved = _CALLS, 0

    def observe(self, work: Callable[[], R]) -> R:
        """Call `work`.

        Raises:
            ConfigurationError: it moved a generator, and so did a call that ended before it began.
        """
        if self._left <= 0:
            return work()
        moved_before, wait, before = self._moved, self._waits.number, _states()
        done = work()
        after = _states()
        if wait % 2 == 0 or wait != self._waits.number:
            return done
        self._left -= 1
        moved = [name for name, state in before.items() if after[name] != state]
        if not moved:
            return done
        if moved_before:  # a single one may have been another thread of the program
            raise ConfigurationError(self._advice.format(" and ".join(moved)))
        self._moved = 1
        return done


TRANSFORM_ADVICE: Final = (
    "transform= or decode= draws from {}, which all threads share, so that batches would differ from run to run; pass "
    'workers="processes", or threads=1 without prefetch=, to ds.loader, which then seeds it for each sample, or draw '
    "from the generator that transform gets as its second argument"
)
BATCH_ADVICE: Final = (
    "batch_transform= draws from {}, so that batches would differ from run to run; draw from the generators that it is "
    'given as its second argument, or draw in transform= with workers="processes"'
)
