"""`shardkit diff`: in what two versions differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import shardkit
from shardkit.dataset import Dataset
from shardkit_tools import console, options
from shardkit_tools.texts import bytes_text, clean, count_text, share_text, short_id
from shardkit_tools.versions import parse_url, stratum_label

_STRATA_SHOWN = 25


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A version: ROOT or ROOT@REF.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another; a bare REF is one of A's root.")],
    all_strata: Annotated[
        bool, typer.Option("--all", help="Show every stratum, also those that did not change.")
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
    console.print_facts(
        [
            ("A", f"{first}  {short_id(document['a']['id'])}"),
            ("B", f"{second}  {short_id(document['b']['id'])}"),
        ]
    )
    if document["a"]["id"] == document["b"]["id"]:
        console.print_line("the same version: equal to the last byte")
        return
    _print_samples(document)
    _print_schema(document)
    _print_strata(document, all_strata)


def compare(a: Dataset, b: Dataset) -> dict[str, Any]:
    """What ``--json`` prints."""
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
    return {
        "id": manifest.id,
        "samples": manifest.selected,
        "rows": manifest.rows,
        "shards": manifest.shards,
        "stored_bytes": manifest.stored_bytes,
        "format": manifest.format,
        "compression": manifest.compression,
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
    rows = [
        {
            "name": name,
            "label": labels[name],
            "a": before.get(name, 0),
            "b": after.get(name, 0),
            "drift": after.get(name, 0) / max(1, len(b)) - before.get(name, 0) / max(1, len(a)),
        }
        for name in sorted(before.keys() | after.keys())
    ]
    return sorted(rows, key=lambda row: -abs(float(str(row["drift"]))))


def _shards(a: Dataset, b: Dataset) -> dict[str, Any]:
    """Shards by their digests: which are in both, and which in one alone."""
    before, after = _digests(a), _digests(b)
    kept = np.isin(before, after)
    new = ~np.isin(after, before)
    return {
        "shared": {"count": int(kept.sum()), "bytes": int(a.table.size[kept].sum())},
        "removed": {"count": int((~kept).sum()), "bytes": int(a.table.size[~kept].sum())},
        "added": {"count": int(new.sum()), "bytes": int(b.table.size[new].sum())},
    }


def _digests(dataset: Dataset) -> NDArray[np.void]:
    digests: NDArray[np.void] = np.ascontiguousarray(dataset.table.digest).view("V32").reshape(-1)
    return digests


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: {"a": before.get(name), "b": after.get(name)} for name in names}


def _print_samples(document: Mapping[str, Any]) -> None:
    a, b, shards = document["a"], document["b"], document["shards"]
    change = b["samples"] - a["samples"]
    console.print_heading("Samples and shards")
    facts = [
        ("samples", f"{a['samples']:,} → {b['samples']:,} ({change:+,})"),
        ("size", f"{bytes_text(a['stored_bytes'])} → {bytes_text(b['stored_bytes'])}"),
        *(
            (f"shards {what}", f"{count_text(shards[what]['count'])}, {bytes_text(shards[what]['bytes'])}")
            for what in ("shared", "removed", "added")
        ),
    ]
    facts += [(what, f"{a[what]} → {b[what]}") for what in ("format", "compression") if a[what] != b[what]]
    console.print_facts(facts)


def _print_schema(document: Mapping[str, Any]) -> None:
    schema = document["schema"]
    lines = [f"+ {name}: {kind}" for name, kind in schema["added"].items()]
    lines += [f"- {name}: {kind}" for name, kind in schema["removed"].items()]
    lines += [f"~ {name}: {kinds['a']} → {kinds['b']}" for name, kinds in schema["changed"].items()]
    if not lines and not schema["same_order"]:
        lines = ["the same fields in another order"]
    console.print_heading("Fields" if lines else "Fields: the same")
    for line in lines:
        console.print_line(line)


def _print_strata(document: Mapping[str, Any], all_strata: bool) -> None:
    a, b = document["a"], document["b"]
    moved = sum(abs(row["drift"]) for row in document["strata"]) / 2
    rows = (
        document["strata"]
        if all_strata
        else [row for row in document["strata"] if row["drift"] or row["a"] != row["b"]]
    )
    console.print_heading(
        f"Strata: {100 * moved:.2f} % of the samples would have to change stratum to undo the drift"
    )
    if not rows:
        console.print_line("all counts are the same")
        return
    shown = rows if all_strata else rows[:_STRATA_SHOWN]
    console.print_table(
        ["*stratum", ">A", ">B", ">share A", ">share B", ">drift in %"],
        [
            (
                clean(row["label"]),
                f"{row['a']:,}",
                f"{row['b']:,}",
                share_text(row["a"], a["samples"]),
                share_text(row["b"], b["samples"]),
                f"{100 * row['drift']:+.2f}",
            )
            for row in shown
        ],
    )
    console.print_more(len(rows) - len(shown), " (--all)")
