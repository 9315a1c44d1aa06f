"""Versions as commands name and describe them: `ROOT`, `ROOT@REF`, `ROOT@sha256:…`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkit.manifest import Stratum
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF
from shardkit_tools.console import clean, short_id


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """A ref or tag, and the commit that gave it its present manifest."""

    name: str
    is_tag: bool
    manifest_id: str
    commit: LogEntry


def parse_url(url: str) -> tuple[str, str]:
    """(root, ref) of a version; the ref is ``main`` where none is given."""
    root, ref = parse_dataset_url(url)
    return root, ref or DEFAULT_REF


def named_versions(log: Sequence[LogEntry]) -> list[NamedVersion]:
    """Refs (``main`` first), then tags, as they stand."""
    if not log:
        return []
    versions = []
    for is_tag, names in ((False, log[0].refs), (True, log[0].tags)):
        for name in sorted(names, key=lambda name: (name != DEFAULT_REF, name)):
            commit = log[0]
            for entry in log:
                if (entry.tags if is_tag else entry.refs).get(name) != names[name]:
                    break
                commit = entry
            versions.append(NamedVersion(name, is_tag, names[name], commit))
    return versions


def stratum_label(stratum: Stratum, axes: Sequence[str], classes: Sequence[str]) -> str:
    """The name of a stratum, with the class name where one of its axes is the label."""
    if "label" in axes and classes and len(stratum.values) == len(axes):
        value = stratum.values[list(axes).index("label")]
        if value.isdecimal() and int(value) < len(classes):
            return clean(f"{stratum.name} {classes[int(value)]}")
    return clean(stratum.name)


def time_text(time: str) -> str:
    """A commit's time for people: 2026-11-20 18:44:05."""
    return time.replace("T", " ").removesuffix("Z")


def moved_facts(moved: Mapping[str, tuple[str | None, str]]) -> list[tuple[str, str]]:
    """Which refs named another version before, for people."""
    return [
        (f"moved {name}", f"from {short_id(stood)} to {short_id(now)}")
        for name, (stood, now) in moved.items()
        if stood is not None
    ]


def moved_document(moved: Mapping[str, tuple[str | None, str]]) -> dict[str, dict[str, str | None]]:
    """Which refs moved, for machines; from null: the ref is new."""
    return {name: {"from": stood, "to": now} for name, (stood, now) in moved.items()}
