"""`shardkit bench --against`: verdicts over results made up for the purpose, through the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit_tools.benchmarks import suite
from shardkit_tools.benchmarks.results import (
    Comparison,
    Contest,
    Entry,
    Ratio,
    Result,
    Round,
    compare,
    hold,
    ratios_of,
)
from shardkit_tools.main import run

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `shardkit bench` in this process: (exit code, standard output, standard error)."""

    def invoke(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            run(["bench", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return invoke


def ratio(median: float, spread: float = 0.02, to: str = "the limit", **more: Any) -> Ratio:
    """A ratio of a made-up contest whose rounds lie ``spread`` of the median to both sides."""
    known: Any = {"contest": "read tokens", "of": "shardkit", "kind": "limit", "clock": "wall", "rounds": 5}
    known |= {"to": to, "median": median, "lowest": median * (1 - spread), "highest": median * (1 + spread)}
    known |= {"conditions": {"rows": 1000}, **more}
    return known  # type: ignore[no-any-return]


def result(*ratios: Ratio, failures: dict[str, str] | None = None, **facts: object) -> Result:
    facts = {"cpus": 2, "machine": "x86_64", **facts}
    return Result(shardkit_bench=1, facts=facts, ratios=[*ratios], failures=failures or {}, rates={})


def written(path: Path, found: Result) -> Path:
    path.write_text(json.dumps(found))
    return path


def verdicts(now: Result, recorded: Result) -> dict[str, str]:
    return {finding["name"]: finding["verdict"] for finding in compare(now, recorded)["findings"]}


def reasons(comparison: Comparison, *verdicts: str) -> list[str]:
    return [finding["reason"] for finding in comparison["findings"] if finding["verdict"] in verdicts]


@pytest.mark.parametrize(
    ("now", "verdict", "code"),
    [(0.5, "same", 0), (0.48, "same", 0), (0.40, "worse", 5), (0.61, "better", 0), (0.54, "same", 0)],
)
def test_verdict_and_exit_code(now: float, verdict: str, code: int, call: Call, tmp_path: Path) -> None:
    before = written(tmp_path / "before.json", result(ratio(0.5, spread=0.05)))
    after = written(tmp_path / "after.json", result(ratio(now)))
    got, out, err = call("--against", before, "--result", after)
    assert (got, err) == (code, "")
    assert verdict in out
    assert "read tokens: shardkit / the limit" in out
    got, out, _ = call("--against", before, "--result", after, "--json")
    comparison = json.loads(out)["comparison"]
    assert (got, comparison["exit_code"]) == (code, code)
    assert [finding["verdict"] for finding in comparison["findings"]] == [verdict]
    assert comparison["findings"][0]["change"] == pytest.approx(now / 0.5 - 1)


def test_the_margin_comes_from_the_recorded_range() -> None:
    """A fifth less is worse than steady rounds, and nothing beside rounds that differ by a third."""
    now = result(ratio(0.40))
    assert verdicts(now, result(ratio(0.5, spread=0.03))) == {"read tokens: shardkit / the limit": "worse"}
    assert verdicts(now, result(ratio(0.5, spread=0.17))) == {"read tokens: shardkit / the limit": "same"}
    assert verdicts(now, result(ratio(0.5, spread=0.3))) == {"read tokens: shardkit / the limit": "too noisy"}


def test_a_single_round_shows_no_noise() -> None:
    before = result(ratio(0.5, spread=0.0, rounds=2))
    assert compare(result(ratio(0.1)), before)["exit_code"] == 3
    assert verdicts(result(ratio(0.1)), before) == {"read tokens: shardkit / the limit": "too noisy"}


def test_one_good_round_is_not_worse() -> None:
    now = result(ratio(0.40, spread=0.25))
    assert verdicts(now, result(ratio(0.5, spread=0.03))) == {"read tokens: shardkit / the limit": "same"}


@given(st.floats(0.01, 100), st.floats(0, 0.24), st.floats(0, 0.9))
def test_a_result_is_never_worse_than_itself(median: float, spread: float, other: float) -> None:
    found = result(ratio(median, spread), ratio(median, other, to="a peer", kind="peer"))
    assert not reasons(compare(found, found), "worse", "better")


@given(st.floats(0.01, 100), st.floats(0, 0.2), st.floats(0.2, 5))
def test_worse_one_way_is_better_the_other_way_or_the_margins_differ(
    median: float, spread: float, factor: float
) -> None:
    first, second = result(ratio(median, spread)), result(ratio(median * factor, spread))
    there, back = compare(second, first), compare(first, second)
    assert not (reasons(there, "worse") and reasons(back, "worse"))
    assert not (reasons(there, "better") and reasons(back, "better"))


def test_another_machine_is_compared_and_said(call: Call, tmp_path: Path) -> None:
    before = written(tmp_path / "before.json", result(ratio(0.5), cpus=64, processor="Big"))
    after = written(tmp_path / "after.json", result(ratio(0.3), processor="Small"))
    code, out, _ = call("--against", before, "--result", after)
    assert code == 5
    assert "another machine" in out
    assert "cpus 2, recorded on 64" in out


def test_nothing_in_common_cannot_be_compared(call: Call, tmp_path: Path) -> None:
    before = written(tmp_path / "before.json", result(ratio(0.5, to="a peer", kind="peer")))
    after = written(tmp_path / "after.json", result(ratio(0.5)))
    code, out, _ = call("--against", before, "--result", after)
    assert code == 3
    assert "could not compare" in out
    assert "not measured" in out


def test_other_conditions_are_not_compared() -> None:
    before, after = result(ratio(0.5)), result(ratio(0.1, conditions={"rows": 2000}))
    comparison = compare(after, before)
    assert comparison["exit_code"] == 3
    assert comparison["findings"][0]["reason"] == "rows 2000, recorded with 1000"


def test_a_peer_that_is_not_there_hides_nothing() -> None:
    before = result(ratio(0.5), ratio(3.0, to="a peer", kind="peer"))
    assert compare(result(ratio(0.5)), before)["exit_code"] == 0
    assert compare(result(ratio(0.3)), before)["exit_code"] == 5


def test_what_failed_now_is_no_success() -> None:
    before = result(ratio(0.5), ratio(0.7, contest="build tokens"))
    after = result(ratio(0.5), failures={"build tokens: shardkit": "no space left"})
    comparison = compare(after, before)
    assert comparison["exit_code"] == 3
    assert reasons(comparison, "failed") == ["build tokens: shardkit: no space left"]
    whole = compare(result(ratio(0.5), failures={"build tokens": "no space left"}), before)
    assert (whole["exit_code"], len(reasons(whole, "failed"))) == (3, 1)
    worse_too = result(ratio(0.2), failures={"build tokens: shardkit": "no space left"})
    assert compare(worse_too, before)["exit_code"] == 5


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "{}", '{"shardkit_bench": 2}', '{"shardkit_bench": 1, "facts": {}, "ratios": 3}',
     "[" * 100_000, '{"shardkit_bench": 1, "facts": {}, "failures": {}, "ratios": [{"median": 1}]}'],
)  # fmt: skip
def test_a_file_that_is_no_result(content: str | None, call: Call, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    code, out, err = call("--against", path)
    assert (code, out) == (3, "")
    assert str(path) in err
    assert "Traceback" not in err


def test_a_ratio_out_of_its_range_is_refused(call: Call, tmp_path: Path) -> None:
    document = result(ratio(0.5))
    document["ratios"][0]["lowest"] = 0.9
    (tmp_path / "before.json").write_text(json.dumps(document))
    assert call("--against", tmp_path / "before.json")[0] == 3


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is three times slower in one round changes no ratio; the warming round does not count."""
    slowness = [50.0, 1.0, 3.0, 1.0]
    turns = {"limit": 0, "shardkit": 0}

    def runner(name: str, seconds: float) -> Callable[[], Round]:
        def run_once() -> Round:
            slow = slowness[turns[name]]
            turns[name] += 1
            return Round(100, seconds * slow, seconds)

        return run_once

    contest = Contest(
        "read x",
        {"rows": 100},
        [
            Entry("limit", "limit", runner("limit", 1.0)),
            Entry("shardkit", "shardkit", runner("shardkit", 4.0)),
        ],
    )
    wall, cpu = ratios_of(hold(contest, 3, lambda text: None))
    known = {
        "contest": "read x",
        "of": "shardkit",
        "to": "limit",
        "kind": "limit",
        "conditions": {"rows": 100},
    }
    figures = {"median": 0.25, "lowest": 0.25, "highest": 0.25, "rounds": 3}
    assert [wall, cpu] == [{**known, **figures, "clock": clock} for clock in ("wall", "cpu")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "reading"), "expected some of read, build, plan, reduce"),
        (("--scale", "0"), "--scale 0"),
        (("--only", "plan", "--scratch", "/nonexistent/folder"), "--scratch /nonexistent/folder"),
        (("--result", "x.json"), "give it with --against"),
    ],
)
def test_wrong_command_lines(arguments: tuple[str, ...], said: str, call: Call) -> None:
    code, _, err = call(*arguments)
    assert code == 2
    assert said in err


def test_what_cannot_be_measured_here_is_told(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(suite, "build_contest", full)
    code, out, _ = call("--only", "build,plan", "--scale", "0.01", "--repeats", 1)
    assert code == 0
    assert "numpy permutation" in out
    assert re.search(r"build tokens +\[Errno 28\] No space left on device", out)


def test_a_plan_is_measured_recorded_and_compared(call: Call, tmp_path: Path) -> None:
    """The whole way, with figures of this machine; whether they are worse is not for a test to say."""
    code, out, _ = call("--only", "plan", "--scale", "0.01", "--repeats", 2, "--out", tmp_path / "a.json")
    assert code == 0
    assert "numpy permutation" in out
    code, out, _ = call("--against", tmp_path / "a.json", "--json")
    document = json.loads(out)
    assert document["facts"]["parts"] == ["plan"]
    assert document["facts"]["scale"] == 0.01
    assert code in (0, 3, 5)
    assert len(document["comparison"]["findings"]) == 2
