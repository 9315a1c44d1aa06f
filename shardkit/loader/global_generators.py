"""The process-wide random generators of Python, numpy and torch, from which transforms of other libraries draw.

Threads share these generators, so draws would depend on the order of threads. If only one thread of the process uses
them, they are seeded for each row from its place in the plan. Otherwise a transform that draws from them is refused.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np

from shardkit.errors import ConfigurationError
from shardkit.plan import Place, draws

R = TypeVar("R")

_CALLS: Final = 16  # number of first calls of a loop that are checked
_EVERY: Final = 16  # one in this number of later calls is checked
_log = logging.getLogger("shardkit.loader")
_reading = threading.Lock()


def _torch_generator() -> Any:
    """Return torch's default generator; None if torch is not imported."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _torch_state(generator: Any) -> Any:
    """Return the state of a torch generator as a tensor, without a garbage collection meanwhile.

    torch makes the tensor while it holds a lock of the generator. Before Python 3.12 that may start a collection, whose
    finalizers let other threads run. One that then asks for the state waits for torch's lock and lets no thread run.
    """
    with _reading:
        collects = gc.isenabled()
        try:
            gc.disable()
            return generator.get_state()
        finally:
            if collects:
                gc.enable()


# a child must not begin with the lock held, or without collections
os.register_at_fork(
    before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
)


def _states() -> dict[str, Any]:
    """Return the state of each generator by name, comparable with ==."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  the generator of others
    words = numpy["state"]["key"].tobytes()
    found: dict[str, Any] = {
        "Python's random": random.getstate(),
        "numpy.random": (words, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]),
    }
    if (generator := _torch_generator()) is not None:
        found["torch's default generator"] = _torch_state(generator).numpy().tobytes()
    return found


@contextmanager
def seeded(place: Place) -> Iterator[None]:
    """Seed the three generators from a place of the plan, and restore their states afterwards.

    The caller ensures that no other thread draws in the meantime.
    """
    of_python, of_numpy, of_torch = draws(place, "global generators", 3)
    python, numpy, generator = random.getstate(), np.random.get_state(), _torch_generator()  # noqa: NPY002
    torch = None if generator is None else _torch_state(generator)
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
    """Call `work` with seeded generators.

    If the call imported torch, whose generator was not seeded then, `work` is called again.
    """
    with seeded(place):
        had_torch = _torch_generator() is not None
        done = work()
    if not had_torch and _torch_generator() is not None:
        with seeded(place):
            return work()
    return done


class TrainerWaits:
    """Context manager around the time that the trainer waits for the loader, and thus draws nothing."""

    def __init__(self) -> None:
        self.number = 0  # odd while it waits

    def __enter__(self) -> None:
        self.number += 1

    def __exit__(self, *error: object) -> None:
        self.number += 1


class GeneratorWatch:
    """Observes calls of a user's function and reports if they advance a global generator.

    If one of the first calls does, it raises. A later call may be checked while another thread of the program draws, so
    a function that begins to draw later causes one warning.

    The trainer may draw from the same generators, so only calls during which it waits all the time are checked. Calls
    may overlap, because overlapping calls are calls of the same function.
    """

    def __init__(self, waits: TrainerWaits, advice: str) -> None:
        self._waits, self._advice = waits, advice
        self._left, self._moved, self._calls = _CALLS, 0, 0
        self._has_warned = False

    def observe(self, work: Callable[[], R]) -> R:
        """Call `work`.

        Raises:
            ConfigurationError: this call and an earlier one advanced a generator.
        """
        self._calls += 1
        is_late = self._left <= 0
        if is_late and self._calls % _EVERY:
            return work()
        moved_before, wait = self._moved, self._waits.number
        if wait % 2 == 0:
            return work()
        before = _states()
        done = work()
        after = _states()
        if wait != self._waits.number:
            return done
        self._left -= 1
        moved = [name for name, state in before.items() if after[name] != state]
        if not moved:
            return done
        if not moved_before:  # a single change may come from another thread of the program
            self._moved = 1
            return done
        text = self._advice.format(" and ".join(moved))
        if not is_late:
            raise ConfigurationError(text)
        if not self._has_warned:
            self._has_warned = True
            _log.warning(text)
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
