"""`shardkit log`: the commits of a root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.texts import clean, short_id
from shardkit_tools.versions import time_text


def log(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A dataset's folder.")],
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Show only the newest N.")
    ] = None,
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
        console.print_table(
            [">commit", "time (UTC)", "*message", "*change"],
            [
                (
                    str(commit["n"]),
                    time_text(commit["time"]),
                    clean(
                        f"{commit['message']} ({commit['author']})" if commit["author"] else commit["message"]
                    ),
                    "\n".join(_change_text(change) for change in commit["changes"]),
                )
                for commit in commits
            ],
        )


def list_commits(root: str) -> dict[str, Any]:
    """What ``--json`` prints: every commit with what it changed."""
    repository = Repository.open(parse_dataset_url(root)[0], read_only=True)
    entries = repository.log()
    commits = []
    for place, entry in enumerate(entries):
        before = entries[place + 1] if place + 1 < len(entries) else None
        changes = _changes("ref", before.refs if before else {}, entry.refs)
        changes += _changes("tag", before.tags if before else {}, entry.tags)
        commits.append(
            {
                "n": entry.n,
                "time": entry.time,
                "author": entry.author,
                "message": entry.message,
                "changes": changes,
                "software": entry.software,
                "digest": entry.digest,
            }
        )
    return {"root": root, "repository": repository.id, "commits": commits}


def _changes(kind: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[dict[str, str | None]]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [{"kind": kind, "name": name, "from": before.get(name), "to": after.get(name)} for name in names]


def _change_text(change: Mapping[str, Any]) -> str:
    name = clean(change["name"]) if change["kind"] == "ref" else f"tag {clean(change['name'])}"
    gone = "dropped" if change["kind"] == "ref" else "withdrawn"
    return f"{name} → {short_id(change['to'])}" if change["to"] else f"{name} {gone}"
