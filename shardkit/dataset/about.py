"""Licence, source and contact of a dataset, and of single strata if they differ.

Users write them as TOML; they are stored as a content-addressed object that the manifest names (SPEC.md §8).
Unlike a manifest, it may hold URLs: they say where the data came from and are never opened.
The sources object, also defined here, lists the files that a version was built from; the build writes it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardkit.credentials import redact, refuse_credentials
from shardkit.documents import Document, Natural, Record, Text, configure, convert, decode, encode
from shardkit.errors import ConfigurationError, FormatError, SourceError
from shardkit.formats import Texts, pack_columns, unpack_columns
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version
from shardkit.stores.file_operations import read_small_file

MAX_ABOUT_BYTES: Final = 4 * 2**20

_MAX_STRATA: Final = 2**17
_SPELLINGS: Final = {"license": "licence", "strata": "stratum"}


class Terms(Record, frozen=True):
    """Terms of use of samples and their contact; an empty text means that nothing is stated."""

    licence: Text = ""  # an SPDX expression such as `CC-BY-4.0`, or the URL of a text
    source: Text = ""  # where the samples come from
    contact: Text = ""  # where to ask, and to report errors and takedowns
    citation: Text = ""  # how the work is cited
    note: Text = ""  # anything else

    def over(self, other: Terms) -> Terms:
        """Return these terms, with empty texts taken from `other`."""
        return Terms(*(getattr(self, name) or getattr(other, name) for name in _TERMS))


_TERMS: Final = Terms.__struct_fields__


class About(Document, frozen=True, kw_only=True, tag="shardkit-about/1"):
    """The content of ``about.toml``."""

    name: Text = ""  # name of the dataset
    description: Text = ""
    version: Text = ""
    homepage: Text = ""
    terms: Terms = Terms()  # default for every stratum
    # (stratum name or pattern such as `web/*`, terms) in the order of the file; the first match counts
    strata: Annotated[tuple[tuple[Text, Terms], ...], Meta(max_length=_MAX_STRATA)] = ()

    def of_stratum(self, name: str) -> Terms:
        """Return the terms of a stratum; empty texts are taken from the dataset's terms."""
        for pattern, terms in self.strata:
            if pattern == name or fnmatchcase(name, pattern):
                return terms.over(self.terms)
        return self.terms

    def to_json(self) -> dict[str, Any]:
        """Return the non-empty entries, as ``show --json`` prints them."""
        document: dict[str, Any] = {name: getattr(self, name) for name in _HEAD if getattr(self, name)}
        document |= msgspec.to_builtins(self.terms)
        if self.strata:
            document["stratum"] = {pattern: msgspec.to_builtins(terms) for pattern, terms in self.strata}
        return document

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the object."""
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> About:
        """Read an object whose digest has been checked."""
        return decode(cls, data, "about", max_bytes=MAX_ABOUT_BYTES)


_HEAD: Final = ("name", "description", "version", "homepage")


class _File(Terms, frozen=True):
    """The keys of an ``about.toml`` file."""

    name: Text = ""
    description: Text = ""
    version: Text = ""
    homepage: Text = ""
    stratum: Annotated[dict[Text, Terms], Meta(max_length=_MAX_STRATA)] = msgspec.field(default_factory=dict)


def parse_about(document: Mapping[str, Any], where: str = "about") -> About:
    """Return the content of a parsed ``about.toml``.

    Raises:
        ConfigurationError: A key is unknown or given twice, or a value is not a text, too long, or a credential.
    """
    given = _own_spelling(document, where)
    if isinstance(given.get("stratum"), Mapping):
        given["stratum"] = {
            name: _own_spelling(terms, where) if isinstance(terms, Mapping) else terms
            for name, terms in given["stratum"].items()
        }
    try:
        file = configure(_File, given, where)
    except ConfigurationError as error:
        raise ConfigurationError(redact(str(error))[:500]) from None
    about = About(
        **{name: getattr(file, name) for name in _HEAD},
        terms=Terms(*(getattr(file, name) for name in _TERMS)),
        strata=tuple(file.stratum.items()),
    )
    for name in (*_HEAD, *_TERMS):
        refuse_credentials(getattr(file, name), f"{where}: {name}")
    for pattern, terms in about.strata:
        refuse_credentials(pattern, f"{where}: the name of a stratum")
        for name in _TERMS:
            refuse_credentials(getattr(terms, name), f"{where}: stratum {pattern!r:.200}: {name}")
    return about


def _own_spelling(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in document.items():
        name = _SPELLINGS.get(key, key)
        if name in given:
            raise ConfigurationError(f"{where}: key {name!r:.60} is given twice")
        given[name] = value
    return given


def given_about(about: About | Mapping[str, Any] | str | os.PathLike[str] | None) -> About | None:
    """Return an `About` from a file name, a parsed mapping or an `About`."""
    if about is None or isinstance(about, About):
        return about
    if isinstance(about, Mapping):
        return parse_about(about)
    try:
        document = tomllib.loads(read_small_file(about, max_bytes=MAX_ABOUT_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, tables in tables
        reason = "too deeply nested" if isinstance(error, RecursionError) else redact(str(error))[:200]
        raise SourceError(
            f'{about}: cannot be read as TOML ({reason}); give a file such as: licence = "CC-BY-4.0"'
        ) from None
    return parse_about(document, str(about))


def check_strata(about: About, strata: Collection[str]) -> None:
    """Refuse terms of unknown strata: a misspelt name would leave samples without a licence."""
    for pattern, _ in about.strata:
        if pattern not in strata and not any(fnmatchcase(name, pattern) for name in strata):
            near = difflib.get_close_matches(pattern, list(strata), n=1)
            known = ", ".join(sorted(strata)[:10]) or "none: stratify it"
            raise ConfigurationError(
                f"about: the dataset has no stratum {pattern!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"there are {known}")
            )


def load_about(repository: Repository, digest: str | None) -> About:
    """Return the verified object that a manifest names, or an empty `About` without a digest."""
    if digest is None:
        return About()
    return About.from_bytes(repository.get_object(digest, "about", max_bytes=MAX_ABOUT_BYTES))


def about_of(version: Version) -> About:
    """Return the `About` of a version; for a merged version, the terms of its parts as strata."""
    if not version.manifest.parts:
        part = version.parts[0]
        return load_about(part.repository, version.manifest.about)
    strata: list[tuple[str, Terms]] = []
    for part in version.parts:
        about = load_about(part.repository, part.manifest.about)
        strata += [
            (f"{_literal(part.name)}/{pattern}", terms.over(about.terms)) for pattern, terms in about.strata
        ]
        # A part without axes is one stratum with the part's name; a part with axes has strata `part/value`.
        if about.terms != Terms():
            strata += [(f"{part.name}", about.terms), (f"{_literal(part.name)}/*", about.terms)]
    return About(strata=tuple(strata))


def _literal(name: str) -> str:
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


# ---- Source files of a version, and skipped rows

_KIND = "sources"


@dataclass(frozen=True, slots=True)
class SourceDigest:
    """A source file as it was when it was read."""

    name: str  # relative to the source root
    size: int  # in bytes
    sha256: str  # hex, as `sha256sum` prints it


@dataclass(frozen=True, slots=True)
class SourcesObject:
    """The content of a sources object."""

    files: tuple[SourceDigest, ...]  # sorted by name
    # (source name, row, kind of error) of skipped rows, in source order
    skipped: tuple[tuple[str, int, str], ...] = ()


class _SourcesMeta(Record, frozen=True, kw_only=True):
    files: Natural
    skipped: tuple[tuple[str, Natural, str], ...]


def pack_sources(sources: SourcesObject) -> bytes:
    """Return the bytes of the object: the same for the same files and rows."""
    files = sources.files
    names = Texts.pack([file.name for file in files])
    digests = b"".join(bytes.fromhex(file.sha256) for file in files)
    meta = {"files": len(files), "skipped": [list(row) for row in sources.skipped]}
    columns: dict[str, NDArray[Any]] = {
        "name_data": names.data,
        "name_offset": names.offsets,
        "size": np.array([file.size for file in files], dtype=np.int64),
        "sha256": np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
    }
    return pack_columns(_KIND, meta, columns)


def joined_sources(one: SourcesObject, other: SourcesObject) -> SourcesObject:
    """Return the files and skipped rows of both; a file listed identically in both appears once."""
    files = {*one.files, *other.files}
    return SourcesObject(
        tuple(sorted(files, key=lambda file: (file.name, file.sha256))), one.skipped + other.skipped
    )


def unpack_sources(data: bytes) -> SourcesObject:
    """Read an object whose digest has been checked."""
    unpacked = unpack_columns(data, _KIND)
    arrays, meta = unpacked.arrays, convert(_SourcesMeta, unpacked.meta, "sources")
    if set(arrays) != {"name_data", "name_offset", "size", "sha256"}:
        raise FormatError("sources: other columns than names, sizes and digests; do not trust it")
    count = meta.files
    names = Texts(arrays["name_data"], arrays["name_offset"])
    names.check("source names", count)
    if arrays["size"].shape != (count,) or arrays["sha256"].shape != (count, 32):
        raise FormatError(
            f"sources: columns do not have one entry for each of {count} files; do not trust it"
        )
    files = tuple(
        SourceDigest(name, size, bytes(digest).hex())
        for name, size, digest in zip(names.to_list(), arrays["size"].tolist(), arrays["sha256"], strict=True)
    )
    return SourcesObject(files, meta.skipped)
