"""Records of telemetry and the heartbeat that writes them."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigurationError, NotFoundError, StoreError
from shardkit.telemetry import (
    Record,
    Recorder,
    Telemetry,
    TelemetrySettings,
    parse_record,
    read_events,
    read_run,
)
from shardkit.telemetry.pages import parse_listen
from shardkit.telemetry.recorder import write_stacks
from shardkit.telemetry.records import MAX_LINE_BYTES, check_run, lanes_text, parse_lanes, record_path
from shardkit.telemetry.serving import serve_health

# ---- Records: what is written comes back, what a stranger wrote does no harm


NUMBERS = st.floats(min_value=0.001, max_value=1e12, allow_nan=False)


@given(
    values=st.dictionaries(st.text(min_size=1, max_size=30), NUMBERS, max_size=20),
    lanes=st.sets(st.integers(0, 3000), max_size=60),
    rank=st.integers(0, 99_999),
    host=st.text(max_size=50),
)
def test_what_is_written_comes_back(values: dict[str, float], lanes: set[int], rank: int, host: str) -> None:
    record = Record(
        time=12.5, rank=rank, world=rank + 1, host=host, lanes=tuple(sorted(lanes)), values=values
    )
    line = record.to_line()
    assert line.count(b"\n") == 1
    found = parse_record(line)
    assert found is not None
    assert (found.time, found.rank, found.host, found.lanes) == (12.5, rank, host, record.lanes)
    assert found.values == pytest.approx(values, abs=1e-6)


def test_zeros_are_left_out_and_read_as_zero() -> None:
    line = Record(time=1.0, rank=0, values={"a": 0.0, "b": 2.0}).to_line()
    found = parse_record(line)
    assert found is not None
    assert list(found.values) == ["b"]
    assert found.value("a") == 0.0


def test_lanes_are_short() -> None:
    assert lanes_text(range(4096)) == "0-4095"
    assert lanes_text([0, 1, 2, 7, 9, 10]) == "0-2,7,9-10"


@pytest.mark.parametrize(
    "text", ["1-", "-1", "2-1", "0-9999999", "3,2", "a", "1,,2", "١", None, 7, "0-65536"]
)
def test_other_lanes_are_refused(text: object) -> None:
    assert parse_lanes(text) is None


def document(**changes: Any) -> bytes:
    plain = json.loads(Record(time=1.0, rank=0, values={"a": 1.0}).to_line())
    return json.dumps({**plain, **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000,
        document(v=2), document(rank=-1), document(rank="0"), document(rank=True), document(rank=1 << 60),
        document(time="now"), document(time=None), document(host="x" * 300), document(host=1), document(lanes=[1]),
        document(values={"a": "1"}), document(values={"a": None}), document(values=[1]),
        document(values={str(i): 1 for i in range(1000)}), document(tables={"t": [[[1]]]}), document(tables={"t": [1]}),
        document(tables={"t": [["x" * 300]]}), document(tables={"t": [["x"]] * 100}), document(interval_s="2"),
        document(values={"a": 1e400}), b'{"v":1,"time":NaN,"rank":0}', b" " * (MAX_LINE_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert parse_record(line) is None


def test_the_plain_document_is_a_record() -> None:
    assert parse_record(document()) is not None


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    parse_record(data)


NAMES = st.sampled_from(["v", "rank", "time", "lanes", "values", "tables", "host"])
LEAVES = st.none() | st.booleans() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_survived(value: object) -> None:
    found = parse_record(
        json.dumps({"v": 1, "rank": 0, "time": 1, "values": value, "tables": value, "lanes": value}).encode()
    )
    if found is not None:
        assert parse_record(found.to_line()) is not None


# ---- The heartbeat: bounded, survives kills and bad sources, read back as it was; health and metrics over HTTP


QUICK = TelemetrySettings(interval_s=0.01)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_records_are_written_and_the_last_says_that_it_ended(tmp_path: Path) -> None:
    telemetry = Telemetry(rank=3, world=8, lanes=lambda: [4, 5])
    counts = {"steps": 0.0}
    telemetry.add_source("loader", lambda: counts)
    seen: list[Record] = []
    recorder = Recorder(telemetry, tmp_path, QUICK, [seen.append])
    until(lambda: len(seen) > 3)
    counts["steps"] = 7.0
    recorder.close()
    recorder.close()
    records = read_run(tmp_path).series[3, 0]
    assert records[-1].state == "ended"
    assert {one.state for one in records[:-1]} == {"running"}
    assert records[-1].value("loader.steps") == 7
    assert records[-1].lanes == (4, 5)
    assert len({one.session for one in records}) == 1
    assert not [one for one in threading.enumerate() if one.name == "shardkit-telemetry"]


def test_files_stay_bounded(tmp_path: Path) -> None:
    telemetry = Telemetry()
    telemetry.add_table("rows", lambda: [["x" * 150]] * 60)
    recorder = Recorder(telemetry, tmp_path, TelemetrySettings(interval_s=0.01, most_bytes=64 << 10))
    until(lambda: Path(f"{recorder.path}.1").exists())
    first = read_run(tmp_path, tail_bytes=1 << 20).series[0, 0][0].time
    until(lambda: read_run(tmp_path, tail_bytes=1 << 20).series[0, 0][0].time > first)  # the oldest are gone
    recorder.close()
    sizes = [path.stat().st_size for path in recorder.path.parent.iterdir()]
    assert len(sizes) <= 2
    assert max(sizes) < 80 << 10
    times = [one.time for one in read_run(tmp_path, tail_bytes=1 << 20).series[0, 0]]
    assert times == sorted(times)
    assert len(times) > 4, "both files are read as one"


def test_a_source_that_raises_is_left_out_and_counted(tmp_path: Path) -> None:
    telemetry = Telemetry()
    telemetry.add_source("bad", lambda: {"a": 1 / 0})
    telemetry.add_source("good", lambda: {"b": 2.0, "nan": float("nan")})
    telemetry.add_table("bad", lambda: [[1 / 0]])
    record = telemetry.read()
    assert record.value("good.b") == 2.0
    assert record.value("telemetry.errors") == 2.0
    assert not [name for name in record.values if name.startswith("bad") or name.endswith("nan")]
    telemetry.remove_source("bad")
    assert telemetry.read().value("telemetry.errors") == 2.0


def test_a_hook_that_raises_does_not_end_the_heartbeat(tmp_path: Path) -> None:
    calls: list[Record] = []

    def bad(record: Record) -> None:
        calls.append(record)
        raise ValueError

    recorder = Recorder(Telemetry(), tmp_path, QUICK, [bad])
    until(lambda: len(calls) > 3)
    recorder.close()
    assert read_run(tmp_path).series[0, 0][-1].value("recorder.failures") >= 3


def test_a_full_disk_stops_the_telemetry_only(tmp_path: Path) -> None:
    (tmp_path / "telemetry").write_bytes(b"in the way")
    seen: list[Record] = []
    recorder = Recorder(Telemetry(), tmp_path, QUICK, [seen.append])
    until(lambda: len(seen) > 2)
    recorder.close()
    assert seen[-1].value("recorder.failures") > 0


def test_a_torn_line_is_closed_and_skipped(tmp_path: Path) -> None:
    path = record_path(tmp_path, 0)
    path.parent.mkdir()
    whole = Record(time=1.0, rank=0, values={"a": 1.0}).to_line()
    path.write_bytes(whole + whole[:40])
    Recorder(Telemetry(), tmp_path, QUICK).close()
    found = read_run(tmp_path)
    assert found.skipped == 1
    assert found.series[0, 0][0].value("a") == 1.0
    assert found.series[0, 0][-1].state == "ended"


def test_a_record_of_another_rank_in_a_file_is_skipped(tmp_path: Path) -> None:
    path = record_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(Record(time=1.0, rank=5).to_line() + Record(time=1.0, rank=0).to_line())
    path.with_name("rank-x.jsonl").write_bytes(Record(time=1.0, rank=1).to_line())
    path.with_name("rank-00009.jsonl").symlink_to("/etc/hosts")
    found = read_run(tmp_path)
    assert (list(found.series), found.skipped) == ([(0, 0)], 1)


def test_a_killed_process_leaves_readable_records(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from shardkit.telemetry import *\n"
        "Recorder(Telemetry(), Path(sys.argv[1]), TelemetrySettings(interval_s=0.01)); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    until(lambda: len(read_run(tmp_path).series.get((0, 0), ())) > 5)
    process.kill()
    process.wait()
    found = read_run(tmp_path)
    assert found.series[0, 0][-1].state == "running"
    assert found.series[0, 0][-1].pid == process.pid
    assert not found.ended


def test_ranks_of_a_smaller_world_are_those_that_count(tmp_path: Path) -> None:
    for rank, world, when in ((0, 4, 1.0), (3, 4, 1.0), (0, 2, 9.0), (1, 2, 9.0)):
        path = record_path(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(Record(time=when, rank=rank, world=world).to_line())
    found = read_run(tmp_path)
    assert found.world == 2
    assert list(found.ranks) == [0, 1]


def test_events_are_read_without_trust(tmp_path: Path) -> None:
    good = {"time": 5.0, "event": "stall", "rank": 1}
    lines = [
        b"{",
        b"[]",
        b'{"event": 1, "time": 1}',
        b'{"event": "x", "time": "now"}',
        json.dumps(good).encode(),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n" + b'{"event": "torn"')
    assert read_events(tmp_path) == [good]
    assert read_events(tmp_path, since=6.0) == []


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is no run directory"):
        check_run(tmp_path)
    with pytest.raises(NotFoundError, match="does not exist"):
        check_run(tmp_path / "nope")


def test_stacks_name_functions_and_hold_no_values(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    password = "not-to-be-seen"  # a local variable
    write_stacks(record_path(tmp_path, 2).with_suffix(".stacks.txt"))
    text = (tmp_path / "telemetry" / "rank-00002.stacks.txt").read_text()
    assert "MainThread" in text
    assert "test_stacks_name_functions_and_hold_no_values" in text
    assert text.count(password) <= text.count(f'"{password}"'), "as source text at most"


@pytest.mark.parametrize("settings", [{"interval_s": 0.0}, {"interval_s": float("nan")}, {"most_bytes": 100}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        TelemetrySettings(**settings)


# ---- over HTTP


def ask(port: int, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("GET", path, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_health_and_metrics_of_a_node(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    telemetry = Telemetry(rank=0, world=1)
    telemetry.add_source("loader", lambda: {"steps": 12, "load_wait_s": 0.5})
    server = serve_health(tmp_path, "127.0.0.1:0")
    recorder = Recorder(telemetry, tmp_path, QUICK)
    until(lambda: (0, 0) in read_run(tmp_path).series)
    try:
        status, body = ask(server.port, "/healthz")
        assert (status, json.loads(body)) == (200, {"healthy": True, "ranks": 1, "problems": []})
        status, body = ask(server.port, "/metrics")
        assert status == 200
        assert b'shardkit_loader_steps_total{rank="0",worker="0"} 12.0' in body
        assert b'shardkit_loader_stage_seconds_total{rank="0",stage="load_wait",worker="0"} 0.5' in body
        assert b'shardkit_anomalies{kind="stall"} 0.0' in body
        elsewhere = Record(
            time=time.time(), rank=0, worker=1, host="another-node", values={"loader.steps": 5.0}
        )
        record_path(tmp_path, 0, 1).write_bytes(elsewhere.to_line())
        assert b'worker="1"' not in ask(server.port, "/metrics")[1], "that node serves it"
        record_path(tmp_path, 0, 1).unlink()
        assert ask(server.port, "/")[0] == 404
        assert ask(server.port, "/healthz", "evil.example")[0] == 403
        assert ask(server.port, "/metrics", f"localhost:{server.port}")[0] == 200
        recorder.close()
        old = Record(time=time.time() - 100, rank=0, host=telemetry.read().host)
        record_path(tmp_path, 0).write_bytes(old.to_line())
        status, body = ask(server.port, "/healthz")
        assert status == 503
        assert json.loads(body)["problems"][0]["kind"] == "stall"
        with pytest.raises(StoreError, match="name another port"):
            serve_health(tmp_path, f"127.0.0.1:{server.port}")
    finally:
        server.close()


@pytest.mark.parametrize("text", ["", "9400", ":9400", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_address_must_be_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected HOST:PORT"):
        parse_listen(text)


def test_importing_starts_and_loads_nothing() -> None:
    program = (
        "import sys, threading, shardkit.telemetry; heavy = {'prometheus_client', 'torch'}\n"
        "assert threading.active_count() == 1; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
