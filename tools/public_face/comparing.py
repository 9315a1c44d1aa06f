"""Compare two faces, and find the differences that the changelog does not name."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, TypeAlias

Names: TypeAlias = dict[str, str]
Face: TypeAlias = dict[str, Names]
"""section → name → meaning, or words."""


_KNOWN_AS: Final = {"loaderconfig": "loader", "make_plan": "plan"}


class Difference(NamedTuple):
    """A name whose meaning differs; `before` or `after` is None if that face lacks the name."""

    section: str
    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        where = f"{self.section}: {self.name}"
        if self.before is None:
            return f"+ {where}: {self.after}"
        if self.after is None:
            return f"- {where}: {self.before}"
        return f"~ {where}: {self.before} → {self.after}"


def differences(before: Face, after: Face) -> list[Difference]:
    """Return all differences, sorted by section and name."""
    found = []
    for section in sorted({*before, *after}):
        old, new = before.get(section, {}), after.get(section, {})
        names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        found += [Difference(section, name, old.get(name), new.get(name)) for name in names]
    return found


def unexplained(found: list[Difference], changelog: str) -> list[Difference]:
    """Return the removals and changes that the newest section of the changelog does not name.

    One text in backquotes must hold the name and its owner: `build --jobs`, `create(seed=)`, `Loader.seek`. A name
    without an owner stands alone. An entry about a removal must contain the word gone, removed, renamed or dropped.
    Naming a removed owner, such as a command, also covers its members, such as the command's options.
    """
    entries = re.split(
        r"^(?:- |## )", changelog.partition("\n## ")[2].partition("\n## ")[0], flags=re.MULTILINE
    )
    spans = [(_words(span), entry) for entry in entries for span in re.findall(r"`([^`]+)`", entry)]
    everything = [span for span, _ in spans]
    removals = [span for span, entry in spans if re.search(r"\b(gone|removed|renamed|dropped)\b", entry)]
    gone = {(one.section, one.name) for one in found if one.after is None}

    def is_named(section: str, name: str) -> bool:
        ways = [_words(name)]
        if section == "telemetry":  # counters of `loader.stats()` under a prefix
            ways.append(_words(name.partition(".")[2]))
        if name.endswith("=)"):  # `loader(memory=)` is enough
            ways.append(_words(re.sub(r"\w+\.(?=\w+\()", "", name)))
        for span in removals if (section, name) in gone else everything:
            if any(needed == span or (len(needed) > 1 and needed <= span) for needed in ways):
                return True
        owner = re.sub(r"(\([^(]*\)|[ .][^ .(]*)$", "", name)
        return owner != name and (section, owner) in gone and is_named(section, owner)

    return [one for one in found if one.before is not None and not is_named(one.section, one.name)]


def _words(name: str) -> set[str]:
    """Return the words of a name without its packages, with the aliases of `_KNOWN_AS` applied."""
    plain = re.sub(r"\bshardkit\w*[. ]([a-z_]+\.)*(?=\w)", "", name).lower()
    return {_KNOWN_AS.get(word, word) for word in re.findall(r"[\w-]+", plain)}
