"""What people must know about a dataset before they use it: licence, source, contact; per stratum where they differ.

Written by hand as TOML, kept as a content-addressed object that the manifest names (SPEC.md §8). Unlike a manifest it
may hold URLs: they say where data came from, nothing is ever read from them. So is the list of the files that a version
was built from, the sources object, which the build writes.
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
    """Under what terms samples may be used, and who answers for them; a text is empty if nothing is said."""

    licence: Text = ""  # an SPDX expression such as `CC-BY-4.0`, or the URL of a text
    source: Text = ""  # where the samples come from
    contact: Text = ""  # whom to ask, and to tell of errors and takedowns
    citation: Text = ""  # how the work is cited
    note: Text = ""  # anything else

    def over(self, other: Terms) -> Terms:
        """Return these terms with open texts taken from others."""
        return Terms(*(getattr(self, name) or getattr(other, name) for name in _TERMS))


_TERMS: Final = Terms.__struct_fields__


class About(Document, frozen=True, kw_only=True, tag="shardkit-about/1"):
    """The content of ``about.toml``."""

    name: Text = ""  # of the dataset
    description: Text = ""
    version: Text = ""
    homepage: Text = ""
    terms: Terms = Terms()  # of every stratum that has none of its own
    # (stratum name or pattern such as `web/*`, terms) in the order of the file; the first match counts
    strata: Annotated[tuple[tuple[Text, Terms], ...], Meta(max_length=_MAX_STRATA)] = ()

    def of_stratum(self, name: str) -> Terms:
        """Return the terms of a stratum, completed by those of the whole dataset."""
        for pattern, terms in self.strata:
            if pattern == name or fnmatchcase(name, pattern):
                return terms.over(self.terms)
        return self.terms

    def to_json(self) -> dict[str, Any]:
        """Return what is said, as ``show --json`` prints it."""
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
    """``about.toml`` as people write it."""

    name: Text = ""
    description: Text = ""
    version: Text = ""
    homepage: Text = ""
    stratum: Annotated[dict[Text, Terms], Meta(max_length=_MAX_STRATA)] = msgspec.field(default_factory=dict)


def parse_about(document: Mapping[str, Any], where: str = "about") -> About:
    """Return the content of a parsed ``about.toml``.

    Raises:
        ConfigurationError: A key is unknown or given twice, or a value is no text, too long, or holds a credential.
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
    """An about as callers give it: a file, or what one would say."""
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
    """Refuse terms of strata that the dataset does not have: a misspelt name would leave its samples unlicensed."""
    for pattern, _ in about.strata:
        if pattern not in strata and not any(fnmatchcase(name, pattern) for name in strata):
            near = difflib.get_close_matches(pattern, list(strata), n=1)
            known = ", ".join(sorted(strata)[:10]) or "none: stratify it"
            raise ConfigurationError(
                f"about: the dataset has no stratum {pattern!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"there are {known}")
            )


def load_about(repository: Repository, digest: str | None) -> About:
    """The object that a manifest names, verified; an empty one where it names none."""
    if digest is None:
        return About()
    return About.from_bytes(repository.get_object(digest, "about", max_bytes=MAX_ABOUT_BYTES))


def about_of(version: Version) -> About:
    """What is said of a version; of a merged one what is said of its parts, by strata."""
    if not version.manifest.parts:
        part = version.parts[0]
        return load_about(part.repository, version.manifest.about)
    strata: list[tuple[str, Terms]] = []
    for part in version.parts:
        about = load_about(part.repository, part.manifest.about)
        strata += [
            (f"{_literal(part.name)}/{pattern}", terms.over(about.terms)) for pattern, terms in about.strata
        ]
        # A part without axes is the one stratum of its name; one with axes has its values behind it.
        if about.terms != Terms():
            strata += [(f"{part.name}", about.terms), (f"{_literal(part.name)}/*", about.terms)]
    return About(strata=tuple(strata))


def _literal(name: str) -> str:
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


# ---- The files that a version was built from, and the rows that were left out

_KIND = "sources"


@dataclass(frozen=True, slots=True)
class SourceDigest:
    """A source file as it was when it was read."""

    name: str  # relative to the source root
    size: int  # in bytes
    sha256: str  # hex, as `sha256sum` prints it


@dataclass(frozen=True, slots=True)
class SourcesObject:
    """What `pack_sources` was given."""

    files: tuple[SourceDigest, ...]  # sorted by name
    # (source name, row, kind of error) of rows that were left out, in source order
    skipped: tuple[tuple[str, int, str], ...] = ()


class _SourcesMeta(Record, frozen=True, kw_only=True):
    files: Natural
    skipped: tuple[tuple[str, Natural, str], ...]


def pack_sources(sources: SourcesObject) -> bytes:
    """The object's bytes: the same for the same files and rows."""
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
    """The files and skipped rows of both; a file that both list as it is appears once."""
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
