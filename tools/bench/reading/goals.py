"""Define the goals of reading, and decide whether the results meet them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.reading.figures import Spread, later, of, rates, shares, spread

__all__ = ["Goal", "goals"]

_OF_PRIVATE = 0.95
"""If private blocks miss a goal, shardkit meets it with this share of their rate."""
_OWN = ("shardkit", "within", "beyond")
_MIB = 1 << 20


@dataclass(frozen=True)
class Goal:
    """One line of the table; ``met`` is None if the goal was not measured."""

    text: str
    wanted: str
    found: str
    met: bool | None


def goals(results: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the measured parts."""
    readers = {part: result["readers"] for part, result in results.items()}
    yield from _rows(readers)
    yield from _objects(readers)
    for part in ("tokens", "small", "blobs", "text"):
        if part in readers:
            yield _evenness(readers[part].get("shardkit", {}), part)
            yield _wait(readers[part].get("shardkit", {}), part)
    if "tokens" in readers:
        yield from _costs(readers["tokens"])
    if "workers" in readers:
        one, other = (readers["workers"].get(name, {}) for name in ("shardkit", "memmap"))
        yield _ratio("tokens, two DataLoader workers, of the memory map with two", 1.0, one, other)
    if "s3" in readers:
        one, other = (readers["s3"].get(name, {}) for name in ("shardkit", "ranges"))
        yield _ratio("S3, shuffled epoch without a cache, of obstore", 0.9, one, other)


def _rows(readers: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of rows of one size."""
    if "tokens" in readers:
        yield _share(readers["tokens"], "tokens, first epoch, touched", 0.55, "touched", first=True)
    for part in ("tokens", "small"):
        if part in readers:
            yield _share(
                readers[part], f"{part}, every later epoch and 4× beyond memory, touched", 0.70, "touched"
            )
            yield _share(readers[part], f"{part}, the same, read once", 0.85, "read")


def _objects(readers: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of bytes and text."""
    if "blobs" in readers:
        for limit, text in (
            ("limit", "map + XXH3 + new bytes"),
            ("memmap", "the memory map that people write"),
        ):
            yield _share(
                readers["blobs"], f"blobs, every epoch, of {text}", 1.0, "touched", every=True, limit=limit
            )
    if "text" in readers:
        yield _share(readers["text"], "text, every epoch, of zstd on all threads", 0.6, "touched", every=True)


def _share(
    readers: dict[str, Any],
    text: str,
    wanted: float,
    mode: str,
    *,
    first: bool = False,
    every: bool = False,
    limit: str = "limit",
) -> Goal:
    """Return the goal for shardkit's worst epoch over all memory bounds, as a share of the limit per repeat."""
    worst: tuple[bool, float, str] | None = None
    for key in ("shardkit",) if first else _OWN:
        reader = readers.get(key, {})
        last = later(reader, mode).stop
        for epoch in range(1) if first else range(last) if every else later(reader, mode):
            found = spread(shares(reader, readers.get(limit, {}), mode, epoch))
            if found is None:
                continue
            beside = _beside_private(readers, key, mode, epoch, wanted) if limit == "limit" else None
            met = found.median >= wanted or (beside is not None and beside >= _OF_PRIVATE)
            where = f"{found.told('.2f')}, {key}, epoch {epoch + 1}"
            if beside is not None:
                where += f"; {beside:.2f} of private blocks, which miss it too"
            if worst is None or (met, found.median) < worst[:2]:
                worst = (met, found.median, where)
    if worst is None:
        return Goal(text, f"≥ {wanted:.2f}", "not measured", None)
    return Goal(text, f"≥ {wanted:.2f}", worst[2], worst[0])


def _beside_private(readers: dict[str, Any], key: str, mode: str, epoch: int, wanted: float) -> float | None:
    """Return shardkit's rate over private blocks in the same epoch; None if private blocks meet the goal."""
    private = readers.get("private_blocks", {})
    own = spread(shares(private, readers.get("limit", {}), mode, epoch))
    if own is None or own.median >= wanted:
        return None
    pairs = zip(rates(readers[key], mode, epoch), rates(private, mode, epoch), strict=False)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _evenness(reader: dict[str, Any], part: str) -> Goal:
    """Return the goal for the slowest over the fastest epoch after the first, per repeat."""
    found = []
    for epochs in reader.get("epochs", {}).get("touched", ()):
        speeds = [one["samples"] / one["seconds"] for one in epochs[1:]]
        if len(speeds) > 1:
            found.append(min(speeds) / max(speeds))
    return _judge(f"{part}, worst ÷ best epoch after the first", spread(found), at_least=0.85)


def _wait(reader: dict[str, Any], part: str) -> Goal:
    """Return the goal for the longest wait in the later epochs of a repeat."""
    each = [[one["longest_s"] * 1e3 for one in of(reader, "touched", k)] for k in later(reader, "touched")]
    longest = [max(waits) for waits in zip(*each, strict=False)]
    return _judge(
        f"{part}, longest wait between batches, warm, steady, ms", spread(longest), at_most=20, form=".1f"
    )


def _costs(readers: dict[str, Any]) -> Iterator[Goal]:
    own = readers.get("shardkit", {})
    cpu = [
        spread([one["cpu_s"] / one["samples"] * 1e6 for one in of(readers.get(key, {}), "touched", epoch)])
        for key in _OWN
        for epoch in range(later(readers.get(key, {}), "touched").stop)
    ]
    known = [one for one in cpu if one is not None]
    dearest = max(known, key=lambda one: one.median) if known else None
    yield _judge("CPU per tokens row, dearest epoch, touched, µs", dearest, at_most=3.2)
    last = later(own, "touched").stop - 1
    peak = spread([one["peak"] / _MIB for one in of(own, "touched", last)]) if last >= 0 else None
    yield _judge("resident at most, default settings, tokens, MiB", peak, at_most=450, form=".0f")
    yield _judge("first batch of a fresh process, all imports, s", spread(own.get("first", [])), at_most=0.3)


def _ratio(text: str, wanted: float, one: dict[str, Any], other: dict[str, Any]) -> Goal:
    """Return the goal for the ratio of two readers' rates in the last epoch, per repeat."""
    last = later(one, "touched").stop - 1
    if last < 0:
        return Goal(text, f"≥ {wanted:.2f}", one.get("error", "not measured"), None)
    pairs = zip(rates(one, "touched", last), rates(other, "touched", last), strict=False)
    return _judge(text, spread([mine / theirs for mine, theirs in pairs]), at_least=wanted)


def _judge(
    text: str,
    found: Spread | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    form: str = ".2f",
) -> Goal:
    wanted = f"≥ {at_least:.2f}" if at_least is not None else f"≤ {at_most:g}"
    if found is None:
        return Goal(text, wanted, "not measured", None)
    met = found.median >= at_least if at_least is not None else found.median <= (at_most or 0.0)
    return Goal(text, wanted, found.told(form), met)
