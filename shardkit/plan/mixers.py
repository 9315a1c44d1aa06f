"""Mixers: functions that decide the weights of strata from the losses of earlier stages (SPEC.md §12).

A mixer has no state: each decision is a function of all earlier losses and weights. It can therefore be computed again
by any rank, after any restart, and by an audit. The mixers here use correctly rounded operations only (+ − × ÷, square
root, `math.fsum`, and powers by `decimal`), so they give the same weights on every machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import Protocol

from shardkit.arrays import Float64s
from shardkit.errors import ConfigurationError, PlanError
from shardkit.function_names import importable_name
from shardkit.ranges import Range, shown

__all__ = ["ADO", "FunctionMixer", "MixFunction", "Mixer", "Temperature", "find_mixer"]

MixFunction = Callable[[Float64s, Float64s, int], Sequence[float]]
"""Function (losses, weights, step) → new weights, one finite number >= 0 per stratum; see `Mixer`."""

_EVERY = Range(1, 2**31 - 1)
_SHARE = Range(0, 1, below=True)
_LEAST_WEIGHT = 1e-300  # becomes 1 when weights are rounded to whole numbers
_TEMPERATURE = Range(1e-6, 1000)
_EXACT = Context(prec=17)


class Mixer(Protocol):
    """A function that decides the weights of strata every ``every`` steps.

    Attributes:
        every: steps of a stage, a multiple of the plan's lanes.
        text: determines the mixer, and is part of the plan's digest.
        needs_losses: False if decisions do not depend on losses; no losses need to be noted then.
    """

    @property
    def every(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def needs_losses(self) -> bool: ...

    def __call__(self, losses: Float64s, weights: Float64s, step: int) -> Sequence[float]:
        """Return the weights of the next stage, one finite number >= 0 per stratum, of any sum.

        Args:
            losses: (n, strata) mean loss of each stratum in stages 0 to n − 1; NaN if it had none.
            weights: (n + 1, strata) shares of the strata in stages 0 to n; each row adds up to 1.
            step: first step of the next stage, n + 1.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FunctionMixer:
    """A mixer that calls a function of your own, which the plan names as ``module:function``.

    The function must be pure, and defined at the top level of a module, where an audit can import it.

    Raises:
        ConfigurationError: the function is defined in a script, a notebook or another function, or is not a function.
    """

    function: MixFunction
    every: int
    needs_losses: bool = True

    def __post_init__(self) -> None:
        _EVERY.check("mixer: every", self.every)
        importable_name("FunctionMixer: function", self.function)

    @property
    def text(self) -> str:
        """Module and name of the function, and " without losses" if it needs none."""
        name = importable_name("FunctionMixer: function", self.function)
        return name if self.needs_losses else f"{name} without losses"

    def __call__(self, losses: Float64s, weights: Float64s, step: int) -> Sequence[float]:
        """Call the function."""
        return self.function(losses, weights, step)


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Weights proportional to first weight ** (1 / temperature), with a temperature that changes over the run.

    With the natural weights of a dataset this is temperature sampling of Arivazhagan et al., "Massively Multilingual
    Neural Machine Translation in the Wild" (2019, arXiv:1907.05019): 1 is proportional to size, 5 is nearly even.
    The temperature is a line from ``start`` at step 0 to ``end`` at step ``steps``, and ``end`` from there on. Near 0
    the stratum with the largest first weight gets nearly all samples.
    """

    every: int
    start: float = 5.0
    end: float = 1.0
    steps: int = 10_000

    def __post_init__(self) -> None:
        _EVERY.check("temperature: every", self.every)
        _TEMPERATURE.check("temperature: start", self.start, float)
        _TEMPERATURE.check("temperature: end", self.end, float)
        Range(1, 2**62).check("temperature: steps", self.steps)

    @property
    def text(self) -> str:
        """Name and arguments."""
        return _text("temperature", self)

    @property
    def needs_losses(self) -> bool:
        """False: the weights depend on the step only."""
        return False

    def __call__(self, losses: Float64s, weights: Float64s, step: int) -> list[float]:
        """Return the weights of the stage that begins at ``step``."""
        done = min(step, self.steps) / self.steps
        temperature = self.start * (1 - done) + self.end * done  # a difference could round to 0
        first: list[float] = weights[0].tolist()
        largest = max(first)
        # Shares of the largest do not all underflow, and a stratum with a weight keeps one.
        return [max(_LEAST_WEIGHT, _power(one / largest, 1 / temperature)) if one else 0.0 for one in first]


@dataclass(frozen=True, kw_only=True)
class ADO:
    """Adaptive data optimisation: more weight for strata whose loss falls fastest per sample.

    Jiang, Zhou, Feng, Malladi and Kolter, "Adaptive Data Optimization: Dynamic Sample Selection with Scaling Laws"
    (2024, arXiv:2410.11820), with the constants of their program (github.com/yidingjiang/ado). For each stratum the law
    loss = ε + β·n^−α over n samples of the whole mixture is fitted. Its slope is multiplied by the first share of the
    stratum and by √(h(1 − h)), h being the moving average of its shares (factor 0.9), and divided by the sum over
    strata. Shares below ``least`` are raised to it. The new weights are 0.9 times the average of all earlier shares,
    plus 0.1 times this result.

    Differences from the program: the fit is least squares over a grid of exponents, because minimisers differ between
    machines; the average is over earlier shares, so that a decision needs no state.

    Args:
        every: steps of a stage.
        warmup: number of stages that keep the first weights; their losses are not fitted.
        least: smallest share of a stratum that has a weight.
        pace: share of the new result in the weights.
    """

    every: int
    warmup: int = 5
    least: float = 0.01
    pace: float = 0.1

    def __post_init__(self) -> None:
        _EVERY.check("ado: every", self.every)
        Range(0, 2**31 - 1).check("ado: warmup", self.warmup)
        _SHARE.check("ado: least", self.least, float)
        Range(0, 1).check("ado: pace", self.pace, float)

    @property
    def text(self) -> str:
        """Name and arguments."""
        return _text("ado", self)

    @property
    def needs_losses(self) -> bool:
        """True: laws are fitted to the losses."""
        return True

    def __call__(self, losses: Float64s, weights: Float64s, step: int) -> list[float]:
        """Return the weights of the stage that begins at ``step``."""
        first: list[float] = weights[0].tolist()
        stages = _spread_stages(self.warmup, len(losses))
        if len(stages) < _LEAST_POINTS:
            return first
        recent = _moving_average(weights[-_RECENT:].tolist())
        wanted = [
            share * max(0.0, _slope(stages, losses[stages, s].tolist(), len(losses))) * math.sqrt(h * (1 - h))
            for s, (share, h) in enumerate(zip(first, recent, strict=True))
        ]
        total = math.fsum(wanted)
        if not 0 < total < math.inf:
            return first
        raised = [
            max(self.least, one / total) if share else 0.0 for one, share in zip(wanted, first, strict=True)
        ]
        total = math.fsum(raised)
        mean = [math.fsum(column) / len(weights) for column in weights.T.tolist()]
        return [(1 - self.pace) * m + self.pace * one / total for m, one in zip(mean, raised, strict=True)]


_LEAST_POINTS = 3  # stages to which a law with three unknowns can be fitted
_POINTS = 64  # most stages that are fitted, spaced evenly in the logarithm of their number
_RECENT = 100  # stages of the moving average; 0.9 ** 100 is 3e-5
_EXPONENTS = [n / 20 for n in range(1, 17)]  # 0.05 to 0.8, the bounds of the program


def _spread_stages(first: int, end: int) -> list[int]:
    """Return up to `_POINTS` stages from ``first`` to ``end`` − 1, denser at the beginning."""
    if end - first <= _POINTS:
        return list(range(first, end))
    found = {first, end - 1}
    for k in range(1, _POINTS - 1):
        ratio = _power((end + 1) / (first + 1), k / (_POINTS - 1))
        found.add(min(end - 1, int((first + 1) * ratio) - 1))
    return sorted(found)


@lru_cache(maxsize=1 << 16)
def _power(base: float, exponent: float) -> float:
    """Return base ** exponent, rounded in the same way on every machine; 0 for the base 0."""
    return float(_EXACT.power(Decimal(base), Decimal(exponent))) if base else 0.0


def _slope(stages: Sequence[int], losses: Sequence[float], now: int) -> float:
    """Return −d loss / d n at ``now`` stages by the law that fits best; 0 if there are too few losses."""
    points = [(n + 1, loss) for n, loss in zip(stages, losses, strict=True) if math.isfinite(loss)]
    if len(points) < _LEAST_POINTS:
        return 0.0
    best = (math.inf, 0.0)
    values = [loss for _, loss in points]
    for exponent in _EXPONENTS:
        x = [_power(n, -exponent) for n, _ in points]
        level, factor = _line(x, values)
        error = math.fsum(_square(level + factor * a - b) for a, b in zip(x, values, strict=True))
        best = min(best, (error, exponent * factor * _power(now, -exponent) / now))
    return best[1]


def _square(number: float) -> float:
    """Return number · number: ``**`` calls the C library, which machines round differently."""
    return number * number


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of the least squares line y = a + b·x with a >= 0."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum(_square(a - mean_x) for a in x)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if mean_y - slope * mean_x >= 0:
        return mean_y - slope * mean_x, slope
    return 0.0, math.fsum(a * b for a, b in zip(x, y, strict=True)) / math.fsum(a * a for a in x)


def _moving_average(rows: Sequence[Sequence[float]]) -> list[float]:
    average = list(rows[0])
    for row in rows[1:]:
        average = [0.9 * old + 0.1 * new for old, new in zip(average, row, strict=True)]
    return average


def _text(name: str, mixer: ADO | Temperature) -> str:
    arguments = {key: value for key, value in asdict(mixer).items() if key != "every"}
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


_SHIPPED: dict[str, Callable[..., Mixer]] = {"ado": ADO, "temperature": Temperature}


def mixer_text(name: str, every: int, arguments: Mapping[str, object]) -> str:
    """Return the text of a mixer that a configuration names: ``ado``, ``temperature`` or ``module:function``.

    Raises:
        PlanError: the name is unknown, or it has other arguments.
    """
    found = None
    if name in _SHIPPED:
        found = find_mixer(f"{name} {json.dumps(dict(arguments))}", every)
    elif ":" not in name or arguments:
        raise PlanError(
            f"mixer {shown(name)}: expected {', '.join(_SHIPPED)}, or package.module:function without arguments"
        )
    return name if found is None else found.text


def find_mixer(text: str, every: int, function: MixFunction | None = None) -> Mixer | None:
    """Return the mixer that a plan names; None if the text names a function of the user that is not given.

    Args:
        text: text of the mixer.
        every: steps of a stage.
        function: function of the user, for a text that does not name a mixer of this package.

    Raises:
        PlanError: no mixer has this name, or this mixer has other arguments.
    """
    name, _, arguments = text.partition(" ")
    if name not in _SHIPPED:
        return function and FunctionMixer(function=function, every=every, needs_losses=not arguments)
    try:
        found = _SHIPPED[name](every=every, **json.loads(arguments or "{}"))
    except (ValueError, TypeError, ConfigurationError) as error:
        raise PlanError(f"mixer {shown(text)}: {error}; expected arguments of {name}") from None
    return found
