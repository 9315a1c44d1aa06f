"""The root of a manifest: one version of a dataset, small, canonical, named by the SHA-256 of its bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, NoReturn

from shardkit.errors import FormatError, UsageError
from shardkit.formats.canonical_json import DIGEST, Fields, dumps, read_document, sha256_digest
from shardkit.formats.schema import MAX_FIELD_NAME, Schema

MAX_MANIFEST_BYTES: Final = 16 * 2**20
"""Of a manifest, without its pages."""

SHARDS_PER_PAGE: Final = 4_096

MAX_SHARDS: Final = 2**26
"""16 PiB of 256 MiB shards; the columns of a table of this size still fit the memory of one machine."""
MAX_SEGMENTS_PER_PAGE: Final = 2**24
POOL: Final = "*pool*"
"""Value of the stratum that stands for the rows of all strata too rare to be spread."""
MIXED: Final = "mixed"
"""Format or compression of a merged manifest whose parts differ in it."""

_FORMAT: Final = "shardkit-manifest/1"
_MAX_STRATA: Final = 2**17
_MAX_PARTS: Final = 4_096
_SHARD_FORMAT: Final = re.compile(r"tar|arrow|mixed")
_COMPRESSION: Final = re.compile(r"none|mixed|zstd:[0-9]{1,2}")
_PART_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PLAIN: Final = (
    "adopted", "axes", "classes", "compression", "parent", "parts", "raw_bytes", "rows", "selected", "shards",
    "sources", "stored_bytes",
)  # fmt: skip
"""Keys that are as the attributes are."""
_KEYS: Final = (*_PLAIN, "build", "pages", "schema", "shard_format", "strata")
_STRATUM_KEYS: Final = ("values", "rows", "selected", "pooled", "in_pool")
_PAGE_KEYS: Final = ("digest", "size", "shards", "rows")
_OPTIONAL_KEYS: Final = ("about", "lookups")
_LOOKUP_KEYS: Final = ("field", "pieces")
_PIECE_KEYS: Final = ("digest", "size", "shards", "entries")
_MAX_LOOKUPS: Final = 100
_COSTS: Final = "costs"
"""Key among the build settings: what reads a manifest without knowing it has all that it needs."""

_HEX: Final = re.compile(r"[0-9a-f]{64}")
_MAX_COSTS: Final = 100
_MAX_PIECES: Final = 2**17


class Stratum(NamedTuple):
    """A value (or tuple of values) by which batches are balanced, and how many rows have it."""

    values: tuple[str, ...]
    """One per axis, as text; empty where the dataset is not stratified."""
    rows: int
    selected: int
    pooled: bool = False
    """It is a pool: its segments hold the rows of the strata marked `in_pool`."""
    in_pool: bool = False
    """It has no segments of its own: its rows lie in the pool's."""

    @property
    def name(self) -> str:
        """The values joined by ``/``, percent-encoded where they hold one; ``all`` without axes."""
        return "/".join(value.replace("%", "%25").replace("/", "%2F") for value in self.values) or "all"


class PageRef(NamedTuple):
    """A page of the shard table: what is needed to fetch it and know it."""

    digest: str
    size: int
    """Bytes of the page object."""
    shards: int
    rows: int


class LookupPiece(NamedTuple):
    """A sorted hash sidecar over a run of shards."""

    digest: str
    size: int
    """Bytes of the lookup object."""
    shards: int
    """How many shards it covers: those after the shards of the pieces before it."""
    entries: int


class Lookup(NamedTuple):
    """By what rows can be found without reading samples: ``key``, or the name of a field."""

    field: str
    pieces: tuple[LookupPiece, ...]
    """In shard order; together they cover all shards."""


class CostPiece(NamedTuple):
    """The codes of all rows of a run of shards: one object."""

    digest: str
    size: int
    """Bytes of the object."""
    shards: int
    """How many shards it covers: those after the shards of the pieces before it."""
    rows: int
    """Of those shards, selected or not: one byte each."""


