"""Policy: how many copies of each object a root must have, and what a commit waits for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from shardkit.errors import ConfigurationError
from shardkit.ranges import Range, duration_text, parse_duration

Mode = Literal["sync", "async", "hybrid"]
"""What a commit waits for; see `MODES`."""

MODES: Final[tuple[Mode, ...]] = ("sync", "async", "hybrid")
"""A commit waits for all copies; for the first copy; or for all copies of critical objects."""

MAX_COPIES: Final = 16
_MAX_CRITICAL: Final = 100
_MAX_MEMBERS: Final = 128
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
