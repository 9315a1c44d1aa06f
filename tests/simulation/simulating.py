"""One seed: who works, what befalls the world, and what must hold in the end."""

from __future__ import annotations

import functools
import re
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from shardkit.errors import ShardkitError
from tests.simulation.actors import DAY, MISFORTUNES, WORK, settle
from tests.simulation.buckets import Faults
from tests.simulation.scheduler import Actor, Killed, Scheduler
from tests.simulation.seams import simulated
from tests.simulation.world import Snapshot, Violated, World, make_template

__all__ = ["Outcome", "shorten", "simulate", "templates"]


class Outcome(NamedTuple):
    """What a seed showed.

    Attributes:
        problem: what does not hold; "" for nothing.
        trace: requests and what befell them, in order.
        drawn: numbers of the draws in which something happened.
        errors: kinds of errors that work ended with.
        actors: names of those who took part.
    """

    problem: str
    trace: list[str]
    drawn: list[int]
    errors: Counter[str]
    actors: tuple[str, ...]


@functools.cache
def templates() -> tuple[Snapshot, ...]:
    """What seeds start from, in turn; made before the product is mutated."""
    return tuple(
        make_template(parity=parity, on_disk=on_disk) for on_disk in (False, True) for parity in (False, True)
    )


def simulate(seed: int, muted: Collection[int] = (), absent: Collection[str] = ()) -> Outcome:
    """Run one seed; without some draws and actors, to make what it shows shorter."""
    scheduler = Scheduler(seed, muted=muted)
    faults = Faults(*(often * scheduler.random.choice((0, 1, 1, 4)) for often in Faults()))
    world = World(scheduler, faults, templates()[seed % len(templates())])
    errors: Counter[str] = Counter()

    def tried(work: Callable[[World], None]) -> Callable[[], None]:
        def attempt() -> None:
            scheduler.trace.append(f"---- {work.__name__} begins")
            try:
                work(world)
            except ShardkitError as error:
                errors[f"{work.__name__}: {type(error).__name__}"] += 1
                scheduler.trace.append(f"---- {work.__name__}: {type(error).__name__}: {error}")
            else:
                errors[f"{work.__name__}: done"] += 1

        return attempt

    actors = []
    for number in range(scheduler.random.randint(2, 4)):
        work = scheduler.random.choice(WORK)
        skew_s = scheduler.random.choice((0.0, 0.0, -3_600.0, 3.0 * DAY))
        actors.append(Actor(f"{work.__name__}-{number}", tried(work), kills=2, skew_s=skew_s))
    for number in range(scheduler.random.randint(0, 3)):
        fate = scheduler.random.choice(MISFORTUNES)
        actors.append(Actor(f"{fate.__name__}-{number}", tried(fate), kills=0))
    for actor in actors:  # some begin when a collection that marks garbage now deletes it
        late = scheduler.random.choice((False, False, True))
        actor.wakes_at = scheduler.now + (1.5 * DAY + 5.0 * scheduler.random.random() if late else 0.0)
    problem = ""
    with simulated(scheduler, world.open_client, world.files):
        try:
            scheduler.run([actor for actor in actors if actor.name not in absent])
            scheduler.is_calm = True
            scheduler.trace.append("==== faults have stopped")
            settle(world)
            world.check_acknowledged()
        except Violated as error:
            problem = str(error)
        except (Exception, Killed) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return Outcome(problem, scheduler.trace, scheduler.drawn, errors, tuple(actor.name for actor in actors))


def shorten(seed: int, found: Outcome, attempts: int = 200) -> Outcome:
    """A failure of the same seed with fewer actors and fewer misfortunes, as long as there is one."""
    absent: set[str] = set()
    for name in found.actors:
        again = simulate(seed, absent={*absent, name})
        if _kind(again) == _kind(found):
            absent.add(name)
            found = again
    muted: set[int] = set()
    size = max(1, len(found.drawn) // 2)
    while size and attempts:
        place = 0
        while place < len(found.drawn) and attempts:
            some = found.drawn[place : place + size]
            attempts -= 1
            again = simulate(seed, muted.union(some), absent)
            if _kind(again) == _kind(found):
                muted.update(some)
                found = again
            else:
                place += size
        size //= 2
    return found


def _kind(outcome: Outcome) -> str:
    """What is wrong, whatever the name is of what it is wrong with."""
    return re.sub(r"[0-9a-f]{8,}|[0-9]", "", outcome.problem)[:60]