class RowCosts(NamedTuple):
    """What each row of a version costs."""

    expression: str
    """Such as ``bytes(text)**2``, without spaces."""
    pieces: tuple[CostPiece, ...]
    """In shard order."""


@dataclass(frozen=True)
class Manifest:
    """One immutable version of a dataset.

    No URL, host, time, credential or library version is in it: the same samples and settings give the same
    bytes, and so the same `id`, wherever and with however many jobs they were built.
    """

    schema: Schema
    format: str
    """``tar`` or ``arrow``; ``mixed`` where merged parts differ."""
    compression: str
    axes: tuple[str, ...]
    """What the strata are made of, one name per value; a merged dataset's first axis is ``part``."""
    strata: tuple[Stratum, ...]
    """Index in this tuple = the number by which segments name their stratum."""
    shards: int
    rows: int
    selected: int
    raw_bytes: int
    stored_bytes: int
    pages: tuple[PageRef, ...]
    classes: tuple[str, ...] = ()
    """Names of folder classes: ``classes[label]``."""
    sources: str | None = None
    """Digest of the object that lists what was imported."""
    build: Mapping[str, Any] = field(default_factory=dict)
    """Settings that decided the bytes: JSON of strings and integers."""
    parent: str | None = None
    """Id of the version this one was made from."""
    parts: tuple[tuple[str, str], ...] = ()
    """(name, manifest id) of the parts of a merged dataset, which then has no pages of its own."""
    adopted: bool = False
    """Some shards are tars of other owners, outside of the repository."""
    about: str | None = None
    """Digest of the object that says licence, source and contact."""
    lookups: tuple[Lookup, ...] = ()
    """Hash sidecars, by field; sorted by field."""
    costs: tuple[RowCosts, ...] = ()
    """What rows cost, by expression; written among the build settings."""

    def __post_init__(self) -> None:
        _check_totals(self)
        _refuse_urls(self.build, "build")

    @cached_property
    def id(self) -> str:
        return sha256_digest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Canonical JSON: one content, one text."""
        optional: dict[str, object] = {} if self.about is None else {"about": self.about}
        if self.lookups:
            optional["lookups"] = [
                {"field": lookup.field, "pieces": [_as_json(piece, _PIECE_KEYS) for piece in lookup.pieces]}
                for lookup in self.lookups
            ]
        return dumps(
            {
                **optional,
                **_as_json(self, _PLAIN),
                "format": _FORMAT,
                "schema": self.schema.to_json(),
                "shard_format": self.format,
                "strata": [_as_json(stratum, _STRATUM_KEYS) for stratum in self.strata],
                "pages": [_as_json(page, _PAGE_KEYS) for page in self.pages],
                "build": {**self.build, **({_COSTS: _costs_to_json(self.costs)} if self.costs else {})},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read bytes whose digest has been checked."""
        where = f"manifest {sha256_digest(data)}"
        fields = read_document(data, where, _FORMAT, _KEYS, MAX_MANIFEST_BYTES, _OPTIONAL_KEYS)
        try:
            build = fields.table("build", maximum=1_000)
            return cls(
                schema=Schema.from_json(fields.items("schema", maximum=10_000)),
                format=fields.text("shard_format", pattern=_SHARD_FORMAT),
                compression=fields.text("compression", pattern=_COMPRESSION),
                axes=fields.texts("axes", maximum=16, longest=200),
                strata=_strata(fields),
                classes=fields.texts("classes", maximum=_MAX_STRATA),
                shards=fields.integer("shards", maximum=MAX_SHARDS),
                rows=fields.integer("rows"),
                selected=fields.integer("selected"),
                raw_bytes=fields.integer("raw_bytes"),
                stored_bytes=fields.integer("stored_bytes"),
                pages=_pages(fields),
                sources=fields.optional_digest("sources"),
                build={name: value for name, value in build.items() if name != _COSTS},
                parent=fields.optional_digest("parent"),
                parts=_parts(fields),
                adopted=fields.boolean("adopted"),
                about=fields.digest("about") if fields.has("about") else None,
                lookups=_lookups(fields) if fields.has("lookups") else (),
                costs=_costs_from_json(build[_COSTS]) if _COSTS in build else (),
            )
        except (FormatError, UsageError) as error:
            raise FormatError(f"{where}: {error}") from error


