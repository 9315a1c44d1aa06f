"""Building onto a ref that names something already: nothing is replaced without a word, and nothing is lost."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import CommitConflict, UsageError
from shardkit.repository.repository import Repository
from shardkit_tools import build
from shardkit_tools.building.build_run import BuildRun
from tests.command_line import ForkedCommand, document_of, output_of


def lines(path: Path, *values: object, field: str = "n") -> Path:
    path.write_text("".join(json.dumps({field: value}) + "\n" for value in values))
    return path


def refs(root: Path) -> dict[str, str]:
    return dict(Repository.open(root, read_only=True).refs)


def test_the_report_says_what_moved(tmp_path: Path) -> None:
    root = tmp_path / "data"
    first = output_of("build", lines(tmp_path / "a.jsonl", 1, 2), root)
    before = refs(root)["main"]
    assert "moved" not in first
    again = output_of("build", tmp_path / "a.jsonl", root)
    assert "moved" not in again
    assert "the same version was there already" in again
    second = output_of("build", lines(tmp_path / "b.jsonl", 3), root)
    assert re.search(rf"moved main +from {before} to {refs(root)['main']}", second)
    third = document_of("build", lines(tmp_path / "c.jsonl", *range(40)), root, "--split", "val=0.5")
    assert third["moved"]["main"]["to"] == third["id"] == refs(root)["main"]
    assert third["moved"]["val"] == {"from": None, "to": refs(root)["val"]}
    (tmp_path / "rows").write_text("0\n")
    chosen = document_of("select", root, "--rows", tmp_path / "rows", "--ref", "val")
    assert chosen["moved"]["val"] == {"from": third["splits"]["val"]["id"], "to": refs(root)["val"]}
    merged = output_of("merge", f"a={root}@val", f"b={root}@main", root)
    assert re.search(rf"^main +{third['id']} +{refs(root)['main']}$", merged, re.MULTILINE)


def test_another_schema_is_refused_unless_told(tmp_path: Path) -> None:
    root, other = tmp_path / "data", lines(tmp_path / "b.jsonl", "x", field="text")
    output_of("build", lines(tmp_path / "a.jsonl", 1, 2), root)
    before = refs(root)
    for dry in ([], ["--dry-run"]):
        said = output_of("build", other, root, *dry, code=2)
        assert all(word in said for word in ("'main'", before["main"], "text", "--ref", "--replace"))
    said = output_of("build", other, root, "--ref", "texts", "--split", "main=0.5", code=2)
    assert "'main'" in said, "a split is a ref too"
    assert refs(root) == before
    with pytest.raises(UsageError, match="replace=True"):
        shardkit.create(root, {"text": "str"})
    output_of("build", other, root, "--replace")
    assert shardkit.open(root)[0] == {"text": "x"}
    with shardkit.create(root, {"n": "int64"}, replace=True) as writer:
        writer.add({"n": 3})
    assert shardkit.open(root)[0] == {"n": 3}


def waiting(tmp_path: Path, name: str, *arguments: object) -> ForkedCommand:
    """A build that has seen where the ref stands, and goes on when the file `go` is there."""
    read = BuildRun._read

    def wait(self: BuildRun, *given: Any, **settings: Any) -> Any:
        (tmp_path / f"begun-{name}").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return read(self, *given, **settings)

    return ForkedCommand(*arguments, before=lambda: setattr(BuildRun, "_read", wait))


def begun(tmp_path: Path, count: int, *builds: ForkedCommand) -> None:
    """Wait until all have seen where the ref stands, then let them go on."""
    while len(list(tmp_path.glob("begun-*"))) < count:
        assert all(one.poll() is None for one in builds), [one.ended() for one in builds]
        time.sleep(0.01)
    (tmp_path / "go").touch()


@pytest.mark.parametrize("is_there", [False, True])
def test_of_three_builds_at_once_one_wins_and_the_others_are_told(tmp_path: Path, is_there: bool) -> None:
    root = tmp_path / "data"
    before = None
    if is_there:
        output_of("build", lines(tmp_path / "old.jsonl", 0), root)
        before = refs(root)["main"]
    sources = [lines(tmp_path / f"{name}.jsonl", *range(name, 10)) for name in (1, 2, 3)]
    builds = [waiting(tmp_path, source.stem, "build", source, root, "--jobs", 1) for source in sources]
    begun(tmp_path, 3, *builds)
    ended = [one.ended() for one in builds]
    assert sorted(str(code) for code, *_ in ended) == ["0", "1", "1"], ended
    winner = refs(root)["main"]
    for source, (code, out, err) in zip(sources, ended, strict=True):
        if code == 0:
            assert winner in out
            continue
        assert "Traceback" not in err
        assert winner in err
        assert before is None or before in err
        (own,) = set(re.findall("sha256:[0-9a-f]{64}", err)) - {winner, before}
        hint = re.search(r"shardkit (tag \S+ NAME sha256:\w+)", err)
        assert hint is not None
        output_of(*hint[1].replace("NAME", source.stem).split())
        assert refs(root)["main"] == winner
        assert len(shardkit.open(f"{root}@{own}")) == len(source.read_text().splitlines())
        assert len(shardkit.open(f"{root}@{source.stem}")) == len(source.read_text().splitlines())
    assert len(Repository.open(root).log()) == 1 + 2 + is_there


def test_writers_in_python_are_told_too(tmp_path: Path) -> None:
    slow = shardkit.create(tmp_path / "data", {"n": "int64"})
    slow.add({"n": 1})
    build(lines(tmp_path / "b.jsonl", 2), tmp_path / "data")
    came = refs(tmp_path / "data")["main"]
    with pytest.raises(CommitConflict, match=came):
        slow.close()
    assert shardkit.open(tmp_path / "data")[0] == {"n": 2}
    with shardkit.create(tmp_path / "data", {"n": "int64"}, replace=True) as bold:
        bold.add({"n": 3})
        build(lines(tmp_path / "c.jsonl", 4), tmp_path / "data")
    assert shardkit.open(tmp_path / "data")[0] == {"n": 3}


def test_replacing_other_samples_is_announced_before_it_happens(tmp_path: Path) -> None:
    root = tmp_path / "data"
    first, second = lines(tmp_path / "a.jsonl", *range(20)), lines(tmp_path / "b.jsonl", 30)
    warning = "main names 20 samples from other files, which this build replaces there"
    assert warning not in output_of("build", first, root)
    assert warning not in output_of("build", first, root), "the same source again"
    dry = output_of("build", second, root, "--dry-run")
    assert warning in dry
    assert "--append" in dry
    assert warning not in output_of("build", second, root, "--dry-run", "--append")
    assert warning not in output_of("build", second, root, "--dry-run", "--replace")
    assert warning in output_of("build", second, root)


def test_other_settings_for_the_samples_of_a_ref_are_announced(tmp_path: Path) -> None:
    root, source = tmp_path / "data", lines(tmp_path / "a.jsonl", *range(20))
    output_of("build", source, root)
    said = output_of("build", source, root, "--dry-run", "--format", "tar", "--block-size", "64KiB")
    assert "main was built with other settings (format arrow, now tar; " in said
    assert "block_size 256 KiB, now 64 KiB" in said
    assert "other settings" not in output_of(
        "build", source, root, "--dry-run", "--format", "tar", "--ref", "tars"
    )


def test_a_rebuild_warns_only_if_the_ref_names_another_version(tmp_path: Path) -> None:
    root = tmp_path / "data"
    output_of("build", lines(tmp_path / "a.jsonl", *range(20)), root, "--split", "val=0.5,train=0.5")
    assert "which this" not in output_of("rebuild", root, "--format", "tar", "--dry-run")
    said = output_of("rebuild", f"{root}@val", "--ref", "main", "--dry-run")
    assert "main names 20 samples of another version" in said
    assert "--append" not in said


def test_appending_files_that_are_there_is_announced_before_it_happens(tmp_path: Path) -> None:
    root, source = tmp_path / "data", lines(tmp_path / "a.jsonl", 1, 2)
    output_of("build", source, root)
    dry = output_of("build", source, root, "--append", "--dry-run")
    assert "main was built from a.jsonl already" in dry
    assert len(shardkit.open(root)) == 2


def test_a_dry_run_says_what_was_guessed(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", 1, 2)
    dry = output_of("build", source, tmp_path / "data", "--dry-run")
    assert re.search(r"fields +n int64 \(from jsonl\)", dry)
    assert re.search(r"format +arrow, zstd:3; for numbers, text and small values", dry)
    found = document_of("build", source, tmp_path / "data", "--format", "arrow", "--dry-run")
    assert (found["fields"], found["importer"], found["format"]) == ({"n": "int64"}, "jsonl", "arrow")
