"""`RUN/control.toml`: settings that change during a run, gradually and reversibly (SPEC.md §8)."""

from __future__ import annotations

import difflib
import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from shardkit.documents import configure, parse_toml
from shardkit.errors import ConfigurationError
from shardkit.telemetry.records import Record, parse_lanes

_MAX_BYTES: Final = 64 << 10
_TAKE_BACK: Final = 2 / 3
_STAGGER: Final = 8
_RECENT: Final = 30
_LEAST_BEFORE: Final = 5  # fewest records from which a rate is computed


@dataclass(frozen=True)
class Knob:
    """A setting that can be changed during a run."""

    read: Callable[[], Any]  # returns the present value, or None if the setting has no effect in this run
    write: Callable[[Any], None]
    parse: Callable[[str, Any], Any]  # (key, value in the file) → setting; raises ConfigurationError
    gradual: bool = False  # at most double or halve the number per record

    @classmethod
    def of(
        cls, owner: object, attribute: str, parse: Callable[[str, Any], Any], *, gradual: bool = False
    ) -> Knob:
        """Make a knob for an attribute; it has no effect if ``owner`` is None."""

        def write(value: Any) -> None:
            setattr(owner, attribute, value)

        return cls(lambda: getattr(owner, attribute, None), write, parse, gradual)

    def step(self, target: Any) -> Any:
        """Return the next value on the way to a target; a gradual setting is at most doubled or halved."""
        now = self.read()
        if not self.gradual:
            return target
        return min(target, max(1, now) * 2) if target > now else max(target, now // 2)


class _Watch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``[change]``."""

    guard_s: Annotated[float, Meta(ge=0, lt=1e6)] = 60.0
    ranks: Annotated[str, Meta(max_length=10_000)] | None = None


@dataclass(frozen=True)
class ControlFile:
    """The content of a control file."""

    targets: Mapping[str, Any]  # knob → value
    guard_s: float = 60.0  # after which the change is reverted if the run is slower by a third; 0: never
    ranks: tuple[int, ...] | None = None  # ranks that apply the change; None: all


def parse_control(text: str, knobs: Mapping[str, Knob]) -> ControlFile:
    """Parse a control file.

    Raises:
        ConfigurationError: the text is invalid, or a key is unknown or has no effect in this run.
    """
    document = parse_toml(text, "control.toml")
    watch = configure(_Watch, document.pop("change", {}), "control.toml, [change]")
    ranks = parse_lanes(watch.ranks)
    if ranks is None and watch.ranks is not None:
        raise ConfigurationError(f'control.toml: change.ranks = {watch.ranks!r}: expected such as "0-3,8"')
    targets = {}
    for key, value in _leaves(document):
        if key not in knobs:
            near = difflib.get_close_matches(key, knobs, n=1, cutoff=0.5)
            hint = f"; nearest known: {near[0]}" if near else ""
            raise ConfigurationError(
                f"control.toml: unknown key {key}{hint}; known: {', '.join(sorted(knobs))}"
            )
        if knobs[key].read() is None:
            raise ConfigurationError(f"control.toml: {key} has no effect in this run; take it out")
        targets[key] = knobs[key].parse(key, value)
    return ControlFile(targets, watch.guard_s, ranks)


def _leaves(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in document.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


@dataclass
class Control:
    """Recorder hook that applies the control file in one rank; one `stat` per record while the file is unchanged.

    Ranks apply a change one after the other: rank r begins r mod 8 records after it reads it. A setting that is removed
    from the file returns to its initial value. Values that the guard reverted are not applied again until the file
    changes.
    """

    _run: Path  # directory of the run
    _rank: int
    _knobs: Mapping[str, Knob]  # by name, such as ``loader.memory``
    _record_event: Callable[..., None]  # appends an event to the run
    _initial: dict[str, Any] = field(default_factory=dict)  # initial values of all knobs that were changed
    _targets: dict[str, Any] = field(default_factory=dict)
    _before: dict[str, Any] = field(default_factory=dict)  # targets to which the guard reverts
    _seen: tuple[int, int, int] | None = None
    _digest: str = ""
    _wait: int = 0
    _guard_s: float = 0.0
    _guard_until: float = 0.0
    _rate_before: float = 0.0
    _recent: deque[Record] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _settled: bool = True
    _changes: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the values of this telemetry source."""
        return {"changes": float(self._changes)}

    def __call__(self, record: Record) -> None:
        """Read the file if it changed, and take one step towards its settings."""
        self._recent.append(record)
        self._look()
        if self._wait:
            self._wait -= 1
        elif not self._settled:
            self._settled = not self._approach()
            if self._settled and self._guard_s:
                self._guard_until = record.time + self._guard_s
                self._recent.clear()
                self._recent.append(record)
        elif self._guard_until and record.time >= self._guard_until:
            self._judge()

    def _look(self) -> None:
        path = self._run / "control.toml"
        try:
            stat = path.stat()
            now = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            now = None
        if now == self._seen:
            return
        self._seen, data = now, b""
        if now is not None:
            with open(path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        digest = hashlib.sha256(data).hexdigest()[:16]
        if digest != self._digest:
            self._digest = digest
            self._apply(data)

    def _apply(self, data: bytes) -> None:
        try:
            if len(data) > _MAX_BYTES:
                raise ConfigurationError(f"control.toml: more than {_MAX_BYTES} bytes")
            change = parse_control(data.decode("utf-8"), self._knobs)
        except (ConfigurationError, UnicodeDecodeError) as error:
            self._record_event("control_refused", file=self._digest, reason=str(error))
            return
        heeds = change.ranks is None or self._rank in change.ranks
        targets = dict(change.targets) if heeds else {}
        for key in targets:
            self._initial.setdefault(key, self._knobs[key].read())
        wanted, present = self._initial | targets, self._initial | self._targets
        if wanted == present:
            return
        self._before, self._targets = present, wanted
        self._guard_s, self._guard_until = change.guard_s, 0.0
        self._rate_before = self._rate()
        self._wait, self._settled = self._rank % _STAGGER, False
        changed = {
            key: [_plain(present[key]), _plain(value)]
            for key, value in wanted.items()
            if value != present[key]
        }
        self._record_event("control", file=self._digest, changes=changed, after_records=self._wait)

    def _approach(self) -> bool:
        """Change every knob by one step; return True if some have not reached their target."""
        under_way = False
        for key, target in self._targets.items():
            knob = self._knobs[key]
            now = knob.read()
            if now is None or now == target:
                continue
            value = knob.step(target)
            knob.write(value)
            self._changes += 1
            self._record_event(
                "control_changed", setting=key, before=_plain(now), now=_plain(value), wanted=_plain(target)
            )
            under_way |= value != target
        return under_way

    def _judge(self) -> None:
        """Keep the change, or revert it if the run has become slower."""
        self._guard_until = 0.0
        rate = self._rate()
        kept = not self._rate_before or rate >= _TAKE_BACK * self._rate_before
        if not kept:
            self._targets, self._before = self._before, {}
            self._guard_s, self._settled = 0.0, False
        self._record_event("control_kept" if kept else "control_taken_back", file=self._digest,
                           samples_per_s=round(rate, 1), before_samples_per_s=round(self._rate_before, 1))  # fmt: skip

    def _rate(self) -> float:
        """Return the samples per second over the recent records of the session, or 0 if there are too few."""
        found = [one for one in self._recent if one.session == self._recent[-1].session]
        if len(found) < _LEAST_BEFORE:
            return 0.0
        seconds = found[-1].time - found[0].time
        samples = found[-1].value("loader.samples") - found[0].value("loader.samples")
        return samples / seconds if seconds > 0 else 0.0


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)
