"""merge, find, remove, rebuild, about and look-ups as somebody types them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.repository.repository import Repository
from shardkit_tools.building import engines
from shardkit_tools.building.rebuilding import label_again, rebuild
from tests.command_line import output_of, typed


def lines(path: Path, numbers: range) -> Path:
    rows = [{"n": n, "url": f"http://h/{n % 40}", "lang": "de" if n % 3 else "fr"} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    about = folder / "about.toml"
    about.write_text(
        'name = "web"\nlicence = "CC-BY-4.0"\n[stratum.fr]\nlicence = "MIT"\ncontact = "fr@example.org"\n'
    )
    source = lines(folder / "one.jsonl", range(90))
    options = ["--lookup", "key,url", "--about", about, "--split", "train=0.7,val=0.3"]
    output_of("build", source, folder / "d", "--stratify", "lang", "--shard-size", "32KiB", *options)
    return folder / "d"


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "d"))


def contents(url: object) -> dict[str, dict[str, Any]]:
    ds = shardkit.open(str(url))
    return {ds.key(sample): ds[sample] for sample in range(len(ds))}


def test_show_tells_about_and_lookups(root: Path) -> None:
    code, out, _ = typed("show", root)
    assert code == 0
    assert "CC-BY-4.0" in out
    assert "fr@example.org" in out
    assert "found by" in out
    document = json.loads(typed("show", root, "--json")[1])
    assert document["about"]["stratum"] == {"fr": {"licence": "MIT", "contact": "fr@example.org"}}
    assert [lookup["field"] for lookup in document["lookups"]] == ["key", "url"]


def test_append_merge_and_find(root: Path, tmp_path: Path) -> None:
    more = lines(tmp_path / "two.jsonl", range(90, 100))
    options = ("--stratify", "lang", "--shard-size", "32KiB", "--split", "train=0.7,val=0.3")
    code, _, err = typed("build", more, root, "--append", *options)
    assert (code, err) == (0, "")
    found = json.loads(typed("find", root, "--field", "url=http://h/10", "--json")[1])
    assert [row["source"] for row in sorted(found["found"], key=lambda row: row["key"])] == [
        {"name": "one.jsonl", "row": 10},
        {"name": "one.jsonl", "row": 50},
        {"name": "two.jsonl", "row": 0},
    ]
    wanted = tmp_path / "urls"
    wanted.write_text("http://h/1\nhttp://h/none\n")
    code, out, _ = typed("find", root, "--field", "url", "--list", wanted)
    assert code == 5
    assert "http://h/none" in out
    digest = hashlib.sha256(b"http://h/1").hexdigest()
    code, out, _ = typed("find", f"{root}@train", "--field", f"url:sha256={digest}")
    assert code == 0
    assert typed("find", root, "--field", "lang=fr")[0] == 1
    assert typed("find", root, "--field", "lang=fr", "--scan")[0] == 0
    assert typed("find", root)[0] == 2
    code, out, _ = typed("merge", f"a={root}@train", f"b={root}@val", tmp_path / "m")
    assert code == 0
    assert contents(tmp_path / "m") == contents(root)
    assert typed("find", tmp_path / "m", "--field", "url=http://h/1")[0] == 0
    assert typed("merge", root, tmp_path / "m", tmp_path / "n")[0] == 2
    assert typed("merge", root, root, tmp_path / "n")[0] == 2
    assert typed("select", tmp_path / "m", "--where", "n < 3", "--ref", "few")[0] == 2
    assert json.loads(typed("diff", root, tmp_path / "m", "--json")[1])["shards"]["added"]["count"] == 0


def test_remove_and_erase(root: Path, tmp_path: Path) -> None:
    typed("tag", root, "v1")
    keys = tmp_path / "keys"
    keys.write_text("0000000003\n0000000007\n")
    before = contents(root)
    code, out, _ = typed("remove", root, "--list", keys, "--reason", "wrong")
    assert code == 0
    assert "v1 (tag)" in out
    assert set(before) - set(contents(root)) == {"0000000003", "0000000007"}
    assert typed("remove", root, "--rows", "1,x", "--reason", "wrong")[0] == 2
    assert typed("remove", root, "--rows", "1")[0] == 2
    assert typed("remove", root, "--rows", "1", "--keys", "2", "--reason", "x")[0] == 2
    report = json.loads(
        typed("remove", f"{root}@v1", "--list", keys, "--reason", "request 7", "--erase", "--json")[1]
    )
    assert set(report["tags"]) == {"v1"}
    assert len(report["refs"]) == 3
    assert any("names, sizes and SHA-256 of 1 files" in note for note in report["not_reached"])
    assert set(contents(root)) == set(before) - {"0000000003", "0000000007"}
    assert "withdrawn" in typed("log", root)[1]
    assert "request 7" in typed("log", root)[1]
    assert typed("show", f"{root}@v1")[0] == 1
    assert typed("verify", root)[0] == 0
    code, out, _ = typed("remove", root, "--resume")
    assert (code, out) == (0, "nothing to finish\n")
    code, out, _ = typed("remove", root, "--rows", "5", "--reason", "text", "--erase")
    assert code == 0
    assert "Not reached" in out
    kept = list((root / "erasures").glob("*/report.json"))
    assert len(kept) == 2
    assert not any(b"0000000003" in path.read_bytes() for path in kept)


def test_rebuild_keeps_samples_keys_and_sources(root: Path, tmp_path: Path) -> None:
    before = shardkit.open(root)
    code, _, err = typed(
        "rebuild", root, "--format", "arrow", "--compression", "zstd", "--stratify", "", "--shard-size", "4KiB",
        "--about", about(tmp_path), "--ref", "flat", "--jobs", "1",
    )  # fmt: skip
    assert (code, err) == (0, "")
    after = shardkit.open(f"{root}@flat")
    assert contents(f"{root}@flat") == contents(root)
    assert after.strata == {"all": 90}
    assert (after.manifest.format, after.manifest.compression) == ("arrow", "zstd:3")
    assert [lookup.field for lookup in after.manifest.lookups] == ["key", "url"]
    sources = {ds.key(i): ds.source(i) for ds in (before, after) for i in range(len(ds))}
    assert all(after.source(i) == sources[after.key(i)] for i in range(len(after)))
    typed("select", root, "--where", "lang == 'fr'", "--ref", "fr")
    result = rebuild(f"{root}@fr", tmp_path / "fr", seed=5, lookup="")
    assert contents(tmp_path / "fr") == contents(f"{root}@fr")
    assert result.manifest is not None
    assert (result.manifest.rows, result.manifest.lookups) == (30, ())
    again = rebuild(f"{root}@fr", tmp_path / "again", seed=5, lookup="")
    assert again.manifest == result.manifest, "the same version, rebuilt the same way, is the same"


def about(tmp_path: Path) -> Path:
    path = tmp_path / "other.toml"
    path.write_text('licence = "CC0-1.0"\n')
    return path


def test_a_rebuild_says_what_must_be_said_anew(root: Path, tmp_path: Path) -> None:
    code, _, err = typed("rebuild", root, "--stratify", "", "--ref", "flat")
    assert code == 2
    assert "'fr'" in err
    assert "flat" not in Repository.open(root).refs
    typed("merge", f"x={root}@train", f"y={root}@val", tmp_path / "m")
    assert contents(rebuilt(tmp_path)) == contents(root)
    typed("tag", root, "v1")
    assert typed("rebuild", f"{root}@v1", "--seed", "3")[0] == 2
    code, _, err = typed("rebuild", root, "--split-by", "url", "--lookup", "n")
    assert (code, "without split" in err) == (2, True), "it was left out, and nothing said so"


def rebuilt(tmp_path: Path) -> Path:
    code, _, err = typed("rebuild", tmp_path / "m", "--to", tmp_path / "one", "--about", about(tmp_path))
    assert (code, err) == (0, "")
    return tmp_path / "one"


def test_lookups_alone_write_no_shard(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.tar")}
    assert typed("rebuild", root, "--lookup", "n")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.tar")} == before
    assert typed("find", root, "--field", "n=17")[0] == 0
    assert typed("find", root, "--field", "url=http://h/1")[0] == 1
    manifest, entry = label_again(root, lookup="n")
    assert entry is None
    assert manifest.id == Repository.open(root).refs["main"]


def test_a_rebuild_in_processes_is_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    one = rebuild(root, tmp_path / "one", shard_size="8KiB", jobs=1)
    two = rebuild(root, tmp_path / "two", shard_size="8KiB", jobs=2)
    assert one.manifest == two.manifest


def test_croissant_is_one_json_document(root: Path, tmp_path: Path) -> None:
    code, out, _ = typed("export", root, "--as", "croissant")
    assert code == 0
    document = json.loads(out)
    assert document["license"] == ["CC-BY-4.0", "MIT"]
    assert typed("export", root, "--as", "croissant", "--out", tmp_path / "c.json")[0] == 0
    assert json.loads((tmp_path / "c.json").read_text()) == document
