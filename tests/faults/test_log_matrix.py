"""The root's log and a copy's log, damaged in every combination: no version that an intact log names is lost.

A root and its mirror hold two versions. Before each case both are put back; then each log is cut, forked or removed,
and every command that reads or changes the root is tried.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import msgspec
import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.formats import sha256_digest
from shardkit.repository.log import LogEntry, entry_name
from tests.command_line import call

LOGS = ("same", "shorter", "longer", "forked", "lost")
"""States of a log: `longer` has an entry that the other does not have."""

COMMANDS = {
    "verify": ["verify", "{root}"],
    "readers": ["show", "{root}@main"],
    "replicate": ["replicate", "{root}"],
    "gc": ["gc", "{root}", "--delete", "--grace", "0s", "--history", "0s"],
    "build": ["build", "{fourth}", "{root}", "--ref", "fourth", "--jobs", "1"],
}

SEQUENCES = (("verify", "readers", "gc", "gc"), ("build",), ("replicate",))
"""Commands that are tried on one damaged root, before it is repaired."""


def _source(path: Path, first: int) -> Path:
    path.write_text(
        "".join(json.dumps({"x": first + i, "text": f"row {first + i}"}) + "\n" for i in range(12))
    )
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a root and a mirror of `main` and `second`, and of a third version that no log names."""
    base = tmp_path_factory.mktemp("logs") / "data"
    base.mkdir()
    for number, ref in enumerate(("main", "second", "third")):
        source = _source(base / f"{ref}.jsonl", 100 * number)
        code, told = call("build", source, base / "root", "--jobs", 1, "--ref", ref)
        assert code == 0, told
        if ref == "main":
            code, told = call(
                "place", base / "root", "--location", f"mirror={base / 'mirror'}", "--copies", 2
            )
            assert code == 0, told
    assert call("replicate", base / "root")[0] == 0
    (base / "third.id").write_text(_names(base / "root")["third"])
    for place in ("root", "mirror"):
        max((base / place / "log").iterdir()).unlink()
    _source(base / "fourth.jsonl", 300)
    shutil.copytree(base, base.with_name("pristine"))
    return base


def _spoil(place: Path, state: str, version: str) -> None:
    """Damage a log; `longer` and `forked` get an entry that names a version which no other entry names."""
    entries = sorted((place / "log").iterdir())
    if state == "lost":
        shutil.rmtree(place / "log")
    if state in ("shorter", "forked"):
        entries.pop().unlink()
    if state in ("longer", "forked"):
        data = entries[-1].read_bytes()
        before = LogEntry.from_bytes(data, "a test")
        entry = msgspec.structs.replace(
            before,
            n=before.n + 1,
            previous=sha256_digest(data),
            txn=uuid.uuid4().hex,
            refs={**before.refs, f"only-{place.name}": version},
        )
        (place / entry_name(entry.n)).write_bytes(entry.to_bytes())


def _conflict(root: Path, mirror: Path) -> bool:
    """Return True if the mirror's log is not the beginning of the root's."""
    entries = sorted((mirror / "log").glob("*"))
    return any(
        not (root / "log" / one.name).exists() or (root / "log" / one.name).read_bytes() != one.read_bytes()
        for one in entries
    )


def _names(place: Path) -> dict[str, str]:
    """Names of the newest entry → manifest ids; empty without a log."""
    entries = sorted((place / "log").glob("*.json"))
    if not entries:
        return {}
    newest = json.loads(entries[-1].read_text())
    return {**newest["refs"], **newest["tags"]}


def _readable(root: Path, version: str) -> bool:
    try:
        dataset = shardkit.open(f"{root}@{version}")
        return len([dataset[i] for i in range(len(dataset))]) == 12
    except ShardkitError:
        return False


def _restored(base: Path) -> tuple[Path, Path]:
    shutil.rmtree(base)
    shutil.copytree(base.with_name("pristine"), base)
    return base / "root", base / "mirror"


def _repaired(root: Path, mirror: Path, expected: set[str]) -> list[object]:
    """Repair a root and return what is wrong after that."""
    code, told = call("repair", root)
    problems: list[object] = [] if code == 0 else [("repair", code, told[-700:])]
    problems += [("unnamed", version) for version in expected - set(_names(root).values())]
    return problems + [
        ("lost", place.name, version)
        for place in (root, mirror)
        for version in sorted(expected)
        if not _readable(place, version)
    ]


@pytest.mark.parametrize("mirror_log", LOGS)
@pytest.mark.parametrize("root_log", LOGS)
def test_nothing_that_an_intact_log_names_is_lost(made: Path, root_log: str, mirror_log: str) -> None:
    if root_log == mirror_log == "lost":
        return  # no log is intact
    problems: list[object] = []
    third = (made / "third.id").read_text()
    is_lost = root_log == "lost"
    for sequence in SEQUENCES:
        root, mirror = _restored(made)
        main = _names(root)["main"]
        _spoil(root, root_log, main)
        _spoil(mirror, mirror_log, third)
        expected = {*_names(root).values(), *_names(mirror).values()}
        conflict = _conflict(root, mirror)
        for command in sequence:
            words = [one.format(root=root, fourth=made / "fourth.jsonl") for one in COMMANDS[command]]
            code, told = call(*words)
            is_refused = (conflict and command in ("verify", "gc")) or (is_lost and command != "replicate")
            if is_refused and (code == 0 or "run: shardkit repair" not in " ".join(told.split())):
                problems.append((command, "no advice", code, told[-500:]))
            elif code != 0 and not conflict and not is_refused:
                problems.append((command, "failed", code, told[-500:]))
        problems += [(sequence, one) for one in _repaired(root, mirror, expected)]
        for place in (root, mirror) if "gc" in sequence else ():
            code, told = call("verify", place)
            problems += [] if code == 0 else [("verify", place, code, told[-400:])]
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_empty_root_next_to_its_copy_is_a_lost_root(made: Path, is_missing: bool) -> None:
    """Nothing is built there; repair brings everything back, with the advice that readers get."""
    root, mirror = _restored(made)
    versions = set(_names(root).values())
    shutil.rmtree(root)
    if not is_missing:
        root.mkdir()
    for command, arguments in COMMANDS.items():
        words = [one.format(root=root, fourth=made / "fourth.jsonl") for one in arguments]
        code, told = call(*words)
        assert code != 0, command
        assert f"run: shardkit repair {root}" in " ".join(told.split()), (command, told)
        assert not list(root.glob("**/*.json")), command
    assert _repaired(root, mirror, versions) == []
    assert call("verify", root)[0] == 0


def test_a_placement_tells_of_a_mirror_that_did_not_get_the_log(tmp_path: Path) -> None:
    """The root lost its newest entry and the mirror has it, so the mirror's log is not continued."""
    root, places = tmp_path / "root", [f"{name}={tmp_path / name}" for name in ("mirror", "second")]
    for first in (0, 100):
        source = _source(tmp_path / f"{first}.jsonl", first)
        assert call("build", source, root, "--jobs", 1, "--ref", f"from-{first}")[0] == 0
        if not first:
            assert call("place", root, "--location", places[0], "--copies", 2)[0] == 0
    assert call("replicate", root)[0] == 0
    max((root / "log").iterdir()).unlink()
    code, told = call("place", root, "--location", places[1])
    assert code == 3, told
    assert "log" in told
    code, told = call("repair", root)
    assert code == 0, told
    assert call("place", root, "--location", places[1])[0] == 0
