"""Settings that follow from measurements, and how they get into a file."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigurationError
from shardkit_tools.commands.tune import merge, write_settings
from shardkit_tools.tuning.proposing import (
    MIB,
    Machine,
    Needs,
    Proposal,
    Ranges,
    Saving,
    fit_line,
    power_below,
    propose,
)

MACHINE = Machine(
    sequential=1e9,
    random=1e9,
    random_bytes=128 << 10,
    gather={MIB: 10e9, 4 * MIB: 9e9, 16 * MIB: 5e9, 64 * MIB: 3e9},
    xxh3=20e9,
    memory_bytes=64 << 30,
)
NEEDS = Needs(dataset_bytes=10**12, lanes=8, ranks=4, nodes=2, cell_s=0.02, gradient_bytes=10**8)


def store(latency_s: float, stream: float, rates: dict[tuple[int, int], float]) -> Ranges:
    return Ranges(
        {b: latency_s + b / stream for b in (1 << 16, 1 << 18, 1 << 20, 1 << 22)}, rates, is_local=False
    )


def values(*arguments: object) -> dict[str, int]:
    return {name: one.value for name, one in propose(*arguments).items()}  # type: ignore[arg-type]


def test_a_line_through_points() -> None:
    start, slope = fit_line({100: 1.2, 200: 1.4, 1000: 3.0})
    assert start == pytest.approx(1.0)
    assert slope == pytest.approx(0.002)
    assert fit_line({50: 2.0})[1] == pytest.approx(0.04)


def test_powers() -> None:
    assert [power_below(x) for x in (0, 1, 3, 4, 1000.5)] == [1, 1, 2, 4, 512]


def test_a_store_that_needs_many_requests_at_a_time() -> None:
    far = store(0.05, 100e6, {(MIB, 4): 65e6, (MIB, 16): 260e6, (MIB, 32): 300e6})
    found = values(MACHINE, far, None, NEEDS)
    assert found["concurrency"] == 32, "16 give less than nine tenths"
    # 32 · b / (50 ms + b / 100 MB/s) ≥ 240 MB/s: from 405 KB on
    assert found["block_size"] == 512 << 10
    assert found["read_ahead"] == pytest.approx(30e6), "twice 50 ms of the 300 MB/s that there are"
    assert found["shard_size"] == 256 * MIB
    near = dataclasses.replace(far, rates={(MIB, 4): 290e6, (MIB, 16): 300e6, (MIB, 32): 300e6})
    assert values(MACHINE, near, None, NEEDS)["concurrency"] == 4


def test_a_local_disk() -> None:
    found = values(MACHINE, None, None, NEEDS)
    assert "concurrency" not in found
    assert found["block_size"] == 256 << 10, "no seek to pay for: the least"
    # seeks of 1 ms: 0.1 · b · (1/1 GB/s + 1/20 GB/s) ≥ 1 ms from 9.5 MB on: the most
    slow = dataclasses.replace(MACHINE, random=(128 << 10) / (0.001 + (128 << 10) / 1e9))
    assert values(slow, None, None, NEEDS)["block_size"] == 8 * MIB
    # windows of 4 MiB gather at nine tenths of the best: 8 lanes of 256 KiB blocks have 2 each, 4 are the least
    assert found["window_blocks"] == 4
    wide = dataclasses.replace(MACHINE, gather={MIB: 10e9, 32 * MIB: 9e9})
    assert values(wide, None, None, NEEDS)["window_blocks"] == 16


def test_memory_is_for_what_is_open_and_on_its_way() -> None:
    small = dataclasses.replace(MACHINE, memory_bytes=1 << 30)
    assert values(small, None, None, NEEDS)["memory"] == (1 << 30) // 8 // 4
    assert values(MACHINE, None, None, NEEDS)["memory"] == 256 * MIB
    assert (
        values(MACHINE, None, None, dataclasses.replace(NEEDS, dataset_bytes=10**9))["shard_size"] == 16 * MIB
    )


def test_how_often_to_sum_gradients() -> None:
    fast = {1 << 18: 0.0001, 1 << 24: 0.0008}
    assert values(MACHINE, None, fast, NEEDS)["accumulation"] == 4  # 4.6 ms beside cells of 20 ms
    assert values(MACHINE, None, fast, NEEDS)["sync_every"] == 1
    slow = {1_000_000: 0.1, 10_000_000: 1.0}  # 10 s for 100 MB: 5000 cells, 64 · 128 are enough
    found = values(MACHINE, None, slow, NEEDS)
    assert (found["accumulation"], found["sync_every"]) == (64, 128)


def test_how_often_to_save() -> None:
    """300 MB of state, steps of 160 ms: copying may take 1 % of the time, writing half of it."""
    for saving, every in ((Saving(30e9, 1e9), 7), (Saving(300e9, 0.1e9), 38), (Saving(300e9, 30e9), 1)):
        assert values(MACHINE, None, None, NEEDS, saving)["checkpoint_every"] == every


def test_every_proposal_says_why() -> None:
    far = store(0.05, 100e6, {(MIB, 4): 65e6, (MIB, 16): 260e6})
    for one in propose(MACHINE, far, {1000: 1.0, 2000: 2.0}, NEEDS).values():
        assert any(c.isdigit() for c in one.why) or one.why == "accumulation is enough"
        assert "\n" not in one.why


# Files

PROPOSED = {
    "block_size": Proposal(1 << 20, ""),
    "window_blocks": Proposal(8, ""),
    "sync_every": Proposal(4, ""),
}
TEXT = """# my run
[data]  # what
dataset = "data/cats"
window_blocks = 16   # as before

