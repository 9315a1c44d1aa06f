"""Ledgers rewritten by somebody who knows the format: all checksums and roots fit again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkit.documents import encode
from shardkit.ledger import Ledger
from shardkit.ledger.ledger import Tree, encode_line, leaf_hash, parse_lines

Event = dict[str, Any]
HeadOf = Callable[[int], Event]
"""Number of events before the change → head of those that replace them."""


def read_events(run: Path) -> list[Event]:
    """Return the committed events of a ledger, unchecked."""
    return [event for event, _ in parse_lines((run / "ledger" / "events").read_bytes(), "events")]


def write_events(run: Path, events: list[Event]) -> int:
    """Write lines whose checksums fit; return their size in bytes."""
    data, check = b"", 0
    for one in events:
        line, check = encode_line(one, check)
        data += line
    (run / "ledger" / "events").write_bytes(data)
    return len(data)


def forge_events(
    run: Path,
    change: Callable[[Event, HeadOf], Event | None],
    after: Callable[[Event], list[Event]] = lambda _: [],
) -> None:
    """Rewrite the events of a ledger, and its state.

    Args:
        run: the run directory.
        change: of every event; None drops it.
        after: events that are added after an event.
    """
    events: list[Event] = []
    sizes, tree = [0], Tree()  # sizes: number of new events by number of old ones

    def head_of(size: int) -> Event:
        return {"size": sizes[size], "root": tree.root(sizes[size]).hex()}

    for event in read_events(run):
        changed = change(dict(event), head_of)
        events += [] if changed is None else [changed]
        events += after(event)
        tree = Tree(leaf_hash(encode(one)) for one in events)
        sizes.append(len(events))
    state = Ledger(run).state
    state.events, state.events_peaks = len(events), tree.frontier().peaks
    state.events_bytes = write_events(run, events)
    (run / "ledger" / "state.json").write_bytes(state.to_bytes())
