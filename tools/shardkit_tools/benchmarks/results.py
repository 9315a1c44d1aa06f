"""What a benchmark found, as ratios, and the document that keeps it.

A ratio is shardkit's rate over that of a limit or a peer in the same round of the same contest: larger is better, and
what slows the whole machine down cancels. Each is told by the clock and by CPU seconds;
the latter hardly notice neighbours.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardkit.errors import FormatError, NotFoundError
from shardkit_tools.benchmarks.rounds import Held, Kind, Round

__all__ = ["Ratio", "Result", "load_result", "ratios_of"]

FORMAT = 1
Clock = Literal["wall", "cpu"]
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Ratio:
    """shardkit's rate over another one.

    Attributes:
        contest: such as "read tokens".
        of: shardkit's entry. to: the other one. kind: of the other one.
        clock: "wall", or "cpu" for rates per CPU second.
        median, lowest, highest: over the rounds. rounds: how many.
        conditions: what must be equal where two results are compared.
    """

    contest: str
    of: str
    to: str
    kind: Kind
    clock: Clock
    median: float
    lowest: float
    highest: float
    rounds: int
    conditions: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the same ratio has in every result."""
        return (self.contest, self.of, self.to, self.clock)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.contest}: {self.of} / {self.to}" + (", by CPU" if self.clock == "cpu" else "")


@dataclass(frozen=True, slots=True)
class Result:
    """All that one run of the benchmarks found.

    Attributes:
        facts: of the machine, and the settings.
        ratios: in the order of measuring.
        failures: "contest" or "contest: entry" → why it has no figures.
        rates: contest → entry → rounds, for who wants to look; never compared.
    """

    facts: Mapping[str, Any]
    ratios: Sequence[Ratio]
    failures: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, Mapping[str, Sequence[Round]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {
            "shardkit_bench": FORMAT,
            "facts": dict(self.facts),
            "ratios": [_ratio_json(ratio) for ratio in self.ratios],
            "failures": dict(self.failures),
            "rates": {
                contest: {
                    name: [[one.amount, one.seconds, one.cpu_s] for one in rounds]
                    for name, rounds in entries.items()
                }
                for contest, entries in self.rates.items()
            },
        }

    @classmethod
    def from_json(cls, document: Any, where: str) -> Result:
        """A recorded result.

        Raises:
            FormatError: it is none.
        """
        try:
            if document.get("shardkit_bench") == FORMAT:
                return cls(
                    dict(document["facts"]),
                    tuple(_ratio_of(entry, where) for entry in document["ratios"]),
                    {str(name): str(text) for name, text in document["failures"].items()},
                )
            version = document["shardkit_bench"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{where}: not a benchmark result ({error!r}); expected what `shardkit bench --out` writes"
            ) from None
        raise FormatError(
            f"{where}: a benchmark result of version {version!r}, this shardkit reads {FORMAT}; measure again with "
            "this one, or compare with a newer one"
        )


def load_result(path: str | Path) -> Result:
    """Read a result.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is not a result.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise NotFoundError(
            f"{path}: {error.strerror}; record a result with: shardkit bench --out {path}"
        ) from None
    if len(data) > _MAX_BYTES:
        raise FormatError(f"{path}: more than {_MAX_BYTES} bytes; not a benchmark result")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: not JSON; expected what `shardkit bench --out` writes") from None
    return Result.from_json(document, str(path))


def ratios_of(held: Held) -> list[Ratio]:
    """Every entry of shardkit over every limit and peer, by both clocks, round by round."""
    found = []
    own = [name for name in held.rounds if held.kinds[name] == "shardkit"]
    for of in own:
        for to, others in held.rounds.items():
            if held.kinds[to] == "shardkit":
                continue
            pairs = list(zip(held.rounds[of], others, strict=True))
            for clock in ("wall", "cpu"):
                values = [_rate(mine, clock) / _rate(theirs, clock) for mine, theirs in pairs
                          if _cost(mine, clock) > 0 and _cost(theirs, clock) > 0]  # fmt: skip
                if values:
                    found.append(
                        Ratio(
                            held.name,
                            of,
                            to,
                            held.kinds[to],
                            clock,
                            statistics.median(values),
                            min(values),
                            max(values),
                            len(values),
                            held.conditions,
                        )
                    )
    return found


def _cost(one: Round, clock: str) -> float:
    return one.seconds if clock == "wall" else one.cpu_s


def _rate(one: Round, clock: str) -> float:
    return one.amount / _cost(one, clock)


def _ratio_json(ratio: Ratio) -> dict[str, Any]:
    names = ("contest", "of", "to", "kind", "clock", "median", "lowest", "highest", "rounds")
    return {**{name: getattr(ratio, name) for name in names}, "conditions": dict(ratio.conditions)}


def _ratio_of(entry: Mapping[str, Any], where: str) -> Ratio:
    median, lowest, highest = (float(entry[name]) for name in ("median", "lowest", "highest"))
    kind, clock = entry["kind"], entry["clock"]
    is_range = 0 < lowest <= median <= highest < float("inf")
    if not is_range or kind not in ("limit", "peer") or clock not in ("wall", "cpu"):
        raise FormatError(f"{where}: the ratio {dict(entry)!r} is not one; record the result again")
    conditions = {str(name): int(value) for name, value in entry["conditions"].items()}
    return Ratio(str(entry["contest"]), str(entry["of"]), str(entry["to"]), kind, clock, median, lowest, highest,
                 int(entry["rounds"]), conditions)  # fmt: skip
