"""`shardkit plan` on a real dataset: report, step, cell, picture, and clear errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkit
from shardkit.errors import PlanError, UsageError
from shardkit_tools.commands.plan import plan_figure
from shardkit_tools.main import make_app


@pytest.fixture
def root(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    with shardkit.create(
        str(tmp_path / "ds"),
        schema={"x": "bytes", "label": "int64"},
        stratify="label",
        shard_size="32KiB",
        block_size="2KiB",
    ) as writer:
        for _ in range(1500):
            writer.add({"x": rng.bytes(100), "label": int(rng.integers(0, 6))})
    return str(tmp_path / "ds")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(
        make_app("plan"), ["plan", *arguments], catch_exceptions=False, env={"COLUMNS": "120"}
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_the_glossary_explains_each_line_of_the_page(root: str) -> None:
    page = run(root, "-b", "64", "--lanes", "16")
    facts, mixing = page.partition("\n\n")[0], page.partition("Mixing\n")[2].partition("\n\n")[0]
    labels = [re.split(r"\s{2,}|, ", line)[0] for line in facts.splitlines()[3:] + mixing.splitlines()[1:-1]]
    glossary = (Path(__file__).parents[2] / "docs" / "words.md").read_text(encoding="utf-8")
    explained = re.findall(r"(?m)^\| (.+?) \|", glossary.partition("## The page of")[2])
    assert len(labels) == 9, page
    assert [label for label in labels if label not in explained] == []


def test_report_and_cells_agree_with_the_plan(root: str) -> None:
    report = json.loads(run(root, "-b", "64", "--lanes", "16", "--json"))
    plan = shardkit.open(root).plan(64, lanes=16)
    assert report["digest"] == plan.digest
    assert report["balance"]["batch"] < report["balance"]["batch_bound"] == 2
    assert sum(s["rows"] for s in report["strata"]) == report["rows"] == 1500
    assert report["remainder"] == {"mode": "drop", "rows": 1500 % 64}
    step = json.loads(run(root, "-b", "64", "--lanes", "16", "--step", "7", "--json"))
    assert [c["samples"] for c in step["cells"]] == plan.step(7).tolist()
    assert [c["digest"] for c in step["cells"]] == [plan.cell_digest(7, lane) for lane in range(16)]
    text = run(root, "-b", "64", "--lanes", "16", "--step", "7", "--lane", "3")
    assert plan.cell_digest(7, 3)[:12] in text
    page = run(root, "-b", "64")
    for word in ("batch balance", "shards per lane", "full shuffle", "lanes of a rank"):
        assert word in page


@pytest.mark.parametrize(
    ("batch", "lanes", "near"),
    [
        (1042, 2, "1041 (347 lanes) or 1043 (149 lanes)"),
        (521, 1, "520 (40 lanes) or 522 (174 lanes)"),
        (254, 254, ""),
        (256, 64, ""),
    ],
)
def test_a_batch_with_few_divisors_is_said(
    root: str, batch: int, lanes: int, near: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert shardkit.open(root).plan(batch).lanes == lanes
    assert (near in caplog.text) if near else not caplog.text
    page = run(root, "-b", str(batch))
    assert (near in " ".join(page.split())) if near else "note:" not in page
    caplog.clear()
    shardkit.open(root).plan(batch, lanes=1)  # asked for: nothing to say
    assert not caplog.text


@pytest.mark.parametrize(("rows", "batch", "lanes"), [(2, 1, 1), (12, 4, 2), (1500, 64, 8)])
def test_axes_of_the_picture_say_steps_lanes_and_counts(
    tmp_path: Path, rows: int, batch: int, lanes: int
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    with shardkit.create(tmp_path / "a", schema={"x": "int64"}) as writer:
        for number in range(rows):
            writer.add({"x": number})
    plan = shardkit.open(tmp_path / "a").plan(batch, lanes=lanes)
    figure = plan_figure(plan, plt)
    figure.canvas.draw()
    grid, strata, distance, shards = figure.axes
    for axis in (
        grid.xaxis,
        grid.yaxis,
        strata.xaxis,
        strata.yaxis,
        distance.xaxis,
        distance.yaxis,
        shards.yaxis,
    ):
        low, high = sorted(axis.get_view_interval())
        ticks = [
            (at, label.get_text())
            for at, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            if low <= at <= high and label.get_text()
        ]
        assert ticks, "an axis without a number says nothing"
        assert [text for _, text in ticks] == [
            f"{round(at):,}" if axis is distance.xaxis else str(round(at)) for at, _ in ticks
        ]
    assert sorted(grid.get_xlim()) == [-0.5, plan.loop_steps - 0.5]
    assert grid.get_ylim() == (lanes - 0.5, -0.5)
    plt.close(figure)


def test_weights_and_picture(root: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    page = run(root, "-b", "64", "--weights", '{"3": 5}', "--plot", str(picture))
    assert "endless" in page
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(PlanError, match="matches no stratum"):
        run(root, "--weights", '{"nobody": 5}')
    with pytest.raises(UsageError, match="JSON object"):
        run(root, "--weights", "3")
    for place in (tmp_path / "nowhere" / "plan.png", tmp_path / "plan.xyz"):
        with pytest.raises(UsageError, match="name a picture in a folder"):
            run(root, "-b", "64", "--plot", str(place))
    with pytest.raises(PlanError, match="largest batch that fits is 1500"):
        run(root, "-b", "2000")
