"""`shardkit show`: everything about one version, on a page."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import about_of
from shardkit.errors import UsageError
from shardkit.extras import install_command, installed, optional_packages, shell_word
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.inventory import read_root
from shardkit.repository.log import LogEntry, first_commit
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, range_text, share_text, short_id
from shardkit_tools.options import argument, option
from shardkit_tools.row_lists import sample_number
from shardkit_tools.version_report import named_versions, parse_url, time_text

_STRATA_SHOWN = 25
_TERMS_SHOWN = ("licence", "source", "contact")


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
    console.present(as_json, lambda: document, lambda: _print(document, all_strata))


def describe(dataset: Dataset, root: str, ref: str) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    manifest, table = dataset.manifest, dataset.table
    log = dataset.repository.log()
    commit = first_commit(log, manifest.id)
    return {
        "root": root,
        "ref": ref,
        "id": manifest.id,
        "parent": manifest.parent,
        "commit": commit and {name: getattr(commit, name) for name in ("n", "time", "message", "author")},
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
        "added": [
            {"id": one.manifest.id, "fields": list(one.manifest.schema), "stored_bytes": one.manifest.stored_bytes,
             "build": dict(one.manifest.build)}
            for one in dataset.version.added
        ],
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


def _strata(manifest: Manifest) -> list[dict[str, Any]]:
    labels = manifest.labels
    return [
        {
            "name": stratum.name,
            "label": labels[stratum.name],
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
        other = read_root(repository.store, version.manifest_id)
        if other.id != manifest.id and (other.parent in family or other.id == manifest.parent):
            found.append({"name": version.name, "id": other.id, "samples": other.selected})
    return found


def _print(document: Mapping[str, Any], all_strata: bool) -> None:
    _print_facts(document)
    console.print_table(["field", "type"], document["schema"].items(), heading="Fields")
    _print_strata(document, all_strata)
    console.print_table(["name", ">samples", ">share", "id"], [
        (one["name"], count_text(one["samples"]), share_text(one["samples"], document["rows"]), short_id(one["id"]))
        for one in document["splits"]
    ], heading="Other versions of the same rows")  # fmt: skip
    about = dict(document["about"])
    strata = about.pop("stratum", {})
    if about:
        console.print_heading("About")
        console.print_facts(about.items())
    rows = [(name, *(terms.get(key, "") for key in _TERMS_SHOWN)) for name, terms in strata.items()]
    console.print_table(["*stratum", *(f"*{term}" for term in _TERMS_SHOWN)], rows, heading="About strata")
    if document["build"]:
        console.print_heading("Built with")
        console.print_facts(
            (name, _setting(name, value)) for name, value in sorted(document["build"].items())
        )


def _print_facts(document: Mapping[str, Any]) -> None:
    shards, commit = document["shards"], document["commit"]
    raw, stored, compression = document["raw_bytes"], document["stored_bytes"], document["compression"]
    samples, rows = document["samples"], document["rows"]
    selected = f" of {count_text(rows)} rows ({share_text(samples, rows)})" if samples != rows else ""
    is_packed = compression != "none"
    packed = compression.replace(":", " level ") if is_packed else "uncompressed"
    ratio = f", {bytes_text(raw)} raw ({raw / stored:.2f}×)" if is_packed else ""
    sizes = range_text(bytes_text(shards["smallest_bytes"]), bytes_text(shards["largest_bytes"]))
    block_rows = range_text(count_text(shards["block_rows_least"]), count_text(shards["block_rows_most"]))
    largest = bytes_text(shards["largest_block_bytes"])
    said = f": {commit['message']}" if commit and commit["message"] else ""
    lookups = ", ".join(f"{one['field']} ({bytes_text(one['bytes'])})" for one in document["lookups"])
    version = f"{document['root']}@{document['ref']}"
    is_adopted = document["build"].get("source", {}).get("importer") == "adopt"
    console.print_line(version, "bold")
    console.print_facts([
        ("id", document["id"]),
        ("samples", f"{count_text(samples)}{selected}"),
        ("format", f"{document['format']}, {packed}"),
        ("size", f"{bytes_text(stored)}{ratio}"),
        ("shards", f"{count_text(shards['count'])} of {sizes}"),
        ("blocks", f"{count_text(shards['blocks'])} of up to {block_rows} rows, {largest}"),
        ("committed", f"{time_text(commit['time'])} UTC, number {commit['n']}{said}" if commit else None),
        ("files", f"adopted; list them: shardkit export {shell_word(version)} --as urls" if is_adopted else None),
        ("made from", document["parent"]),
        *(("part", f"{part['name']} {part['id']}") for part in document["parts"]),
        *(
            ("added", f"{', '.join(one['fields'])}: {bytes_text(one['stored_bytes'])}, {short_id(one['id'])}")
            for one in document["added"]
        ),
        ("found by", lookups or None),
        ("costs", ", ".join(document["costs"]) or None),
    ])  # fmt: skip


def _print_strata(document: Mapping[str, Any], all_strata: bool) -> None:
    strata = document["strata"]
    if not document["axes"]:
        console.print_heading("Not stratified: every batch is drawn from all samples alike")
        return
    console.print_heading(f"{count_text(len(strata))} strata by {' and '.join(document['axes'])}")
    if len(strata) > _STRATA_SHOWN and not all_strata:
        shown = sorted(strata, key=lambda one: (-one["samples"], one["name"]))[:_STRATA_SHOWN]
    else:
        shown = sorted(strata, key=lambda one: [_natural(value) for value in one["values"]])
    console.print_table(["*stratum", ">samples", ">share", ""], [
        (one["label"], count_text(one["samples"]), share_text(one["samples"], document["samples"]),
         "pooled: too rare for every shard" if one["in_pool"] else "")
        for one in shown
    ])  # fmt: skip
    console.print_more(len(strata) - len(shown), " (--all)")


def _natural(value: str) -> tuple[int, str]:
    """Numbers by their size, before texts by their letters."""
    return (int(value), "") if value.isdecimal() else (2**63, value)


def _setting(name: str, value: object) -> str:
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: (item[0] not in ("importer", "name"), item[0]))
        return ", ".join(f"{key} {_setting(key, item)}" for key, item in items if item not in (None, {}, []))
    if isinstance(value, list):
        return ", ".join(" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return bytes_text(value) if name.endswith("_size") and isinstance(value, int) else str(value)


_COMPILED = "shardkit.loader.block_rows"
_GET = "install a C compiler (apt install gcc), then in a clone: pip install --force-reinstall --no-deps ."
_PACKAGE = re.compile(r"[A-Za-z0-9._-]+")
_OWN = ("dev", "docs")


def show_environment(*, as_json: bool) -> None:
    """Print which fast modules and optional packages are missing, and how to get them."""
    is_compiled, extras = _is_there(_COMPILED), _extras()
    versions = {"shardkit": shardkit.__version__, "python": platform.python_version()}
    if as_json:
        compiled = {"compiled": {_COMPILED: is_compiled}, "to_compile": None if is_compiled else _GET}
        console.print_json({**versions, **compiled, "extras": extras})
        return
    lacking = "missing: reading, hashing and gathering in one call; numpy takes up to twice as long"
    console.print_facts(versions.items())
    console.print_heading("Compiled modules")
    console.print_facts([(_COMPILED, "installed" if is_compiled else lacking)])
    if not is_compiled:
        console.print_line(f"To get them: {_GET}")
    console.print_heading("Extras")
    lines = []
    for extra, packages in extras.items():
        lacks = [name for name, version in packages.items() if version is None]
        found = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        how = f"missing {', '.join(lacks)}; run: {install_command(extra)}" if lacks else ""
        lines.append((extra, "; ".join(filter(None, [found, how]))))
    console.print_facts(lines)


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _extras() -> dict[str, dict[str, str | None]]:
    """Extra → package → version that is installed, as shardkit's own metadata lists them."""
    found: dict[str, dict[str, str | None]] = {}
    for extra, requirement in optional_packages():
        name = _PACKAGE.match(requirement)
        if name is not None and extra not in _OWN:
            found.setdefault(extra, {})[name[0]] = installed([name[0]]).get(name[0])
    return found


# ---- Lineage


_FILES_SHOWN = 20


def show_lineage(dataset: Dataset, sample: str | None, *, as_json: bool) -> None:
    """Print the origin of a version, and of one of its samples."""
    from shardkit.audit import sample_lineage, version_lineage

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
    build = sorted(part["build"].items())
    facts += [(name, _setting(name, value)) for name, value in build if value not in (None, {}, [])]
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
