"""Describe a version in MLCommons Croissant 1.1 (JSON-LD): files with SHA-256, fields, licences by stratum.

Source: https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html.
Shards are `FileObject`s with relative `contentUrl`s, so that the document can be stored in the dataset's root
or next to a published copy.
A tar is read through one `FileSet` per field (``KEY.FIELD.EXTENSION``), an Arrow shard by its columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from shardkit.dataset.about import About, Terms
from shardkit.formats import FieldType, Schema, member_names, parse_digest
from shardkit.manifest import Manifest
from shardkit.repository.versions import Version
from shardkit.stores.store import object_name

CONFORMS_TO: Final = "http://mlcommons.org/croissant/1.1"

_PREFIXES: Final = {"cr": "http://mlcommons.org/croissant/", "dct": "http://purl.org/dc/terms/"}
_TERMS: Final = (
    "arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract", "field", "fileObject",
    "fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5",
    "parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate", "separator",
    "source", "subField", "transform",
)  # fmt: skip
_MEDIA: Final = {
    "tar": "application/x-tar",
    "arrow": "application/vnd.apache.arrow.file",
    "rows": "application/octet-stream",
}
_TYPES: Final = {"str": "sc:Text", "json": "sc:Text", "bytes": "sc:Text", "bool": "sc:Boolean"}
_LOGICAL_TYPES: Final = {
    "date": "sc:Date",
    "time": "sc:Time",
    "timestamp": "sc:DateTime",
    "duration": "sc:Duration",
    "decimal": "sc:Number",
}
_NOT_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


def croissant_document(version: Version, about: About, *, name: str) -> dict[str, Any]:
    """Return the JSON-LD document of a version: plain JSON values, the same for the same arguments."""
    manifest = version.manifest
    document: dict[str, Any] = {
        "@context": _context(),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": about.name or _NOT_A_NAME.sub("-", name) or "dataset",
        "description": about.description or _description(manifest),
        "identifier": manifest.id,
    }
    licences = _licences(manifest, about)
    document |= {
        key: value
        for key, value in (
            ("license", licences[0] if len(licences) == 1 else licences),
            ("url", about.homepage),
            ("version", about.version),
            ("citeAs", about.terms.citation),
            ("isBasedOn", about.terms.source),
            ("creator", _contact(about.terms)),
        )
        if value
    }
    parts = _strata(manifest, about)
    if parts:
        document["hasPart"] = parts
    document["distribution"] = [*_shards(version), *_file_sets(version), *_added_shards(version)]
    document["recordSet"] = _record_sets(version)
    if manifest.selected != manifest.rows:
        # Croissant cannot express selections, and readers of the shards must know of them.
        note = f" The version holds {manifest.selected} of the {manifest.rows} rows of its shards."
        for item in (document, *document["recordSet"]):
            item["description"] += note
    return document


def _context() -> dict[str, Any]:
    context: dict[str, Any] = {
        "@language": "en",
        "@vocab": "https://schema.org/",
        "sc": "https://schema.org/",
    }
    context |= _PREFIXES | {"rai": "http://mlcommons.org/croissant/RAI/", "conformsTo": "dct:conformsTo"}
    context |= {term: f"cr:{term}" for term in _TERMS}
    context |= {term: {"@container": "@language"} for term in ("description", "name")}
    context |= {term: {"@id": f"cr:{term}", "@type": "@json"} for term in ("data", "examples")}
    context["dataType"] = {"@id": "cr:dataType", "@type": "@vocab"}
    return dict(sorted(context.items()))


def _description(manifest: Manifest) -> str:
    fields = ", ".join(f"{field} ({kind})" for field, kind in manifest.schema.items())
    return f"{manifest.selected} samples of {fields} in {manifest.shards} shards; manifest {manifest.id}"


def _licences(manifest: Manifest, about: About) -> list[str]:
    """Return the licences of all strata without duplicates, the dataset's own first."""
    named = [about.of_stratum(stratum.name).licence for stratum in manifest.strata if not stratum.pooled]
    return list(dict.fromkeys(licence for licence in (about.terms.licence, *named) if licence))


def _strata(manifest: Manifest, about: About) -> list[dict[str, Any]]:
    """Return one part per stratum whose terms differ from the dataset's."""
    parts = []
    for stratum in manifest.strata:
        terms = about.of_stratum(stratum.name)
        if stratum.pooled or not stratum.selected or terms == about.terms:
            continue
        said = {
            "license": terms.licence,
            "isBasedOn": terms.source,
            "citation": terms.citation,
            "creator": _contact(terms),
            "description": terms.note,
        }
        size = f"{stratum.selected} samples"
        parts.append(
            {
                "@type": "sc:Dataset",
                "name": stratum.name,
                "size": size,
                **{k: v for k, v in said.items() if v},
            }
        )
    return parts


def _contact(terms: Terms) -> dict[str, str] | None:
    if not terms.contact:
        return None
    place = "url" if "://" in terms.contact else "email" if "@" in terms.contact else "name"
    contact = {"@type": "sc:Organization", place: terms.contact}
    return contact if place == "name" else {**contact, "name": terms.contact}


def _shards(version: Version) -> Iterator[dict[str, Any]]:
    table = version.table
    for shard in range(len(table)):
        part = version.part_of(shard)
        suffix = part.manifest.format
        digest = table.digest_text(shard)
        place = object_name(digest, suffix)
        yield _node(
            "FileObject",
            _shard_id(shard),
            place.rpartition("/")[2],
            # The shards of a merged dataset are in other roots; their paths begin with the name of the part.
            contentUrl=f"{part.name}/{place}" if part.name else place,
            contentSize=f"{int(table.size[shard])} B",
            encodingFormat=_MEDIA[suffix],
            sha256=parse_digest(digest),
        )


