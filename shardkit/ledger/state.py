"""`state.json`: how much of the ledger is committed, and what the next merge goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from shardkit.errors import FormatError, IntegrityError
from shardkit.formats.canonical_json import dumps, loads
from shardkit.formats.digest import sha256_digest

__all__ = ["LedgerState"]

_MAX_STATE: Final = 1 << 28


@dataclass
class LedgerState:
    """What `state.json` holds: how much is committed, and what the next merge goes on from.

    Attributes:
        records: step records in `steps`, abandoned branches included.
        check: checksum of the last of them.
        first: step of the first leaf.
        branch: [step, record] pairs: from which step on the records of the current branch begin where.
        peaks: frontier of the tree of steps; its size is the number of leaves.
        events, events_bytes, events_check, events_peaks: the same of `events`.
        heads_bytes, heads_check: of `heads`.
        plans: (manifest id, plan digest) by number.
        journals: file name → [offset, checksum, start]: what of it is merged.
        start: the newest start of the run, see `merging`.
    """

    records: int = 0
    check: int = 0
    first: int = 0
    size: int = 0
    branch: list[list[int]] = field(default_factory=list)
    peaks: list[str] = field(default_factory=list)
    events: int = 0
    events_bytes: int = 0
    events_check: int = 0
    events_peaks: list[str] = field(default_factory=list)
    heads_bytes: int = 0
    heads_check: int = 0
    plans: list[list[str]] = field(default_factory=list)
    journals: dict[str, list[int]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Canonical JSON with its own digest; checksums as text, since they may exceed int64."""
        body = {
            name: f"{value:016x}" if name.endswith("check") else value for name, value in vars(self).items()
        }
        body["journals"] = {
            name: [at, f"{check:016x}", start] for name, (at, check, start) in self.journals.items()
        }
        return (
            dumps({"format": "shardkit-ledger/1", "state": body, "digest": sha256_digest(dumps(body))})
            + b"\n"
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerState:
        """Read it back.

        Raises:
            IntegrityError: damaged.
        """
        try:
            document = loads(data.rstrip(b"\n"), _MAX_STATE)
            body = dict(document["state"])
            if document["format"] != "shardkit-ledger/1" or document["digest"] != sha256_digest(dumps(body)):
                raise FormatError("its digest does not fit")
            for name in list(body):
                body[name] = int(body[name], 16) if name.endswith("check") else body[name]
            body["journals"] = {
                n: [at, int(check, 16), start] for n, (at, check, start) in body["journals"].items()
            }
            return cls(**body)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"ledger/state.json is damaged: {error}") from error
