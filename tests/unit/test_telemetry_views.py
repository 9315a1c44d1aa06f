"""What is shown of telemetry: its summary, `shardkit top`, metrics, alerts and the runbook."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardkit.errors import MissingDependency
from shardkit.reading.attestations import COUNTED
from shardkit.telemetry import Record, RunTelemetry, summarise
from shardkit.telemetry.control import Knob, parse_control
from shardkit.telemetry.diagnosis import KINDS, cost_skew
from shardkit.telemetry.recorder import BlockTimes
from shardkit.telemetry.serving import METRICS, exposition, metric_names
from shardkit.telemetry.summary import chart_series, lane_history, lane_moves
from shardkit_tools.commands.top import _rank_row, terminal_page
from shardkit_tools.observing.run_view import grouped_events
from tests.unit.telemetry_series import made_series

# ---- The document that `top` and the page show: rates, sources, lanes over time


STEADY = {
    "loader.steps": 10.0, "loader.samples": 320.0, "loader.cells": 20.0, "loader.consumer_wait_s": 0.5,
    "reads.bytes_from_cache": 2_000.0, "blocks.local_bytes": 4_000.0,
}  # fmt: skip


def of(*series: list[Record]) -> RunTelemetry:
    return RunTelemetry({(records[-1].rank, records[-1].worker): records for records in series})


def test_rates_are_per_second_and_summed_over_ranks_and_workers() -> None:
    ranks = [made_series(rank, world=2, per_interval=STEADY) for rank in range(2)]
    worker = made_series(0, world=2, per_interval=STEADY, worker=1)
    view = summarise(of(*ranks, worker), [], ranks[0][-1].time)
    assert view["samples_per_s"] == pytest.approx(3 * 160)
    assert [row["samples_per_s"] for row in view["ranks"]] == pytest.approx([320, 160])
    assert view["ranks"][0]["bytes_per_s"] == pytest.approx(6_000)
    assert view["ranks"][1]["data_share"] == pytest.approx(0.25)
    assert view["ranks"][1]["step_s"] == pytest.approx(0.2)
    assert view["bytes"] == {"disk": 3 * 39 * 4_000, "cache": 3 * 39 * 2_000}
    assert view["state"] == "running"
    assert view["world"] == 2


def test_own_work_is_not_measured_unless_the_loop_reports_it() -> None:
    for reported, own in (({}, None), ({"loader.computed_s": 1.0}, 0.15)):
        series = made_series(per_interval=STEADY | reported)
        (row,) = summarise(of(series), [], series[-1].time)["ranks"]
        assert row["busy_step_s"] == (None if own is None else pytest.approx(own))
        assert ("not measured" in _rank_row(row)) == (own is None)


@pytest.mark.parametrize(("state", "age", "shown"), [
    ("running", 5.0, "running"), ("running", 20.0, "silent"), ("ended", 1e5, "ended"),
])  # fmt: skip
def test_the_state_of_a_run(state: str, age: float, shown: str) -> None:
    series = made_series(per_interval=STEADY, state=state)
    assert summarise(of(series), [], series[-1].time + age)["state"] == shown


def test_a_run_without_records_is_shown_as_that() -> None:
    view = summarise(RunTelemetry(), [{"time": 1.0, "event": "start"}], 5.0)
    assert view["state"] == "no records yet"
    assert (view["ranks"], view["bottleneck"], view["anomalies"], view["lane_owners"]) == ([], None, [], [])
    assert len(view["events"]) == 1


def test_what_grew_is_spread_over_the_points_that_it_covers() -> None:
    """Nothing is lost and nothing is counted twice, however points and records lie."""
    for interval_s, records in ((2.0, 500), (0.3, 20), (7.0, 1000)):
        series = made_series(records=records, interval_s=interval_s, per_interval=STEADY)
        found = chart_series(of(series), series[-1].time)
        assert sum(found["samples_per_s"]) * found["width_s"] == pytest.approx(320 * (records - 1), rel=1e-6)
        assert len(found["time"]) == len(found["samples_per_s"]) <= 91
        assert found["bytes_per_s"].keys() == {"cache", "disk"}
        assert max(one for one in found["wait_share"] if one is not None) <= 1.0


def test_lane_moves_are_seen_in_the_records_whoever_speaks_first() -> None:
    for first, second in ((0.0, 1.5), (1.5, 0.0)):
        before = [
            made_series(0, world=2, records=5, lanes=(0, 1), begin=10.0 + first),
            made_series(1, world=2, records=5, lanes=(2, 3), begin=10.0 + second),
        ]
        after = [
            made_series(0, world=2, records=5, lanes=(0, 1, 2), begin=30.0 + first),
            made_series(1, world=2, records=5, lanes=(3,), begin=30.0 + second),
        ]
        ranks = {rank: [*before[rank], *after[rank]] for rank in range(2)}
        assert [(one["lane"], one["from"], one["to"]) for one in lane_moves(ranks)] == [(2, 1, 0)]
        assert [row["owners"] for row in lane_history(ranks)] == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_a_lane_that_two_ranks_have_worked_is_one_lane() -> None:
    rows: list[list[list[Any]]] = [
        [[3, 2, 0.5, 100], [1, 1, 0.25, 50]],
        [[3, 1, 1.0, 50], ["x", 1, 1.0, 1], [7, 1], [-1, 1, 1.0, 1], [2.0, 1, 0.125, 8]],
    ]
    records = [
        Record(time=5.0, rank=rank, world=2, session=str(rank), tables={"lane_loads": rows[rank]})
        for rank in range(2)
    ]
    view = summarise(of(*([one] for one in records)), [], 5.0)
    assert view["lane_loads"] == [[1, 1, 0.25, 50], [2, 1, 0.125, 8], [3, 3, 1.5, 150]]


def test_loads_are_counted_for_the_lane_that_needs_the_block_first() -> None:
    times = BlockTimes(lambda shard: f"shard {shard}", lambda _: True)
    times.expect([10, 11, 12], [0, 0, 5])
    for number, seconds in ((10, 0.5), (11, 0.25), (12, 3.0), (13, 9.0)):  # of 13 nobody has spoken
        times.note(0, number, seconds, 100, number=number)
    times.note(0, 12, 1.0, 100, number=12)  # loaded again: after an eviction, or because lanes moved
    times.expect([12], [4])
    times.note(0, 12, 0.125, 100, number=12)
    assert times.lane_loads() == [[5, 2, 4.0, 200], [0, 2, 0.75, 200], [4, 1, 0.125, 100]]
    assert times.hot_shards() == [["shard 0", 6, 600]]


# ---- `shardkit top` in terminals of several widths


GROWTH = {
    "loader.steps": 10.0, "loader.samples": 320_000.0, "loader.cells": 80.0, "loader.consumer_wait_s": 1.5,
    "loader.step": 10.0, "blocks.local_bytes": 4e9, "process.cpu_s": 1.0,
}  # fmt: skip


def lines_at(width: int, ranks: int = 8) -> list[str]:
    series = [
        made_series(rank, world=ranks, records=120, per_interval=GROWTH, lanes=range(8 * rank, 8 * rank + 8))
        for rank in range(ranks)
    ]
    telemetry = RunTelemetry({(one[-1].rank, one[-1].worker): one for one in series})
    document = {"run": "runs-with-a-name", "loss": 1.25, **summarise(telemetry, [], series[0][-1].time)}
    for row in document["ranks"]:
        row["host"] = f"node-{row['rank']}.training.cluster.example.com"
    document |= {"steps": None, "replication_lag_bytes": None, "verification_failures": 0} | document
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=24, force_terminal=True, color_system=None)
    console.print(terminal_page(document, width, 8))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 130, 220])
def test_rank_step_wait_and_bottleneck_are_whole_at_every_width(width: int) -> None:
    lines = lines_at(width)
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if line.startswith("rank"))
    rows = lines[lines.index(heads) + 1 :][:8]
    for column in ("rank", "step", "data wait", "bound by"):
        assert column in heads, (width, heads)
    for number, row in enumerate(rows):
        assert row.split()[0] == str(number)
        assert "1,190" in row  # the step
        assert "75 %" in row  # the wait for data
        assert "data 75 %" in row  # what bounds it
        assert "…" not in row
    assert any("data-bound" in line for line in lines[:4])
    assert lines.index(heads) + 8 <= 24


def test_events_are_not_repeated_and_digests_are_short() -> None:
    digest = "3f9a" * 16
    raw = [
        {
            "time": 10.0 + rank,
            "event": "failover",
            "rank": rank,
            "name": f"objects/sha256/3f/{digest}.tar",
            "location": "b",
        }
        for rank in range(3)
    ]
    raw += [{"time": 20.0, "event": "checkpoint", "rank": 0, "digest": f"sha256:{digest}"}]
    raw += [{"time": 30.0, "event": "failover", "rank": 1, "name": "short"}]
    found = grouped_events(raw)
    assert [(one["event"], one["count"], one["rank"], one["time"]) for one in found] == [
        ("failover", 3, None, 12.0),
        ("checkpoint", 1, 0, 20.0),
        ("failover", 1, 1, 30.0),
    ]
    assert found[0]["text"] == "name=objects/sha256/3f/3f9a3f9a3f9a….tar  location=b"
    assert found[1]["text"] == "digest=sha256:3f9a3f9a3f9a…"
    assert digest not in str(found)


# ---- The exposition, and that everything which names a metric, a kind or a section names one that exists


OPERATING = Path(__file__).parents[2] / "examples" / "operating"
NAME = re.compile(r"\bshardkit_[a-z_]+")


def alerts() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    document = yaml.safe_load((OPERATING / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_names_and_units_are_standard() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"shardkit_[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.help[0].isupper()
        for _, value in metric.values:
            unit = {"_s": "_seconds", "bytes": "_bytes"}.get(
                value[-2:] if value.endswith("_s") else value[-5:]
            )
            if unit is not None:
                assert metric.name.endswith(unit), (metric.name, value)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_counter_of_remote_reads_is_exposed() -> None:
    values = {value for metric in METRICS for _, value in metric.values}
    for name in COUNTED:
        assert f"reads.{name}" in values or f"reads.remote_{name}" in values, name


def test_the_exposition_parses_and_holds_every_rank() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    values = {"loader.steps": 5.0, "reads.bytes_from_root": 7.0, "reads.bytes_from_cache": 8.0}
    values |= {"reads.remote_failovers": 2.0, "reads.cache_hits": 3.0, "trainer.compute_s": 1.5}
    text = exposition(
        [
            Record(time=9.0, rank=rank, world=2, values=values, tables={"step_costs": [[4, 1 + 2 * rank, 5]]})
            for rank in range(2)
        ],
        {"stall": 1},
    )
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    for rank in ("0", "1"):
        at = {"rank": rank, "worker": "0"}
        assert value("shardkit_loader_steps_total", **at) == 5
        assert value("shardkit_read_bytes_total", source="root", **at) == 7
        assert value("shardkit_read_bytes_total", source="cache", **at) == 8
        assert value("shardkit_read_events_total", kind="failovers", **at) == 2
        assert value("shardkit_cache_events_total", kind="hits", **at) == 3
        assert value("shardkit_trainer_stage_seconds_total", stage="compute", **at) == 1.5
        assert value("shardkit_heartbeat_timestamp_seconds", **at) == 9
    assert value("shardkit_anomalies", kind="stall") == 1
    assert (value("shardkit_cost_skew", order="plan"), value("shardkit_cost_skew", order="plain")) == (1.5, 1)
    assert {name for name, _ in found} == metric_names()


def test_skew_of_cost_is_of_steps_that_all_ranks_tell_of() -> None:
    def record(rank: int, rows: list[list[Any]], world: int = 2) -> Record:
        return Record(time=1.0, rank=rank, world=world, tables={"step_costs": rows})

    first = record(0, [[5, 30, 10], [6, 10, 10], [7, 9, 9]])
    assert cost_skew([first, record(1, [[5, 10, 30], [6, 10, 30], [9, 1, 1], [8, "x", 1]])]) == {
        "steps": 2, "plan": 1.25, "plan_p95": 1.5, "plain": 1.5, "plain_p95": 1.5,
    }  # fmt: skip
    assert cost_skew([first]) is None  # the other rank is not heard
    assert cost_skew([first, record(1, [])]) is None
    assert cost_skew([]) is None


def test_alerts_name_metrics_labels_and_sections_that_exist() -> None:
    sections = set(re.findall(r"^## (\S+)$", (OPERATING / "RUNBOOK.md").read_text(), re.MULTILINE))
    rules = alerts()
    assert {rule["alert"] for rule in rules} == sections
    for rule in rules:
        names = set(NAME.findall(rule["expr"]))
        assert names
        assert names <= metric_names(), rule["alert"]
        assert rule["annotations"]["runbook"] == f"RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
    kinds = {
        kind for rule in rules for kind in re.findall(r'shardkit_anomalies\{kind="(\w+)"\}', rule["expr"])
    }
    assert kinds <= set(KINDS)
    assert kinds == set(KINDS) - {"verification"}, "that one has its own counter"


def test_every_section_of_the_runbook_has_symptom_command_and_expected_output() -> None:
    text = (OPERATING / "RUNBOOK.md").read_text()
    for section in text.split("\n## ")[1:]:
        name = section.splitlines()[0]
        assert "**Symptom.**" in section, name
        assert re.search(r"```console\n\$ shardkit \w+ .*```", section, re.DOTALL), name
        assert "**Expected.**" in section, name


def test_the_commands_of_the_runbook_exist() -> None:
    from shardkit_tools.main import COMMANDS

    known = {name for _, names in COMMANDS for name in names}
    text = "".join((OPERATING / name).read_text() for name in ("RUNBOOK.md", "README.md"))
    used = set(re.findall(r"shardkit (top|[a-z]+) (?:RUN|ROOT)", text))
    assert {"top", "verify", "repair", "replicate", "plan"} <= used
    assert used <= known


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            if name in ("expr", "query") and isinstance(one, str) and one != "prometheus":
                yield one
            yield from expressions(one)
    elif isinstance(value, list):
        for one in value:
            yield from expressions(one)


def test_the_grafana_dashboard_asks_for_metrics_that_exist() -> None:
    document = json.loads((OPERATING / "grafana-dashboard.json").read_text())
    asked = list(expressions(document))
    assert len(asked) >= len(document["panels"])
    for one in asked:
        names = set(NAME.findall(one))
        assert names, one
        assert names <= metric_names(), one
        assert one.count("(") == one.count(")")
    boxes = [panel["gridPos"] for panel in document["panels"]]
    for i, a in enumerate(boxes):
        assert a["x"] + a["w"] <= 24
        for b in boxes[i + 1 :]:
            apart = (
                a["x"] + a["w"] <= b["x"]
                or b["x"] + b["w"] <= a["x"]
                or a["y"] + a["h"] <= b["y"]
                or b["y"] + b["h"] <= a["y"]
            )
            assert apart
    titles = {panel["title"] for panel in document["panels"]}
    assert {"Throughput", "Bytes by source", "Replication lag", "Own work per cell, by rank"} <= titles


def test_the_example_of_a_control_file_is_one(tmp_path: Path) -> None:
    def anything(_: str, value: Any) -> Any:
        return value

    names = [
        "loader.memory",
        "loader.prefetch",
        "reading.hedge",
        "cache.size",
        "locations.mirror.rank",
        "locations.mirror.off",
    ]
    knobs = {name: Knob(lambda: 1, lambda _: None, anything) for name in names}
    text = (OPERATING / "control.toml").read_text()
    assert parse_control(text, knobs).targets == {"loader.memory": "4GiB"}
    whole = re.sub(r"^# (?=\[|[a-z]+ = )", "", text, flags=re.MULTILINE)
    assert set(parse_control(whole, knobs).targets) == set(names)
    assert parse_control(whole, knobs).ranks == (0, 1, 2, 3)


def test_the_scrape_configuration_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    document = yaml.safe_load((OPERATING / "prometheus.yml").read_text())
    assert document["rule_files"] == ["alerts.yml"]
    assert document["scrape_configs"][0]["job_name"] == "shardkit"


def test_what_is_not_installed_is_answered_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependency, match="pip install 'prometheus-client>="):
        exposition([], {})
