"""Where the data fit into the memory bound they are copied and verified once; later loops depend on no file."""

from __future__ import annotations

import errno
import mmap
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import IntegrityError
from shardkit.loader import machinery
from shardkit.storage import blocks as block_reader
from shardkit.storage import machine_memory

ROWS = 1200  # of `root`
Rows = list[tuple[int, list[int], list[bytes]]]


def _loader(root: Path, *, verify: Any = "fast", **options: Any) -> Any:
    ds = shardkit.open(str(root), verify=verify)
    return ds.loader(ds.plan(global_batch=30, lanes=3, seed=5), tensors=False, **options)


def _rows(loop: Any) -> Rows:
    return [(batch.step, batch["x"][:, 0].tolist(), batch["blob"]) for batch in loop]


def _shards(root: Path) -> list[Path]:
    return [path for path in (root / "objects").rglob("*.*") if path.suffix != ".index"]


def _loops(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """What loops give that read files every time."""
    with monkeypatch.context() as patch:
        patch.setattr(machinery, "available_memory", lambda: 0)
        with _loader(root) as loader:
            found = [_rows(loader) for _ in range(count)]
            assert loader.stats()["block_copies"] == 0
    return found


@pytest.mark.parametrize("verify", ["fast", "strong"])
def test_later_loops_give_the_same_without_the_files(
    root: Path, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _loops(root, 5, monkeypatch)
    with _loader(root, verify=verify) as loader:
        assert [_rows(loader), _rows(loader)] == expected[:2]
        stats = loader.stats()
        blocks = stats["block_copies"]
        assert stats["block_loads"] == 2 * blocks > 60
        window = loader.machinery.window
        assert window.views(range(int(blocks))) == []
        for shard in _shards(root):
            shard.chmod(0o644)
            with shard.open("r+b") as file:
                file.truncate(1)  # whoever reads a map of it dies of SIGBUS
        assert _rows(loader) == expected[2]
        shutil.rmtree(root)
        assert [_rows(loader), _rows(loader)] == expected[3:]
        assert loader.stats()["block_loads"] == 2 * blocks


def test_a_first_loop_copies_nothing(root: Path) -> None:
    with _loader(root) as loader:
        _rows(loader)
        assert loader.stats()["block_copies"] == 0


def test_what_is_damaged_before_it_is_copied_is_found(root: Path) -> None:
    with _loader(root) as loader:
        _rows(loader)
        for shard in _shards(root):
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.chmod(0o644)
            shard.write_bytes(data)
        with pytest.raises(IntegrityError, match="mismatch"):
            _rows(loader)


@pytest.mark.parametrize("verify", ["fast", "strong"])
def test_it_is_the_copy_that_is_verified(root: Path, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = block_reader._copied

    def wrongly(view: memoryview) -> tuple[memoryview, int]:
        found, address = copied(view)
        memory = found.obj
        assert isinstance(memory, mmap.mmap)
        memory[len(view) // 3] ^= 4  # the file is as it was
        return found, address

    with _loader(root, verify=verify) as loader:
        _rows(loader)
        monkeypatch.setattr(block_reader, "_copied", wrongly)
        with pytest.raises(IntegrityError, match="mismatch"):
            _rows(loader)


def test_what_does_not_fit_is_not_copied(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with shardkit.create(
        str(root), schema={"x": "int32[64]", "blob": "bytes"}, shard_size="256KiB", block_size="16KiB"
    ) as writer:
        for number in range(2 * ROWS):
            writer.add({"x": [number] * 64, "blob": bytes(1000)})
    with _loader(root, memory=1 << 20) as loader:
        next(iter(loader))  # a loop that is left, and drops nothing
        for _ in range(3):
            assert sum(len(rows) for _, rows, _ in _rows(loader)) == 2 * ROWS
        stats = loader.stats()
        assert stats["block_copies"] == 0
        assert stats["evictions"] > 0
        assert stats["peak_bytes"] <= 1 << 20


def test_copies_take_half_of_what_the_machine_has_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _loops(root, 4, monkeypatch)
    monkeypatch.setattr(machinery, "available_memory", lambda: 400_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with _loader(root) as loader:
        assert [_rows(loader) for _ in range(4)] == expected
        window = loader.machinery.window
        kept = {
            block: entry.size for block, entry in window._entries.items() if entry.good_for == float("inf")
        }
        assert 50_000 < sum(kept.values()) <= 100_000
        assert window.views(window._entries) == sorted(
            set(window._entries) - set(kept), key=list(window._entries).index
        )


def test_a_smaller_bound_gives_copies_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _loops(root, 7, monkeypatch)
    there: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
    copied = block_reader._copied

    def noted(view: memoryview) -> tuple[memoryview, int]:
        found, address = copied(view)
        assert isinstance(found.obj, mmap.mmap)
        there.add(found.obj)
        return found, address

    monkeypatch.setattr(block_reader, "_copied", noted)
    with _loader(root) as loader:
        assert [_rows(loader) for _ in range(3)] == expected[:3]
        window, copies = loader.machinery.window, loader.stats()["block_copies"]
        assert len(there) == copies
        loader._drop_pipeline()  # and with it what was leased ahead
        before = window.nbytes
        window.budget = before * 2 // 3
        assert 0 < sum(map(len, there)) <= window.nbytes <= window.budget
        loader.seek(ROWS // 30 * 3)
        assert [_rows(loader), _rows(loader)] == expected[3:5]
        assert loader.stats()["block_copies"] == copies  # for not all of it fits
        window.budget = 2 * before
        # of the next loop the first blocks have been read already
        assert [_rows(loader), _rows(loader)] == expected[5:]
        assert loader.stats()["block_copies"] > copies
    assert not there


def test_a_machine_that_has_less_memory_than_it_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _loops(root, 4, monkeypatch)
    asked, copied = [0], block_reader._copied

    def short(view: memoryview) -> tuple[memoryview, int]:
        asked[0] += 1
        if asked[0] > 20:
            raise MemoryError
        return copied(view)

    monkeypatch.setattr(block_reader, "_copied", short)
    with _loader(root) as loader:
        assert [_rows(loader) for _ in range(4)] == expected
        window = loader.machinery.window
        assert 10 <= loader.stats()["block_copies"] <= 20
        views = window.views(window._entries)
        assert len(views) == len(window._entries) - loader.stats()["block_copies"]
        assert {window._entries[block].good_for for block in views} <= {3, 4, 5}


def test_no_memory_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="no memory for a copy of 3 bytes: Cannot allocate memory"):
        block_reader._copied(memoryview(b"abc"))


MEMINFO = "MemTotal:       24105 kB\nMemFree:  9000 kB\nMemAvailable:   20000 kB\nHugePages_Total:       0\n"


def _system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Files as the system has them below /proc and /sys/fs/cgroup, all in one folder."""
    monkeypatch.setattr(machine_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine_memory, "_GROUPS", tmp_path / "groups")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def _group(most: object, used: int, stat: str = "", folder: str = "") -> dict[str, str]:
    files = {"memory.max": most, "memory.current": used, "memory.stat": stat}
    return {f"groups/{folder}{name}": f"{value}\n" for name, value in files.items()}


def _group_of_old(most: int, used: int, stat: str = "", folder: str = "") -> dict[str, str]:
    files = {"memory.limit_in_bytes": most, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"groups/memory/{folder}{name}": f"{value}\n" for name, value in files.items()}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, 20_000 * 1024),
        (_group("max", 5), 20_000 * 1024),
        (_group(9_000_000, 5_000_000, "anon 3500000\nactive_file 600000\ninactive_file 900000\nfile 1500000"),
         5_500_000),
        (_group_of_old(9_000_000, 5_000_000, "active_file 1\ntotal_active_file 300\ntotal_inactive_file 500"),
         4_000_800),
        (_group(100, 200, "anon 200"), 0),
        # a job on a machine without containers: its own group, and those around it, limit it
        ({"membership": "0::/slurm/job_7/step_0\n"} | _group(9_000, 5_000, folder="slurm/job_7/")
         | _group("max", 3_000, folder="slurm/job_7/step_0/"), 4_000),
        ({"membership": "0::/slurm/job_7/step_0\n"} | _group(9_000, 5_000, folder="slurm/job_7/")
         | _group(4_000, 3_000, folder="slurm/job_7/step_0/"), 1_000),
        ({"membership": "5:cpu:/a\n4:hugetlb,memory:/jobs/7:x\n0::/\n"} | _group_of_old(2**63 - 4096, 5)
         | _group_of_old(9_000, 2_000, folder="jobs/7:x/"), 7_000),
        # another group's limit is not ours
        ({"membership": "0::/slurm/job_8\n"} | _group(9_000, 5_000, folder="slurm/job_7/"), 20_000 * 1024),
        # in a container that is told its name outside
        ({"membership": "0::/docker/3f\n"} | _group(9_000, 2_500), 6_500),
        ({"membership": "nothing of the kind\n\n::\n"} | _group(9_000, 2_500), 6_500),
    ],
)  # fmt: skip
def test_memory_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, str], expected: int
) -> None:
    _system(tmp_path, monkeypatch, groups | {"meminfo": MEMINFO})
    assert machine_memory.available_memory() == expected


@pytest.mark.parametrize("files", [{}, {"meminfo": "MemTotal: 1 kB\n"}, {"meminfo": "MemAvailable: much\n"}])
def test_where_nobody_says_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    _system(tmp_path, monkeypatch, files)
    assert machine_memory.available_memory() == 0


def test_this_machine_has_memory_left() -> None:
    assert 0 <= machine_memory.available_memory() < 1 << 60
