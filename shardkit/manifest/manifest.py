"""The root of a manifest: one version of a dataset, identified by the SHA-256 of its canonical bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta

from shardkit.documents import Digest, Document, Natural, Record, check_plain, decode, encode, sha256_digest
from shardkit.errors import FormatError, UsageError
from shardkit.formats.schema import MAX_FIELD_NAME, Schema

MAX_MANIFEST_BYTES: Final = 16 * 2**20
"""Maximum size of a root, without its pages."""

SHARDS_PER_PAGE: Final = 4_096

MAX_SHARDS: Final = 2**26
"""Maximum number of shards: 16 PiB in shards of 256 MiB, whose table still fits the memory of one machine."""
MAX_SEGMENTS_PER_PAGE: Final = 2**24
MAX_ADDED: Final = 64
"""Maximum number of versions with added fields; a block of each is read where its fields are."""
POOL: Final = "*pool*"
"""Value of the stratum that pools strata too rare to be spread."""

PART_AXIS: Final = "part"
"""First axis of the strata of a merged version, and of a selection of it."""

MIXED: Final = "mixed"
"""Format or compression of a merged manifest whose parts differ."""

_MAX_STRATA: Final = 2**17

_Size = Annotated[int, Meta(ge=1, le=2**32)]
_Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
_Value = Annotated[str, Meta(max_length=1_000)]
_PartName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]


class Stratum(Record, frozen=True):
    """A combination of values that batches are balanced over, and its number of rows."""

    values: Annotated[tuple[_Value, ...], Meta(max_length=32)]
    """One value per axis, as text; empty if the dataset is not stratified."""
    rows: Natural
    selected: Natural
    pooled: bool = False
    """Whether this is the pool, whose segments hold the rows of the strata marked `in_pool`."""
    in_pool: bool = False
    """Whether the rows of this stratum are in the segments of the pool."""

    @property
    def name(self) -> str:
        """The values joined by ``/``, with ``/`` and ``%`` percent-encoded; ``all`` without axes."""
        return "/".join(value.replace("%", "%25").replace("/", "%2F") for value in self.values) or "all"


class PageRef(Record, frozen=True):
    """A page of the shard table."""

    digest: Digest
    size: _Size
    """Bytes of the page object."""
    shards: Annotated[int, Meta(ge=1, le=SHARDS_PER_PAGE)]
    rows: Natural


class LookupPiece(Record, frozen=True):
    """Sorted hashes of the values in a run of shards, stored as an object."""

    digest: Digest
    size: _Size
    """Bytes of the lookup object."""
    shards: _Shards
    """Number of shards; the first follows the shards of the previous piece."""
    entries: Annotated[int, Meta(ge=0, le=2**32)]


class Lookup(Record, frozen=True):
    """An index that finds rows by ``key`` or by the value of a field, without reading samples."""

    field: Annotated[str, Meta(max_length=MAX_FIELD_NAME)]
    pieces: Annotated[tuple[LookupPiece, ...], Meta(max_length=MAX_SHARDS)]
    """In shard order; together they cover all shards."""


class CostPiece(Record, frozen=True):
    """The cost codes of all rows of a run of shards, stored as an object."""

    digest: Digest
    size: _Size
    """Bytes of the object."""
    shards: _Shards
    """Number of shards; the first follows the shards of the previous piece."""
    rows: Annotated[int, Meta(ge=1, le=2**42)]
    """Number of rows of these shards, selected or not; each has one byte."""


class RowCosts(Record, frozen=True):
    """The cost of each row of a version."""

    expression: Annotated[str, Meta(max_length=1_000)]
    """Expression without spaces, such as ``bytes(text)**2``."""
    pieces: Annotated[tuple[CostPiece, ...], Meta(max_length=_MAX_STRATA)]
    """In shard order."""


class Manifest(Document, frozen=True, kw_only=True, dict=True, tag="shardkit-manifest/1"):
    """One immutable version of a dataset.

    It holds no URL, host, time, credential or library version, so the same samples and settings give the same bytes and
    the same `id` on every machine and with any number of jobs.
    """

    schema: Schema
    format: Annotated[str, Meta(pattern=r"\A(tar|arrow|rows|mixed)\Z")] = msgspec.field(name="shard_format")
    """``tar``, ``arrow`` or ``rows`` (adopted files); ``mixed`` if merged parts differ."""
    compression: Annotated[str, Meta(pattern=r"\A(none|mixed|zstd:[0-9]{1,2})\Z")]
    axes: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(max_length=16)]
    """Names of the values of a stratum, in order; the first axis of a merged dataset is ``part``."""
    strata: Annotated[tuple[Stratum, ...], Meta(max_length=_MAX_STRATA)]
    """Segments refer to a stratum by its index in this tuple."""
    shards: Annotated[int, Meta(ge=0, le=MAX_SHARDS)]
    rows: Natural
    selected: Natural
    raw_bytes: Natural
    stored_bytes: Natural
    pages: Annotated[tuple[PageRef, ...], Meta(max_length=MAX_SHARDS)]
    classes: Annotated[tuple[_Value, ...], Meta(max_length=_MAX_STRATA)] = ()
    """Names of folder classes, indexed by label."""
    sources: Digest | None = None
    """Digest of the object that lists the imported files."""
    build: Annotated[dict[str, Any], Meta(max_length=1_000)] = msgspec.field(default_factory=dict)
    """Settings that determined the bytes, as JSON without floats."""
    parent: Digest | None = None
    """Id of the version from which this one was made."""
    parts: Annotated[tuple[tuple[_PartName, Digest], ...], Meta(max_length=4_096)] = ()
    """(name, manifest id) of the parts of a merged dataset, which has no pages of its own."""
    added: Annotated[tuple[Digest, ...], Meta(max_length=MAX_ADDED)] = ()
    """Ids of the versions of the same root that hold further fields of the same rows; they come last in `schema`."""
    adopted: bool = False
    """Whether some shards are files of other owners, outside of the repository."""
    about: Digest | None = None
    """Digest of the object with licence, source and contact."""
    lookups: Annotated[tuple[Lookup, ...], Meta(max_length=100)] = ()
    """Sorted by field."""
    costs: Annotated[tuple[RowCosts, ...], Meta(max_length=100)] = ()
    """Sorted by expression."""

    def __post_init__(self) -> None:
        _check_totals(self)
        check_plain(self.build)
        _refuse_urls(self.build, "build")

    @cached_property
    def id(self) -> str:
        return sha256_digest(self.to_bytes())

    @property
    def labels(self) -> dict[str, str]:
        """Name of each stratum → the same, followed by the class name if one of its axes is the field `label`."""
        return {stratum.name: self._label(stratum) for stratum in self.strata}

    def _label(self, stratum: Stratum) -> str:
        if "label" in self.axes and len(stratum.values) == len(self.axes):
            value = stratum.values[self.axes.index("label")]
            if value.isdecimal() and int(value) < len(self.classes):
                return f"{stratum.name} {self.classes[int(value)]}"
        return stratum.name

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a root whose digest has been checked.

        Raises:
            FormatError: The bytes are not a manifest, or the manifest contradicts itself.
        """
        return decode(cls, data, f"manifest {sha256_digest(data)}", max_bytes=MAX_MANIFEST_BYTES)


