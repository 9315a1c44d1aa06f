"""Amendments that are recorded while the run trains: all ranks apply them at the same step (SPEC.md §6)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from shardkit.ledger.amendments import Amendment, bind_switches

from .distributed import World

READ_AHEAD: Final = 3
"""Steps from the one that ranks begin, whose samples may be read before they know of an amendment."""


class AmendmentWatch:
    """The amendments that a run applies, and new amendments that `shardkit amend` records meanwhile.

    Rank 0 looks before each step, and the ranks exchange the number of the list that they apply next. So all of them
    change to a list after the same step, before they read a step that it changes.

    Attributes:
        number: number of the list that this rank applies.
        amendments: the list.
    """

    def __init__(self, run: Path, world: World, amendments: Sequence[Amendment]) -> None:
        self._run, self._world = run, world
        self.number, self.amendments = 0, list(amendments)
        self._seen: tuple[int, int, int] | None = None

    def look(self, step: int) -> int:
        """Return the number of the list to apply after ``step``; on rank 0, read a changed ledger first."""
        if self._world.rank:
            return self.number
        border = step + READ_AHEAD
        stat = (self._run / "ledger" / "state.json").stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen and all(one.from_step != border for one in self.amendments):
            return self.number
        self._seen = seen
        active = bind_switches(self._run, border, {one.number for one in self.amendments})
        if active == self.amendments:
            return self.number
        text = json.dumps([asdict(one) for one in active])
        self._world.store.set(f"amendments-{self.number + 1}", text)
        return self.number + 1

    def follow(self, number: int) -> list[Amendment]:
        """Change to the list with this number, which rank 0 has published, and return the new amendments."""
        before = {one.number for one in self.amendments}
        text = self._world.store.get(f"amendments-{number}")
        self.number, self.amendments = number, [Amendment(**one) for one in json.loads(text)]
        return [one for one in self.amendments if one.number not in before]
