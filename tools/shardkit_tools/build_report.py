"""What `shardkit build` tells: progress, the result as a page and as a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardkit_tools import console
from shardkit_tools.building import BuildResult, Progress
from shardkit_tools.console import bytes_text, count_text, duration_text, share_text
from shardkit_tools.versions import moved_document

_VERBS = {"read": "reading", "pack": "packing", "write": "writing", "commit": "committing"}


def progress_text(now: Progress, doing: str | None = None) -> str:
    """One line that says how far a build is, and what it is doing: the phase, unless given."""
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
    """What ``--json`` prints."""
    manifest = result.manifest
    return {
        "root": root,
        "ref": ref,
        "id": manifest.id if manifest else None,
        "commit": result.commit.n if result.commit else None,
        "moved": moved_document(result.moved),
        "schema": {name: str(kind) for name, kind in manifest.schema.items()} if manifest else {},
        "samples": result.rows,
        "raw_bytes": result.raw_bytes,
        "stored_bytes": manifest.stored_bytes if manifest else None,
        "shards": result.shards,
        "strata": dict(result.strata),
        "pooled_strata": result.pooled,
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


def print_result(document: Mapping[str, Any], doing: str = "build") -> None:
    """Print for people what a build or an adoption did, or would do."""
    root, ref, rows = document["root"], document["ref"], document["samples"]
    is_made = document["id"] is not None
    version = f"{root}@{ref}"
    console.print_line(version if is_made else f"would {doing} {version}; nothing was written", "bold")
    page = {name: value for name, value in document.items() if value != 0 and name not in _NOT_ON_THE_PAGE}
    page |= {name: _shares(document.get(name, {}), rows) for name in ("strata", "classes")}
    page["moved"] = {name: one for name, one in document["moved"].items() if one["from"] is not None}
    if is_made:
        page["split_samples"] = None  # `splits` has them
    if is_made and document["commit"] is None:
        page["commit"] = "none: the same version was there already"
    console.print_document(page)
    for note in document.get("notes", ()):
        console.print_line(f"note: {note}", "yellow")
    if is_made:
        console.print_line(f"next: shardkit show {root}{'' if ref == 'main' else '@' + ref}", "dim")


_NOT_ON_THE_PAGE = ("root", "ref", "notes", "lag_bytes")


def _shares(counts: Mapping[str, int], rows: int) -> dict[str, dict[str, float]]:
    """Of strata or classes, the largest first; nothing where there is only one."""
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0])) if len(counts) > 1 else []
    return {name: {"samples": count, "share": count / rows} for name, count in largest}
