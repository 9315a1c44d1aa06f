"""Diagnosis of a run from its records: bottleneck, skew between ranks, anomalies (SPEC.md §5, §6). Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any, Final

from shardkit.telemetry.records import Record

Ranks = Mapping[int, Sequence[Record]]
"""Records of each rank, oldest first."""

WINDOW_S: Final = 60.0
_LEAST_INTERVALS: Final = 4

BUSY: Final = ("data_s", "prepare_s", "compute_s", "update_s")
"""Stages of the trainer in which a rank works by itself."""

WAITING: Final = ("exchange_s", "reduce_s")
"""Stages of the trainer in which a rank waits for other ranks."""

_STAGES: Final = (*BUSY, *WAITING, "checkpoint_s", "evaluation_s")
_LOCATION_BYTES: Final = "reads.bytes_from_"

VERIFICATION: Final = ("reads.remote_mismatches", "reads.cache_damaged", "loader.verification_failures")
"""Counters of blocks that failed verification."""


@dataclass(frozen=True)
class Interval:
    """Two consecutive records of one session."""

    first: Record
    last: Record

    @property
    def seconds(self) -> float:
        """Seconds between the two records, above 0."""
        return self.last.time - self.first.time

    def delta(self, name: str) -> float:
        return max(0.0, self.last.value(name) - self.first.value(name))

    @property
    def steps(self) -> float:
        return self.delta("loader.steps")

    @property
    def cells(self) -> float:
        return self.delta("trainer.cells") or self.delta("loader.cells")

    @property
    def has_trainer(self) -> bool:
        """True if the trainer reports its stages. Before its first step it reports only the total number of steps."""
        return not {"trainer.steps", "trainer.steps_in_all"}.isdisjoint(self.last.values)

    @property
    def is_timed(self) -> bool:
        """True if compute time is known: the trainer reports it, or the loop calls `Loader.computed`."""
        return self.has_trainer or "loader.computed_s" in self.last.values

    @property
    def busy_s(self) -> float:
        """Seconds of the rank's own work; only the wait for data if compute time is unknown."""
        if self.has_trainer:
            return sum(self.delta(f"trainer.{name}") for name in BUSY)
        return self.delta("loader.consumer_wait_s") + self.delta("loader.computed_s")

    @property
    def data_wait_s(self) -> float:
        return self.delta("trainer.data_s" if self.has_trainer else "loader.consumer_wait_s")

    @property
    def waiting_s(self) -> float:
        """Seconds of waiting for other ranks."""
        return sum(self.delta(f"trainer.{name}") for name in WAITING)

    @property
    def training_s(self) -> float:
        """Seconds without evaluation and checkpoints."""
        between = self.delta("trainer.evaluation_s") + self.delta("trainer.checkpoint_s")
        return max(0.0, self.seconds - between)

    @property
    def verification_failures(self) -> float:
        return sum(map(self.delta, VERIFICATION))


def intervals(records: Sequence[Record]) -> list[Interval]:
    """Return the intervals between consecutive records of a session with increasing time."""
    return [
        Interval(first, last)
        for first, last in pairwise(records)
        if first.session == last.session and last.time > first.time
    ]


def window(records: Sequence[Record], seconds: float = WINDOW_S) -> list[Interval]:
    """Return the intervals of the last ``seconds``, but at least the newest four."""
    found = intervals(records)
    recent = [one for one in found if one.first.time >= found[-1].last.time - seconds]
    return recent if len(recent) >= _LEAST_INTERVALS else found[-_LEAST_INTERVALS:]


def total(found: Iterable[Interval], name: str) -> float:
    """Return the growth of a counter over intervals."""
    return sum(one.delta(name) for one in found)


def step_seconds(found: Sequence[Interval]) -> float:
    """Return the mean seconds per step, or 0 without steps."""
    steps = sum(one.steps for one in found)
    return sum(one.seconds for one in found) / steps if steps else 0.0


def stage_of(record: Record) -> str:
    """Return the current stage of the trainer, or "" if it is not reported."""
    rows = record.tables.get("stage") or ()
    return str(rows[0][0]) if rows and rows[0] else ""


def byte_counters(record: Record) -> dict[str, str]:
    """Return the byte counters of a record and the source of each: "disk" (local shards), "cache", or a location."""
    found = {
        name: name.removeprefix(_LOCATION_BYTES) for name in record.values if name.startswith(_LOCATION_BYTES)
    }
    return found | {"blocks.local_bytes": "disk"}


