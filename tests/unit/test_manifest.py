"""The root of a manifest: canonical, strict, free of places and times."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from shardkit.documents import encode
from shardkit.errors import FormatError, SchemaError, UsageError
from shardkit.formats.schema import Schema
from shardkit.manifest import CostPiece, Manifest, RowCosts, Stratum, check_against, merge
from tests.property.shard_tables import composed, made_up_digest, made_up_table

SCHEMA = Schema.parse({"image": "bytes", "label": "int64"})
TABLE = made_up_table(5, 6, 3, selected=True)
STRATA = [("0", "web"), ("1", "web"), ("1", "book")]


def small(**changes: Any) -> Manifest:
    settings: dict[str, Any] = {
        "schema": SCHEMA,
        "format": "tar",
        "compression": "none",
        "axes": ("label", "source"),
        "classes": ("cat", "dog"),
        "build": {"seed": 0, "shuffle": True, "shard_size": 2**28, "importer": "folder"},
        "parent": made_up_digest("parent"),
        "sources": made_up_digest("sources"),
    }
    return composed(TABLE, STRATA, **(settings | changes))[0]


def test_round_trip() -> None:
    manifest = small()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert Manifest.from_bytes(manifest.to_bytes()).id == manifest.id
    assert [stratum.name for stratum in manifest.strata] == ["0/web", "1/web", "1/book"]


def test_golden_bytes() -> None:
    """The format does not change by accident: every id in the world would."""
    manifest = Manifest(
        schema=Schema.parse({"x": "int64"}), format="arrow", compression="none", axes=(), strata=(Stratum((), 0, 0),),
        shards=0, rows=0, selected=0, raw_bytes=0, stored_bytes=0, pages=(), build={"seed": 7},
    )  # fmt: skip
    assert manifest.to_bytes() == (
        b'{"axes":[],"build":{"seed":7},"compression":"none","format":"shardkit-manifest/1","pages":[],"raw_bytes":0,'
        b'"rows":0,"schema":[["x","int64"]],"selected":0,"shard_format":"arrow","shards":0,"stored_bytes":0,'
        b'"strata":[{"rows":0,"selected":0,"values":[]}]}'
    )
    assert manifest.strata[0].name == "all"


@pytest.mark.parametrize(
    "change", [{"classes": ["cat"]}, {"parent": None}, {"build": {}}, {"format": "arrow"}]
)
def test_every_fact_is_part_of_the_id(change: dict[str, Any]) -> None:
    assert small(**change).id != small().id


def test_names_of_strata_cannot_collide() -> None:
    names = {
        Stratum(values, 0, 0).name for values in [("a/b", "c"), ("a", "b/c"), ("a", "b", "c"), ("a%2Fb", "c")]
    }
    assert len(names) == 4


def test_no_places_in_a_manifest() -> None:
    with pytest.raises(UsageError, match=r"build\.source\.0 holds a URL"):
        small(build={"source": ["s3://key:secret@bucket/x"]})


def test_build_settings_are_json_without_floats() -> None:
    for value in (0.5, {1, 2}, object()):
        with pytest.raises(UsageError):
            small(build={"x": value})


Change = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Change] = {
    "another format": lambda d: d.update(format="shardkit-manifest/2"),
    "no format": lambda d: d.pop("format"),
    "an unknown key": lambda d: d.update(extra=1),
    "a missing key": lambda d: d.pop("rows"),
    "a flag of another type": lambda d: d.update(adopted=1),
    "rows not the sum of pages": lambda d: d.update(rows=d["rows"] + 1),
    "shards not the sum of pages": lambda d: d.update(shards=d["shards"] + 1),
    "too many shards": lambda d: d.update(shards=2**40),
    "negative rows": lambda d: d.update(rows=-1),
    "rows as text": lambda d: d.update(rows="6"),
    "rows as truth value": lambda d: d.update(rows=True),
    "rows beyond 63 bits": lambda d: d.update(rows=2**62 + 1),
    "selected more than rows": lambda d: d.update(selected=d["rows"] + 1),
    "selected not the sum of strata": lambda d: d.update(selected=d["selected"] - 1),
    "a stratum twice": lambda d: d["strata"].append(dict(d["strata"][0])),
    "a stratum of one value too many": lambda d: d["strata"][0]["values"].append("x"),
    "a stratum with more selected than rows": lambda d: d["strata"][0].update(selected=10**6),
    "a stratum that is no object": lambda d: d["strata"].append(3),
    "a stratum in a pool that is not there": lambda d: d["strata"].append(
        {"values": ["9", "9"], "rows": 3, "selected": 3, "in_pool": True}
    ),
    "a pool inside a pool": lambda d: d["strata"][0].update(pooled=True, in_pool=True),
    "a page without shards": lambda d: d["pages"][0].update(shards=0),
    "a page of too many shards": lambda d: d["pages"][0].update(shards=4_097),
    "a page of no bytes": lambda d: d["pages"][0].update(size=0),
    "a page of enormous size": lambda d: d["pages"][0].update(size=2**40),
    "a page digest in capitals": lambda d: d["pages"][0].update(digest=d["pages"][0]["digest"].upper()),
    "a page by path": lambda d: d["pages"][0].update(digest="sha256:../../../../etc/passwd"),
    "a page by URL": lambda d: d["pages"][0].update(url="http://169.254.169.254/"),
    "parts and pages": lambda d: d.update(parts=[["a", made_up_digest(1)]]),
    "a part by path": lambda d: d.update(pages=[], parts=[["../a", made_up_digest(1)]]),
    "a part of three": lambda d: d.update(pages=[], parts=[["a", made_up_digest(1), "x"]]),
    "a schema that is none": lambda d: d.update(schema=[["x", "pickle"]]),
    "an empty schema": lambda d: d.update(schema=[]),
    "a reserved field": lambda d: d.update(schema=[["__key__", "str"]]),
    "an unknown shard format": lambda d: d.update(shard_format="pickle"),
    "an unknown compression": lambda d: d.update(compression="zstd:3; rm -rf /"),
    "a parent that is no digest": lambda d: d.update(parent="main"),
    "build settings that are a list": lambda d: d.update(build=[]),
    "a URL in the build settings": lambda d: d.update(build={"from": "http://x"}),
    "costs of some shards": lambda d: d.update(
        costs=[
            {
                "expression": "label",
                "pieces": [{"digest": made_up_digest(1), "size": 1, "shards": d["shards"] - 1, "rows": 1}],
            }
        ]
    ),
    "classes that are numbers": lambda d: d.update(classes=[1, 2]),
    "a very long class": lambda d: d.update(classes=["x" * 10_000]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_roots_are_refused(what: str) -> None:
    document = copy.deepcopy(json.loads(small().to_bytes()))
    HOSTILE[what](document)
    with pytest.raises(FormatError, match="manifest sha256:"):
        Manifest.from_bytes(encode(document))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b'{"format":"shardkit-manifest/1"}',
        b"[" * 100_000,
        b"\x80\x04K\x01.",
    ],
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(data)


def test_other_spellings_of_the_same_content_are_refused() -> None:
    data = small().to_bytes()
    document = json.loads(data)
    for spelling in (
        json.dumps(document, sort_keys=True).encode(),
        json.dumps(document, indent=1, sort_keys=True).encode(),
        json.dumps(dict(reversed(document.items())), separators=(",", ":")).encode(),
        data + b"\n",
        b"\xef\xbb\xbf" + data,
        data.replace(b'"rows"', b'"\\u0072ows"', 1),
        data.replace(b'"axes":', b'"axes":[],"axes":', 1),
    ):
        assert spelling != data
        with pytest.raises(FormatError):
            Manifest.from_bytes(spelling)


def test_memory_is_bounded_by_the_bytes() -> None:
    nested = b'{"axes":' + b"[" * 60 + b"]" * 60 + b"}"
    wide = b'{"axes":[' + b"[]," * 350_000 + b"[]]}"  # 1 MiB
    for data in (nested, wide):
        tracemalloc.start()
        with pytest.raises(FormatError):
            Manifest.from_bytes(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * 2**20
    with pytest.raises(FormatError, match="at most"):
        Manifest.from_bytes(b" " * (16 * 2**20 + 1))


def test_root_and_pages_must_agree() -> None:
    manifest = small()
    check_against(manifest, TABLE)
    for other in (
        made_up_table(5, 6, 3),
        made_up_table(6, 6, 3),
        TABLE.take(range(5)),
        dataclasses.replace(TABLE, size=TABLE.size + 1),
    ):
        with pytest.raises(FormatError, match=manifest.id):
            check_against(manifest, other)
    for more in (0, 1):
        piece = CostPiece(made_up_digest(1), 1, len(TABLE), int(TABLE.rows.sum()) + more)
        with pytest.raises(FormatError, match="cost 'label'") if more else contextlib.nullcontext():
            check_against(small(costs=(RowCosts("label", (piece,)),)), TABLE)
    with pytest.raises(FormatError, match="stratum 2, there are 2"):
        composed(TABLE, [("x",), ("y",)], axes=("a",))


def test_merge_refuses_other_schemas_and_nothing() -> None:
    other = small(schema=Schema.parse({"image": "bytes"}))
    with pytest.raises(SchemaError, match=r"'b' has the fields image \(bytes\), "):
        merge([("a", small()), ("b", other)])
    with pytest.raises(UsageError, match="at least one"):
        merge([])
    with pytest.raises(FormatError, match="twice"):
        merge([("a", small()), ("a", small())])
    with pytest.raises(FormatError, match="part"):
        merge([("../a", small())])
