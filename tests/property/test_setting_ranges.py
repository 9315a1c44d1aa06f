"""Every number of every configuration has a range: what lies outside is one message of key, value and range."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.dataset.layout import LayoutSettings
from shardkit.errors import ConfigurationError, PlanError, UsageError
from shardkit.loader import Rebalancing
from shardkit.loader.monitoring import count_in, size_of
from shardkit.loader.settings import LoaderConfig
from shardkit.plan.assignment import Rules
from shardkit.plan.settings import Settings
from shardkit.ranges import Range, parse_duration, parse_size
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.policy import Policy
from shardkit.telemetry import TelemetrySettings
from shardkit.telemetry.control import Knob, parse_control
from shardkit_tools.simulation.cluster import (
    parse_count,
    parse_number,
    parse_rate,
)
from shardkit_trainer.configuration import Configuration, StageConfig, load_configuration
from tests.command_line import output_of

NEEDED = ["run.directory=runs/a", "data.dataset=data/a", "run.steps=100"]
RANGE = re.compile(r"expected (0, or )?a (whole )?number (from|above) \S+ (to|and) ")


def numeric_keys() -> dict[str, type]:
    """section.key → int or float, whatever stands beside it in the annotation."""
    found = {}
    for section, kind in get_type_hints(Configuration).items():
        for key, hint in get_type_hints(kind, include_extras=True).items():
            inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            if inner in (int, float):
                found[f"{section}.{key}"] = inner
    return found


KEYS = numeric_keys()
# Nothing that a run is told is negative, endless or above 10^30.
OUTSIDE = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -1, -1.0, -5, 10**400, -(10**400), 1e300, True, "many", [1], {}]),
    st.floats(max_value=-1e-9, allow_nan=False), st.floats(min_value=1e30, allow_nan=False),
    st.integers(max_value=-1), st.integers(min_value=10**30),
)  # fmt: skip


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def refusal(key: str, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(None, [*NEEDED, f"{key}={text}"])
    return str(caught.value)


def test_there_are_keys_of_both_kinds() -> None:
    assert len(KEYS) > 40
    assert set(KEYS.values()) == {int, float}


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=20, deadline=None)
@given(value=OUTSIDE)
def test_a_value_outside_is_one_message_of_key_value_and_range(key: str, value: object) -> None:
    message = refusal(key, toml(value))
    assert message.startswith(f"{key} = "), message
    assert RANGE.search(message), message
    assert "\n" not in message
    if not isinstance(value, int) or abs(value) < 2**256:
        assert repr(value)[:20] in message or str(value) in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.clip", -1), ("schedule.final", -5), ("optimizer.weight_decay", -100), ("parallel.density", -3),
     ("parallel.density", 0), ("parallel.density", 1.5), ("parallel.correction", -3), ("parallel.correction", 1),
     ("parallel.outer_lr", -1), ("optimizer.beta1", 1.5), ("optimizer.beta2", 1), ("optimizer.epsilon", -1),
     ("parallel.timeout_s", -5), ("parallel.timeout_s", 0), ("run.seed", -1), ("data.seed", 2**63),
     ("optimizer.lr", 0), ("schedule.final", 2), ("log.telemetry_s", 0.001), ("model.stages", 60)],
)  # fmt: skip
def test_what_trains_wrongly_or_not_at_all_is_refused(key: str, value: object) -> None:
    assert RANGE.search(refusal(key, str(value)))


@pytest.mark.parametrize("text", ["1" + "0" * 5000, "-" + "9" * 400])
def test_numbers_that_python_does_not_print_are_refused(text: str) -> None:
    assert refusal("run.steps", text).startswith("run.steps = ")


@pytest.mark.parametrize("first", [100, 101, 10**6])
def test_a_stage_behind_the_end_is_refused(first: int) -> None:
    message = refusal("data.stages", f"[{{from_step = {first}, global_batch = 8}}]")
    for word in ("data.stages", str(first), "run.steps = 100"):
        assert word in message


@pytest.mark.parametrize("text", ["{web = -1}", "{web = nan}", "{web = 1.5}", "{web = 1073741824}"])
def test_weights_have_a_range(text: str) -> None:
    assert refusal("data.weights", text).startswith("data.weights.web = ")
    assert RANGE.search(refusal("data.stages", f"[{{from_step = 5, weights = {text}}}]"))


def test_sections_made_by_hand_are_checked_too() -> None:
    for section, kind in get_type_hints(Configuration).items():
        for key in (key for key in KEYS if key.startswith(f"{section}.")):
            for value in (-1, math.nan, math.inf):
                with pytest.raises(ConfigurationError, match=re.escape(key)):
                    kind(**{key.partition(".")[2]: value})
    with pytest.raises(ConfigurationError, match="from_step"):
        StageConfig(global_batch=4)


def test_the_command_ends_with_2_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\ndirectory = "runs/a"\n[data]\ndataset = "data/a"\n[optimizer]\nclip = -1\n')
    said = output_of("train", path, code=2)
    assert said == "shardkit: optimizer.clip = -1: expected a number from 0 to 1,000,000,000\n"


def test_the_command_lists_every_setting_with_its_range() -> None:
    lines = output_of("train", "--settings").splitlines()
    for key in KEYS:
        (line,) = (line for line in lines if line.split()[:1] == [key])
        assert RANGE.search(re.sub("^.*?(0, or )?(?=a (whole )?number)", "expected ", line) + " "), line


# ---- elsewhere

SIBLINGS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, type]]] = [
    (LoaderConfig, {}, {"memory": int, "threads": int, "prefetch": int, "stall_s": float, "stride": int, "offset": int,
                        "cache_size": int}),
    (Rebalancing, {}, {"every": int, "timeout_s": float}),
    (Rules, {}, {"lead": int, "settle": int, "gain": float, "worse": float, "backoff": int}),
    (TelemetrySettings, {}, {"interval_s": float, "most_bytes": int}),
    (ReadSettings, {}, {"deadline_s": float, "attempt_s": float, "cool_down_s": float, "first_concurrency": int,
                        "most_concurrency": int, "trip_after": int}),
    (LayoutSettings, {}, {"seed": int, "shard_size": int, "block_size": int}),
    (Policy, {}, {"copies": int, "max_scrub_age_s": int}),
    (Settings, {"global_batch": 8, "lanes": 4}, {"global_batch": int, "lanes": int, "seed": int, "window_blocks": int,
                                                 "epoch_steps": int}),
]  # fmt: skip
CASES = [(make, base, name, kind) for make, base, names in SIBLINGS for name, kind in names.items()]


@pytest.mark.parametrize(
    ("make", "base", "name", "kind"), CASES, ids=[f"{m.__name__}.{n}" for m, _, n, _ in CASES]
)
def test_numbers_of_the_library_have_ranges_too(
    make: Callable[..., Any], base: dict[str, Any], name: str, kind: type
) -> None:
    wrong: list[object] = [
        *([0] if name == "cache_size" else []),
        math.nan,
        math.inf,
        -math.inf,
        -1,
        -(10**400),
        10**400,
        "many",
        True,
        [1],
        np.float64("nan"),
    ]
    for value in [*wrong, *([1.5, np.float32(3)] if kind is int else [])]:
        with pytest.raises((ConfigurationError, PlanError)) as caught:
            make(**{**base, name: value})
        message = str(caught.value)
        assert name in message, (value, message)
        assert "expected" in message
        assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -1, -1.0, 10**400, "nan", "many", [1], "9" * 400, "9" * 5000]
)
@pytest.mark.parametrize("parse", [parse_duration, parse_rate, parse_count, parse_number, parse_size])
def test_quantities_of_simulate_and_tune_are_numbers(parse: Callable[[Any], float], value: object) -> None:
    with pytest.raises(ConfigurationError):
        parse(value)


@pytest.mark.parametrize(
    "line",
    ["loader.memory = -1", "loader.memory = nan", "loader.prefetch = 0", "loader.prefetch = 1e3",
     "loader.prefetch = true", "change.guard_s = nan", "change.guard_s = inf", "change.guard_s = -1"],
)  # fmt: skip
def test_numbers_of_control_toml_have_ranges_too(line: str) -> None:
    knobs = {"loader.memory": Knob(lambda: 1, lambda _: None, size_of(1 << 20)),
             "loader.prefetch": Knob(lambda: 1, lambda _: None, count_in(Range(1, 1024)))}  # fmt: skip
    key = line.partition(" ")[0]
    with pytest.raises(
        ConfigurationError, match=f"({re.escape(key)}|{key.partition('.')[2]}) = .*[Ee]xpected"
    ):
        parse_control(line, knobs)
