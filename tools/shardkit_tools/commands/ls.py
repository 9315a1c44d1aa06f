"""`shardkit ls`: which versions a root holds."""

from __future__ import annotations

from typing import Annotated, Any

from shardkit.reading.inventory import read_root
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, short_id
from shardkit_tools.options import argument
from shardkit_tools.version_report import named_versions, time_text


def ls(
    root: Annotated[str, argument("ROOT", "A dataset's folder.")],
    as_json: options.JsonFlag = False,
) -> None:
    """List the versions of a dataset: its refs and tags.

    Example: shardkit ls data/cats
    """
    document = list_versions(root)
    if as_json:
        console.print_json(document)
    elif not document["versions"]:
        console.print_line(f"{root} has no versions yet; build one: shardkit build SOURCE {root}")
    else:
        console.print_table(["*name", "kind", ">samples", ">size", ">shards", "committed (UTC)", "id"], [
            (one["name"], one["kind"], count_text(one["samples"]), bytes_text(one["selected_bytes"]),
             count_text(one["shards"]), time_text(one["time"])[:16], short_id(one["id"]))
            for one in document["versions"]
        ])  # fmt: skip


def list_versions(root: str) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    repository = Repository.open(parse_dataset_url(root)[0], read_only=True)
    versions = []
    for version in named_versions(repository.log()):
        manifest = read_root(repository.store, version.manifest_id)
        versions.append({
            "name": version.name,
            "kind": "tag" if version.is_tag else "ref",
            "id": version.manifest_id,
            "samples": manifest.selected,
            "rows": manifest.rows,
            "shards": manifest.shards,
            "stored_bytes": manifest.stored_bytes,  # of its shards, which other versions share
            "selected_bytes": manifest.stored_bytes * manifest.selected // max(1, manifest.rows),
            "commit": version.commit.n,
            "time": version.commit.time,
        })  # fmt: skip
    return {"root": root, "repository": repository.id, "versions": versions}
