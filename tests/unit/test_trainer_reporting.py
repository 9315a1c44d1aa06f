"""What the trainer reports of its steps."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.errors import ConfigurationError
from shardkit_trainer.configuration import LogConfig
from shardkit_trainer.reporting import StageMeter


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
