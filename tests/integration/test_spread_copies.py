"""scrub, repair and replicate on an engine: the same result as by threads, in whatever order results come."""

from __future__ import annotations

import functools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import shardkit
from shardkit.copies.repair import repair
from shardkit.copies.replicate import replicate
from shardkit.copies.scrub import scrub
from shardkit.copies.walk import CheckSettings
from shardkit.errors import ConfigurationError
from shardkit.repository.repository import Repository
from shardkit_tools.copies import copying, spread
from tests.command_line import output_of
from tests.flips import flip


class Elsewhere:
    """An engine that sends everything through pickle, does every task twice, and hands results over backwards."""

    is_remote = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, make: Any, items: Any, report: Any, *, here: bool = False) -> Iterator[Any]:
        del here
        results = []
        for item in items:
            worker = pickle.loads(pickle.dumps(make))()
            worker.work(pickle.loads(pickle.dumps(item)), report)
            results.append(pickle.loads(pickle.dumps(worker.work(item, report))))
            worker.close()
        yield from reversed(results)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Some 100 objects in the root and a mirror."""
    place = tmp_path / "cats"
    with shardkit.create(
        place, {"x": "int64[64]"}, format="tar", shard_size="16KiB", block_size="4KiB"
    ) as writer:
        for number in range(800):
            writer.add({"x": [number] * 64})
    (tmp_path / "rack").mkdir()
    output_of("place", place, "--location", f"mirror={tmp_path / 'rack' / 'cats'},domain=rack", "--copies", 2)
    return place


def damage(folder: Path, count: int) -> set[str]:
    """Flip a bit of some shards and take another one away."""
    shards = sorted((folder / "objects").rglob("*.tar"))
    for path in shards[:count]:
        flip(path)
    shards[count].unlink()
    return {f"objects/sha256/{path.parent.name}/{path.name}" for path in shards[: count + 1]}


def test_scrub_and_repair_find_what_threads_find(root: Path) -> None:
    wanted = damage(root.parent / "rack" / "cats", 3)
    with Elsewhere() as engine:
        found = scrub(
            str(root), depth="read", settings=CheckSettings(engine=functools.partial(spread, engine))
        )
        plain = scrub(str(root), depth="read")
        assert {n: sorted(one.bad.items()) for n, one in found.locations.items()} == {
            n: sorted(one.bad.items()) for n, one in plain.locations.items()
        }
        assert set(found.locations["mirror"].bad) == wanted
        assert found.locations["root"].checked == found.locations["mirror"].checked > 64  # more than one task
        healed = repair(
            str(root), level="read", settings=CheckSettings(engine=functools.partial(spread, engine))
        )
    assert {one.name for one in healed.healed} == wanted
    assert scrub(str(root), depth="read").exit_code == 0


def test_replicate_copies_the_same(root: Path) -> None:
    mirror = root.parent / "rack" / "cats"
    whole = {path.name for path in (mirror / "objects").rglob("*.*")}
    for path in sorted((mirror / "objects").rglob("*.*"))[::2]:
        path.unlink()
    with Elsewhere() as engine:
        done = replicate(
            Repository.open(root), settings=CheckSettings(engine=functools.partial(spread, engine))
        )
    assert done.exit_code == 0
    assert done.lag_before > 0
    assert done.lag_after == 0
    assert {path.name for path in (mirror / "objects").rglob("*.*")} == whole
    assert scrub(str(root), depth="read").exit_code == 0


def test_a_location_that_a_node_does_not_see_is_not_called_empty(root: Path) -> None:
    """The directory vanishes between the look from here and the work elsewhere, as if it was mounted here alone."""
    mirror = root.parent / "rack" / "cats"

    class NotMounted(Elsewhere):
        def run(self, make: Any, items: Any, report: Any, *, here: bool = False) -> Iterator[Any]:
            tasks = list(items)
            mirror.rename(mirror.with_name("away"))
            try:
                yield from super().run(make, tasks, report, here=here)
            finally:
                mirror.with_name("away").rename(mirror)

    with NotMounted() as engine:
        found = scrub(
            str(root), depth="read", settings=CheckSettings(jobs=64, engine=functools.partial(spread, engine))
        )
    assert found.exit_code == 3
    assert not found.locations["mirror"].bad
    assert {one.location for one in found.unchecked} == {"mirror"}
    assert "is not seen from node" in found.unchecked[0].why
    shutil.rmtree(mirror / "objects")
    with NotMounted() as engine:
        done = replicate(
            Repository.open(root), settings=CheckSettings(engine=functools.partial(spread, engine))
        )
    assert not done.lost
    assert done.exit_code == 3


def test_a_rate_is_for_threads() -> None:
    with (
        pytest.raises(ConfigurationError, match="--bandwidth and --between"),
        copying("ray", None, 1, "1MB/s", None),
    ):
        pass
    with (
        pytest.raises(ConfigurationError, match="only --engine ray"),
        copying("local", "auto", 1, None, None),
    ):
        pass
