"""Five rules over the records of a run, and the watch that tells what they find as events (SPEC.md §6)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from shardkit.telemetry.intervals import Interval, find_bottleneck, intervals, stage_of, window
from shardkit.telemetry.reading import read_run
from shardkit.telemetry.records import Record

KINDS: Final = ("stall", "straggler", "skew", "slowdown", "verification")
"""What is recognised; a rule each (SPEC.md §6)."""

STALL_S: Final = 30.0
STALL_STEPS: Final = 20
FIRST_STEP_S: Final = 300.0
BETWEEN_STEPS: Final = ("evaluation", "checkpoint", "end")
BETWEEN_STEPS_S: Final = 600.0
SILENT_S: Final = 15.0
SILENT_INTERVALS: Final = 5
STRAGGLER_FACTOR: Final = 1.5
STRAGGLER_LEAST_S: Final = 0.001
SKEW_SHARE: Final = 0.2
SLOWDOWN_FACTOR: Final = 0.7
SLOWDOWN_INTERVALS: Final = 12
SLOWDOWN_WARM_UP: Final = 3
SLOWDOWN_LEAST_S: Final = 10.0
SLOWDOWN_STEPS: Final = 10
SLOWDOWN_WINDOW_S: Final = 600.0
FAILURES_LEAST: Final = 3

Ranks = Mapping[int, Sequence[Record]]


@dataclass(frozen=True)
class Anomaly:
    """Something that a person would want to know of.

    Attributes:
        kind: one of `KINDS`.
        rank: whom it is about; -1: the whole run.
        evidence: the numbers that the rule saw.
        action: what exists against it: rebalance, failover, scrub, restart, or advice.
        advice: what to do, in a sentence.
    """

    kind: str
    rank: int
    evidence: Mapping[str, Any]
    action: str
    advice: str

    @property
    def key(self) -> tuple[str, int]:
        """What makes two findings the same one."""
        return self.kind, self.rank

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "rank": self.rank, "evidence": dict(self.evidence), "action": self.action,
                "advice": self.advice}  # fmt: skip


def find_anomalies(ranks: Ranks, now: float) -> list[Anomaly]:
    """All rules over all ranks.

    Args:
        ranks: rank → records, oldest first.
        now: seconds since the epoch; only silence is measured by it.
    """
    known = {rank: records for rank, records in ranks.items() if records}
    found = _causes(
        [one for rank, records in known.items() if (one := _stall(rank, records, now)) is not None]
    )
    stragglers = _stragglers(known)
    slowdown = [] if found else _slowdown(known)  # what stands still is slow, too
    return [*found, *(stragglers or _skew(known)), *slowdown, *_verification(known)]


def _causes(stalls: list[Anomaly]) -> list[Anomaly]:
    """All ranks wait for one that is gone, or that has no data: the others' stalls are its consequence."""
    silent = [one for one in stalls if "silent_s" in one.evidence]
    without_data = [one for one in stalls if one.evidence["stage"] == "data"]
    return silent or without_data or stalls


def _stall(rank: int, records: Sequence[Record], now: float) -> Anomaly | None:
    last = records[-1]
    if last.state == "ended":
        return None
    silent = now - last.time
    stage = stage_of(last)
    if silent > max(SILENT_S, SILENT_INTERVALS * last.interval_s):
        evidence = {"silent_s": round(silent, 1), "step": int(last.value("loader.step")), "host": last.host,
                    "pid": last.pid, "stage": stage}  # fmt: skip
        return Anomaly("stall", rank, evidence, "restart",
                       "the process is gone or frozen: look at its host; the supervisor restarts it")  # fmt: skip
    session = [record for record in records if record.session == last.session]
    steps = last.value("loader.steps")
    since = next((one.time for one in session if one.value("loader.steps") == steps), last.time)
    stuck = last.time - since
    if stuck <= _patience(session, stage):
        return None
    evidence = {"stuck_s": round(stuck, 1), "step": int(last.value("loader.step")), "stage": stage}
    if stage in ("", "data"):
        return Anomaly("stall", rank, evidence, "failover", "it waits for data: rank another location first, or switch "
                       "the silent one off, in control.toml; the stall events name the shard")  # fmt: skip
    return Anomaly("stall", rank, evidence, "advice", "it does not wait for data: shardkit report RUN asks every rank "
                   "for its stacks")  # fmt: skip


