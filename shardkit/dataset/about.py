"""What people must know about a dataset before they use it: licence, source, contact; per stratum where they differ.

Written by hand as TOML, kept as a content-addressed object that the manifest names (SPEC.md §8). Unlike a manifest it
may hold URLs: they say where data came from, nothing is ever read from them. So is the list of the files that a version
was built from, the sources object, which the build writes.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.credentials import redact, refuse_credentials
from shardkit.errors import ConfigurationError, FormatError, SourceError
from shardkit.formats import Texts, canonical_json, pack_columns, unpack_columns
from shardkit.formats.canonical_json import Fields, read_document
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version
from shardkit.stores.file_operations import read_small_file

MAX_ABOUT_BYTES: Final = 4 * 2**20

_FORMAT: Final = "shardkit-about/1"
_LONGEST: Final = 10_000
_MAX_STRATA: Final = 2**17
_SPELLINGS: Final = {"license": "licence", "strata": "stratum"}


@dataclass(frozen=True, slots=True)
class Terms:
    """Under what terms samples may be used, and who answers for them; "" where it is not said."""

    licence: str = ""  # an SPDX expression such as `CC-BY-4.0`, or the URL of a text
    source: str = ""  # where the samples come from
    contact: str = ""  # who is asked, and told of errors and takedowns
    citation: str = ""  # how the work is cited
    note: str = ""  # anything else

    def over(self, other: Terms) -> Terms:
        """These terms, with what they leave open filled from others."""
        return Terms(*(getattr(self, name) or getattr(other, name) for name in _TERMS))


_TERMS: Final = tuple(item.name for item in fields(Terms))


@dataclass(frozen=True, slots=True)
class About:
    """What ``about.toml`` says."""

    name: str = ""  # of the dataset; "" where not said
    description: str = ""
    version: str = ""
    homepage: str = ""
    terms: Terms = field(default_factory=Terms)  # of everything that no stratum says otherwise
    # (stratum name or pattern such as `web/*`, terms) in the order of the file; the first match counts
    strata: tuple[tuple[str, Terms], ...] = ()

    def of_stratum(self, name: str) -> Terms:
        for pattern, terms in self.strata:
            if pattern == name or fnmatchcase(name, pattern):
                return terms.over(self.terms)
        return self.terms

    def to_json(self) -> dict[str, Any]:
        """As ``show --json`` prints it: what is said, and nothing else."""
        document: dict[str, Any] = {name: getattr(self, name) for name in _HEAD if getattr(self, name)}
        document |= _said(self.terms)
        if self.strata:
            document["stratum"] = {pattern: _said(terms) for pattern, terms in self.strata}
        return document

    def to_bytes(self) -> bytes:
        """The object's bytes: the same for the same content."""
        return canonical_json.dumps(
            {
                "format": _FORMAT,
                **{name: getattr(self, name) for name in _HEAD},
                "terms": asdict(self.terms),
                "strata": [[pattern, asdict(terms)] for pattern, terms in self.strata],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> About:
        """Read an object whose digest has been checked."""
        document = read_document(data, "about", _FORMAT, (*_HEAD, "terms", "strata"), MAX_ABOUT_BYTES)
        strata: list[tuple[str, Terms]] = []
        for item in document.items("strata", maximum=_MAX_STRATA):
            match item:
                case [str(pattern), terms] if len(pattern) <= _LONGEST:
                    strata.append((pattern, _read_terms(terms)))
                case _:
                    document.refuse(f"has the stratum {str(item)[:100]}, expected [name, terms]")
        return cls(
            **{name: document.text(name, maximum=_LONGEST) for name in _HEAD},
            terms=_read_terms(document.table("terms", maximum=len(_TERMS))),
            strata=tuple(strata),
        )


_HEAD: Final = ("name", "description", "version", "homepage")


def parse_about(document: Mapping[str, Any], where: str = "about") -> About:
    """What a parsed ``about.toml`` says."""
    given = _checked(document, (*_HEAD, *_TERMS, "stratum"), where)
    strata = given.pop("stratum", {})
    if not isinstance(strata, Mapping):
        raise ConfigurationError(
            f'{where}: stratum is a {type(strata).__name__}; expected tables such as [stratum."web/de"]'
        )
    parsed = []
    for pattern, terms in strata.items():
        place = f"{where}: stratum {_checked_text(pattern, f'{where}: the name of a stratum')!r:.200}"
        if not isinstance(terms, Mapping):
            raise ConfigurationError(
                f"{place} is a {type(terms).__name__}; expected a table with licence, source, contact"
            )
        parsed.append((str(pattern), Terms(**_texts(_checked(terms, _TERMS, place), place))))
    texts = _texts(given, where)
    head = {name: texts.pop(name) for name in _HEAD if name in texts}
    return About(**head, terms=Terms(**texts), strata=tuple(parsed))


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


def _said(terms: Terms) -> dict[str, str]:
    return {name: text for name, text in asdict(terms).items() if text}


def _read_terms(value: object) -> Terms:
    given = Fields(value, "about, terms", _TERMS)
    return Terms(**{name: given.text(name, maximum=_LONGEST) for name in _TERMS})


def _checked(document: Mapping[str, Any], known: Iterable[str], where: str) -> dict[str, Any]:
    """The keys in our spelling; unknown ones are refused."""
    expected = tuple(known)
    given: dict[str, Any] = {}
    for key, value in document.items():
        name = _SPELLINGS.get(key, key)
        if name not in expected or name in given:
            near = difflib.get_close_matches(key, expected, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(expected)}"
            shown = redact(str(key))[:60]
            raise ConfigurationError(f"{where}: key {shown!r} is unknown or given twice; {hint}")
        given[name] = value
    return given


def _texts(given: Mapping[str, Any], where: str) -> dict[str, str]:
    return {key: _checked_text(value, f"{where}: {key}") for key, value in given.items()}


def _checked_text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        what = f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
        raise ConfigurationError(f"{where} is {what}; expected a text of at most {_LONGEST} characters")
    refuse_credentials(value, where)
    return value


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
    arrays, meta = unpacked.arrays, unpacked.meta
    if set(arrays) != {"name_data", "name_offset", "size", "sha256"} or set(meta) != {"files", "skipped"}:
        raise FormatError("sources: other columns than names, sizes and digests; do not trust it")
    count = meta["files"]
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
    return SourcesObject(files, tuple((name, row, kind) for name, row, kind in meta["skipped"]))
