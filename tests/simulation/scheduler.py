"""One thread, many actors: which of them runs next, what fails and who dies is drawn from a seed.

Every actor is a greenlet that runs the product's own code. It gives the turn away at each request to a store and
whenever it sleeps; nothing else can interleave. The clock is virtual: it moves with requests and jumps over sleeps.
After FoundationDB's simulation (Zhou et al., SIGMOD 2021, §4).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import NoReturn

from greenlet import getcurrent, greenlet

__all__ = ["Actor", "Deadlock", "Killed", "Scheduler"]

_SWITCH = 0.25
_LATENCY_S = 0.02


class Killed(BaseException):
    """The process of an actor is gone: whatever its code still does has no effect."""


class Deadlock(AssertionError):
    """Actors are left and no request of theirs is under way."""


class Actor:
    """A process of the simulation: work that may be killed, and is then begun again."""

    def __init__(self, name: str, work: Callable[[], None], *, kills: int, skew_s: float = 0.0) -> None:
        self.name, self.work = name, work
        self.is_mortal = kills > 0
        self.kills_left = kills
        self.skew_s = skew_s
        """How far the clock of its machine is ahead."""
        self.process = 0
        """Its number; another one each time that it begins again."""
        self.is_dead = False
        self.is_done = False
        self.wakes_at = 0.0
        self.greenlet: greenlet | None = None


class Scheduler:
    """The only source of chance.

    Args:
        seed: of everything.
        muted: numbers of draws whose outcome is "nothing happens": how a trace is made shorter.
        most_requests: after so many requests of all actors no fault is drawn any more.
    """

    def __init__(self, seed: int, *, muted: Collection[int] = (), most_requests: int = 20_000) -> None:
        self.random = random.Random(seed)
        self.now = 1_700_000_000.0
        self.actors: list[Actor] = []
        self.boots = 1
        """How often the machines were started."""
        self.trace: list[str] = []
        self.drawn: list[int] = []
        """Numbers of the draws in which something happened."""
        self.is_calm = False
        """Whether no faults are drawn: while the world is set up, and in the end."""
        self._muted = frozenset(muted)
        self._draws = self._requests = 0
        self._processes = 1
        self._most_requests = most_requests
        self._hub: greenlet = getcurrent()
        self._running: Actor | None = None

    # ---- for actors

    def happens(self, probability: float) -> bool:
        """Whether something does, this time."""
        self._draws += 1
        if self.random.random() >= probability or self.is_calm or self._draws in self._muted:
            return False
        self.drawn.append(self._draws)
        return True

    def request(self, what: str) -> None:
        """A request begins: others may run before it, or its actor may be killed.

        Raises:
            Killed: the actor is dead.
        """
        actor = self._running
        if actor is None:
            return
        self._check_alive(actor)
        self._requests += 1
        if self._requests > 3 * self._most_requests:
            raise Deadlock("the actors do not come to an end")
        self.now += self.random.random() * _LATENCY_S
        if self._requests < self._most_requests and actor.kills_left and self.happens(0.004):
            actor.kills_left -= 1
            self._kill(actor)
        if self.happens(_SWITCH):
            self._give_turn()
            self._check_alive(actor)
        self.trace.append(f"{actor.name}: {what}")

    def check_alive(self) -> None:
        """Something is done that others cannot see.

        Raises:
            Killed: the actor is dead.
        """
        actor = self._running
        if actor is not None:
            self._check_alive(actor)

    def kill_all(self) -> None:
        """The power is cut: every process is dead, and no misfortune is."""
        self.boots += 1
        for actor in self.actors:
            if actor.greenlet is not None and actor.is_mortal:
                actor.is_dead = True
                actor.wakes_at = self.now

    def sleep(self, seconds: float) -> None:
        """Wait on the virtual clock."""
        actor = self._running
        if actor is None:
            self.now += max(0.0, seconds)
            return
        self._check_alive(actor)
        actor.wakes_at = self.now + max(0.0, seconds)
        self._give_turn()
        self._check_alive(actor)

    @property
    def process(self) -> int:
        """The number of the process that asks."""
        actor = self._running
        return 1 if actor is None else actor.process

    def time(self) -> float:
        """Seconds since 1970, as the machine of the process that asks has them."""
        return self.now + (self._running.skew_s if self._running else 0.0)

    def is_alive(self, process: int) -> bool:
        """Whether a process is."""
        return process == 1 or any(
            actor.process == process and actor.greenlet is not None and not actor.is_dead
            for actor in self.actors
        )

    def _check_alive(self, actor: Actor) -> None:
        if actor.is_dead:
            raise Killed

    def _kill(self, actor: Actor) -> NoReturn:
        self.trace.append(f"{actor.name}: KILLED")
        actor.is_dead = True
        raise Killed

    def _give_turn(self) -> None:
        self._hub.switch()

    # ---- the loop

    def run(self, actors: list[Actor]) -> None:
        """Run actors until all are done; those that were killed begin again."""
        self.actors = actors
        self._hub = getcurrent()
        while waiting := [actor for actor in actors if not actor.is_done]:
            ready = [actor for actor in waiting if actor.wakes_at <= self.now]
            if not ready:
                self.now = min(actor.wakes_at for actor in waiting)
                continue
            actor = ready[self.random.randrange(len(ready))]
            if actor.greenlet is None:
                actor.is_dead = False
                self._processes += 1
                actor.process = self._processes
                actor.greenlet = greenlet(self._body(actor))
            self._running = actor
            actor.greenlet.switch()
            self._running = None
            if actor.greenlet.dead:
                actor.greenlet = None
                actor.wakes_at = self.now
        self.actors = []

    def _body(self, actor: Actor) -> Callable[[], None]:
        def body() -> None:
            try:
                actor.work()
            except Killed:
                return
            if (
                not actor.is_dead
            ):  # code that swallows everything must not make a dead process finish its work
                actor.is_done = True

        return body