def _patience(session: Sequence[Record], stage: str) -> float:
    if stage in BETWEEN_STEPS:
        return BETWEEN_STEPS_S
    found = intervals(session)
    while found and not found[-1].steps:
        found.pop()  # the wait that is judged
    steps = sum(one.steps for one in found)
    typical = sum(one.seconds for one in found) / steps if steps else 0.0
    return max(STALL_S, STALL_STEPS * typical) if steps else FIRST_STEP_S


def _cell_seconds(found: Sequence[Interval]) -> float | None:
    values = [one.busy_s / one.cells for one in found if one.cells]
    return median(values) if values else None


def _stragglers(ranks: Ranks) -> list[Anomaly]:
    seconds = {
        rank: one for rank, records in ranks.items() if (one := _cell_seconds(window(records))) is not None
    }
    if len(seconds) < 2:
        return []
    # of two ranks the median is the mean, which the slow one would pull up: compare with the others
    found = []
    for rank, own in seconds.items():
        others = median(value for other, value in seconds.items() if other != rank)
        if own >= STRAGGLER_FACTOR * others and own - others >= STRAGGLER_LEAST_S:
            evidence = {"cell_s": round(own, 6), "others_cell_s": round(others, 6), "times": _times(own, others),
                        "host": ranks[rank][-1].host}  # fmt: skip
            found.append(Anomaly("straggler", rank, evidence, "rebalance", "lanes go to faster ranks where rebalancing "
                                 "is on; look at the host for other load, heat, a slow disk"))  # fmt: skip
    return found


def _times(own: float, others: float) -> float:
    return round(min(own / others, 1e6), 2) if others > 0 else 1e6


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
    most = busy[slowest]
    lost = (most - mean(busy.values())) / step_s
    if lost < SKEW_SHARE:
        return []
    lanes = {rank: len(ranks[rank][-1].lanes) for rank in busy}
    evidence = {"busiest_step_s": round(most, 6), "mean_step_s": round(mean(busy.values()), 6),
                "lost_share": round(lost, 3), "lanes": lanes[slowest], "fewest_lanes": min(lanes.values())}  # fmt: skip
    return [Anomaly("skew", slowest, evidence, "rebalance", "the ranks have unequal work: choose a world size that "
                    "divides the lanes (shardkit plan lists them), or switch rebalancing on")]  # fmt: skip


def _slowdown(ranks: Ranks) -> list[Anomaly]:
    if not ranks:
        return []
    first = min(ranks)
    found = [one for one in intervals(ranks[first]) if one.first.session == ranks[first][-1].session]
    warm = found[SLOWDOWN_WARM_UP:]
    warm = [one for one in warm if one.first.time >= warm[-1].last.time - SLOWDOWN_WINDOW_S] if warm else []
    if len(warm) < SLOWDOWN_INTERVALS:
        return []
    cut = len(warm) - len(warm) // 4
    before, _ = _rate(warm[:cut])
    now, seconds = _rate(warm[cut:])
    steps = sum(one.steps for one in warm[:cut])
    typical = sum(one.seconds for one in warm[:cut]) / steps if steps else 0.0
    if (
        seconds < max(SLOWDOWN_LEAST_S, SLOWDOWN_STEPS * typical)
        or not before
        or now > SLOWDOWN_FACTOR * before
    ):
        return []
    since = warm[cut].first.time
    bottleneck = find_bottleneck(
        {rank: [one for one in records if one.time >= since] for rank, records in ranks.items()}
    )
    kind = bottleneck.kind if bottleneck is not None else "unknown"
    evidence = {"samples_per_s": round(now, 2), "before_samples_per_s": round(before, 2),
                "share": round(now / before, 3), "bottleneck": bottleneck.text if bottleneck else ""}  # fmt: skip
    action, advice = _against(kind)
    return [Anomaly("slowdown", -1, evidence, action, advice)]