def _as_json(item: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(item, name) for name in names}


def _strata(fields: Fields) -> tuple[Stratum, ...]:
    return tuple(
        Stratum(
            values=one.texts("values", maximum=32),
            rows=one.integer("rows"),
            selected=one.integer("selected"),
            pooled=one.boolean("pooled"),
            in_pool=one.boolean("in_pool"),
        )
        for one in fields.objects("strata", _STRATUM_KEYS, "stratum", maximum=_MAX_STRATA)
    )


def _pages(fields: Fields) -> tuple[PageRef, ...]:
    return tuple(
        PageRef(
            digest=one.digest("digest"),
            size=one.integer("size", minimum=1, maximum=2**32),
            shards=one.integer("shards", minimum=1, maximum=SHARDS_PER_PAGE),
            rows=one.integer("rows"),
        )
        for one in fields.objects("pages", _PAGE_KEYS, "page", maximum=MAX_SHARDS)
    )


def _lookups(fields: Fields) -> tuple[Lookup, ...]:
    lookups = tuple(
        Lookup(one.text("field", maximum=MAX_FIELD_NAME), _pieces(one))
        for one in fields.objects("lookups", _LOOKUP_KEYS, "lookup", maximum=_MAX_LOOKUPS)
    )
    if not lookups:
        fields.refuse("lists no lookups; expected no such list then")
    return lookups


def _pieces(lookup: Fields) -> tuple[LookupPiece, ...]:
    return tuple(
        LookupPiece(
            digest=one.digest("digest"),
            size=one.integer("size", minimum=1, maximum=2**32),
            shards=one.integer("shards", minimum=1, maximum=MAX_SHARDS),
            entries=one.integer("entries", maximum=2**32),
        )
        for one in lookup.objects("pieces", _PIECE_KEYS, "piece", maximum=MAX_SHARDS)
    )


def _parts(fields: Fields) -> tuple[tuple[str, str], ...]:
    parts: list[tuple[str, str]] = []
    for item in fields.items("parts", maximum=_MAX_PARTS):
        match item:
            case [str(name), str(manifest)] if _PART_NAME.fullmatch(name) and DIGEST.fullmatch(manifest):
                parts.append((name, manifest))
            case _:
                fields.refuse(f"has the part {str(item)[:100]}, expected [name, manifest id]")
    return tuple(parts)