def _added_shards(version: Version) -> Iterator[dict[str, Any]]:
    """Yield the shards with added fields, and one set of them for each time fields were added."""
    for number, added in enumerate(version.added):
        table, identities = added.table, []
        for shard in range(len(table)):
            place = object_name(table.digest_text(shard), "arrow")
            identities.append(f"added-{number}-{_shard_id(shard)}")
            yield _node(
                "FileObject",
                identities[-1],
                place.rpartition("/")[2],
                contentUrl=place,
                contentSize=f"{int(table.size[shard])} B",
                encodingFormat=_MEDIA["arrow"],
                sha256=parse_digest(table.digest_text(shard)),
            )
        inside = [{"@id": identity} for identity in identities]
        fields = ", ".join(added.manifest.schema)
        yield _node(
            "FileSet",
            f"added-{number}",
            f"Arrow shards with {fields}",
            containedIn=inside,
            encodingFormat=_MEDIA["arrow"],
            includes="*.arrow",
        )


def _own_members(version: Version) -> list[tuple[str, str]]:
    """Return `_members` of the fields that are in the version's own shards."""
    added = {field for one in version.added for field in one.manifest.schema}
    return [pair for pair in _members(version.manifest.schema) if pair[0] not in added]


def _file_sets(version: Version) -> Iterator[dict[str, Any]]:
    tars, arrows = _by_kind(version)
    if tars:
        for field, member in _own_members(version):
            yield _file_set(
                f"files/{member}", f"members of {field}", tars, "application/octet-stream", f"*.{member}.*"
            )
    if arrows:
        yield _file_set("arrow-shards", "Arrow shards", arrows, _MEDIA["arrow"], "*.arrow")


def _file_set(identity: str, name: str, shards: list[int], media: str, includes: str) -> dict[str, Any]:
    inside = [{"@id": _shard_id(shard)} for shard in shards]
    return _node("FileSet", identity, name, containedIn=inside, encodingFormat=media, includes=includes)


def _members(schema: Schema) -> Iterator[tuple[str, str]]:
    """Return (field, its spelling in member names and identifiers) pairs."""
    return zip(schema, member_names(schema), strict=True)


def _by_kind(version: Version) -> tuple[list[int], list[int]]:
    kinds = [version.part_of(shard).manifest.format for shard in range(len(version.table))]
    tars = [shard for shard, kind in enumerate(kinds) if kind == "tar"]
    return tars, [shard for shard, kind in enumerate(kinds) if kind == "arrow"]


def _shard_id(shard: int) -> str:
    return f"shard-{shard:06d}"


def _record_sets(version: Version) -> list[dict[str, Any]]:
    tars, arrows = _by_kind(version)
    schema = version.manifest.schema
    own = _own_members(version)
    sets = [_tar_records(field, member, schema[field]) for field, member in own] if tars else []
    if arrows:
        sets.append(_arrow_records("samples", "One record per sample.", "arrow-shards", schema, own))
    for number, added in enumerate(version.added):
        told = f"The fields {', '.join(added.manifest.schema)} of every sample, by key."
        members = [pair for pair in _members(schema) if pair[0] in added.manifest.schema]
        sets.append(_arrow_records(f"samples/added-{number}", told, f"added-{number}", schema, members))
    return sets


def _arrow_records(
    identity: str, description: str, files: str, schema: Schema, members: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return the record set of some fields of a set of Arrow shards."""
    columns = [_key_field(identity, {"fileSet": {"@id": files}, "extract": {"column": "__key__"}})]
    for field, member in members:
        source = {"fileSet": {"@id": files}, "extract": {"column": field}}
        columns.append(_value_field(identity, field, member, schema[field], source))
    return _record_set(identity, description, columns)


def _tar_records(field: str, member: str, kind: FieldType) -> dict[str, Any]:
    """Return the record set of one field of tar shards; record sets of several fields are joined by key."""
    files = {"fileSet": {"@id": f"files/{member}"}}
    name = {
        **files,
        "extract": {"fileProperty": "filename"},
        "transform": {"regex": rf"^(.*)\.{member}\.[^.]*$"},
    }
    content = {**files, "extract": {"fileProperty": "content"}}
    records = f"samples/{member}"
    fields = [_key_field(records, name), _value_field(records, field, member, kind, content)]
    return _record_set(records, f"The field {field} of every sample, by key.", fields)


def _record_set(identity: str, description: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    key = {"@id": f"{identity}/key"}
    return _node("RecordSet", identity, description=description, key=key, field=fields)


def _key_field(records: str, source: dict[str, Any]) -> dict[str, Any]:
    return _node("Field", f"{records}/key", dataType="sc:Text", source=source)


def _value_field(
    records: str, field: str, member: str, kind: FieldType, source: dict[str, Any]
) -> dict[str, Any]:
    identity, described = f"{records}/field-{member}", f"{field}: {kind}"
    value = _node("Field", identity, description=described, dataType=_data_type(kind), source=source)
    if kind.kind in ("array", "ragged") or kind.is_packed:
        sizes = kind.items.shape if kind.items is not None else kind.shape
        shape = ",".join(str(size or -1) for size in sizes or (0,))
        value |= {"isArray": True, "arrayShape": shape}
    return value


def _node(kind: str, identity: str, name: str = "", **said: Any) -> dict[str, Any]:
    return {"@type": f"cr:{kind}", "@id": identity, "name": name or identity, **said}


def _data_type(kind: FieldType) -> str:
    if kind.logical is not None:
        return _LOGICAL_TYPES[kind.logical.kind]
    kind = kind.items or kind
    known = _TYPES.get(kind.kind) or _TYPES.get(kind.dtype)
    return known or ("sc:Float" if kind.dtype.startswith("float") else "sc:Integer")