[model]
width = 3
"""


def test_comments_and_order_stay() -> None:
    changed, said = merge(TEXT, PROPOSED, "x.toml")
    assert said == ["data.window_blocks = 8", "parallel.sync_every = 4"]
    assert changed.startswith("# my run\n[data]  # what\ndataset")
    assert "window_blocks = 8   # as before" in changed
    document = tomllib.loads(changed)
    assert document["data"] == {"dataset": "data/cats", "window_blocks": 8}
    assert document["parallel"] == {"sync_every": 4}
    assert document["model"] == {"width": 3}
    assert "#   shardkit build … --block-size 1048576" in changed
    assert merge(changed, PROPOSED, "x.toml")[0] == changed


def test_a_key_is_put_into_its_section() -> None:
    changed, _ = merge(
        "[data]\ndataset = 'x'\n\n# next\n[model]\nwidth = 1\n", {"window_blocks": Proposal(8, "")}, "x"
    )
    assert changed.startswith("[data]\nwindow_blocks = 8\ndataset = 'x'\n\n# next\n[model]\n")


@given(
    st.lists(st.sampled_from(["[data]", "[parallel]", "[a.b]", "# c", "", "x = 1", "y = [1, 2]"]), max_size=8)
)
def test_what_was_valid_stays_valid_and_the_rest_is_untouched(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ConfigurationError, match="nothing was written"):
            merge(text, PROPOSED, "f")
        return
    after = tomllib.loads(merge(text, PROPOSED, "f")[0])
    assert after.setdefault("data", {}).pop("window_blocks") == 8
    assert after.setdefault("parallel", {}).pop("sync_every") == 4
    for name in ("data", "parallel"):
        before.setdefault(name, {})
    assert after == before


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    write_settings(path, PROPOSED)
    assert tomllib.loads(path.read_text())["data"]["window_blocks"] == 8
    path.write_text("[data\n")
    with pytest.raises(ConfigurationError, match="no TOML"):
        write_settings(path, PROPOSED)
    assert path.read_text() == "[data\n"
    assert [p.name for p in tmp_path.iterdir()] == ["new.toml"]
