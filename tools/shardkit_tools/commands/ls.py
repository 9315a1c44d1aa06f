"""`shardkit ls`: which versions a root holds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardkit.reading.inventory import read_root
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.texts import bytes_text, clean, count_text, short_id
from shardkit_tools.versions import named_versions, time_text


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A dataset's folder.")],
    as_json: options.JsonFlag = False,
) -> None:
    """List the versions of a dataset: its refs and tags.

    Example: shardkit ls data/cats
    """
    document = list_versions(root)
    if as_json:
        console.print_json(document)
        return
    if not document["versions"]:
        console.print_line(
            f"{document['root']} has no versions yet; build one: shardkit build SOURCE {document['root']}"
        )
        return
    console.print_table(
        ["name", "kind", ">samples", ">size", ">shards", "committed (UTC)", "id"],
        [
            (
                clean(version["name"]),
                version["kind"],
                count_text(version["samples"]),
                bytes_text(version["stored_bytes"]),
                count_text(version["shards"]),
                time_text(version["time"]),
                short_id(version["id"]),
            )
            for version in document["versions"]
        ],
    )


def list_versions(root: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    repository = Repository.open(parse_dataset_url(root)[0], read_only=True)
    versions = []
    for version in named_versions(repository.log()):
        manifest = read_root(repository, version.manifest_id)
        versions.append(
            {
                "name": version.name,
                "kind": "tag" if version.is_tag else "ref",
                "id": version.manifest_id,
                "samples": manifest.selected,
                "rows": manifest.rows,
                "shards": manifest.shards,
                "stored_bytes": manifest.stored_bytes,
                "commit": version.commit.n,
                "time": version.commit.time,
            }
        )
    return {"root": root, "repository": repository.id, "versions": versions}
