"""Policy and locations of a root, which the log records.

The policy says how many copies of each object there must be and what a commit waits for. `shardkit.copies` decides
which location an object belongs in. URLs of locations never have a credential.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import unquote

from shardkit.credentials import refuse_credentials
from shardkit.documents import Natural, Record, Time
from shardkit.errors import ConfigurationError, UsageError
from shardkit.ranges import Range, duration_text, parse_duration
from shardkit.reading.objects import ROOT_NAME, check_location_name
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.store import absolute_path, place_text, scheme_of

Mode = Literal["sync", "async", "hybrid"]
"""What a commit waits for; see `MODES`."""

MODES: Final[tuple[Mode, ...]] = ("sync", "async", "hybrid")
"""A commit waits for all copies; for the first copy; or for all copies of critical objects."""

MAX_COPIES: Final = 16
_MAX_CRITICAL: Final = 100
_MAX_MEMBERS: Final = 128
_MAX_LOCATIONS: Final = 64
_DOMAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/ -]{0,199}")
_NEVER: Final = "1970-01-01T00:00:00Z"
_PARITY: Final = re.compile(r"([0-9]{1,3})\+([0-9])")


@dataclass(frozen=True, slots=True)
class Critical:
    """A stratum with more copies: every shard with a row of the stratum gets them."""

    stratum: str
    """Its name in the manifest, such as ``gold`` or ``web/de``."""
    copies: int

    def __post_init__(self) -> None:
        if not self.stratum:
            raise ConfigurationError("critical stratum '': expected the name of a stratum")
        _check_copies(self.copies, f"critical stratum {self.stratum!r}: copies")


@dataclass(frozen=True, slots=True)
class Parity:
    """Sets of `members` shards with `extra` parity objects each: any `extra` lost members can be rebuilt."""

    members: int
    extra: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.members <= _MAX_MEMBERS or self.extra != 2:
            raise ConfigurationError(
                f"parity {self.members}+{self.extra}: expected 2 to {_MAX_MEMBERS} members and 2 parity objects, "
                "such as 8+2"
            )

    def __str__(self) -> str:
        return f"{self.members}+{self.extra}"

    @classmethod
    def parse(cls, text: str) -> Parity | None:
        """Parse ``8+2``; return None for ``none``.

        Raises:
            ConfigurationError: The text has another form.
        """
        if text in ("none", ""):
            return None
        match = _PARITY.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"parity {text[:40]!r}: expected members+2, such as 8+2, or none")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Copies that replication makes, and checks that scrubs make."""

    copies: int = 1  # number of copies of every object, in distinct failure domains, including the root's
    critical: tuple[Critical, ...] = ()  # strata whose shards get more copies
    # size of the parity sets, which survive the loss of two members; None for no parity
    parity: Parity | None = None
    # the copies that a commit waits for. "sync": all copies. "async": the copy in the root. "hybrid": all copies of
    # metadata and of shards with critical strata, and the root's copy of other shards.
    mode: Mode = "hybrid"
    max_scrub_age_s: int = 30 * 86_400  # seconds after which a copy is due for a check

    def __post_init__(self) -> None:
        _check_copies(self.copies, "copies")
        if self.mode not in MODES:
            raise ConfigurationError(f"mode {str(self.mode)[:40]!r}: expected one of {', '.join(MODES)}")
        names = [one.stratum for one in self.critical]
        if len(set(names)) != len(names) or len(names) > _MAX_CRITICAL:
            raise ConfigurationError(
                f"critical: {len(names)} strata, expected each once and at most {_MAX_CRITICAL}"
            )
        Range(1, 2**40).check("max_scrub_age_s", self.max_scrub_age_s)

    @property
    def most_copies(self) -> int:
        """Largest number of copies of any object, which is the number of failure domains needed."""
        return max([self.copies, *(one.copies for one in self.critical)])

    def copies_of(self, strata: Sequence[str] | frozenset[str] = ()) -> int:
        """Return the number of copies of a shard that has rows of these strata."""
        return max([self.copies, *(one.copies for one in self.critical if one.stratum in strata)])

    def is_critical(self, strata: Sequence[str] | frozenset[str]) -> bool:
        """Return True if one of the strata of a shard is critical."""
        return any(one.stratum in strata for one in self.critical)

    def changed(
        self,
        *,
        copies: int | None = None,
        critical: Sequence[str] | None = None,
        parity: str | None = None,
        mode: str | None = None,
        max_scrub_age: str | None = None,
    ) -> Policy:
        """Return this policy with settings of a command line; None keeps a setting."""
        new: dict[str, Any] = {"copies": copies, "mode": mode}
        if critical is not None:
            new["critical"] = tuple(sorted(map(_parse_critical, critical), key=lambda one: one.stratum))
        if max_scrub_age is not None:
            new["max_scrub_age_s"] = int(parse_duration(max_scrub_age, "max_scrub_age"))
        new = {name: value for name, value in new.items() if value is not None}
        if parity is not None:
            new["parity"] = Parity.parse(parity)
        return dataclasses.replace(self, **new)

    def to_table(self) -> dict[str, Any]:
        """Return the policy for display, with durations as text."""
        table = {**dataclasses.asdict(self), "critical": list(map(dataclasses.asdict, self.critical))}
        table["parity"] = str(self.parity or "none")
        table["max_scrub_age"] = duration_text(table.pop("max_scrub_age_s"))
        return table