@dataclass(frozen=True)
class Bottleneck:
    """The largest share of the critical rank's time."""

    kind: str  # key of `shares`
    share: float
    rank: int  # critical rank
    shares: Mapping[str, float]  # shares of the rank's time; they sum to 1

    @property
    def text(self) -> str:
        """Summary as text, such as ``store-bound, 71 %``."""
        return f"{self.kind}-bound, {100 * self.share:.0f} %"


def find_bottleneck(ranks: Ranks) -> Bottleneck | None:
    """Return the bottleneck in the newest window, or None if no rank made a step.

    The critical rank waits least for other ranks, so it determines the time of a step.
    """
    windows = {rank: window(records) for rank, records in ranks.items()}
    windows = {rank: found for rank, found in windows.items() if total(found, "loader.steps")}
    if not windows:
        return None

    def idleness(rank: int) -> tuple[float, float, int]:
        found = windows[rank]
        seconds = sum(one.seconds for one in found)
        waiting, busy = (sum(one.waiting_s for one in found), sum(one.busy_s for one in found))
        return waiting / seconds, -busy / seconds, rank

    critical = min(windows, key=idleness)
    shares = shares_of(windows[critical])
    kind = max(shares, key=lambda name: (shares[name], name))
    return Bottleneck(kind, shares[kind], critical, shares)


def shares_of(found: Sequence[Interval]) -> dict[str, float]:
    """Divide the time of one rank into shares by stage; they sum to 1."""
    seconds = sum(one.seconds for one in found)
    if found[-1].has_trainer:
        parts = {name.removesuffix("_s"): total(found, f"trainer.{name}") for name in _STAGES}
        rest = "other"
    else:
        parts = {"data": total(found, "loader.consumer_wait_s"), "compute": total(found, "loader.computed_s")}
        rest = "trainer"
    known = sum(parts.values())
    data = parts.pop("data")
    parts |= {name: data * share for name, share in _data_shares(found).items()}
    parts[rest] = max(0.0, seconds - known)
    whole = max(seconds, known)
    return {name: value / whole for name, value in parts.items() if value > 0.0}


def _data_shares(found: Sequence[Interval]) -> dict[str, float]:
    """Divide the wait for data in proportion to the busy time of the loader's stages."""
    requests = total(found, "reads.remote_requests") + total(found, "reads.cache_misses")
    busy = {"store" if requests else "disk": total(found, "loader.load_wait_s")}
    busy |= {name: total(found, f"loader.{name}_s") for name in ("gather", "transform")}
    busy["plan"] = total(found, "loader.plan_starved_s")
    whole = sum(busy.values())
    return {name: value / whole for name, value in busy.items()} if whole else {"data": 1.0}


def cost_skew(newest: Iterable[Record]) -> dict[str, float] | None:
    """Return the skew of cost between ranks: cost of the most expensive rank over the mean cost.

    Returns:
        ``steps``: number of steps that all ranks report; ``plan`` and ``plain``: mean skew of the plan and of
        the same plan without costs; ``plan_p95`` and ``plain_p95``: 95th percentiles. None without such steps.
    """
    ranks = {record.rank: record for record in newest if not record.worker}
    world = max((record.world for record in ranks.values()), default=0)
    told: dict[int, list[Sequence[float]]] = {}
    for record in ranks.values():
        for row in record.tables.get("step_costs", ()):
            if len(row) == 3 and all(type(one) in (int, float) and 0 <= one < math.inf for one in row):
                told.setdefault(int(row[0]), []).append(row[1:])
    found: dict[str, float] = {}
    for place, order in enumerate(("plan", "plain")):
        columns = [[share[place] for share in shares] for shares in told.values() if len(shares) == world]
        skews = sorted(max(one) * world / sum(one) for one in columns if sum(one))
        if not skews:
            return None
        found |= {"steps": len(skews), order: sum(skews) / len(skews)}
        found[f"{order}_p95"] = skews[math.ceil(0.95 * len(skews)) - 1]
    return found


# ---- five rules

KINDS: Final = ("stall", "straggler", "skew", "slowdown", "verification")
"""Kinds of anomalies, with one rule each (SPEC.md §6)."""

_STALL_S, _STALL_STEPS, _FIRST_STEP_S = 30.0, 20, 300.0
_BETWEEN_STEPS, _BETWEEN_STEPS_S = ("evaluation", "checkpoint", "end"), 600.0
_SILENT_S, _SILENT_INTERVALS = 15.0, 5
_STRAGGLER_FACTOR, _STRAGGLER_LEAST_S = 1.5, 0.001
_SKEW_SHARE = 0.2
_SLOWDOWN_FACTOR, _SLOWDOWN_WINDOW_S, _SLOWDOWN_INTERVALS, _SLOWDOWN_WARM_UP = 0.7, 600.0, 12, 3
_SLOWDOWN_LEAST_S, _SLOWDOWN_STEPS = 10.0, 10
_FAILURES_LEAST = 3

