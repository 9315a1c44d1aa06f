"""What a commit asks for, applied to a head; pure, so that a commit is rebased by applying it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shardkit.errors import CommitConflict, UsageError
from shardkit.formats.digest import parse_digest
from shardkit.repository.log import MAX_NAMES, LogEntry, check_ref_name

__all__ = ["Changes"]

_NOTHING: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Changes:
    """Refs to set or drop, tags to add or withdraw, and what must hold before."""

    refs: Mapping[str, str | None]
    """Name → manifest id, None to drop the ref."""
    tags: Mapping[str, str]
    expected: Mapping[str, str | None]
    """Name → what the ref must point at when the commit lands, None for "must not exist"."""
    withdraw: Mapping[str, str] = field(default_factory=dict)
    """Tag → the manifest id that it has: the tag goes, for good, and the log says so."""

    def __post_init__(self) -> None:
        for name in (*self.refs, *self.tags, *self.expected, *self.withdraw):
            check_ref_name(name)
        for manifest in (
            *self.refs.values(),
            *self.tags.values(),
            *self.expected.values(),
            *self.withdraw.values(),
        ):
            if manifest is not None:
                parse_digest(manifest)
        both = sorted(self.refs.keys() & self.tags.keys())
        if both:
            raise UsageError(
                f"{both[0]!r} is to become a ref and a tag: a name can be one of them; use two names"
            )

    @property
    def manifests(self) -> set[str]:
        """Manifests that must be in the repository before the commit."""
        return {manifest for manifest in (*self.refs.values(), *self.tags.values()) if manifest is not None}

    def apply(self, base: LogEntry | None, head: LogEntry | None) -> dict[str, dict[str, str]]:
        """The tables of refs, tags and withdrawn tags after this commit.

        Args:
            base: The head when the commit began.
            head: The head now: the commit is rebased onto it where it touches other refs.

        Raises:
            CommitConflict: A ref is not where it was expected, or was moved since `base`; or a tag exists, or is to go
                and names something else, or the name is that of a withdrawn one.
        """
        base_refs = base.refs if base else _NOTHING
        refs = dict(head.refs if head else _NOTHING)
        tags = dict(head.tags if head else _NOTHING)
        self._check_expected(refs)
        for name, manifest in self.refs.items():
            now = refs.get(name)
            if name not in self.expected and now not in (base_refs.get(name), manifest):
                raise CommitConflict(
                    f"ref {name!r} was moved to {now} by another commit, expected {base_refs.get(name)}; "
                    "look at it (shardkit log), then commit again"
                )
            if manifest is None:
                refs.pop(name, None)
            else:
                refs[name] = manifest
        self._add_tags(tags)
        gone = self._withdrawn(head)
        again = sorted((tags.keys() | refs.keys()) & gone.keys() - self.withdraw.keys())
        if again:
            raise CommitConflict(
                f"{again[0]!r} was a tag of {gone[again[0]]}, which was withdrawn: its name is never used again; use "
                "another name"
            )
        tags = {name: manifest for name, manifest in tags.items() if name not in self.withdraw}
        _check_tables(refs, tags)
        return {"refs": refs, "tags": tags, "withdrawn": gone}

    def _withdrawn(self, head: LogEntry | None) -> dict[str, str]:
        gone = dict(head.withdrawn if head else _NOTHING)
        tags = head.tags if head else _NOTHING
        for name, manifest in self.withdraw.items():
            if tags.get(name, gone.get(name)) != manifest:
                raise CommitConflict(
                    f"tag {name!r} names {tags.get(name)}, expected {manifest}; look at it (shardkit log), then try "
                    "again"
                )
            gone[name] = manifest
        return gone

    def _check_expected(self, refs: Mapping[str, str]) -> None:
        for name, manifest in self.expected.items():
            # Where it stands already where it is to go, nobody loses anything: the same version was made twice.
            if refs.get(name) != manifest and (name not in self.refs or refs.get(name) != self.refs[name]):
                raise CommitConflict(
                    f"ref {name!r} points at {refs.get(name)}, expected {manifest}; "
                    "look at it (shardkit log), then commit again"
                )

    def _add_tags(self, tags: dict[str, str]) -> None:
        for name, manifest in self.tags.items():
            if tags.setdefault(name, manifest) != manifest:
                raise CommitConflict(
                    f"tag {name!r} exists and points at {tags[name]}: tags are never moved; use another name"
                )


def _check_tables(refs: Mapping[str, str], tags: Mapping[str, str]) -> None:
    both = sorted(refs.keys() & tags.keys())
    if both:
        raise CommitConflict(f"{both[0]!r} would be a ref and a tag at once; use another name")
    if max(len(refs), len(tags)) > MAX_NAMES:
        raise UsageError(
            f"{len(refs)} refs and {len(tags)} tags, expected at most {MAX_NAMES} each; drop some refs"
        )