def _refuse_urls(value: object, where: str) -> None:
    """A URL may hold a host or a credential, and neither belongs into what is shared and never changes."""
    if isinstance(value, str) and "://" in value:
        raise UsageError(
            f"manifest setting {where} holds a URL: expected settings only; name the source without it"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_urls(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _refuse_urls(item, f"{where}.{number}")


def _check_totals(manifest: Manifest) -> None:
    """Compare the totals of a root with its pages and strata."""
    if not 0 <= manifest.selected <= manifest.rows:
        _refuse(f"{manifest.selected} of {manifest.rows} rows are selected")
    _check_strata(manifest)
    _check_lookups(manifest)
    if manifest.parts:
        _check_parts(manifest)
        return
    for total in ("shards", "rows"):
        held = sum(getattr(page, total) for page in manifest.pages)
        if held != getattr(manifest, total):
            _refuse(f"its pages hold {held} {total}, the root {getattr(manifest, total)}")


def _check_strata(manifest: Manifest) -> None:
    own = [stratum for stratum in manifest.strata if not stratum.in_pool]
    inside = [stratum for stratum in manifest.strata if stratum.in_pool]
    pools = [stratum for stratum in manifest.strata if stratum.pooled]
    if len({stratum.values for stratum in manifest.strata}) != len(manifest.strata):
        _refuse("a stratum appears twice")
    for stratum in manifest.strata:
        _check_stratum(manifest, stratum)
    for total, rows in (("rows", "rows"), ("selected", "selected rows")):
        held = sum(getattr(stratum, total) for stratum in own)
        if held != getattr(manifest, total):
            _refuse(f"its strata hold {held} {rows}, the root {getattr(manifest, total)}")
        # Every pooled row is in a pool, and the other way round.
        if sum(getattr(s, total) for s in inside) != sum(getattr(s, total) for s in pools):
            _refuse(f"the {rows} of the strata in the pool do not add up to the pool's")


def _check_stratum(manifest: Manifest, stratum: Stratum) -> None:
    if not 0 <= stratum.selected <= stratum.rows:
        _refuse(f"stratum {stratum.name!r}: {stratum.selected} of {stratum.rows} rows are selected")
    if stratum.pooled and stratum.in_pool:
        _refuse(f"stratum {stratum.name!r} is a pool inside a pool")
    if not stratum.pooled and not manifest.parts and len(stratum.values) != len(manifest.axes):
        _refuse(f"stratum {stratum.name!r} has {len(stratum.values)} values for {len(manifest.axes)} axes")


def _check_lookups(manifest: Manifest) -> None:
    fields = [lookup.field for lookup in manifest.lookups]
    if fields != sorted(set(fields)):
        _refuse(f"its lookups are of the fields {fields[:10]}, expected each once and sorted")
    for lookup in manifest.lookups:
        if lookup.field != "key" and lookup.field not in manifest.schema:
            _refuse(f"it has a lookup of {lookup.field!r}, which is no field")
        covered = sum(piece.shards for piece in lookup.pieces)
        if covered != manifest.shards or manifest.parts:
            _refuse(f"its lookup of {lookup.field!r} covers {covered} shards of {manifest.shards}")


def _check_parts(manifest: Manifest) -> None:
    if manifest.pages:
        _refuse("a merged manifest has pages of its own")
    names = [name for name, _ in manifest.parts]
    if len(set(names)) != len(names):
        _refuse("a part appears twice")
    unknown = {stratum.values[0] if stratum.values else "" for stratum in manifest.strata} - set(names)
    if unknown:
        _refuse(f"a stratum belongs to {min(unknown)[:100]!r}, which is no part")


def _refuse(why: str) -> NoReturn:
    raise FormatError(f"the manifest contradicts itself: {why}; do not trust it")


def _costs_to_json(costs: Sequence[RowCosts]) -> dict[str, list[list[object]]]:
    """What stands among the build settings."""
    return {
        one.expression: [
            [piece.digest.removeprefix("sha256:"), piece.size, piece.shards, piece.rows]
            for piece in one.pieces
        ]
        for one in costs
    }


def _costs_from_json(value: object) -> tuple[RowCosts, ...]:
    """Read it again; sorted by expression."""
    if not isinstance(value, Mapping) or not 0 < len(value) <= _MAX_COSTS:
        raise FormatError(f"build setting {_COSTS!r}: expected an object of 1 to {_MAX_COSTS} expressions")
    return tuple(RowCosts(name, _cost_pieces(name, value[name])) for name in sorted(value))


def _cost_pieces(expression: str, value: Any) -> tuple[CostPiece, ...]:
    if not isinstance(value, list) or len(value) > _MAX_PIECES or len(expression) > 1_000:
        raise FormatError(f"costs of {expression[:100]!r}: expected a list of at most {_MAX_PIECES} pieces")
    pieces = []
    for piece in value:
        match piece:
            case [str(digest), int(size), int(shards), int(rows)] if (
                _HEX.fullmatch(digest)
                and 0 < size < 2**32
                and 0 < shards < 2**32
                and 0 < rows < 2**42
                and not any(isinstance(number, bool) for number in piece)
            ):
                pieces.append(CostPiece(f"sha256:{digest}", size, shards, rows))
            case _:
                raise FormatError(
                    f"costs of {expression[:100]!r}: piece {str(piece)[:120]}, expected [hex, size, shards, rows]"
                )
    return tuple(pieces)