_ADVICE: Final[Mapping[str, tuple[str, str]]] = {
    "silent": ("restart", "the process is gone or frozen: look at its host; torchrun restarts one that ended"),
    "stuck without data": ("failover", ("it waits for data: rank another location first, or switch the silent one "
                                       "off, in control.toml; the stall events name the shard")),
    "stuck": ("advice", "it does not wait for data: run py-spy dump --pid PID on its host to see what it does"),
    "straggler": ("rebalance", ("lanes go to faster ranks where rebalancing is on; look at the host for other load, "
                               "heat, a slow disk")),
    "skew": ("rebalance", ("the ranks have unequal work: choose a world size that divides the lanes (shardkit plan "
                          "lists them), or switch rebalancing on")),
    "store": ("failover", ("the store answers slowly: rank another location first in control.toml, or enlarge the "
                          "cache")),
    "loader": ("advice", "the loader is busy: raise prefetch in control.toml, threads at the next start"),
    "disk": ("advice", "the disk is slow or shared: look at iostat; a cache on another disk helps"),
    "machine": ("advice", "the data comes in time: look at the machine (clock, heat, other load) and at the model"),
    "verification": ("scrub", ("a location gives wrong bytes (the model has seen none of them): shardkit scrub ROOT, "
                              "then shardkit repair ROOT --from-run RUN")),
}  # fmt: skip
"""Action and advice for each reason."""
_LOADER_STAGES: Final = ("gather", "transform", "plan")


@dataclass(frozen=True)
class Anomaly:
    """A problem of a run that a person should know."""

    kind: str  # one of `KINDS`
    rank: int  # affected rank, or -1 for the whole run
    evidence: Mapping[str, Any]  # input of the rule
    action: str  # available remedy: rebalance, failover, scrub, restart, or advice
    advice: str  # sentence that says what to do

    @property
    def key(self) -> tuple[str, int]:
        """Identity of an anomaly over time: (kind, rank)."""
        return self.kind, self.rank

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _anomaly(kind: str, rank: int, reason: str, **evidence: Any) -> Anomaly:
    return Anomaly(kind, rank, evidence, *_ADVICE[reason])


def find_anomalies(ranks: Ranks, now: float) -> list[Anomaly]:
    """Apply all rules to all ranks.

    `now` (seconds since the epoch) is used only to detect silent ranks.
    """
    known = {rank: records for rank, records in ranks.items() if records}
    stalls = [one for rank, records in known.items() if (one := _stall(rank, records, now)) is not None]
    # all ranks wait for a rank that is gone or has no data: report causes, not consequences
    silent = [one for one in stalls if "silent_s" in one.evidence]
    found = silent or [one for one in stalls if one.evidence["stage"] == "data"] or stalls
    slowdown = [] if found else _slowdown(known)  # a stalled run is slow, too
    return [*found, *(_stragglers(known) or _skew(known)), *slowdown, *_verification(known)]


def is_silent(last: Record, now: float) -> bool:
    """Return True if a rank that has not ended should have written another record by now."""
    return last.state != "ended" and now - last.time > max(_SILENT_S, _SILENT_INTERVALS * last.interval_s)


def _stall(rank: int, records: Sequence[Record], now: float) -> Anomaly | None:
    last = records[-1]
    stage, step, steps = stage_of(last), int(last.value("loader.step")), last.value("loader.steps")
    if last.state == "ended":
        return None
    if is_silent(last, now):
        return _anomaly("stall", rank, "silent", silent_s=round(now - last.time, 1), step=step, host=last.host,
                        pid=last.pid, stage=stage)  # fmt: skip
    session = [record for record in records if record.session == last.session]
    stuck = last.time - next((one.time for one in session if one.value("loader.steps") == steps), last.time)
    if stuck <= _longest_step(session, stage):
        return None
    reason = "stuck without data" if stage in ("", "data") else "stuck"
    return _anomaly("stall", rank, reason, stuck_s=round(stuck, 1), step=step, stage=stage)


