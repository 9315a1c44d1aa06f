"""Parse and describe versions in commands: `ROOT`, `ROOT@REF`, `ROOT@sha256:…`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkit.manifest import Stratum
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF
from shardkit_tools.console import clean, short_id


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """A ref or tag with its manifest and the commit that set it."""

    name: str
    is_tag: bool
    manifest_id: str
    commit: LogEntry


def parse_url(url: str) -> tuple[str, str]:
    """Return (root, ref) of a version. The default ref is ``main``."""
    root, ref = parse_dataset_url(url)
    return root, ref or DEFAULT_REF


def named_versions(log: Sequence[LogEntry]) -> list[NamedVersion]:
    """Return the current refs (``main`` first), then the tags.

    Args:
        log: commits, the newest first.
    """
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
    """Return the name of a stratum, with the class name if one of its axes is the label."""
    if "label" in axes and classes and len(stratum.values) == len(axes):
        value = stratum.values[list(axes).index("label")]
        if value.isdecimal() and int(value) < len(classes):
            return clean(f"{stratum.name} {classes[int(value)]}")
    return clean(stratum.name)


def time_text(time: str) -> str:
    """Return a commit's time in the form 2026-11-20 18:44:05."""
    return time.replace("T", " ").removesuffix("Z")


def moved_facts(moved: Mapping[str, tuple[str | None, str]]) -> list[tuple[str, str]]:
    """Return (name, text) pairs for the refs that named another version before."""
    return [
        (f"moved {name}", f"from {short_id(stood)} to {short_id(now)}")
        for name, (stood, now) in moved.items()
        if stood is not None
    ]


def moved_document(moved: Mapping[str, tuple[str | None, str]]) -> dict[str, dict[str, str | None]]:
    """Return the moved refs as JSON data: name → {"from", "to"}. A new ref has "from" null."""
    return {name: {"from": stood, "to": now} for name, (stood, now) in moved.items()}
