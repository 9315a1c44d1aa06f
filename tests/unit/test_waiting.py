"""A store that does not answer is named while it is waited for, by every command and from Python alike."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.reading.read_path import ReadSettings
from shardkit.stores import waiting
from shardkit.stores.remote import object_store
from shardkit.stores.waiting import Waits
from shardkit_tools.main import run
from tests.servers.object_stores import ACCESS_KEY, SECRET_KEY, s3_environment


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock, told: list[str]) -> Waits:
    return Waits(clock=clock, tell=told.append, is_watched=False)


def passed(waits: Waits, clock: Clock, seconds: float) -> None:
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        waits.tell_due()


def test_nothing_for_five_seconds_then_a_line_now_and_then(
    waits: Waits, clock: Clock, told: list[str]
) -> None:
    with waits.waiting("s3://bucket/cats", "read shardkit.json", 120) as wait:
        passed(waits, clock, 4.5)
        assert told == []
        passed(waits, clock, 0.5)
        assert told == [
            "still waiting for s3://bucket/cats to read shardkit.json: 5 s, at most 120 s",
        ]
        wait.problem = "no answer"
        passed(waits, clock, 30)
    assert [line.partition(": ")[2] for line in told[1:]] == [
        f"{seconds} s, at most 120 s; last: no answer" for seconds in (15, 25, 35)
    ]
    passed(waits, clock, 60)
    assert len(told) == 4


def test_one_line_for_many_requests_of_one_store_and_one_for_each_store(
    waits: Waits, clock: Clock, told: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(50):
            stack.enter_context(waits.waiting("s3://a", f"read {number}", 30))
        stack.enter_context(waits.waiting("s3://b", "list log/", 30))
        passed(waits, clock, 9)
    assert [line.split(":")[1] for line in told] == ["//a to read 0", "//b to list log/"]


def test_quick_answers_say_nothing_however_many(waits: Waits, clock: Clock, told: list[str]) -> None:
    for number in range(100):
        with waits.waiting("s3://a", f"read {number}", 30):
            passed(waits, clock, 1)
    assert told == []


@contextlib.contextmanager
def endpoint(kind: str) -> Iterator[str]:
    """An address where somebody takes connections and never says a word, or where nobody listens."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    if kind == "refuses":
        server.close()
        yield address
        return
    with server:
        yield address


@pytest.fixture(params=["silent", "refuses"])
def dead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """S3 at a dead endpoint; deadlines, and the time until a line is due, a fiftieth of what they are."""
    real = waiting.RetryPolicy
    short = real(deadline_s=1.5, attempt_s=0.7, longest_pause_s=0.1)
    quick = Waits(first_s=0.2, every_s=0.4)
    for module in (object_store,):
        monkeypatch.setattr(module, "RetryPolicy", lambda: short)
        monkeypatch.setattr(module, "WAITS", quick)
    with endpoint(request.param) as address:
        for name, value in s3_environment(address).items():
            monkeypatch.setenv(name, value)
        yield
    while threading.active_count() > 1 and quick._watcher is not None:
        quick._watcher.join(1)


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "s3://bucket/cats"),
        ("ls", "s3://bucket/cats"),
        ("log", "s3://bucket/cats"),
        ("repair", "s3://bucket/cats"),
        ("replicate", "s3://bucket/cats"),
        ("build", "{source}", "s3://bucket/cats"),
    ],
    ids=lambda command: command[0],
)
@pytest.mark.usefixtures("dead")
def test_commands_say_what_they_wait_for(command: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text('{"x": 1}\n')
    said, out = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as ended,
    ):
        run([part.format(source=source) for part in command])
    assert ended.value.code
    lines = [line for line in said.getvalue().splitlines() if line.startswith("still waiting for")]
    assert lines, said.getvalue()
    assert all("s3://bucket/cats" in line for line in lines)
    assert all("at most 2 s" in line for line in lines)
    assert "still waiting" not in out.getvalue()
    assert SECRET_KEY not in said.getvalue()
    assert ACCESS_KEY not in said.getvalue()
    assert "Traceback" not in said.getvalue()


@pytest.mark.usefixtures("dead")
def test_python_hears_of_it_by_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shardkit"), pytest.raises(ShardkitError):
        shardkit.open("s3://bucket/cats", settings=ReadSettings(deadline_s=1.5, attempt_s=0.7))
    said = [one for one in caplog.records if one.name.startswith("shardkit")]
    assert said
    assert all(one.getMessage().startswith("still waiting for s3://bucket/cats") for one in said)


def test_the_watcher_ends_when_nothing_is_waited_for(told: list[str]) -> None:
    quick = Waits(first_s=0.05, every_s=0.05, tell=told.append)
    with quick.waiting("s3://a", "read x", 1):
        watcher = quick._watcher
        assert watcher is not None
        while not told:
            watcher.join(0.01)
    watcher.join(5)
    assert not watcher.is_alive()
    assert waiting.WAITS is not quick
