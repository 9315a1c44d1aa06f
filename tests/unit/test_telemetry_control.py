"""The control file: mistakes change nothing, changes are gradual, and there is a way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigurationError
from shardkit.loader.monitoring import count_in, flag_of, size_of
from shardkit.ranges import Range
from shardkit.telemetry import Record
from shardkit.telemetry.control import Control, Knob, parse_control

MIB = 1 << 20


class Settings:
    """Something with three settings, and what was written to them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"memory": 64 * MIB, "prefetch": 4, "hedge": True, "absent": None}
        self.written: list[tuple[str, Any]] = []

    def knobs(self) -> dict[str, Knob]:
        return {
            "loader.memory": Knob(self.reader("memory"), self.writer("memory"), size_of(MIB), gradual=True),
            "loader.prefetch": Knob(
                self.reader("prefetch"), self.writer("prefetch"), count_in(Range(1, 64)), gradual=True
            ),
            "reading.hedge": Knob(self.reader("hedge"), self.writer("hedge"), flag_of),
            "cache.size": Knob(self.reader("absent"), self.writer("absent"), size_of(MIB), gradual=True),
        }

    def reader(self, name: str) -> Callable[[], Any]:
        return lambda: self.values[name]

    def writer(self, name: str) -> Callable[[Any], None]:
        def write(value: Any) -> None:
            self.values[name] = value
            self.written.append((name, value))

        return write


class Run:
    """A run whose records come when the test says so."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.settings, self.events = path / "control.toml", Settings(), []  # type: ignore[var-annotated]
        self.control = Control(path, rank, self.settings.knobs(), self.event)
        self.time, self.samples = 0.0, 0.0

    def event(self, kind: str, **details: Any) -> None:
        self.events.append((kind, details))

    def say(self, text: str) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.path)

    def go_on(self, records: int, samples_per_s: float = 100.0) -> None:
        for _ in range(records):
            self.time += 2.0
            self.samples += 2.0 * samples_per_s
            self.control(Record(time=self.time, rank=0, values={"loader.samples": self.samples}))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_without_a_file_nothing_happens(run: Run) -> None:
    run.go_on(20)
    assert (run.events, run.settings.written) == ([], [])


def test_sizes_change_by_halves_and_doubles(run: Run) -> None:
    run.say('[loader]\nmemory = "10MiB"\nprefetch = 32\n[change]\nguard_s = 0')
    run.go_on(10)
    assert [value // MIB for name, value in run.settings.written if name == "memory"] == [32, 16, 10]
    assert [value for name, value in run.settings.written if name == "prefetch"] == [8, 16, 32]
    changes = [details for kind, details in run.events if kind == "control_changed"]
    assert len(changes) == 6 == run.control.numbers()["changes"]
    assert changes[0] == {"setting": "loader.memory", "before": 64 * MIB, "now": 32 * MIB, "wanted": 10 * MIB}
    assert run.events[0][1]["changes"] == {"loader.memory": [64 * MIB, 10 * MIB], "loader.prefetch": [4, 32]}


def test_one_change_per_record(run: Run) -> None:
    run.say('[loader]\nmemory = "10MiB"')
    run.go_on(1)
    assert run.settings.values["memory"] == 32 * MIB
    run.go_on(1)
    assert run.settings.values["memory"] == 16 * MIB


@pytest.mark.parametrize("way", ["delete", "empty", "key"])
def test_what_the_file_no_longer_says_goes_back(run: Run, way: str) -> None:
    run.say('[loader]\nmemory = "32MiB"\n[reading]\nhedge = false\n[change]\nguard_s = 0')
    run.go_on(3)
    assert run.settings.values["memory"] == 32 * MIB
    if way == "delete":
        run.path.unlink()
    else:
        run.say("" if way == "empty" else '[loader]\nmemory = "32MiB"')
    run.go_on(3)
    assert run.settings.values["hedge"] is True
    assert run.settings.values["memory"] == (32 * MIB if way == "key" else 64 * MIB)


def test_ranks_begin_one_after_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path, rank=3)
    run.say("[reading]\nhedge = false")
    run.go_on(3)
    assert run.settings.written == []
    run.go_on(1)
    assert run.settings.written == [("hedge", False)]


@pytest.mark.parametrize(("ranks", "heeds"), [("0-2", True), ("1-2", False), ("7", False)])
def test_some_ranks_may_try_it_first(run: Run, ranks: str, heeds: bool) -> None:
    run.say(f'[reading]\nhedge = false\n[change]\nranks = "{ranks}"')
    run.go_on(3)
    assert run.settings.values["hedge"] is not heeds


def test_a_change_that_makes_the_run_slower_is_taken_back(run: Run) -> None:
    run.go_on(10, samples_per_s=100)
    run.say('[loader]\nmemory = "32MiB"\n[reading]\nhedge = false\n[change]\nguard_s = 20')
    run.go_on(14, samples_per_s=50)
    assert "control_taken_back" in run.kinds()
    evidence = dict(run.events)["control_taken_back"]
    assert evidence["samples_per_s"] == 50
    assert evidence["before_samples_per_s"] == pytest.approx(100, rel=0.1)
    assert run.settings.values["memory"] == 64 * MIB
    assert run.settings.values["hedge"] is True
    before = len(run.events)
    run.go_on(30, samples_per_s=50)
    assert len(run.events) == before, "not tried again until the file changes"
    run.say("[reading]\nhedge = false\n[change]\nguard_s = 0")
    run.go_on(2)
    assert run.settings.values["hedge"] is False


def test_a_change_that_does_no_harm_is_kept(run: Run) -> None:
    run.go_on(10, samples_per_s=100)
    run.say("[reading]\nhedge = false\n[change]\nguard_s = 20")
    run.go_on(30, samples_per_s=80)
    assert run.kinds() == ["control", "control_changed", "control_kept"]
    assert run.settings.values["hedge"] is False


@pytest.mark.parametrize(("text", "said"), [
    ("[loader]\nmemry = 5", "unknown key loader.memry; nearest known: loader.memory"),
    ("[loader]\nmemory = 5", "loader.memory = 5: expected a size"),
    ('[loader]\nmemory = "much"', "loader.memory = 'much': expected a size"),
    ("[loader]\nmemory = true", "loader.memory = True: expected a size"),
    ("[loader]\nprefetch = 0", "a whole number from 1 to 64"), ("[loader]\nprefetch = 2.5", "a whole number"),
    ('[reading]\nhedge = "no"', "expected true or false"), ("[cache]\nsize = '1GiB'", "has no effect in this run"),
    ("loader = 3", "unknown key loader"), ("[loader", "is no TOML"), ("[change]\nguard = 3", "did you mean guard_s"),
    ("[change]\nguard_s = -1", "guard_s"), ("[change]\nranks = 'all'", 'expected such as "0-3,8"'),
    ("change = 3", r"\[change\]: Expected `object`"),
])  # fmt: skip
def test_a_file_with_a_mistake_changes_nothing_and_says_which(run: Run, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_control(text, run.settings.knobs())
    run.say(f"[reading]\nhedge = false\n{text}" if text.startswith("[loader]") else text)
    run.go_on(4)
    assert run.kinds() == ["control_refused"]
    assert run.settings.written == []


def test_bytes_that_are_no_text_are_refused(run: Run) -> None:
    run.path.write_bytes(b"\xff\xfe")
    run.go_on(2)
    run.path.write_bytes(b"#" * 100_000)
    run.go_on(2)
    assert run.kinds() == ["control_refused", "control_refused"]
