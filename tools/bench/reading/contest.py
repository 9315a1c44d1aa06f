"""Measure one workload: build the data of its readers, and run the readers in turns."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.reading.page_cache import drop, warm
from bench.reading.processes import PEERS, SHARES_DATA, THREADS_ONLY, Job, Reader, build_data, interpreter
from bench.reading.workloads import Workload

__all__ = ["Entrant", "first_batches", "measure", "take_turns"]

_WORKER_EPOCHS = 2


@dataclass(frozen=True)
class Entrant:
    """A participant; ``modes`` has the modes measured besides "touched": "read", "delivered", "cold" and "first"."""

    label: str
    job: Job
    modes: frozenset[str]


def measure(
    workload: Workload, options: argparse.Namespace, scratch: Path, workers: int = 0
) -> dict[str, Any]:
    """Measure one workload, or two epochs of the readers with worker processes if ``workers`` is given."""
    wanted = _readers(workload, options, workers)
    builders = dict.fromkeys(SHARES_DATA.get(name, name) for name in ("memmap", *wanted))
    jobs = {
        name: Job(
            reader=name,
            workload=workload.name,
            scale=options.scale,
            directory=str(scratch / name),
            python=wanted.get(name, sys.executable),
        )
        for name in builders
    }
    failed = build_data(jobs)
    raw = (scratch / "memmap" / "rows.bin").stat().st_size
    entrants, found = {}, {}
    for key, entrant in _entrants(workload, wanted, jobs, raw, workers):
        reason = failed.get(SHARES_DATA.get(entrant.job.reader, entrant.job.reader))
        found[key] = {"label": entrant.label, "epochs": {}, "first": []} | (
            {"error": reason} if reason else {}
        )
        if reason is None:
            entrants[key] = entrant
    stayed = 0.0
    for repeat in range(options.repeats):
        print(f"  repeat {repeat + 1} of {options.repeats}", flush=True)
        first_batches(entrants, found)
        take_turns(entrants, found, options, repeat, _sequence(options, workers))
        stayed = max(stayed, _cold(entrants, found, options))
    facts = {"rows": workload.rows(options.scale), "batch": workload.batch, "bytes": raw, "stayed": stayed}
    return {**facts, "readers": found}


def _readers(workload: Workload, options: argparse.Namespace, workers: int) -> dict[str, str]:
    """Return the readers to run and the interpreter of each."""
    own = ["shardkit_reader", "memmap"]
    if not workers:
        own = ["limit", *(["private_blocks"] if workload.shape else []), *own]
    wanted = dict.fromkeys(own, sys.executable)
    if options.peers_python:
        wanted |= {name: interpreter(options.peers_python, name) for name in PEERS if name not in wanted}
    return {
        name: python
        for name, python in wanted.items()
        if (not options.readers or name in options.readers) and not (workers and name in THREADS_ONLY)
    }


def _entrants(
    workload: Workload, wanted: Mapping[str, str], jobs: Mapping[str, Job], raw: int, workers: int
) -> Iterator[tuple[str, Entrant]]:
    """Yield the key and entrant of each reader; shardkit comes three times, with different memory bounds."""

    def job(name: str, **settings: Any) -> Job:
        data = jobs[SHARES_DATA.get(name, name)]
        return Job(reader=name, workload=workload.name, scale=data.scale, directory=data.directory,
                   workers=workers, settings=settings, python=wanted[name])  # fmt: skip

    every = frozenset() if workers else frozenset({"read", "delivered", "cold", "first"})
    limits = {
        "limit": f"limit: {workload.limit}",
        "private_blocks": "limit: private blocks, hashed",
    }
    for name in wanted:
        if name in limits:
            cold = set() if workload.compressed else {"cold"}  # it decompresses from memory
            yield name, Entrant(limits[name], job(name), frozenset({"read", "delivered", *cold}))
        elif name != "shardkit_reader":
            yield name, Entrant(PEERS[name], job(name), every if name == "memmap" else every - {"delivered"})
        else:
            yield "shardkit", Entrant("**shardkit**", job(name), every)
            if not workers:
                for key, memory in (("within", 2 * raw), ("beyond", max(1 << 20, raw // 4))):
                    label = f"**shardkit**, memory={memory >> 20}MiB ({key})"
                    yield key, Entrant(label, job(name, memory=memory), frozenset({"read"}))


def _sequence(options: argparse.Namespace, workers: int) -> list[str]:
    if workers:
        return ["touched"] * min(_WORKER_EPOCHS, options.epochs)
    return ["touched"] * options.epochs + ["read"] * max(1, options.epochs - 1) + ["delivered"]


def take_turns(
    entrants: Mapping[str, Entrant],
    found: dict[str, Any],
    options: argparse.Namespace,
    repeat: int,
    sequence: Iterable[str],
) -> None:
    """Start new processes and run an epoch of each in turn; add one list of epochs per repeat to ``found``."""
    with contextlib.ExitStack() as running:
        readers = {}
        for key, entrant in entrants.items():
            if "error" not in found[key]:
                readers[key] = running.enter_context(Reader(entrant.job))
                _note(found[key], "facts", readers[key].ask("prepare"))
        for turn, mode in enumerate(sequence):
            keys = [key for key in readers if mode == "touched" or mode in entrants[key].modes]
            first = (repeat + turn) % max(1, len(keys))
            for key in keys[first:] + keys[:first]:
                warm(
                    Path(entrants[key].job.directory)
                )  # all readers' data together may exceed the page cache
                _epoch(found[key], readers[key], mode, repeat, options.seconds)


def _epoch(found: dict[str, Any], reader: Reader, mode: str, repeat: int, seconds: float) -> None:
    if "error" in found:
        return
    answer = reader.ask(f"epoch {'touched' if mode == 'cold' else mode} {seconds}")
    if "error" in answer or not answer["samples"]:
        found["error"] = answer.get("error", "no samples")
        return
    repeats: list[list[Any]] = found["epochs"].setdefault(mode, [])
    while len(repeats) <= repeat:
        repeats.append([])
    repeats[repeat].append({name: _short(value) for name, value in answer.items()})


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _note(found: dict[str, Any], name: str, answer: dict[str, Any]) -> None:
    if "error" in answer:
        found["error"] = answer["error"]
    else:
        found[name] = answer


def first_batches(entrants: Mapping[str, Entrant], found: dict[str, Any]) -> None:
    """Measure the first batch of each reader in a new process."""
    for key, entrant in entrants.items():
        if "first" in entrant.modes and "error" not in found[key]:
            with Reader(entrant.job) as reader:
                answer = reader.ask("first")
            _note(found[key], "first_of_repeat", answer)
            if "error" not in answer:
                found[key]["first"].append(_short(found[key].pop("first_of_repeat")["seconds"]))


def _cold(entrants: Mapping[str, Entrant], found: dict[str, Any], options: argparse.Namespace) -> float:
    """Run first epochs after dropping the page cache; return the largest share of a reader's pages that stayed."""
    stayed = 0.0
    for key, entrant in entrants.items():
        if "cold" in entrant.modes and "error" not in found[key]:
            stayed = max(stayed, drop(Path(entrant.job.directory)))
            with Reader(entrant.job) as reader:
                _note(found[key], "facts", reader.ask("prepare"))
                _epoch(found[key], reader, "cold", len(found[key]["epochs"].get("cold", ())), options.seconds)
    return stayed
