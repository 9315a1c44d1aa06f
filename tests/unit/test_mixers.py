"""The mixers: ADO follows the slope of losses, temperatures interpolate, and both are functions of their arguments."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.arrays import Float64s
from shardkit.errors import ConfigurationError, PlanError
from shardkit.plan import ADO, FunctionMixer, Temperature, mixers
from shardkit.plan.mixed import whole_weights
from shardkit.plan.mixers import find_mixer


def history(exponents: list[float], factors: list[float], stages: int) -> tuple[Float64s, Float64s]:
    """Return the losses 1 + factor · n ** −exponent of each stratum, and even weights."""
    n = np.arange(1, stages + 1)[:, None]
    return 1 + np.array(factors) * n ** -np.array(exponents), np.full(
        (stages + 1, len(factors)), 1 / len(factors)
    )


@pytest.mark.parametrize("stages", [10, 200, 3000])
def test_ado_prefers_the_stratum_that_learns_fastest(stages: int) -> None:
    losses, weights = history([0.3, 0.3, 0.3], [1.0, 2.0, 6.0], stages)
    small, middle, large = ADO(every=64)(losses, weights, 64 * stages)
    assert small < middle < large
    exact = 0.9 / 3 + 0.1 * np.array([1, 2, 6]) / 9  # slopes are proportional to the factors
    assert np.allclose([small, middle, large], exact, rtol=1e-6)


def test_ado_has_the_first_weights_until_a_law_can_be_fitted() -> None:
    losses, weights = history([0.3, 0.3], [1.0, 2.0], 7)
    weights[0] = [0.25, 0.75]
    assert ADO(every=8, warmup=5)(losses, weights, 56) == [0.25, 0.75]


def test_ado_survives_strata_without_losses_and_flat_losses() -> None:
    losses, weights = history([0.3, 0.3], [1.0, 1.0], 40)
    losses[:, 1] = np.nan
    found = ADO(every=8, least=0.05)(losses, weights, 320)
    assert found[1] == pytest.approx(0.9 * 0.5 + 0.1 * 0.05 / 1.05)
    losses[:] = 2.0
    assert all(one == pytest.approx(0.5) for one in ADO(every=8)(losses, weights, 320))


def test_a_temperature_is_a_line_from_start_to_end() -> None:
    mixer = Temperature(every=10, start=4, end=1, steps=100)
    weights, none = np.array([[0.2, 0.8]]), np.empty((0, 2))

    def ratio(step: int) -> float:
        small, large = mixer(none, weights, step)
        return small / large

    assert ratio(0) == pytest.approx(0.25**0.25)
    assert ratio(50) == pytest.approx(0.25**0.4)
    assert ratio(100) == ratio(900) == pytest.approx(0.25)


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=5).filter(any),
    st.floats(1e-6, 1000),
    st.floats(1e-6, 1000),
    st.floats(0, 1),
)
@example([1, 2], 1e-6, 1e-6, 0.5)
@example([1, 1], 1000.0, 1e-6, 1.0)
def test_any_temperature_gives_weights_at_any_step(
    rows: list[int], start: float, end: float, done: float
) -> None:
    mixer = Temperature(every=10, start=start, end=end, steps=1 << 40)
    shares = np.array([rows]) / sum(rows)
    found = mixer(np.empty((0, len(rows))), shares, round(done * (1 << 40)))
    whole = whole_weights(found, [one > 0 for one in rows], 1 << 20)
    assert sum(whole) == 1 << 20
    assert [one > 0 for one in whole] == [one > 0 for one in rows]
    assert (
        whole[rows.index(max(rows))] >= max(whole) - 1
    )  # strata with 1 may take it from one of two equal ones


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="temperature: start = 0"):
        Temperature(every=8, start=0.0)
    with pytest.raises(ConfigurationError, match="temperature: end = 0"):
        Temperature(every=8, end=0.0)


@pytest.mark.parametrize("mixer", [ADO(every=64, least=0.02), Temperature(every=8, start=2.5, steps=7)])
def test_a_text_names_its_mixer(mixer: ADO | Temperature) -> None:
    assert find_mixer(mixer.text, mixer.every) == mixer


def test_other_texts() -> None:
    assert find_mixer("my_run.mixing:halve", 8) is None
    assert FunctionMixer(function=history, every=8).text == f"{__name__}:history"  # type: ignore[arg-type]
    for text in ('ado {"least": 2}', "ado {", 'ado {"other": 1}', 'temperature {"every": 1}'):
        with pytest.raises(PlanError, match="expected arguments of"):
            find_mixer(text, 8)
    with pytest.raises(ConfigurationError, match="ado: every = 0"):
        ADO(every=0)


def test_a_fit_uses_no_power_of_the_c_library() -> None:
    """Python's ``**`` of floats calls pow(), whose last bit depends on the machine."""
    tree = ast.parse(inspect.getsource(mixers))
    powers = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]
    assert all(isinstance(node.left, ast.Constant) for node in powers)
