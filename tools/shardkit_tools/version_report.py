"""How commands show versions (URLs, refs, tags, strata), and the progress and the result of a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardkit.extras import shell_word
from shardkit.manifest import Manifest
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF
from shardkit_tools import console
from shardkit_tools.console import bytes_text, count_text, duration_text, share_text, short_id

if TYPE_CHECKING:
    from shardkit_tools.building.outcome import BuildResult, Progress, SkippedRow, SpaceNeed


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


_STRATA_SHOWN = 15
_CLASSES_SHOWN = 4
_SKIPPED_SHOWN = 5
_MOSTLY_PADDING = 3
_VERBS = {"read": "reading", "pack": "packing", "write": "writing", "commit": "committing"}


def progress_text(now: Progress, doing: str | None = None) -> str:
    """Return a line on the progress of a build. `doing` replaces the name of the phase."""
    if now.phase == "commit":
        return "committing …"
    left = f", {duration_text(now.seconds_left)} left" if now.seconds_left is not None else ""
    is_scratch = now.phase == "read" and now.scratch_bytes
    scratch = f", scratch {bytes_text(now.scratch_bytes)}" if is_scratch else ""
    return (
        f"{doing or _VERBS[now.phase]} {count_text(now.rows, 'sample')}, {bytes_text(now.done_bytes)} of "
        f"{bytes_text(now.total_bytes)} ({share_text(now.done_bytes, now.total_bytes)}), "
        f"{bytes_text(int(now.rate))}/s{left}{scratch}"
    )


def document(result: BuildResult, root: str, ref: str) -> dict[str, Any]:
    """Return the result as printed by ``--json``."""
    manifest = result.manifest
    return {
        "root": root,
        "ref": ref,
        "id": manifest.id if manifest else None,
        "commit": result.commit.n if result.commit else None,
        "moved": moved_document(result.moved),
        "healed": list(result.healed),
        "samples": result.rows,
        "raw_bytes": result.raw_bytes,
        "stored_bytes": manifest.stored_bytes if manifest else None,
        "shards": result.shards,
        "strata": dict(result.strata),
        "pooled_strata": result.pooled,
        "fields": {name: str(kind) for name, kind in result.schema.items()},
        "importer": result.importer,
        "format": result.format,
        "compression": result.compression,
        "classes": dict(sorted(result.classes.items())),
        "notes": list(result.notes),
        "splits": {name: {"id": one.id, "samples": one.selected} for name, one in result.splits.items()},
        "split_samples": dict(result.split_rows),
        "skipped": [
            {"source": row.source_name, "row": row.source_row, "error": row.message} for row in result.skipped
        ],
        "skipped_file": result.skipped_file,
        "duplicates": result.duplicates,
        "packed": asdict(result.packed) if result.packed else None,
        "source_bytes": result.source_bytes,
        "scratch_bytes": result.scratch_bytes,
        "space": [
            {
                "for": one.what,
                "folder": one.folder,
                "need_bytes": one.need_bytes,
                "free_bytes": one.free_bytes,
            }
            for one in result.space
        ],
        "reused_tasks": result.reused_tasks,
        "reused_shards": result.reused_shards,
        "seconds": round(result.seconds, 3),
    }


def print_result(result: BuildResult, root: str, ref: str) -> None:
    """Print the result of a build, or of a dry run."""
    manifest = result.manifest
    version = f"{root}@{ref}"
    console.print_line(version if manifest else f"would build {version}; nothing was written", "bold")
    console.print_facts(_facts(result, manifest))
    for note in result.notes:
        console.print_line(f"note: {note}", "yellow")
    if not manifest:
        print_strata(result.strata, result.rows)
    if result.skipped:
        console.print_heading(f"Skipped {_count_skips(result.skipped)}")
        for row in result.skipped[:_SKIPPED_SHOWN]:
            console.print_line(f"  {row.message}")
        if result.skipped_file:
            console.print_line(f"all of them: {result.skipped_file}")
    if manifest:
        print_next(root, ref)


def print_next(root: str, ref: str) -> None:
    """Print the command that shows a new version."""
    is_plain = ref == DEFAULT_REF and "@" not in root.rpartition("/")[2]
    console.print_line(f"next: shardkit show {shell_word(root if is_plain else f'{root}@{ref}')}", "dim")


def _facts(result: BuildResult, manifest: Manifest | None) -> list[tuple[str, object]]:
    strata = f" in {count_text(len(result.strata))} strata" if len(result.strata) > 1 else ""
    pooled = f", {result.pooled} of them pooled: too rare for every shard" if result.pooled else ""
    rate = bytes_text(int(result.source_bytes / result.seconds)) if result.seconds else "–"
    reused = f"{result.reused_tasks} tasks, {result.reused_shards} shards of an interrupted run"
    return [
        ("id", manifest.id if manifest else None),
        ("fields", _fields(result)),
        ("format", _format(result)),
        ("samples", f"{count_text(result.rows)}{strata}{pooled}"),
        ("classes", _classes(result.classes) if result.classes else None),
        ("size", bytes_text(manifest.stored_bytes) if manifest else
         f"{bytes_text(result.raw_bytes)} before compression"),
        ("shards", count_text(result.shards)),
        ("read", f"{bytes_text(result.source_bytes)} in {duration_text(result.seconds)}, {rate}/s"),
        *((f"split {name}", _split(result, name, rows)) for name, rows in result.split_rows.items()),
        *((f"{one.what} space", _space(one)) for one in result.space),
        ("duplicates", f"{count_text(result.duplicates)} left out" if result.duplicates else None),
        ("packed", _pack_line(result)),
        ("commit", "none: the same version was there already" if manifest and result.commit is None else None),
        ("healed", f"{count_text(len(result.healed), 'damaged object')} replaced" if result.healed else None),
        *moved_facts(result.moved),
        ("reused", reused if result.reused_tasks or result.reused_shards else None),
    ]  # fmt: skip


def print_strata(strata: Mapping[str, int], rows: int) -> None:
    """Print the largest strata with their shares, if there are several."""
    if len(strata) < 2:
        return
    console.print_heading("Strata")
    largest = sorted(strata.items(), key=lambda item: (-item[1], item[0]))
    console.print_table(
        ["*stratum", ">samples", ">share"],
        [(name, count_text(n), share_text(n, rows)) for name, n in largest[:_STRATA_SHOWN]],
    )
    console.print_more(len(largest) - _STRATA_SHOWN, "")


def _classes(counts: Mapping[str, int]) -> str:
    """Return the number of classes, and the first and last few with their numbers of samples."""
    listed = [f"{name} {count:,}" for name, count in sorted(counts.items())]
    if len(listed) > 2 * _CLASSES_SHOWN:
        listed[_CLASSES_SHOWN:-_CLASSES_SHOWN] = ["…"]
    return f"{len(counts):,}: {', '.join(listed)}"


def _fields(result: BuildResult) -> str:
    importer = f" (from {result.importer})" if result.importer else ""
    return f"{result.schema}{importer}"


def _format(result: BuildResult) -> str:
    """Return format and compression with the kind of data they suit, and advice if headers take most bytes."""
    if result.format == "arrow":
        compression = "not compressed" if result.compression == "none" else result.compression
        return f"arrow, {compression}; for numbers, text and small values"
    if result.raw_bytes > _MOSTLY_PADDING * result.source_bytes:
        times = f"{result.raw_bytes / max(1, result.source_bytes):.0f} times the size of the source"
        return f"tar: {times}; smaller for rows like these: --format arrow --compression zstd"
    return "tar; for files, such as pictures"


def _count_skips(rows: Sequence[SkippedRow]) -> str:
    """Return the number of skipped rows; a row of -1 stands for an unknown number at the end of a file."""
    single = sum(row.source_row >= 0 for row in rows)
    texts = [count_text(single, "row")] if single else []
    ends = len({row.source_name for row in rows if row.source_row < 0})
    texts += [f"unread rows of {count_text(ends, 'file')}"] if ends else []
    return " and the ".join(texts)


def _pack_line(result: BuildResult) -> str | None:
    packed = result.packed
    if packed is None:
        return None
    share = share_text(packed.padding, packed.tokens + packed.padding)
    return (
        f"{count_text(packed.documents, 'document')}, {count_text(packed.tokens, 'token')}, {share} padding"
    )


def _space(need: SpaceNeed) -> str:
    return f"about {bytes_text(need.need_bytes)} in {need.folder}, {bytes_text(need.free_bytes)} free"


def _split(result: BuildResult, name: str, rows: int) -> str:
    text = f"{count_text(rows)} samples, {share_text(rows, result.rows)}"
    return f"{text}, {short_id(result.splits[name].id)}" if name in result.splits else text
