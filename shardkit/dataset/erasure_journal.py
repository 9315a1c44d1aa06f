"""What an erasure leaves on its way, for a killed one to go on, and at its end, as evidence (SPEC.md §10).

Documents below ``erasures/<id>/`` of the root, in the order in which they appear: ``plan.json`` (which rows of which
shards), ``objects.json`` (what replaces them, and what is to be deleted), ``report.json`` (what was done; the first two
go). Numbers and digests only: no key, no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from shardkit.errors import FormatError, NotFoundError
from shardkit.formats import canonical_json, sha256_digest
from shardkit.repository.repository import Repository
from shardkit.stores.store import put_over

_PREFIX: Final = "erasures/"
_MAX_BYTES: Final = 2**30
_FORMAT: Final = "shardkit-erasure/1"


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """Which rows go."""

    request: str  # digest of what was asked for, by which a second call of the same kind knows it again
    reason: str  # for the log, as the author
    author: str
    # (hex of the shard, hex of its index) → rows, ascending
    shards: Mapping[tuple[str, str], tuple[int, ...]]
    notes: tuple[str, ...]  # what was found that cannot be erased from here
    samples: int  # how many were asked for

    @property
    def id(self) -> str:
        """32 hex digits: the same for the same plan."""
        return sha256_digest(self.to_bytes()).removeprefix("sha256:")[:32]

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        shards = [[*pair, list(rows)] for pair, rows in sorted(self.shards.items())]
        return canonical_json.dumps({**facts, "format": _FORMAT, "notes": list(self.notes), "shards": shards})

    @classmethod
    def from_bytes(cls, data: bytes) -> ErasurePlan:
        """Read a plan.

        Raises:
            FormatError: not one that this version writes.
        """
        value = _loads(data)
        try:
            shards = {(str(a), str(b)): tuple(int(row) for row in rows) for a, b, rows in value["shards"]}
            facts = {one.name: value[one.name] for one in fields(cls)}
            return cls(**{**facts, "shards": shards, "notes": tuple(value["notes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"erasure plan: {error!r}; a newer shardkit may read it") from None


@dataclass(frozen=True, slots=True)
class NewShard:
    """What replaces a shard of which rows were erased; `digest` is "" where no row was left."""

    digest: str
    size: int
    index_digest: str
    index_size: int
    largest_block: int
    raw_bytes: int


@dataclass(slots=True)
class ErasureReport:
    """What an erasure did."""

    id: str = ""  # of the erasure
    reason: str = ""
    samples: int = 0  # that were asked for
    rows: int = 0  # erased from shards, equal rows in other shards counted
    # old manifest id → new one, "" where nothing was left
    versions: dict[str, str] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # ref → its new manifest id, "" where it was dropped
    tags: dict[str, str] = field(default_factory=dict)  # withdrawn tag → the manifest id that it named
    commits: list[int] = field(default_factory=list)  # numbers of the log entries
    rewritten: int = 0  # shards that were replaced
    dropped: int = 0  # shards that had no row left
    objects: list[str] = field(default_factory=list)  # names of what was deleted
    bytes: int = 0  # how many bytes that were
    # what cannot be erased from here, and what to do about it
    not_reached: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class Journal:
    """The documents of one erasure."""

    def __init__(self, repository: Repository, plan: ErasurePlan) -> None:
        self._store = repository.store
        self.plan = plan
        self._folder = f"{_PREFIX}{plan.id}/"

    def begin(self) -> None:
        """Make the plan durable: from here on the erasure will be finished."""
        self._store.put_new(f"{self._folder}plan.json", self.plan.to_bytes())

    def write(self, shards: Mapping[str, NewShard], report: ErasureReport) -> None:
        """Note what replaces what, and what is to be deleted, before anything that needs it is gone."""
        document = {
            "format": _FORMAT,
            "shards": {
                key: [getattr(new, item.name) for item in fields(NewShard)] for key, new in shards.items()
            },
            "report": report.to_json(),
        }
        put_over(self._store, f"{self._folder}objects.json", canonical_json.dumps(document))

    def read(self) -> tuple[dict[str, NewShard], ErasureReport]:
        """What `write` noted; nothing where it has not been called."""
        try:
            data = self._store.get(f"{self._folder}objects.json", max_bytes=_MAX_BYTES)
        except NotFoundError:
            plan = self.plan
            return {}, ErasureReport(
                plan.id,
                plan.reason,
                plan.samples,
                sum(map(len, plan.shards.values())),
                not_reached=list(plan.notes),
            )
        value = _loads(data)
        try:
            shards = {key: NewShard(*columns) for key, columns in value["shards"].items()}
            return shards, ErasureReport(**value["report"])
        except (KeyError, TypeError) as error:
            raise FormatError(f"erasure journal: {error!r}; a newer shardkit may read it") from None

    def report(self) -> ErasureReport | None:
        """The report of an erasure that was killed while it tidied up, else None."""
        try:
            value = _loads(self._store.get(f"{self._folder}report.json", max_bytes=_MAX_BYTES))
            return ErasureReport(**value["report"])
        except NotFoundError:
            return None

    def finish(self, report: ErasureReport) -> None:
        """Leave the report, and nothing else."""
        document = {"format": _FORMAT, "report": report.to_json()}
        put_over(self._store, f"{self._folder}report.json", canonical_json.dumps(document))
        for name in ("objects.json", "plan.json"):
            self._store.delete(self._folder + name)


def unfinished(repository: Repository) -> list[ErasurePlan]:
    """Plans of erasures that were begun and are not done, oldest name first."""
    return [
        ErasurePlan.from_bytes(repository.store.get(name, max_bytes=_MAX_BYTES))
        for name in repository.store.list_after(_PREFIX)
        if name.endswith("/plan.json")
    ]


def _loads(data: bytes) -> dict[str, Any]:
    value = canonical_json.loads(data, _MAX_BYTES)
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise FormatError(f"erasure: expected {_FORMAT}; a newer shardkit may read it")
    return value
