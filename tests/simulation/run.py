"""``python -m tests.simulation.run --seeds 0:2000``: simulate; a failure prints its seed and its shortest trace.

A process of its own, since the seams are those of the whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tests.simulation.mutations import FOUND_BY, MUTATIONS, mutated
from tests.simulation.simulating import shorten, simulate, templates

__all__ = ["main"]

MOST_SEEDS: Final = 2_000
"""In which each mutation must be found."""


def find_mutations(names: Iterable[str], seeds: Iterable[int]) -> int:
    """Print the first seed that finds each mutation; exit code 1 where one is not found, or fails without it."""
    templates()
    missed = 0
    for name in names:
        with mutated(name):
            found = next(((seed, problem) for seed in seeds if (problem := simulate(seed).problem)), None)
        own = "" if found is None else simulate(found[0]).problem
        if found is None:
            told = "not found"
        elif own:
            told = f"seed {found[0]} fails without it: {own[:150]}"
        else:
            told = f"seed {found[0]}: {found[1][:150]}"
        missed += found is None or bool(own)
        print(f"{name}: {told}", flush=True)
    return 1 if missed else 0


def main() -> int:
    """Run seeds; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default=os.environ.get("SEED", "0:200"), help="FIRST:LAST, or one")
    parser.add_argument("--mutation", default="", help="a fault in the product, with which the seeds are run")
    parser.add_argument(
        "--mutations", action="store_true", help="find the first seed for each mutation, or for the one"
    )
    parser.add_argument(
        "--check", action="store_true", help="find each mutation of FOUND_BY, beginning with its seed"
    )
    parser.add_argument("--part", default="0/1", help="with --check: the mutations of this part, of so many")
    parser.add_argument("--all", action="store_true", help="go on after a failure, and print no traces")
    parser.add_argument("-v", action="store_true", help="print the whole trace")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what waits in a simulation says so every few virtual seconds
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if given.check:
        part, parts = map(int, given.part.split("/"))
        some = list(FOUND_BY.items())[part::parts]
        return max(find_mutations([name], [seed, *range(MOST_SEEDS)]) for name, seed in some)
    if given.mutations:
        return find_mutations([given.mutation] if given.mutation else list(MUTATIONS), seeds)
    templates()
    started, errors, failed = time.process_time(), Counter[str](), 0
    with mutated(given.mutation) if given.mutation else contextlib.nullcontext():
        for seed in seeds:
            found = simulate(seed)
            errors += found.errors
            if given.v:
                print("\n".join(found.trace))
            if found.problem and given.all:
                failed += 1
                print(f"seed {seed}: {found.problem}", flush=True)
            elif found.problem:
                short = shorten(seed, found)
                print("\n".join(short.trace))
                print(f"seed {seed}: {short.problem}\nagain: SEED={seed} pytest tests/simulation")
                return 1
    if not given.v:
        print(f"{len(seeds)} seeds, {time.process_time() - started:.1f} s of CPU")
    for name, count in sorted(errors.items()):
        print(f"  {count:6} {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