def _rate(found: Sequence[Interval]) -> tuple[float, float]:
    """Samples per second of training, and how long that was: evaluation and checkpoints are left out."""
    training = [one for one in found if one.steps or stage_of(one.last) not in BETWEEN_STEPS]
    between = [one.delta("trainer.evaluation_s") + one.delta("trainer.checkpoint_s") for one in training]
    seconds = sum(max(0.0, one.seconds - spent) for one, spent in zip(training, between, strict=True))
    return sum(one.delta("loader.samples") for one in found) / seconds if seconds else 0.0, seconds


def _against(kind: str) -> tuple[str, str]:
    if kind == "store":
        return (
            "failover",
            "the store answers slowly: rank another location first in control.toml, or enlarge the cache",
        )
    if kind in ("gather", "transform", "plan"):
        return "advice", "the loader is busy: raise prefetch in control.toml, threads at the next start"
    if kind == "disk":
        return "advice", "the disk is slow or shared: look at iostat; a cache on another disk helps"
    return "advice", "the data comes in time: look at the machine (clock, heat, other load) and at the model"


def _verification(ranks: Ranks) -> list[Anomaly]:
    anomalies = []
    for rank, records in ranks.items():
        found = window(records)
        half = len(found) // 2
        before = sum(one.verification_failures for one in found[:half])
        now = sum(one.verification_failures for one in found[half:])
        if now >= FAILURES_LEAST and now > before:
            seconds = round(sum(one.seconds for one in found[half:]), 1)
            evidence = {
                "failures": int(now),
                "before": int(before),
                "seconds": seconds,
                "host": records[-1].host,
            }
            advice = (
                "a location gives wrong bytes (the model has seen none of them): shardkit scrub ROOT, then "
                "shardkit repair ROOT --from-run RUN"
            )
            anomalies.append(Anomaly("verification", rank, evidence, "scrub", advice))
    return anomalies


_LOOK_INTERVALS: Final = 5
_SHARE_OF_TIME: Final = 1 / 200
_TAIL_BYTES: Final = 64 << 10
_OWN_RECORDS: Final = 400
_MOST_TOLD: Final = 8  # of one kind at a time: a switch that fails stalls a thousand ranks


class AnomalyWatch:
    """A hook of rank 0's recorder.

    Args:
        run: directory, where the other ranks' records are.
        record_event: appends an event to the run.
    """

    def __init__(self, run: Path, record_event: Callable[..., None]) -> None:
        self._run, self._record_event = run, record_event
        self._own: deque[Record] = deque(maxlen=_OWN_RECORDS)
        self._open: dict[tuple[str, int], tuple[Anomaly, float]] = {}
        self._next_look = 0.0

    def __call__(self, record: Record) -> None:
        """Keep the record; look, if it is time to."""
        self._own.append(record)
        started = time.monotonic()
        if started < self._next_look:
            return
        ranks: dict[int, Sequence[Record]] = dict(read_run(self._run, tail_bytes=_TAIL_BYTES).ranks)
        ranks[record.rank] = list(self._own)
        self.settle(find_anomalies(ranks, record.time), record.time)
        took = time.monotonic() - started
        self._next_look = started + max(_LOOK_INTERVALS * record.interval_s, took / _SHARE_OF_TIME)

    def settle(self, found: Sequence[Anomaly], now: float) -> None:
        """Tell what is new and what is over."""
        present = {anomaly.key: anomaly for anomaly in found}
        told: Counter[str] = Counter()
        for key, anomaly in present.items():
            if key not in self._open and told[anomaly.kind] < _MOST_TOLD:  # the others at the next look
                told[anomaly.kind] += 1
                self._open[key] = (anomaly, now)
                self._record_event("anomaly", **_details(anomaly))
        for key in [key for key in self._open if key not in present]:
            anomaly, since = self._open.pop(key)
            self._record_event(
                "anomaly_over", anomaly=anomaly.kind, rank=anomaly.rank, seconds=round(now - since, 1)
            )


def _details(anomaly: Anomaly) -> dict[str, Any]:
    details = anomaly.to_json()
    return {"anomaly": details.pop("kind"), **details}
