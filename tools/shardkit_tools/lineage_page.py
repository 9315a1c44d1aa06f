"""The page of `shardkit show --lineage`: how a version came to be, and where one of its samples comes from."""

from __future__ import annotations

from typing import Any

from shardkit.audit import resolve_samples, sample_lineage, version_lineage
from shardkit.dataset import Dataset
from shardkit.errors import NotFoundError
from shardkit_tools import console
from shardkit_tools.texts import bytes_text, clean, count_text
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
    if sample is None:
        document = version_lineage(dataset)
    else:
        document = sample_lineage(dataset, int(sample) if sample.isdecimal() else _number(dataset, sample))
    if as_json:
        console.print_json(document)
        return
    if sample is not None:
        _print_sample(document)
        document = document["version"]
    console.print_line()
    console.print_line(f"version {document['id']}", "bold")
    for part in document["parts"]:
        _print_part(part)


def _number(dataset: Dataset, key: str) -> int:
    samples, _, _ = resolve_samples(dataset, "key", [key])
    if not len(samples):
        raise NotFoundError(f"no sample has the key {key!r}")
    return int(samples[0])


def _print_sample(document: dict[str, Any]) -> None:
    shard, source = document["shard"], document["source"]
    console.print_line(f"sample {document['sample']}: {clean(document['key'])}", "bold")
    facts = [
        ("shard", shard["name"]),
        (
            "place",
            f"row {shard['row']}, block {shard['block']}: {bytes_text(shard['size'])} from byte {shard['offset']:,}",
        ),
    ]
    if source is None:
        facts.append(("source", "not recorded by the build"))
    else:
        facts.append(("source", clean(f"{source['name']}, row {source['row']}")))
        if source["sha256"]:
            facts.append(("source file", f"sha256:{source['sha256']}"))
    console.print_facts(facts)


def _print_part(part: dict[str, Any]) -> None:
    if part["name"]:
        console.print_heading(f"Part {clean(part['name'])}: {part['id']}")
    commit, sources = part["commit"], part["sources"]
    facts = []
    if commit is not None:
        facts += [
            ("committed", f"{time_text(commit['time'])} UTC, number {commit['n']}"),
            ("made with", clean(commit["software"])),
        ]
    facts += [
        (name, clean(str(value)))
        for name, value in sorted(part["build"].items())
        if value not in (None, {}, [])
    ]
    if sources is not None:
        left_out = (
            f", {count_text(sources['rows_left_out'], 'row')} left out" if sources["rows_left_out"] else ""
        )
        facts.append(
            (
                "sources",
                f"{count_text(len(sources['files']), 'file')}{left_out}, listed in {sources['digest']}",
            )
        )
    if facts:
        console.print_facts(facts)
    for file in (sources or {"files": ()})["files"][:_FILES_SHOWN]:
        console.print_line(f"  {file['sha256']}  {bytes_text(file['size'])}  {clean(file['name'])}")
    if sources is not None and len(sources["files"]) > _FILES_SHOWN:
        console.print_line(f"  … and {len(sources['files']) - _FILES_SHOWN} more (--json lists all)")
    for ancestor in part["ancestors"]:
        what = (
            "not in this repository any more"
            if "missing" in ancestor
            else count_text(ancestor["samples"], "sample")
        )
        console.print_line(f"made from {ancestor['id']}: {what}")