def _parse_critical(text: str) -> Critical:
    stratum, equals, copies = text.rpartition("=")
    if not equals or not (copies.isascii() and copies.isdecimal()):
        raise ConfigurationError(f"critical {text[:80]!r}: expected a stratum and its copies, such as gold=3")
    return Critical(stratum, int(copies))


def _check_copies(copies: int, what: str) -> None:
    Range(1, MAX_COPIES).check(what, copies)


@dataclass(frozen=True, slots=True)
class LocationRecord:
    """A location in a table."""

    name: str  # short unique name, used in attestations, events and tables
    url: str  # URL or absolute path of the copy; for ``root``, the root's URL when the table was written
    domain: str  # failure domain: locations of one domain fail together. The default is the location's name.
    rank: int = 1  # order of reads: the location with the lowest rank is read first
    # share of the objects, relative to the weights of other locations. A location of weight 0 gets no
    # objects, and its objects are moved to other locations.
    weight: int = 100

    def __post_init__(self) -> None:
        check_location_name(self.name)
        if _DOMAIN.fullmatch(self.domain) is None:
            raise ConfigurationError(
                f"location {self.name!r}: failure domain {self.domain[:60]!r}, expected at most 200 of "
                "[A-Za-z0-9._:/ -]"
            )
        Range(-1_000, 1_000).check(f"location {self.name!r}: rank", self.rank)
        Range(0, 10**6).check(f"location {self.name!r}: weight", self.weight)
        _check_url(self.name, self.url)

    @classmethod
    def parse(cls, text: str) -> LocationRecord:
        """Parse ``NAME=URL[,domain=…][,rank=…][,weight=…]``."""
        refuse_credentials(text, "--location")
        name, equals, rest = text.partition("=")
        url, *options = rest.split(",")
        if not equals or not url:
            raise ConfigurationError(
                f"--location {text[:200]!r}: expected NAME=URL, such as mirror=s3://bucket/cats,domain=aws"
            )
        given: dict[str, Any] = {}
        for option in options:
            key, sign, value = option.partition("=")
            if key not in ("domain", "rank", "weight") or not sign or key in given:
                raise ConfigurationError(
                    f"--location {name}: {option[:200]!r}, expected domain=…, rank=… or weight=…, each once"
                )
            given[key] = value if key == "domain" else _number(value, f"--location {name}: {key}")
        return cls(name, absolute_url(place_text(url, name)), **{"domain": name, **given})


class LocationTable(Record, frozen=True, kw_only=True):
    """Locations and policy of a root; without `n` and `time`, a draft for computing placements."""

    n: Natural = 0  # number of the log entry that set them
    time: Time = _NEVER  # time of that entry
    policy: Policy  # number of copies, parity and scrubs
    locations: tuple[LocationRecord, ...]  # all locations; the first is the root

    def __post_init__(self) -> None:
        names, urls = [one.name for one in self.locations], [one.url for one in self.locations]
        if not names or names[0] != ROOT_NAME:
            raise ConfigurationError(f"locations {names[:5]}: expected {ROOT_NAME!r} first")
        twice = [one for values in (names, urls) for one in sorted(set(values)) if values.count(one) > 1]
        if twice:
            raise ConfigurationError(
                f"location {twice[0]!r} is named twice; give each location one name and one place"
            )
        if len(names) > _MAX_LOCATIONS:
            raise ConfigurationError(f"{len(names)} locations, expected at most {_MAX_LOCATIONS}")
        domains = {one.domain for one in self.locations if one.weight or one.name == ROOT_NAME}
        if self.policy.most_copies > len(domains):
            raise ConfigurationError(
                f"{self.policy.most_copies} copies need as many failure domains, and there are {len(domains)} "
                f"({', '.join(sorted(domains))}); add locations: --location NAME=URL,domain=NAME"
            )

    @property
    def root(self) -> LocationRecord:
        """Location of the root, which gets the commits."""
        return self.locations[0]

    @property
    def others(self) -> tuple[LocationRecord, ...]:
        return self.locations[1:]

    def find(self, name: str) -> LocationRecord | None:
        return next((one for one in self.locations if one.name == name), None)


def absolute_url(url: str) -> str:
    """Return a URL for a table: a local path becomes absolute."""
    return url if scheme_of(url) else absolute_path(url)


def local_path(url: str) -> str | None:
    """Return the path of a local folder, None for any other URL."""
    scheme = scheme_of(url)
    if scheme == "file":
        return "/" + unquote(url.partition("://")[2].partition("/")[2])
    return absolute_path(url) if scheme is None else None


def _check_url(name: str, url: str) -> None:
    refuse_credentials(url, f"location {name!r}")
    scheme = scheme_of(url)
    if scheme is None and not os.path.isabs(url):
        raise ConfigurationError(f"location {name!r} at {url[:200]!r}: expected a URL or an absolute path")
    if scheme in (None, "file"):
        return
    try:
        parse_address(url)
    except UsageError as error:
        raise UsageError(f"location {name!r}: {error}") from None
    if scheme in ("http", "https"):
        raise ConfigurationError(
            f"location {name!r}: {scheme} servers take no copies; give it to readers (locations=), not to the root"
        )


def _number(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{what} {text[:40]!r}: expected a whole number") from None
