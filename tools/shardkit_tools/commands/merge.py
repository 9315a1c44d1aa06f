"""`shardkit merge`: several datasets as one version; no sample is copied."""

from __future__ import annotations

import re
from typing import Annotated

from shardkit.dataset.merging import merge_datasets
from shardkit.errors import UsageError
from shardkit_tools import console, options
from shardkit_tools.options import argument
from shardkit_tools.version_report import moved_document, parse_url

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=(.+)", re.DOTALL)
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")


def merge(
    datasets: Annotated[
        list[str],
        argument(
            "[NAME=]A [NAME=]B… ROOT",
            "Versions to merge, each ROOT or ROOT@REF, and last where the merged version goes.",
        ),
    ],
    ref: options.RefOption = "main",
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    as_json: options.JsonFlag = False,
) -> None:
    """Merge datasets of one schema into a version over their shards, which stay where they are.

    NAME is the first axis of the strata, so that a plan can weigh the parts; without it the folder's name is
    taken. When a part has moved, merge again with its new place.

    Example: shardkit merge web=data/web@v3 data/code data/mix && shardkit plan data/mix --global-batch 512
    """
    if len(datasets) < 2:
        raise UsageError("merge takes at least one dataset, and the ROOT that the merged version goes to")
    *urls, root = datasets
    parts: dict[str, str] = {}
    for url in urls:
        name, place = _split_name(url)
        if name in parts:
            raise UsageError(f"merge: two parts are called {name!r}; give names, such as {name}2={place}")
        parts[name] = place
    manifest, moved = merge_datasets(parts, root, ref=ref, message=message, author=author)
    samples = dict.fromkeys(parts, 0)
    for stratum in manifest.strata:
        if not stratum.pooled:
            samples[stratum.values[0]] += stratum.selected
    document = {
        "root": root,
        "ref": ref,
        "id": manifest.id,
        "commit": moved.entry.n if moved.entry else None,
        "moved": moved_document(moved.refs),
        "samples": manifest.selected,
        "parts": [
            {"name": name, "url": parts[name], "id": part, "samples": samples[name]}
            for name, part in manifest.parts
        ],
    }
    console.present(as_json, lambda: document)


def _split_name(url: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(url)
    if match is not None:
        return match[1], match[2]
    folder, _ = parse_url(url)
    name = _NO_NAME.sub("-", folder.rstrip("/").rpartition("/")[2]).lstrip("-._")
    if not name:
        raise UsageError(f"merge: {url!r} gives no name; give one, such as web={url}")
    return name, url