def _refuse_urls(value: object, where: str) -> None:
    """Raise UsageError for URLs: they may hold a host or a credential, and a manifest is shared and never changes."""
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
    """Compare the totals of a root with its pages, strata, lookups and costs."""
    if not 0 <= manifest.selected <= manifest.rows:
        _refuse(f"{manifest.selected} of {manifest.rows} rows are selected")
    _check_strata(manifest)
    _check_lookups(manifest)
    if manifest.parts and manifest.added:
        _refuse("it is merged and has added fields")
    if len(set(manifest.added)) != len(manifest.added):
        _refuse("fields are added twice")
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
        # Pools hold exactly the rows of the strata marked `in_pool`.
        if sum(getattr(s, total) for s in inside) != sum(getattr(s, total) for s in pools):
            _refuse(f"the {rows} of the strata in the pool do not add up to the pool's")


def _check_stratum(manifest: Manifest, stratum: Stratum) -> None:
    if not 0 <= stratum.selected <= stratum.rows:
        _refuse(f"stratum {stratum.name!r}: {stratum.selected} of {stratum.rows} rows are selected")
    if stratum.pooled and stratum.in_pool:
        _refuse(f"stratum {stratum.name!r} is a pool inside a pool")
    # a merged version has the axes that its parts share; a part may have more
    extra = len(stratum.values) - len(manifest.axes)
    if not stratum.pooled and (extra < 0 or (extra and manifest.axes[:1] != (PART_AXIS,))):
        _refuse(f"stratum {stratum.name!r} has {len(stratum.values)} values for {len(manifest.axes)} axes")


def _check_lookups(manifest: Manifest) -> None:
    for names, what in (
        ([lookup.field for lookup in manifest.lookups], "lookups are of the fields"),
        ([costs.expression for costs in manifest.costs], "costs are of the expressions"),
    ):
        if names != sorted(set(names)):
            _refuse(f"its {what} {names[:10]}, expected each once and sorted")
    for lookup in manifest.lookups:
        if lookup.field != "key" and lookup.field not in manifest.schema:
            _refuse(f"it has a lookup of {lookup.field!r}, which is no field")
        _check_covered(manifest, lookup.pieces, f"lookup of {lookup.field!r}")
    for costs in manifest.costs:
        _check_covered(manifest, costs.pieces, f"cost {costs.expression!r}")


def _check_covered(manifest: Manifest, pieces: Sequence[LookupPiece | CostPiece], what: str) -> None:
    covered = sum(piece.shards for piece in pieces)
    if covered != manifest.shards or manifest.parts:
        _refuse(f"its {what} covers {covered} shards of {manifest.shards}")


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
