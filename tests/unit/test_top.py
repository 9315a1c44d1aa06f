"""`shardkit top` in terminals of several widths."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from rich.console import Console

from shardkit.telemetry import RunTelemetry, summarise
from shardkit_tools.commands.top import terminal_page
from shardkit_tools.observing.run_view import grouped_events
from tests.unit.telemetry_series import made_series

GROWTH = {
    "loader.steps": 10.0, "loader.samples": 320_000.0, "loader.cells": 80.0, "loader.consumer_wait_s": 1.5,
    "loader.step": 10.0, "blocks.local_bytes": 4e9, "process.cpu_s": 1.0,
}  # fmt: skip


def lines_at(width: int, ranks: int = 8) -> list[str]:
    series = [
        made_series(rank, world=ranks, records=120, per_interval=GROWTH, lanes=range(8 * rank, 8 * rank + 8))
        for rank in range(ranks)
    ]
    telemetry = RunTelemetry({(one[-1].rank, one[-1].worker): one for one in series})
    document = {"run": "runs-with-a-name", "loss": 1.25, **summarise(telemetry, [], series[0][-1].time)}
    for row in document["ranks"]:
        row["host"] = f"node-{row['rank']}.training.cluster.example.com"
    document |= {"steps": None, "replication_lag_bytes": None, "verification_failures": 0} | document
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=24, force_terminal=True, color_system=None)
    console.print(terminal_page(document, width, 8))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 130, 220])
def test_rank_step_wait_and_bottleneck_are_whole_at_every_width(width: int) -> None:
    lines = lines_at(width)
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if line.startswith("rank"))
    rows = lines[lines.index(heads) + 1 :][:8]
    for column in ("rank", "step", "data wait", "bound by"):
        assert column in heads, (width, heads)
    for number, row in enumerate(rows):
        assert row.split()[0] == str(number)
        assert "1,190" in row  # the step
        assert "75 %" in row  # the wait for data
        assert "data 75 %" in row  # what bounds it
        assert "…" not in row
    assert any("data-bound" in line for line in lines[:4])
    assert lines.index(heads) + 8 <= 24


def test_wider_terminals_show_more() -> None:
    heads = [
        next(line for line in lines_at(width) if line.startswith("rank")).split()
        for width in (80, 100, 130, 220)
    ]
    assert [len(few) <= len(more) for few, more in pairwise(heads)] == [True] * 3
    assert "host" not in heads[0]
    assert "host" in heads[-1]


def test_events_are_not_repeated_and_digests_are_short() -> None:
    digest = "3f9a" * 16
    raw = [
        {
            "time": 10.0 + rank,
            "event": "failover",
            "rank": rank,
            "name": f"objects/sha256/3f/{digest}.tar",
            "location": "b",
        }
        for rank in range(3)
    ]
    raw += [{"time": 20.0, "event": "checkpoint", "rank": 0, "digest": f"sha256:{digest}"}]
    raw += [{"time": 30.0, "event": "failover", "rank": 1, "name": "short"}]
    found = grouped_events(raw)
    assert [(one["event"], one["count"], one["rank"], one["time"]) for one in found] == [
        ("failover", 3, None, 12.0),
        ("checkpoint", 1, 0, 20.0),
        ("failover", 1, 1, 30.0),
    ]
    assert found[0]["text"] == "name=objects/sha256/3f/3f9a3f9a3f9a….tar  location=b"
    assert found[1]["text"] == "digest=sha256:3f9a3f9a3f9a…"
    assert digest not in str(found)
