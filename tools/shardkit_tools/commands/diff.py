"""`shardkit diff`: in what two versions differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import shardkit
from shardkit.dataset import Dataset
from shardkit_tools import console, options
from shardkit_tools.options import argument, option
from shardkit_tools.versions import parse_url, stratum_label

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
    document |= {"a": {"url": first, **document["a"]}, "b": {"url": second, **document["b"]}}
    if document["a"]["id"] == document["b"]["id"] and not as_json:
        console.print_line(f"{first} and {second} are the same version: equal to the last byte")
        return
    changed = [one for one in document["strata"] if all_strata or one["drift"] or one["a"] != one["b"]]
    both = {
        name: tuple(console.value_text(name, document[one][name]) for one in "ab") for name in document["a"]
    }
    page = {"versions": {name: a if a == b else f"{a} → {b}" for name, (a, b) in both.items()}} | document
    page |= {"a": None, "b": None, "strata": changed}
    most = None if all_strata else _STRATA_SHOWN
    console.present(as_json, lambda: document, lambda: console.print_document(page, most, " (--all)"))


def compare(a: Dataset, b: Dataset) -> dict[str, Any]:
    """What ``--json`` prints."""
    strata = _strata(a, b)
    return {
        "a": _summary(a),
        "b": _summary(b),
        "schema": _schema(a, b),
        "strata": strata,
        "moved_share": sum(abs(one["drift"]) for one in strata) / 2,  # of the samples, to undo the drift
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
    """Counts of each stratum in both, with the drift of its share; the largest drift first."""
    before, after = a.strata, b.strata
    labels = {
        stratum.name: stratum_label(stratum, dataset.manifest.axes, dataset.classes)
        for dataset in (a, b)
        for stratum in dataset.manifest.strata
    }
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
        name: {"count": int(chosen.sum()), "bytes": int(dataset.table.size[chosen].sum())}
        for name, (dataset, chosen) in parts.items()
    }


def _digests(dataset: Dataset) -> NDArray[np.void]:
    digests: NDArray[np.void] = np.ascontiguousarray(dataset.table.digest).view("V32").reshape(-1)
    return digests


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: {"a": before.get(name), "b": after.get(name)} for name in names}
