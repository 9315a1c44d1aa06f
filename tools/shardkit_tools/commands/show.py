"""`shardkit show`: everything about one version, on a page."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from typing import Annotated, Any

import numpy as np

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import about_of
from shardkit.errors import UsageError
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.inventory import read_root
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.installed import installed
from shardkit_tools.options import argument, option
from shardkit_tools.row_lists import sample_number
from shardkit_tools.versions import named_versions, parse_url, stratum_label

_STRATA_SHOWN = 25


def show(
    root: Annotated[str | None, argument("ROOT[@REF]", "The version; without @REF: main.")] = None,
    environment: Annotated[
        bool,
        option("--environment", "Show what is installed here instead: compiled modules, optional packages."),
    ] = False,
    all_strata: Annotated[bool, option("--all", "Show every stratum, however many there are.")] = False,
    lineage: Annotated[
        bool, option("--lineage", "Show where it comes from: sources, build settings, ancestors.")
    ] = False,
    sample: Annotated[
        str | None, option("--sample N|KEY", "Show where one sample comes from, down to file and row.")
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Show a version: schema, strata, shards, splits and how it was built.

    Example: shardkit show data/cats@val
    """
    if environment:
        if root is not None:
            raise UsageError(f"--environment is about this machine, not about {root}; leave one of them out")
        show_environment(as_json=as_json)
        return
    if root is None:
        raise UsageError("show takes a version, such as data/cats@val, or --environment")
    dataset = shardkit.open(root)
    if lineage or sample is not None:
        show_lineage(dataset, sample, as_json=as_json)
        return
    document = describe(dataset, *parse_url(root))
    most = None if all_strata else _STRATA_SHOWN
    page = document | {"strata": _by_size(document["strata"], most)}
    console.present(as_json, lambda: document, lambda: console.print_document(page, most, " (--all)"))


def describe(dataset: Dataset, root: str, ref: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    manifest, table = dataset.manifest, dataset.table
    log = dataset.repository.log()
    return {
        "root": root,
        "ref": ref,
        "id": manifest.id,
        "parent": manifest.parent,
        "commit": _commit(log, manifest.id),
        "samples": manifest.selected,
        "rows": manifest.rows,
        "format": manifest.format,
        "compression": manifest.compression,
        "schema": {name: str(kind) for name, kind in manifest.schema.items()},
        "axes": list(manifest.axes),
        "strata": _strata(manifest),
        "classes": list(manifest.classes),
        "shards": _shards(table),
        "stored_bytes": manifest.stored_bytes,
        "raw_bytes": manifest.raw_bytes,
        "parts": [{"name": name, "id": part} for name, part in manifest.parts],
        "splits": _splits(dataset.repository, log, manifest),
        "sources": manifest.sources,
        "about": about_of(dataset.version).to_json(),
        "lookups": [
            {"field": one.field, "entries": sum(piece.entries for piece in one.pieces),
             "bytes": sum(piece.size for piece in one.pieces)}
            for one in manifest.lookups
        ],
        "costs": [costs.expression for costs in manifest.costs],
        "build": dict(manifest.build),
    }  # fmt: skip


def _commit(log: list[LogEntry], manifest_id: str) -> dict[str, Any] | None:
    """The first commit that named the manifest."""
    for entry in reversed(log):
        if manifest_id in (*entry.refs.values(), *entry.tags.values()):
            return {name: getattr(entry, name) for name in ("n", "time", "message", "author")}
    return None


def _strata(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "name": stratum.name,
            "label": stratum_label(stratum, manifest.axes, manifest.classes),
            "values": list(stratum.values),
            "samples": stratum.selected,
            "rows": stratum.rows,
            "in_pool": stratum.in_pool,
        }
        for stratum in manifest.strata
        if not stratum.pooled
    ]


