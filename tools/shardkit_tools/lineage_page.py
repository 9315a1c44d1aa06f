"""The page of `shardkit show --lineage`: how a version came to be, and where one of its samples comes from."""

from __future__ import annotations

from typing import Any

from shardkit.audit import sample_lineage, version_lineage
from shardkit.dataset import Dataset
from shardkit_tools import console
from shardkit_tools.row_lists import sample_number
from shardkit_tools.texts import bytes_text, count_text
from shardkit_tools.versions import time_text

_FILES_SHOWN = 20


def show_lineage(dataset: Dataset, sample: str | None, *, as_json: bool) -> None:
    """Print it.

    Args:
        dataset: the version.
        sample: number or key of a sample; None for the version alone.
        as_json: one JSON document instead.

    Raises:
        NotFoundError: there is no such sample.
    """
    number = None if sample is None else sample_number(dataset, sample)
    document = version_lineage(dataset) if number is None else sample_lineage(dataset, number)
    if as_json:
        console.print_json(document)
        return
    if number is not None:
        _print_sample(document)
        document = document["version"]
    console.print_line()
    console.print_line(f"version {document['id']}", "bold")
    for part in document["parts"]:
        _print_part(part)


def _print_sample(document: dict[str, Any]) -> None:
    shard, source = document["shard"], document["source"]
    size = bytes_text(shard["size"])
    console.print_line(f"sample {document['sample']}: {document['key']}", "bold")
    console.print_facts([
        ("shard", shard["name"]),
        ("place", f"row {shard['row']}, block {shard['block']}: {size} from byte {shard['offset']:,}"),
        ("source", f"{source['name']}, row {source['row']}" if source else "not recorded by the build"),
        ("source file", f"sha256:{source['sha256']}" if source and source["sha256"] else None),
    ])  # fmt: skip


def _print_part(part: dict[str, Any]) -> None:
    if part["name"]:
        console.print_heading(f"Part {part['name']}: {part['id']}")
    commit, sources = part["commit"], part["sources"]
    facts: list[tuple[str, object]] = []
    if commit is not None:
        facts += [("committed", f"{time_text(commit['time'])} UTC, number {commit['n']}"),
                  ("made with", commit["software"])]  # fmt: skip
    facts += [(name, value) for name, value in sorted(part["build"].items()) if value not in (None, {}, [])]
    if sources is not None:
        left = f", {count_text(sources['rows_left_out'], 'row')} left out" if sources["rows_left_out"] else ""
        files = count_text(len(sources["files"]), "file")
        facts.append(("sources", f"{files}{left}, listed in {sources['digest']}"))
    console.print_facts(facts)
    if sources is not None:
        lines = [f"{one['sha256']}  {bytes_text(one['size'])}  {one['name']}" for one in sources["files"]]
        console.print_list(lines, _FILES_SHOWN)
    for ancestor in part["ancestors"]:
        gone = "missing" in ancestor
        what = "not in this repository any more" if gone else count_text(ancestor["samples"], "sample")
        console.print_line(f"made from {ancestor['id']}: {what}")
