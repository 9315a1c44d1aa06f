"""`shardkit rebuild`: a version again, in other strata, shards, blocks, format or compression."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from shardkit.dataset.version_plan import VersionSettings
from shardkit.repository.repository import DEFAULT_REF
from shardkit_tools import console, options
from shardkit_tools.building.rebuilding import label_again
from shardkit_tools.building.rebuilding import rebuild as rebuild_version
from shardkit_tools.commands.build import split_shares
from shardkit_tools.console import count_text, short_id
from shardkit_tools.options import ShardFormat, argument, option
from shardkit_tools.version_report import document, parse_url, print_result, progress_text


def rebuild(
    root: Annotated[str, argument("ROOT[@REF]", "The version whose samples are taken.")],
    to: Annotated[str | None, option("--to ROOT", "Root of the new version; default: the same root.")] = None,
    stratify: Annotated[list[str] | None, options.STRATIFY] = None,
    split: Annotated[str | None, options.SPLIT] = None,
    split_by: Annotated[str | None, options.SPLIT_BY] = None,
    format: Annotated[ShardFormat | None, options.FORMAT] = None,
    compression: Annotated[str | None, options.COMPRESSION] = None,
    shard_size: Annotated[str | None, options.SHARD_SIZE] = None,
    block_size: Annotated[str | None, options.BLOCK_SIZE] = None,
    seed: Annotated[int | None, options.SEED] = None,
    shuffle: Annotated[bool | None, options.SHUFFLE] = None,
    about: Annotated[Path | None, options.ABOUT] = None,
    lookup: Annotated[str | None, options.LOOKUP] = None,
    cost: Annotated[list[str] | None, options.COST] = None,
    ref: Annotated[
        str | None, option("--ref NAME", "The ref that is moved; default: the one named, or main of --to.")
    ] = None,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    jobs: options.JobsOption = None,
    scratch: options.ScratchOption = None,
    dry_run: options.DryRunOption = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Build a version again with other settings; samples, keys and all other settings stay the same.

    Splits are not taken over: give them again. '' for --stratify, --lookup or --cost takes them away. With --lookup,
    --cost and --about alone no shard is written. After Ctrl-C or a crash the same command continues.

    Example: shardkit rebuild data/web --stratify lang --format arrow --compression zstd --ref by-lang
    """
    given = locals()
    changes = options.settings_for(VersionSettings, given) | {
        "stratify": None if stratify is None else [axis for axis in stratify if axis],
        "cost": None if cost is None else [text for text in cost if text],
        "split": split_shares(split),
    }
    labels = {name: changes.pop(name) for name in ("about", "lookup", "cost")}
    commit: dict[str, Any] = {"ref": ref, "message": message, "author": author}
    shards_stay = to is None and all(setting is None for setting in changes.values())
    if shards_stay and not dry_run and any(setting is not None for setting in labels.values()):
        _label_again(root, labels | commit, as_json=as_json)
        return
    with console.long_work() as status:
        result = rebuild_version(
            root,
            to,
            **changes,
            **labels,
            **commit,
            jobs=jobs or os.cpu_count() or 1,
            scratch=scratch,
            dry_run=dry_run,
            progress=lambda now: status.show(progress_text(now)),
        )
    place = to or parse_url(root)[0]
    named = ref or (parse_url(root)[1] if to is None else DEFAULT_REF)
    if as_json:
        console.print_json(document(result, place, named))
    else:
        print_result(result, place, named)


def _label_again(root: str, given: dict[str, Any], *, as_json: bool) -> None:
    """Look-ups, costs and the about over the same shards."""
    manifest, entry = label_again(root, **given)
    if as_json:
        console.print_json(
            {"root": parse_url(root)[0], "id": manifest.id, "commit": entry.n if entry else None}
        )
        return
    told = f"commit {entry.n}" if entry else "nothing has changed"
    samples = count_text(manifest.selected, "sample")
    console.print_line(f"{root}: {samples} in the same shards, {told}; {short_id(manifest.id)}")
