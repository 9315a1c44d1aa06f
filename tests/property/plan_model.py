"""A slow model of the plan: cards dealt one by one, lists cut and sorted, nothing in closed form.

It shares no arithmetic with ``shardkit.plan``: only the words of its SPEC.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shardkit.plan import Population

__all__ = ["NaturalModel", "permuted"]

_M64 = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(seed: int, index: int) -> int:
    """Output ``index`` of the splitmix64 generator with ``seed``, from its published description."""
    z = (seed + _GOLDEN * (index + 1)) % _M64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _M64
    return z ^ (z >> 31)


def _key(seed: int, *parts: int) -> int:
    for part in parts:
        seed = _splitmix(seed, part)
    return seed


def permuted(key: int, items: Sequence[object]) -> list[object]:
    """Items in the order of (high half of output i, i)."""
    return [items[i] for _, i in sorted((_splitmix(key, i) >> 32, i) for i in range(len(items)))]


@dataclass
class NaturalModel:
    """The natural-weights grid, epoch by epoch, for small populations.

    ``epoch(e)`` gives steps as lists of lanes of cells; ``None`` fills the empty slots of a short step.
    """

    population: Population
    global_batch: int
    lanes: int
    seed: int
    remainder: str
    window_blocks: int
    shuffle: str
    groups: list[list[tuple[int, int, int]]] = field(
        init=False
    )  # per group: (sample, shard block id, rows) rows

    def __post_init__(self) -> None:
        pop = self.population
        rows: dict[int, list[tuple[int, int]]] = {}  # stratum -> [(sample, block)]
        sample = block = 0
        for shard, stratum, count in zip(
            pop.segment_shard.tolist(), pop.segment_stratum.tolist(), pop.segment_rows.tolist(), strict=True
        ):
            size = int(pop.shard_block_rows[shard])
            for row in range(count):
                rows.setdefault(stratum, []).append((sample + row, block + row // size))
            sample, block = sample + count, block + -(-count // size)
        self.total = sample
        share = Fraction(self.global_batch, max(1, sample))
        named = sorted(rows, key=lambda s: (-len(rows[s]), pop.strata[s]))
        self.decks = [rows[s] for s in named if len(rows[s]) * share >= 1]
        rare = sorted(row for s in named if len(rows[s]) * share < 1 for row in rows[s])
        if rare:
            self.decks.append(rare)
        self.full = self.total // self.global_batch
        self.short = self.remainder == "short" and self.total % self.global_batch > 0
        step = 1 if self.total <= 2 else (math.isqrt(5 * self.total**2) - self.total) // 2
        while math.gcd(step, self.total) != 1:
            step += 1
        self.dither_step = step
        self.dropped_so_far = [0] * len(self.decks)
        self.next_epoch = 0

    def counts(self, epoch: int) -> list[list[int]]:
        """Samples of each group in each step: differences of floors of exact rationals."""
        dither = 0 if self.short else Fraction(epoch * self.dither_step % self.total, self.total)
        below = [0]
        for deck in self.decks:
            below.append(below[-1] + len(deck))
        out, before = [], [0] * len(self.decks)
        for step in range(1, self.full + 1):
            sums = [math.floor(Fraction(step * self.global_batch * b, self.total) + dither) for b in below]
            drawn = [sums[g + 1] - sums[g] for g in range(len(self.decks))]
            out.append([drawn[g] - before[g] for g in range(len(self.decks))])
            before = drawn
        if self.short:
            out.append([len(deck) - before[g] for g, deck in enumerate(self.decks)])
        return out

    def dealt(self, epoch: int) -> list[list[list[int]]]:
        """draws[step][lane][group]: every slot dealt by hand."""
        out = []
        for step, counts in enumerate(self.counts(epoch)):
            turn = step * self.lanes // self.full if step < self.full else 0
            lanes = [[0] * len(counts) for _ in range(self.lanes)]
            slots = [g for g, count in enumerate(counts) for _ in range(count)]
            for slot, group in enumerate(slots):
                lanes[(slot + turn) % self.lanes][group] += 1
            out.append(lanes)
        return out

    def epoch(self, number: int) -> list[list[list[int | None]]]:
        """Cells of an epoch; epochs must be asked for in order, the dropped rows move on."""
        assert number == self.next_epoch
        self.next_epoch += 1
        dealt = self.dealt(number)
        hands = [
            [sum(s[lane][g] for s in dealt) for g in range(len(self.decks))] for lane in range(self.lanes)
        ]
        played = []  # played[g][lane]: samples in drawing order
        for g, deck in enumerate(self.decks):
            kept = self._without_dropped(g, deck, sum(h[g] for h in hands))
            lanes, at = [], 0
            for lane in range(self.lanes):
                hand = kept[at : at + hands[lane][g]]
                at += hands[lane][g]
                lanes.append(self._shuffled(hand, number, lane, g))
            played.append(lanes)
        first = number * len(dealt)
        return [
            [self._cell(played, counts, first + step, lane) for lane, counts in enumerate(lanes)]
            for step, lanes in enumerate(dealt)
        ]

    def _without_dropped(self, group: int, deck: list[tuple[int, int]], keep: int) -> list[tuple[int, int]]:
        rows, gone = len(deck), len(deck) - keep
        start = _splitmix(_key(self.seed, 3), group) % rows + self.dropped_so_far[group]
        self.dropped_so_far[group] += gone
        out = {(start + i) % rows for i in range(gone)}
        return [row for i, row in enumerate(deck) if i not in out]

    def _shuffled(self, hand: list[tuple[int, int]], epoch: int, lane: int, group: int) -> list[int]:
        if self.shuffle == "none":
            return [sample for sample, _ in hand]
        key = _key(self.seed, 1, epoch, lane, group)
        blocks: list[list[int]] = []
        last = None
        for sample, block in hand:
            # a block that the dropped rows cut in two counts as two
            if last != (sample - 1, block):
                blocks.append([])
            blocks[-1].append(sample)
            last = (sample, block)
        shuffled = permuted(_key(key, 0), blocks)
        size = self._window(group)
        head = size - _splitmix(key, 2) % size
        out: list[int] = []
        window = 0
        while shuffled:
            take, shuffled = shuffled[:head], shuffled[head:]
            rows = [sample for block in take for sample in block]  # type: ignore[attr-defined]
            out += permuted(_key(key, 1, window), rows)  # type: ignore[arg-type]
            head, window = size, window + 1
        return out

    def _window(self, group: int) -> int:
        size = self.global_batch // self.lanes
        share = Fraction(len(self.decks[group]), self.total)
        if share * size >= 1:
            return max(1, math.floor(self.window_blocks * share))
        return max(1, self.window_blocks // (2 * size))

    def _cell(
        self, played: list[list[list[int]]], counts: list[int], step: int, lane: int
    ) -> list[int | None]:
        cell: list[object] = []
        for g, count in enumerate(counts):
            cell += played[g][lane][:count]
            del played[g][lane][:count]
        if self.shuffle != "none":
            cell = permuted(_key(self.seed, 2, lane, step), cell)
        return cell + [None] * (self.global_batch // self.lanes - len(cell))  # type: ignore[return-value]
