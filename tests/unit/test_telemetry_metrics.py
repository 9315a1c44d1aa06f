"""The exposition, and that everything which names a metric, a kind or a section names one that exists."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import MissingDependency
from shardkit.reading.attestations import COUNTED
from shardkit.telemetry import Record
from shardkit.telemetry.control import Knob, parse_control
from shardkit.telemetry.diagnosis import KINDS, cost_skew
from shardkit.telemetry.serving import METRICS, exposition, metric_names

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
