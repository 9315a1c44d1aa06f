"""Records of runs as they might have been: for tests of the rules over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit.telemetry import Record

__all__ = ["made_series"]


def made_series(
    rank: int = 0,
    *,
    world: int = 1,
    records: int = 40,
    interval_s: float = 2.0,
    begin: float = 1_000.0,
    lanes: Sequence[int] = (0, 1),
    per_interval: Mapping[str, float] | None = None,
    change: Callable[[int], Mapping[str, float]] | None = None,
    session: str = "one",
    stage: str = "compute",
    state: str = "running",
    **fields: Any,
) -> list[Record]:
    """Counters that grow by the same in every interval, but where `change` says otherwise.

    Args:
        rank: of the records.
        world: ranks in all.
        records: how many.
        interval_s: between them.
        begin: time of the first.
        lanes: of the rank.
        per_interval: counter → growth in an interval.
        change: number of an interval (from 1 on) → growths that differ in it.
        session: of all of them.
        stage: that the trainer says it is in.
        state: of the last one.
        fields: of every record.
    """
    totals: dict[str, float] = {}
    made = []
    for number in range(records):
        if number:
            for name, growth in {**(per_interval or {}), **(change(number) if change else {})}.items():
                totals[name] = totals.get(name, 0.0) + growth
        totals["loader.step"] = totals.get("loader.steps", 0.0)
        made.append(
            Record(
                time=begin + number * interval_s, rank=rank, world=world, interval_s=interval_s, host=f"node{rank}",
                session=session, lanes=tuple(lanes), values=dict(totals), tables={"stage": [[stage]]},
                state=state if number == records - 1 else "running", **fields,
            )
        )  # fmt: skip
    return made
