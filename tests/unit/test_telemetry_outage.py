"""What an outage cost, on series where a person can count it; and what the trainer reports of its steps."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.errors import ConfigurationError
from shardkit.telemetry import Record, RunTelemetry
from shardkit_tools.commands.report import outage_cost, parse_since
from shardkit_trainer.configuration import LogConfig
from shardkit_trainer.reporting import StageMeter
from tests.unit.telemetry_series import made_series

# Ten steps every two seconds.
STEADY = {"loader.steps": 10.0, "loader.samples": 320.0, "reads.bytes_from_root": 1_000.0}


def cost(*ranks: list[Record], price: float = 0.0, watts: float = 0.0) -> dict[str, object]:
    series = {(rank, 0): records for rank, records in enumerate(ranks)}
    return outage_cost(RunTelemetry(series), price_per_hour=price, watts=watts)


def test_a_steady_run_has_lost_nothing() -> None:
    found = cost(made_series(records=200, per_interval=STEADY))
    assert (found["lost_s"], found["lost_spans"], found["down_s"], found["dollars"]) == (0.0, [], 0.0, 0.0)
    assert found["typical_step_s"] == 0.2
    assert found["bytes"] == {"root": 199_000}
    assert cost()["lost_s"] == 0.0


def test_a_stall_is_lost_on_every_rank() -> None:
    """Sixty seconds without a step, on two ranks at 36 dollars an hour each: a cent per rank second."""

    def stuck(number: int) -> dict[str, float]:
        quiet = {
            "loader.steps": 0.0,
            "loader.samples": 0.0,
            "reads.remote_timeouts": 1.0,
            "reads.remote_failovers": 2.0,
        }
        return quiet if 100 < number <= 130 else {}

    ranks = [made_series(rank, world=2, records=300, per_interval=STEADY, change=stuck) for rank in range(2)]
    found = cost(*ranks, price=36.0, watts=500.0)
    assert found["lost_s"] == pytest.approx(60.0, abs=0.5)
    assert found["rank_seconds"] == pytest.approx(120.0, abs=1.0)
    assert found["dollars"] == pytest.approx(1.2, abs=0.01)
    assert found["joules"] == pytest.approx(60_000, rel=0.01)
    assert found["reads"] == {"failovers": 120, "timeouts": 60}


def test_evaluations_and_checkpoints_are_not_lost() -> None:
    def evaluating(number: int) -> dict[str, float]:
        return {"loader.steps": 0.0, "trainer.evaluation_s": 2.0} if 100 < number <= 130 else {}

    assert cost(made_series(records=300, per_interval=STEADY, change=evaluating))["lost_s"] == 0.0


def test_a_restart_costs_the_time_between_and_the_steps_taken_twice() -> None:
    before = made_series(records=100, per_interval=STEADY, session="one")  # ends at 1198 s, step 990
    again = made_series(records=100, per_interval=STEADY, session="two", begin=1_298.0)
    again = [
        Record(**{**one.__dict__, "values": {**one.values, "loader.step": one.values["loader.step"] + 900}})
        for one in again
    ]
    found = cost([*before, *again])
    assert found["down_s"] == 100.0
    assert found["repeated_steps"] == 90
    assert found["lost_s"] == pytest.approx(100.0 + 90 * 0.2, abs=0.5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30min", 1800), ("2h", 7200), ("1d", 86400), ("90s", 90), ("1.5h", 5400), ("all", math.inf)],
)
def test_since(text: str, seconds: float) -> None:
    assert parse_since(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2 weeks", "-1h", "1e3s", "2h30min"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"or all.*: expected a number and a unit"):
        parse_since(text)


# ---- what the trainer reports


def test_waiting_inside_of_the_computation_is_not_own_work() -> None:
    """DDP's last backward waits for the buckets of others: computed_s tells what was this rank's."""
    world: Any = SimpleNamespace(stage="compute")
    meter = StageMeter(10, world)
    for loss, moved_bytes in ((2.5, 7.0), (math.nan, 9.0)):
        meter.seconds |= {"prepare": 0.1, "compute": 1.0, "reduce": 0.2}
        meter.step(computed_s=0.4, cells=3, loss=loss, moved_bytes=moved_bytes)
    numbers = meter.numbers()
    assert numbers["compute_s"] == pytest.approx(0.6)
    assert numbers["reduce_s"] == pytest.approx(1.8)
    assert (numbers["steps"], numbers["cells"], numbers["moved_bytes"], numbers["steps_in_all"]) == (
        2,
        6,
        9,
        10,
    )
    assert numbers["loss"] == 0.0, "a number that JSON can hold"


def test_an_evaluation_counts_while_it_goes_on() -> None:
    world: Any = SimpleNamespace(stage="step")
    meter = StageMeter(10, world)
    with meter.between_steps("evaluation"):
        time.sleep(0.01)
        assert meter.table() == [["evaluation"]]
        assert meter.numbers()["evaluation_s"] >= 0.01
    assert meter.table() == [["step"]]


def test_settings_of_the_trainer() -> None:
    settings = LogConfig(telemetry_s=0.5, listen="127.0.0.1:9400").telemetry()
    assert settings is not None
    assert (settings.interval_s, settings.listen) == (0.5, "127.0.0.1:9400")
    assert LogConfig(telemetry_s=0.0).telemetry() is None
    for wrong in ({"listen": "9400"}, {"telemetry_s": 0.001}):
        with pytest.raises(ConfigurationError):
            LogConfig(**wrong)
