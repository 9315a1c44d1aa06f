"""`shardkit log`: the commits of a root."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.console import short_id
from shardkit_tools.options import argument, option
from shardkit_tools.version_report import time_text


def log(
    root: Annotated[str, argument("ROOT", "A dataset's folder.")],
    limit: Annotated[int | None, option("--limit -n N", "Show only the newest N.", min=1)] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """List the commits of a dataset, newest first, once their chain has been verified.

    Example: shardkit log data/cats -n 10
    """
    document = list_commits(root)
    commits = document["commits"] = document["commits"][:limit]
    if as_json:
        console.print_json(document)
    elif not commits:
        console.print_line(f"{root} has no commits yet; build a version: shardkit build SOURCE {root}")
    else:
        console.print_table([">commit", "time (UTC)", "*message", "*change"], [
            (one["n"], time_text(one["time"]),
             f"{one['message']} ({one['author']})" if one["author"] else one["message"],
             [_change_text(change) for change in one["changes"]])
            for one in commits
        ])  # fmt: skip


def list_commits(root: str) -> dict[str, Any]:
    """Return the document that ``--json`` prints: every commit with its changes."""
    repository = Repository.open(parse_dataset_url(root)[0], read_only=True)
    commits = []
    for entry, before in pairwise([*repository.log(), None]):
        assert entry is not None, "the log ends once"
        refs, tags = (before.refs, before.tags) if before is not None else ({}, {})
        commits.append({
            "n": entry.n,
            "time": entry.time,
            "author": entry.author,
            "message": entry.message,
            "changes": [*_changes("ref", refs, entry.refs), *_changes("tag", tags, entry.tags)],
            "software": entry.software,
            "digest": entry.digest,
        })  # fmt: skip
    return {"root": root, "repository": repository.id, "commits": commits}


def _changes(kind: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[dict[str, str | None]]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [{"kind": kind, "name": name, "from": before.get(name), "to": after.get(name)} for name in names]


def _change_text(change: Mapping[str, Any]) -> str:
    is_tag = change["kind"] == "tag"
    name = f"tag {change['name']}" if is_tag else str(change["name"])
    gone = "withdrawn" if is_tag else "dropped"
    return f"{name} → {short_id(change['to'])}" if change["to"] else f"{name} {gone}"
