"""`shardkit diff`: in what two versions differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import shardkit
from shardkit.dataset import Dataset
from shardkit.manifest import ShardTable
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, share_text, short_id
from shardkit_tools.options import argument, option
from shardkit_tools.version_report import parse_url

_STRATA_SHOWN = 25


def diff(
    first: Annotated[str, argument("A", "A version: ROOT or ROOT@REF.")],
    second: Annotated[str, argument("B", "Another; a bare REF is one of A's root.")],
    all_strata: Annotated[
        bool, option("--all", "Show every stratum, also those that did not change.")
    ] = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Compare two versions: schema, samples, drift of strata, shards shared, added and removed.

    Example: shardkit diff data/cats@v1 v2
    """
    second = _second(first, second)
    document = compare(shardkit.open(first), shardkit.open(second))
    if as_json:
        console.print_json(
            {"a": {"url": first, **document.pop("a")}, "b": {"url": second, **document.pop("b")}, **document}
        )
        return
    a, b = document["a"]["id"], document["b"]["id"]
    console.print_facts([("A", f"{first}  {short_id(a)}"), ("B", f"{second}  {short_id(b)}")])
    if a == b:
        console.print_line("the same version: equal to the last byte")
        return
    _print_samples(document)
    _print_schema(document["schema"])
    _print_strata(document, all_strata)


def compare(a: Dataset, b: Dataset) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return {
        "a": _summary(a),
        "b": _summary(b),
        "schema": _schema(a, b),
        "strata": _strata(a, b),
        "shards": _shards(a, b),
        "settings": _settings(a.manifest.build, b.manifest.build),
    }


def _second(first: str, second: str) -> str:
    if "/" in second or "@" in second or os.path.exists(second):
        return second
    return f"{parse_url(first)[0]}@{second}"


def _summary(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    names = ("rows", "shards", "stored_bytes", "format", "compression")
    return {
        "id": manifest.id,
        "samples": manifest.selected,
        **{name: getattr(manifest, name) for name in names},
    }


def _schema(a: Dataset, b: Dataset) -> dict[str, Any]:
    before = {name: str(kind) for name, kind in a.schema.items()}
    after = {name: str(kind) for name, kind in b.schema.items()}
    return {
        "added": {name: kind for name, kind in after.items() if name not in before},
        "removed": {name: kind for name, kind in before.items() if name not in after},
        "changed": {
            n: {"a": before[n], "b": after[n]} for n in before if n in after and before[n] != after[n]
        },
        "same_order": list(before) == list(after),
    }


def _strata(a: Dataset, b: Dataset) -> list[dict[str, Any]]:
    """Return the counts of each stratum in both versions and the drift of its share, the largest drift first."""
    before, after = a.strata, b.strata
    labels = a.manifest.labels | b.manifest.labels
    rows: list[dict[str, Any]] = []
    for name in sorted(before.keys() | after.keys()):
        had, has = before.get(name, 0), after.get(name, 0)
        drift = has / max(1, len(b)) - had / max(1, len(a))
        rows.append({"name": name, "label": labels[name], "a": had, "b": has, "drift": drift})
    return sorted(rows, key=lambda row: -abs(row["drift"]))


def _shards(a: Dataset, b: Dataset) -> dict[str, Any]:
    """Shards by their digests: which are in both, and which in one alone."""
    before, after = _digests(a), _digests(b)
    kept, new = np.isin(before, after), ~np.isin(after, before)
    parts = {"shared": (a, kept), "removed": (a, ~kept), "added": (b, new)}
    return {
        name: {
            "count": int(chosen.sum()),
            "bytes": int(np.concatenate([table.size for table in _tables(dataset)])[chosen].sum()),
        }
        for name, (dataset, chosen) in parts.items()
    }


def _tables(dataset: Dataset) -> list[ShardTable]:
    """The version's own shards, and those with added fields."""
    return [dataset.table, *(one.table for one in dataset.version.added)]


def _digests(dataset: Dataset) -> NDArray[np.void]:
    every = np.concatenate([table.digest for table in _tables(dataset)])
    digests: NDArray[np.void] = np.ascontiguousarray(every).view("V32").reshape(-1)
    return digests


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: {"a": before.get(name), "b": after.get(name)} for name in names}


def _print_samples(document: Mapping[str, Any]) -> None:
    a, b, shards = document["a"], document["b"], document["shards"]
    console.print_heading("Samples and shards")
    console.print_facts([
        ("samples", f"{a['samples']:,} → {b['samples']:,} ({b['samples'] - a['samples']:+,})"),
        ("size", f"{bytes_text(a['stored_bytes'])} → {bytes_text(b['stored_bytes'])}"),
        *((f"shards {what}", f"{count_text(one['count'])}, {bytes_text(one['bytes'])}")
          for what, one in shards.items()),
        *((what, f"{a[what]} → {b[what]}") for what in ("format", "compression") if a[what] != b[what]),
    ])  # fmt: skip


def _print_schema(schema: Mapping[str, Any]) -> None:
    lines = [f"+ {name}: {kind}" for name, kind in schema["added"].items()]
    lines += [f"- {name}: {kind}" for name, kind in schema["removed"].items()]
    lines += [f"~ {name}: {kinds['a']} → {kinds['b']}" for name, kinds in schema["changed"].items()]
    if not lines and not schema["same_order"]:
        lines = ["the same fields in another order"]
    console.print_heading("Fields" if lines else "Fields: the same")
    for line in lines:
        console.print_line(line)


def _print_strata(document: Mapping[str, Any], all_strata: bool) -> None:
    a, b, strata = document["a"]["samples"], document["b"]["samples"], document["strata"]
    moved = sum(abs(row["drift"]) for row in strata) / 2
    rows = [row for row in strata if all_strata or row["drift"] or row["a"] != row["b"]]
    console.print_heading(
        f"Strata: {100 * moved:.2f} % of the samples would have to change stratum to undo the drift"
    )
    if not rows:
        console.print_line("all counts are the same")
        return
    console.print_table(["*stratum", ">A", ">B", ">share A", ">share B", ">drift in %"], [
        (row["label"], f"{row['a']:,}", f"{row['b']:,}", share_text(row["a"], a), share_text(row["b"], b),
         f"{100 * row['drift']:+.2f}")
        for row in rows
    ], most=None if all_strata else _STRATA_SHOWN, more=" (--all)")  # fmt: skip
