"""``python -m tests.simulation.run --seeds 0:2000``: simulate; a failure prints its seed and its shortest trace.

Runs in a process of its own with ``PYTHONHASHSEED=0``, so that sets are walked in the same order each time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from shardkit.errors import ShardkitError
from tests.simulation.actors import MISFORTUNES, WORK, settle
from tests.simulation.buckets import Faults
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.scheduler import Actor, Killed, Scheduler
from tests.simulation.seams import simulated
from tests.simulation.world import Snapshot, Violated, World, make_template

__all__ = ["Outcome", "main", "simulate"]


class Outcome(NamedTuple):
    """What a seed showed.

    Attributes:
        problem: what does not hold; "" for nothing.
        trace: requests and what befell them, in order.
        drawn: numbers of the draws in which something happened.
        errors: kinds of errors that work ended with.
    """

    problem: str
    trace: list[str]
    drawn: list[int]
    errors: Counter[str]


def simulate(seed: int, template: Snapshot, muted: Collection[int] = ()) -> Outcome:
    """Run one seed."""
    scheduler = Scheduler(seed, muted=muted)
    world = World(scheduler, Faults(), template)
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
        actors.append(Actor(f"{work.__name__}-{number}", tried(work), kills=2))
    for number in range(scheduler.random.randint(0, 3)):
        fate = scheduler.random.choice(MISFORTUNES)
        actors.append(Actor(f"{fate.__name__}-{number}", tried(fate), kills=0))
    problem = ""
    with simulated(scheduler, world.open_client, world.files):
        try:
            scheduler.run(actors)
            scheduler.is_calm = True
            scheduler.trace.append("==== faults have stopped")
            settle(world)
            world.check_acknowledged()
        except Violated as error:
            problem = str(error)
        except (Exception, Killed) as error:
            problem = f"{type(error).__name__}: {error}"
    return Outcome(problem, scheduler.trace, scheduler.drawn, errors)


def shorten(seed: int, template: Snapshot, found: Outcome, attempts: int = 200) -> Outcome:
    """The same failure with fewer things happening: draws are muted as long as it still fails."""
    muted: set[int] = set()
    size = max(1, len(found.drawn) // 2)
    while size and attempts:
        place = 0
        while place < len(found.drawn) and attempts:
            some = found.drawn[place : place + size]
            attempts -= 1
            again = simulate(seed, template, muted | set(some))
            if again.problem:
                muted |= set(some)
                found = again
            else:
                place += size
        size //= 2
    return found


def find_mutations(names: Iterable[str], most: int = 2_000) -> int:
    """Print the first seed that finds each mutation; exit code 1 where one is not found."""
    templates = [make_template(parity=False), make_template(parity=True)]
    missed = 0
    for name in names:
        with mutated(name):
            found = next(((seed, problem) for seed in range(most)
                          if (problem := simulate(seed, templates[seed % 2]).problem)), None)  # fmt: skip
        missed += found is None
        print(f"{name}: {'not found' if found is None else f'seed {found[0]}: {found[1][:150]}'}", flush=True)
    return 1 if missed else 0


def main() -> int:
    """Run seeds; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default=os.environ.get("SEED", "0:200"), help="FIRST:LAST, or one")
    parser.add_argument("--mutation", default="", help="a fault in the product that must be found")
    parser.add_argument("--mutations", action="store_true", help="find the first seed for each mutation")
    parser.add_argument("--all", action="store_true", help="go on after a failure, and print no traces")
    parser.add_argument("-v", action="store_true", help="print the whole trace")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what waits in a simulation says so every few virtual seconds
    if given.mutations:
        return find_mutations([given.mutation] if given.mutation else list(MUTATIONS))
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    templates = [make_template(parity=False), make_template(parity=True)]
    started, errors, failed = time.perf_counter(), Counter[str](), 0
    for seed in seeds:
        template = templates[seed % 2]
        with mutated(given.mutation) if given.mutation else contextlib.nullcontext():
            found = simulate(seed, template)
        errors += found.errors
        if given.v:
            print("\n".join(found.trace))
        if found.problem and given.all:
            failed += 1
            print(f"seed {seed}: {found.problem}", flush=True)
        elif found.problem:
            short = shorten(seed, template, found)
            print("\n".join(short.trace))
            print(f"seed {seed}: {short.problem}\nagain: SEED={seed} python -m tests.simulation.run")
            return 1
    print(f"{len(seeds)} seeds, {time.perf_counter() - started:.1f} s")
    for name, count in sorted(errors.items()):
        print(f"  {count:6} {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]],
                  {**os.environ, "PYTHONHASHSEED": "0"})  # fmt: skip
    sys.exit(main())
