"""Events of a ledger. Each kind has one writer, one place and one shape (SPEC.md, "Events").

Documents are validated when they are written and when they are read, so other modules can rely on the types and sizes
of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from shardkit.documents import DIGEST, convert
from shardkit.errors import FormatError

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
Lane: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 24)]
Hex: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
CellDigest: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Digest: TypeAlias = Annotated[str, Meta(pattern=f"^{DIGEST.pattern}$")]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]
Weight: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,200}(\.[0-9]{1,200}|/[1-9][0-9]{0,199})?$")]
"""A weight without an exponent, which would make a number of any size."""


class _Event(Struct, forbid_unknown_fields=True):
    kind: str
    step: Count


# ---- written by the merge of the journals


class PlanRecipe(Struct, forbid_unknown_fields=True):
    """One entry of `Plan.history`: the settings of a plan, or the change that made it from the previous plan."""

    manifest: Digest
    settings: dict[str, Any]
    change: dict[str, Any] | None


class PlanFacts(Struct, forbid_unknown_fields=True):
    """The first entry of a journal: the facts needed to rebuild the plan."""

    history: list[PlanRecipe] = []
    dataset: list[Text] = []
    beside: list[Text] = []


class _Plan(_Event):
    number: Count
    manifest: Digest
    plan: Hex
    lanes: Lane
    history: list[PlanRecipe] = []
    dataset: list[Text] = []
    beside: list[Text] = []


class _Start(_Event):
    start: Count
    ranks: Rank
    workers: Rank
    reached: Count
    repeats: Count
    time: Count


class _Assignment(_Event):
    start: Count
    lanes: list[tuple[Rank, Lane, Lane]]


class TreeHead(Struct, forbid_unknown_fields=True):
    """Size and root of a tree. `first` is the step of the first leaf in the tree of steps."""

    size: Count
    root: Hex
    first: Count = 0


class Head(Struct, forbid_unknown_fields=True):
    """Heads of both trees."""

    steps: TreeHead
    events: TreeHead


class _Fork(_Event):
    record: Count
    start: Count
    plan: Count
    abandoned: TreeHead


class _Conflict(_Event):
    start: Count
    lane: Lane
    before: CellDigest
    now: CellDigest


# ---- written by a process before it makes a claim


class _Checkpoint(_Event):
    name: Text
    checkpoint: Digest
    merged: Count
    replaces: Digest | None = None


class _Configuration(_Event):
    run: Digest
    settings: Annotated[str, Meta(max_length=1 << 24)]
    changed: list[tuple[Text, Text, Text]]
    allowed: list[Text]


class _Losses(_Event):
    first: Count
    end: Count
    digest: Digest


class _Deal(_Event):
    nodes: list[Text]
    lanes: Lane
    owners: list[Rank]


class _Amendment(_Event):
    number: Count
    from_step: Count
    resume_from: Count
    parent: Hex
    plan: Hex
    manifest: Digest
    skip: Count | None
    weights: dict[Text, Weight] | None
    excluded: Digest | None
    author: Text
    message: Text
    time: Count


class _Undo(_Event):
    number: Count
    author: Text
    message: Text
    time: Count


class _Switch(_Event):
    number: Count


# ---- written by ranks, through their journals


class _JournalEvent(_Event):
    rank: Rank
    start: Count


class _Replacement(_JournalEvent):
    lane: Lane
    slot: Count
    sample: Count
    by: Count
    field: Text
    reason: Text


class _Rewind(_JournalEvent):
    worker: Rank
    number: Count
    reached: Count


class _Stage(_JournalEvent):
    number: Count


class _Decoders(_JournalEvent):
    made_by: dict[Text, Text]


class _Rebalance(_JournalEvent):
    number: Count
    from_step: Count
    owner: list[Rank]
    moved: Count
    before_us: Count
    expected_us: Count
    undoes: Count


class _Decision(_JournalEvent):
    plan: Hex
    stage: Count
    weights: list[Count]
    drawn: list[Count]
    sums: list[int]
    counts: list[Count]


class _ReadEvent(_JournalEvent):
    location: Text
    count: Annotated[int, Meta(gt=0, lt=1 << 62)]
    what: Text


SUBSTITUTED: Final = "substituted"
"""Kind of the event of a replaced sample: `sample` was planned, `by` was used."""
MASKED: Final = "masked"
"""Kind of the event of a sample that was marked invalid. The digest of its cell equals the plan's."""
READS: Final = (
    "failover", "mismatch", "missing", "rebuild", "repair", "repair_failed", "location_lost", "location_back",
)  # fmt: skip
"""Kinds of read events: a count of incidents at one location, with the first object affected."""

JOURNALED: Final[Mapping[str, type[_Event]]] = {
    SUBSTITUTED: _Replacement, MASKED: _Replacement, "rewind": _Rewind, "stage": _Stage, "decoders": _Decoders,
    "rebalance": _Rebalance, "decision": _Decision, **dict.fromkeys(READS, _ReadEvent),
}  # fmt: skip
"""Kinds that ranks write. A journal may hold no other kinds."""
MERGED: Final[Mapping[str, type[_Event]]] = {
    "plan": _Plan, "start": _Start, "assignment": _Assignment, "fork": _Fork, "conflict": _Conflict,
}  # fmt: skip
"""Kinds that the merge of the journals writes."""
BOUND: Final[Mapping[str, type[_Event]]] = {
    "checkpoint": _Checkpoint, "configuration": _Configuration, "dealt": _Deal, "amendment": _Amendment, "undo": _Undo,
    "switch": _Switch, "losses": _Losses,
}  # fmt: skip
"""Kinds that a process writes directly to the ledger before it makes the claim."""

_SHAPES: Final[Mapping[str, type[_Event]]] = {**JOURNALED, **MERGED, **BOUND}


def check_event(document: Mapping[str, Any], where: str) -> None:
    """Raise FormatError unless the document is an event of a known kind with exactly the fields of that kind."""
    shape = _SHAPES.get(str(document.get("kind")))
    if shape is None:
        raise FormatError(
            f"{where}: {str(document.get('kind'))[:40]!r} is no kind of event; do not trust the record"
        )
    convert(shape, document, where)


def journaled_event(step: int, rank: int, start: int, body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the ledger event of a journal entry. Raise FormatError if a journal may not hold it."""
    if body.get("kind") not in JOURNALED or not body.keys().isdisjoint(("step", "rank", "start")):
        raise FormatError(
            f"{where}: a rank's journal holds an event of the kind {str(body.get('kind'))[:40]!r} with the fields "
            f"{', '.join(map(str, body))[:200]}, and ranks write none like that: it was put there by somebody else"
        )
    event = {"step": step, "rank": rank, "start": start, **body}
    check_event(event, where)
    return event
