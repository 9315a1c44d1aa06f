"""What a commit asks for, applied to a head; pure, so that a commit is rebased by applying it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardkit.errors import CommitConflict, UsageError
from shardkit.formats.digest import parse_digest
from shardkit.storage.log import MAX_NAMES, LogEntry, check_ref_name

__all__ = ["Changes"]

_NOTHING: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Changes:
    """Refs to set or drop, tags to add, and what must hold before."""

    refs: Mapping[str, str | None]
    """Name → manifest id, None to drop the ref."""
    tags: Mapping[str, str]
    expected: Mapping[str, str | None]
    """Name → what the ref must point at when the commit lands, None for "must not exist"."""

    def __post_init__(self) -> None:
        for name in (*self.refs, *self.tags, *self.expected):
            check_ref_name(name)
        for manifest in (*self.refs.values(), *self.tags.values(), *self.expected.values()):
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

    def apply(self, base: LogEntry | None, head: LogEntry | None) -> tuple[dict[str, str], dict[str, str]]:
        """The tables of refs and tags after this commit.

        Args:
            base: The head when the commit began.
            head: The head now: the commit is rebased onto it where it touches other refs.

        Raises:
            CommitConflict: A ref is not where it was expected, or was moved since `base`; or a tag exists.
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
        _check_tables(refs, tags)
        return refs, tags

    def _check_expected(self, refs: Mapping[str, str]) -> None:
        for name, manifest in self.expected.items():
            if refs.get(name) != manifest:
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
