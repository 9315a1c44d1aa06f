"""How much memory is left: the least of what the machine and the groups around this process say."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.stores import machine_memory

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