def _longest_step(session: Sequence[Record], stage: str) -> float:
    """Return the largest number of seconds without a step that is not a stall."""
    if stage in _BETWEEN_STEPS:
        return _BETWEEN_STEPS_S
    found = intervals(session)
    while found and not found[-1].steps:
        found.pop()  # exclude the present wait
    typical = step_seconds(found)
    return max(_STALL_S, _STALL_STEPS * typical) if typical else _FIRST_STEP_S


def _stragglers(ranks: Ranks) -> list[Anomaly]:
    paces = {
        rank: [one.busy_s / one.cells for one in window(records) if one.cells]
        for rank, records in ranks.items()
    }
    seconds = {rank: median(pace) for rank, pace in paces.items() if pace}
    found = []
    for rank, own in seconds.items():
        # exclude the rank itself: with two ranks, the median is a mean that a slow rank raises
        others = median([value for other, value in seconds.items() if other != rank] or [own])
        if own >= _STRAGGLER_FACTOR * others and own - others >= _STRAGGLER_LEAST_S:
            times = round(min(own / others, 1e6), 2) if others > 0 else 1e6
            found.append(_anomaly("straggler", rank, "straggler", cell_s=round(own, 6), others_cell_s=round(others, 6),
                                  times=times, host=ranks[rank][-1].host))  # fmt: skip
    return found


def _skew(ranks: Ranks) -> list[Anomaly]:
    busy: dict[int, float] = {}
    step_s = 0.0
    for rank, records in ranks.items():
        found = [one for one in window(records) if one.steps]
        if found and found[-1].is_timed:
            busy[rank] = median(one.busy_s / one.steps for one in found)
            step_s = max(step_s, median(one.seconds / one.steps for one in found))
    if len(busy) < 2:
        return []
    slowest = max(busy, key=lambda rank: busy[rank])
    average = mean(busy.values())
    lost = (busy[slowest] - average) / step_s
    if lost < _SKEW_SHARE:
        return []
    fewest = min(len(ranks[rank][-1].lanes) for rank in busy)
    return [_anomaly("skew", slowest, "skew", busiest_step_s=round(busy[slowest], 6), mean_step_s=round(average, 6),
                     lost_share=round(lost, 3), lanes=len(ranks[slowest][-1].lanes), fewest_lanes=fewest)]  # fmt: skip


def _slowdown(ranks: Ranks) -> list[Anomaly]:
    if not ranks:
        return []
    records = ranks[min(ranks)]
    warm = [one for one in intervals(records) if one.first.session == records[-1].session][_SLOWDOWN_WARM_UP:]
    warm = [one for one in warm if one.first.time >= warm[-1].last.time - _SLOWDOWN_WINDOW_S]
    if len(warm) < _SLOWDOWN_INTERVALS:
        return []
    cut = len(warm) - len(warm) // 4
    (before, _), (now, seconds) = _rate(warm[:cut]), _rate(warm[cut:])
    least = max(_SLOWDOWN_LEAST_S, _SLOWDOWN_STEPS * step_seconds(warm[:cut]))
    if seconds < least or not before or now > _SLOWDOWN_FACTOR * before:
        return []
    since = warm[cut].first.time
    bottleneck = find_bottleneck(
        {rank: [one for one in found if one.time >= since] for rank, found in ranks.items()}
    )
    kind, text = (bottleneck.kind, bottleneck.text) if bottleneck is not None else ("", "")
    reason = kind if kind in ("store", "disk") else "loader" if kind in _LOADER_STAGES else "machine"
    return [_anomaly("slowdown", -1, reason, samples_per_s=round(now, 2), before_samples_per_s=round(before, 2),
                     share=round(now / before, 3), bottleneck=text)]  # fmt: skip


def _rate(found: Sequence[Interval]) -> tuple[float, float]:
    """Return samples per second of training and the seconds of training, without evaluation and checkpoints."""
    seconds = sum(one.training_s for one in found if one.steps or stage_of(one.last) not in _BETWEEN_STEPS)
    return total(found, "loader.samples") / seconds if seconds else 0.0, seconds


def _verification(ranks: Ranks) -> list[Anomaly]:
    anomalies = []
    for rank, records in ranks.items():
        found = window(records)
        half = len(found) // 2
        before, now = (
            sum(one.verification_failures for one in part) for part in (found[:half], found[half:])
        )
        if now >= _FAILURES_LEAST and now > before:
            seconds = round(sum(one.seconds for one in found[half:]), 1)
            anomalies.append(_anomaly("verification", rank, "verification", failures=int(now), before=int(before),
                                      seconds=seconds, host=records[-1].host))  # fmt: skip
    return anomalies
