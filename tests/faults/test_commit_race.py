"""Many processes commit to one root at once: no commit is lost, none lands twice, the chain holds."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit.errors import CommitConflict
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from tests.drills import drill_count

WRITERS = 16

# Each writer counts up a ref of its own, blindly, and a shared one by compare-and-set until it wins.
WRITER = """
import sys
from shardkit.errors import CommitConflict
from shardkit.repository.repository import Repository

root, name, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
repository = Repository.open(root)
conflicts = 0
print("ready", flush=True)
sys.stdin.readline()
for turn in range(turns):
    manifest = repository.put_object(f"{name} {turn}".encode(), "manifest").digest
    if turn % 2:
        entry = repository.commit({name: manifest}, message=str(turn), author=name)
    else:
        while True:
            before = repository.refs.get("shared")
            try:
                entry = repository.commit(
                    {"shared": manifest}, {f"{name}-{turn}": manifest},
                    message=str(turn), author=name, expected={"shared": before},
                )
                break
            except CommitConflict:
                conflicts += 1
    print(entry.n, entry.txn, flush=True)
print("conflicts", conflicts)
"""


def race(root: Path, turns: int) -> tuple[list[tuple[int, str]], int, float]:
    """(number and transaction of each acknowledged commit, conflicts seen, seconds)."""
    Repository.create(root)
    with contextlib.ExitStack() as children:
        writers = [children.enter_context(_writer(root, number, turns)) for number in range(WRITERS)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        start = time.perf_counter()
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        outputs = [writer.communicate(timeout=500)[0] for writer in writers]
        seconds = time.perf_counter() - start
        assert [writer.returncode for writer in writers] == [0] * WRITERS
    acknowledged: list[tuple[int, str]] = []
    conflicts = 0
    for output in outputs:
        for line in output.splitlines():
            first, second = line.split()
            if first == "conflicts":
                conflicts += int(second)
            else:
                acknowledged.append((int(first), second))
    return acknowledged, conflicts, seconds


def _writer(root: Path, number: int, turns: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), f"writer{number}", str(turns)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.drill
def test_racing_writers_lose_nothing(tmp_path: Path) -> None:
    turns = drill_count(50)
    acknowledged, conflicts, seconds = race(tmp_path / "root", turns)
    log = Repository.open(tmp_path / "root", read_only=True).log()  # verifies the whole chain
    total = WRITERS * turns
    assert len(acknowledged) == total
    assert sorted(acknowledged) == sorted((entry.n, entry.txn) for entry in log)
    assert [entry.n for entry in log] == list(range(total, 0, -1))
    assert max(Counter((entry.author, entry.message) for entry in log).values()) == 1
    # Compare-and-set: every value of the shared ref was put on top of another one, so none was overwritten unseen.
    shared = [entry.refs.get("shared") for entry in reversed(log)]
    values = [new for old, new in zip([None, *shared], shared, strict=False) if new != old]
    assert len(values) == len(set(values)) == WRITERS * ((turns + 1) // 2)
    for number in range(WRITERS):
        mine = [entry for entry in reversed(log) if entry.author == f"writer{number}"]
        assert [entry.message for entry in mine] == [str(turn) for turn in range(turns)]
    print(json.dumps({"commits": total, "lost": 0, "conflicts": conflicts, "seconds": round(seconds, 2)}))


class Interrupted(Repository):
    """Another commit lands between this one's look at the head and its put."""

    interruption: Callable[[], object] | None = None

    def head(self) -> LogEntry | None:
        found, interruption = super().head(), self.interruption
        if interruption is not None:
            self.interruption = None
            interruption()
        return found


def test_a_commit_to_another_ref_is_rebased_over(tmp_path: Path) -> None:
    first = Repository.create(tmp_path / "root")
    second = Repository.open(tmp_path / "root")
    one, two = (first.put_object(data, "manifest").digest for data in (b"1", b"2"))
    first.commit({"main": one}, message="first")
    stale = second.head()

    racing = Interrupted(first.store, first._identity, read_only=False)
    racing.interruption = lambda: second.commit({"val": two}, message="in between")
    entry = racing.commit({"main": two}, message="rebased")
    assert stale is not None
    assert (entry.n, dict(entry.refs)) == (3, {"main": two, "val": two})

    racing.interruption = lambda: second.commit({"main": one}, message="same ref")
    with pytest.raises(CommitConflict, match=r"'main' was moved"):
        racing.commit({"main": None}, message="refused")

    racing.interruption = lambda: second.commit({"main": two}, message="what I wanted too")
    assert racing.commit({"main": two}, message="agreed").n == 6

    racing.interruption = lambda: second.commit({}, {"v1": one}, message="tag")
    with pytest.raises(CommitConflict, match="never moved"):
        racing.commit({}, {"v1": two}, message="refused")
    assert [entry.message for entry in first.log()][:2] == ["tag", "agreed"]


def test_threads_share_one_repository(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "root")
    manifest = repository.put_object(b"1", "manifest").digest

    def commit(number: int) -> str:
        return repository.commit({f"ref-{number % 8}": manifest}, message=str(number)).txn

    with ThreadPoolExecutor(8) as pool:
        acknowledged = list(pool.map(commit, range(64)))
    assert sorted(acknowledged) == sorted(entry.txn for entry in repository.log())