def _shards(table: ShardTable) -> dict[str, int]:
    blocks = -(-table.segment_rows // table.block_rows[table.segment_shard])
    return {
        "count": len(table),
        "smallest_bytes": int(table.size.min(initial=2**62)) if len(table) else 0,
        "largest_bytes": int(table.size.max(initial=0)),
        "blocks": int(blocks.sum()),
        "block_rows_least": int(np.min(table.block_rows, initial=2**62)) if len(table) else 0,
        "block_rows_most": int(table.block_rows.max(initial=0)),
        "largest_block_bytes": int(table.largest_block.max(initial=0)),
        "index_bytes": int(table.index_size.sum()),
    }


def _splits(repository: Repository, log: list[LogEntry], manifest: Manifest) -> list[dict[str, Any]]:
    """Other refs and tags over the same rows: versions that were selected from this one, or with it from another."""
    family = {manifest.id, manifest.parent} - {None}
    found = []
    for version in named_versions(log):
        other = read_root(repository, version.manifest_id)
        if other.id != manifest.id and (other.parent in family or other.id == manifest.parent):
            found.append({"name": version.name, "id": other.id, "samples": other.selected})
    return found


def _by_size(strata: list[dict[str, Any]], most: int | None) -> list[dict[str, Any]]:
    """All strata in the order of their values; where there are more than so many, the largest first."""
    if most is not None and len(strata) > most:
        return sorted(strata, key=lambda one: (-one["samples"], one["name"]))
    return sorted(strata, key=lambda one: [_natural(value) for value in one["values"]])


def _natural(value: str) -> tuple[int, str]:
    """Numbers by their size, before texts by their letters."""
    return (int(value), "") if value.isdecimal() else (2**63, value)


_COMPILED = {
    "shardkit.loader.block_rows": "reading, hashing and gathering in one call; numpy takes up to twice as long",
}
_GET = "install a C compiler (apt install gcc), then: pip install --force-reinstall --no-binary shardkit shardkit"
_EXTRA = re.compile(r"([A-Za-z0-9._-]+)[^;]*;.*extra\s*==\s*['\"](\w+)['\"]")
_OWN = ("dev", "docs")


def show_environment(*, as_json: bool) -> None:
    """Print which fast modules and optional packages are missing, and how to get them."""
    compiled, extras = {name: _is_there(name) for name in _COMPILED}, _extras()
    versions = {"shardkit": importlib.metadata.version("shardkit"), "python": platform.python_version()}
    to_compile = None if all(compiled.values()) else _GET
    document = {**versions, "compiled": compiled, "to_compile": to_compile, "extras": extras}
    page = document | {
        "compiled": {
            name: "there" if there else f"missing: {_COMPILED[name]}" for name, there in compiled.items()
        },
        "extras": {
            extra: [f"{name} {version or 'missing'}" for name, version in packages.items()]
            for extra, packages in extras.items()
        },
        "to_install": {
            extra: f'pip install "shardkit[{extra}]"'
            for extra, packages in extras.items()
            if None in packages.values()
        },
    }
    console.present(as_json, lambda: document, lambda: console.print_document(page))


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _extras() -> dict[str, dict[str, str | None]]:
    """Extra → package → version that is installed, as shardkit's own metadata lists them."""
    found: dict[str, dict[str, str | None]] = {}
    for text in importlib.metadata.requires("shardkit") or []:
        match = _EXTRA.match(text)
        if match is None or match[1] == "shardkit" or match[2] in _OWN:
            continue
        found.setdefault(match[2], {})[match[1]] = installed([match[1]]).get(match[1])
    return found


# ---- Lineage


def show_lineage(dataset: Dataset, sample: str | None, *, as_json: bool) -> None:
    """Print how a version came to be, and where one of its samples comes from.

    Args:
        dataset: the version.
        sample: number or key of a sample; None for the version alone.
        as_json: one JSON document instead.

    Raises:
        NotFoundError: there is no such sample.
    """
    from shardkit.audit import sample_lineage, version_lineage

    number = None if sample is None else sample_number(dataset, sample)
    document = version_lineage(dataset) if number is None else sample_lineage(dataset, number)
    console.present(as_json, lambda: document)
