from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

import shardkit
import shardkit_tools.commands.ls as ls_command
from shardkit.repository.repository import Repository
from shardkit_tools.main import COMMANDS, make_app
from tests.command_line import document_of, outcome, output_of, typed
from tests.pictures import PNG

PROGRAM = [sys.executable, "-c", "from shardkit_tools.main import run; run()"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 files in two class folders, 30 of them cats."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(40):
        folder = root / ("cat" if number % 4 else "dog")
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02d}.png").write_bytes(PNG + bytes([number]) * (100 + number))
    return root


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with refs main, train and val, and the tag v1."""
    root = tmp_path_factory.mktemp("data") / "photos"
    split = ["--split", "train=0.75,val=0.25"]
    output_of("build", source, root, "--stratify", "label", *split, "-m", "first", "--jobs", 1)
    output_of("tag", root, "v1", "--author", "me")
    return root


@pytest.fixture
def dataset(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "photos"))


def test_overview_and_help_pages() -> None:
    code, out, _ = typed()
    assert code == 0
    for heading, names in COMMANDS:
        assert heading in out or "plan" in names
    assert "3 could not check, 4 damaged and not repaired" in " ".join(out.split())
    for name in re.findall(r"^  ([a-z]+) +[A-Z]", out, re.MULTILINE):
        code, page, _ = typed(name, "--help")
        assert code == 0
        assert f"\nExample\n  shardkit {name}" in page
        assert max(map(len, page.splitlines())) <= 100
        assert typed(name, "-h")[1] == page


def test_the_overview_needs_none_of_the_commands_code() -> None:
    program = """
import sys
from shardkit_tools.main import run
try:
    run(["--help"])
finally:
    print(sorted({"numpy", "pyarrow", "rich", "zstandard", "shardkit_tools.commands.build"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page, _, loaded = done.stdout.rstrip().rpartition("\n")
    assert loaded == "[]"
    said = " ".join(page.split())
    commands = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    assert set(commands) == {name for _, names in COMMANDS for name in names}
    for name, command in commands.items():
        first = " ".join(inspect.cleandoc(command.help).partition("\n\n")[0].split())
        assert f"{name} {first}" in said


def test_everyday_work_imports_no_large_package_in_vain(source: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    reading = "loader = shardkit.open(root).loader(plan, tensors=False); assert len(list(loader)) == 10"
    works = [
        ("pandas torch", f"run(['build', {str(source)!r}, root])"),
        ("pandas torch pyarrow", "run(['show', root])"),
        ("pandas torch pyarrow", "run(['verify', root])"),
        ("pandas torch pyarrow", "run(['tag', root, 'v1'])"),
        ("pandas torch shardkit_tools.building.build_run", "run(['build', '--help'])"),
        ("pandas torch pyarrow shardkit.audit", "run(['train', '--help'])"),
        (
            "pandas torch pyarrow",
            f"plan = shardkit.open(root).plan(global_batch=4); {reading}; loader.close()",
        ),
    ]
    program = """
import os, sys, shardkit
from shardkit_tools.main import run
root, works = eval(sys.argv[1])
for packages, work in works:
    if (child := os.fork()) == 0:  # each begins with the imports above
        try:
            exec(work)
        except SystemExit as ended:
            assert not ended.code, work
        os._exit(len(set(packages.split()) & set(sys.modules)))
    assert os.waitpid(child, 0)[1] == 0, work
"""
    words = [sys.executable, "-c", program, repr((root, works))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version() -> None:
    assert typed("--version") == (0, f"shardkit {shardkit.__version__}\n", "")


def test_build_reports_what_it_did(source: Path, tmp_path: Path) -> None:
    code, out, err = typed("build", source, tmp_path / "a", "--stratify", "label")
    assert (code, err) == (0, "")
    assert "40 in 2 strata" in out
    first = document_of(
        "build", source, tmp_path / "b", "--stratify", "label", "--jobs", 2, "--split", "x=0.5"
    )
    assert first["samples"] == 40
    assert first["strata"] == {"0": 30, "1": 10}
    again = document_of("build", source, tmp_path / "b", "--stratify", "label", "--split", "x=0.5")
    assert again["id"] == first["id"]
    assert again["commit"] is None
    assert (
        "none: the same version was there already"
        in typed("build", source, tmp_path / "b", "--stratify", "label", "--split", "x=0.5")[1]
    )


def test_ls(built: Path) -> None:
    found = document_of("ls", built)["versions"]
    assert isinstance(found, list)
    assert [(v["name"], v["kind"], v["rows"]) for v in found] == [
        ("main", "ref", 40), ("train", "ref", 40), ("val", "ref", 40), ("v1", "tag", 40)
    ]  # fmt: skip
    assert found[1]["samples"] + found[2]["samples"] == found[0]["samples"] == 40
    _, out, _ = typed("ls", built)
    assert [line.split()[0] for line in out.splitlines()] == ["name", "main", "train", "val", "v1"]
    assert found[0]["id"] in out


def test_ls_of_a_root_without_versions(tmp_path: Path) -> None:
    Repository.create(tmp_path / "new")
    assert "has no versions yet" in typed("ls", tmp_path / "new")[1]
    assert document_of("ls", tmp_path / "new")["versions"] == []
    assert "no commits yet" in typed("log", tmp_path / "new")[1]
    assert typed("verify", tmp_path / "new")[0] == 0


def test_show(built: Path) -> None:
    page = document_of("show", f"{built}@val")
    main = shardkit.open(built)
    assert page["parent"] == main.manifest.id
    assert page["schema"] == {"image": "bytes", "label": "int64"}
    assert page["classes"] == ["cat", "dog"]
    strata = page["strata"]
    assert isinstance(strata, list)
    assert [s["rows"] for s in strata] == [30, 10]
    assert sum(s["samples"] for s in strata) == page["samples"]
    splits = page["splits"]
    assert isinstance(splits, list)
    assert [s["name"] for s in splits] == ["main", "train", "v1"]
    _, out, _ = typed("show", f"{built}@val")
    for expected in (
        "0 cat",
        "1 dog",
        "name val",
        "number 1: first",
        "shares train 3/4, val 1/4",
        str(page["id"]),
    ):
        assert expected in out


def test_log(built: Path) -> None:
    commits = document_of("log", built)["commits"]
    assert isinstance(commits, list)
    assert [(c["n"], c["message"], c["author"]) for c in commits] == [
        (2, "tag v1 for main", "me"),
        (1, "first", ""),
    ]
    assert [(c["kind"], c["name"], c["from"]) for c in commits[1]["changes"]] == [
        ("ref", "main", None), ("ref", "train", None), ("ref", "val", None)
    ]  # fmt: skip
    assert len(typed("log", built, "-n", 1)[1].splitlines()) == 2


def test_diff(built: Path, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (tmp_path / "less").mkdir()
    shutil.copytree(source / "cat", tmp_path / "less" / "cat")
    shutil.copytree(source / "dog", tmp_path / "less" / "puma")
    (tmp_path / "less" / "puma" / "00.png").unlink()
    typed("build", tmp_path / "less", other, "--stratify", "label", "--format", "arrow")
    found = document_of("diff", built, other)
    strata = found["strata"]
    assert isinstance(strata, list)
    assert {row["name"]: (row["a"], row["b"]) for row in strata} == {"0": (30, 30), "1": (10, 9)}
    assert found["shards"] == {
        "shared": {"count": 0, "bytes": 0},
        "removed": {"count": 1, "bytes": shardkit.open(built).manifest.stored_bytes},
        "added": {"count": 1, "bytes": shardkit.open(other).manifest.stored_bytes},
    }
    assert "tar → arrow" in typed("diff", built, other)[1]
    shared = document_of("diff", built, "val")["shards"]
    assert isinstance(shared, dict)
    assert [shared[what]["count"] for what in ("shared", "removed", "added")] == [1, 0, 0]
    assert "equal to the last byte" in typed("diff", built, "v1")[1]


def test_diff_of_schemas(built: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"label": 0.5, "text": "a"}\n')
    typed("build", tmp_path / "rows.jsonl", tmp_path / "rows")
    assert document_of("diff", built, tmp_path / "rows")["schema"] == {
        "added": {"text": "str"},
        "removed": {"image": "bytes"},
        "changed": {"label": {"a": "int64", "b": "float64"}},
        "same_order": False,
    }
    out = typed("diff", built, tmp_path / "rows")[1]
    assert "+ text: str\n- image: bytes\n~ label: int64 → float64\n" in out


def test_tag(dataset: Path) -> None:
    assert document_of("tag", f"{dataset}@val", "eval-2026")["created"] is True
    assert document_of("tag", dataset, "eval-2026", "val")["created"] is False
    code, _, err = typed("tag", dataset, "eval-2026", "train")
    assert code == 1
    assert "eval-2026" in err
    assert typed("tag", dataset, "no such name")[0] == 2


def test_cat(built: Path) -> None:
    ds = shardkit.open(built)
    shown = document_of("cat", built, 5)
    image = ds[5]["image"]
    assert shown["fields"] == {
        "image": {"bytes": len(image), "sha256": hashlib.sha256(image).hexdigest(), "kind": "png"},
        "label": ds[5]["label"],
    }
    assert shown["key"] == ds.key(5)
    _, out, _ = typed("cat", built, 5)
    assert "89 50 4e 47 0d 0a 1a 0a" in out
    assert f"{ds[5]['label']} ({ds.classes[ds[5]['label']]})" in out


def test_cat_writes_a_field_to_a_new_file_only(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "image.png"
    assert typed("cat", built, 5, "--field", "image", "--out", out)[0] == 0
    assert out.read_bytes() == shardkit.open(built)[5]["image"]
    code, _, err = typed("cat", built, 6, "--field", "image", "--out", out)
    assert code == 1
    assert "image.png: cannot be made (File exists)" in err
    assert out.read_bytes() == shardkit.open(built)[5]["image"]
    assert typed("cat", built, 5, "--out", tmp_path / "x")[0] == 2
    assert "no field 'img'" in typed("cat", built, 5, "-f", "img")[2]


def test_cat_of_every_type(tmp_path: Path) -> None:
    schema = {"t": "str", "j": "json", "a": "float32[2,3]", "r": "int64[*]", "s": "uint8", "b": "bool"}
    with shardkit.create(tmp_path / "d", schema) as writer:
        writer.add(
            {
                "t": "one\x1b[31m\nÄ",
                "j": {"k": [1, None]},
                "a": np.arange(6).reshape(2, 3),
                "r": [],
                "s": 7,
                "b": True,
            }
        )
    _, out, _ = typed("cat", tmp_path / "d", 0)
    assert "one\\x1b[31m\nÄ" in out
    assert "\x1b" not in out
    assert "shape [2, 3], 0.0 to 5.0" in out
    fields = document_of("cat", tmp_path / "d", 0)["fields"]
    assert fields == {
        "t": "one\x1b[31m\nÄ",
        "j": {"k": [1, None]},
        "a": {"dtype": "float32", "shape": [2, 3], "items": [[0, 1, 2], [3, 4, 5]]},
        "r": {"dtype": "int64", "shape": [0], "items": []},
        "s": 7,
        "b": True,
    }
    typed("cat", tmp_path / "d", 0, "-f", "a", "-o", tmp_path / "a.npy")
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.arange(6, dtype=np.float32).reshape(2, 3))


def test_a_field_goes_to_a_pipe_as_it_is(built: Path) -> None:
    done = subprocess.run([*PROGRAM, "cat", built, "5", "-f", "image"], capture_output=True, check=True)
    assert done.stdout == shardkit.open(built)[5]["image"]


def test_select(dataset: Path, tmp_path: Path) -> None:
    cats = document_of("select", dataset, "--where", "label == 0", "--ref", "cats")
    assert cats["samples"] == 30
    assert {shardkit.open(f"{dataset}@cats")[i]["label"] for i in range(30)} == {0}
    (tmp_path / "list").write_text("3\n1\n3\n")
    typed("select", f"{dataset}@cats", "--rows", tmp_path / "list", "--ref", "two")
    typed("select", f"{dataset}@cats", "--exclude", tmp_path / "list", "--ref", "rest")
    views = {name: shardkit.open(f"{dataset}@{name}") for name in ("cats", "two", "rest")}
    keys = {name: [view.key(i) for i in range(len(view))] for name, view in views.items()}
    assert keys["two"] == [keys["cats"][1], keys["cats"][3]]
    assert sorted(keys["two"] + keys["rest"]) == sorted(keys["cats"])
    assert typed("verify", dataset)[0] == 0
    assert Repository.open(dataset).head().message == "select by list"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ref", "x"], 2, "select takes one of --where, --rows and --exclude"),
        (["--where", "label ==", "--ref", "x"], 2, "cannot be read"),
        (["--where", "label > 7", "--ref", "x"], 2, "no row is selected"),
        (["--rows", "/nowhere", "--ref", "x"], 1, "/nowhere: cannot be read"),
        (["--rows", __file__, "--ref", "x"], 1, "begins or ends with a blank"),
        (["--where", "label == 0"], 2, "Missing option '--ref'"),
    ],
)
def test_select_errors(dataset: Path, arguments: list[str], code: int, message: str) -> None:
    before = len(Repository.open(dataset).log())
    got, _, err = typed("select", dataset, *arguments)
    assert (got, message in err) == (code, True), err
    assert len(Repository.open(dataset).log()) == before


def test_verify_clean_at_every_level(dataset: Path) -> None:
    for level, code in (("list", 0), ("attested", 3), ("stored", 0), ("read", 0), ("decode", 0)):
        result = document_of("verify", dataset, "--level", level, code=code)
        assert result["damaged"] == []
        assert result["exit_code"] == code
        assert bool(result["unknown"]) == (code == 3)
    read = document_of("verify", dataset, "--level", "read", code=0)["stored_bytes"]
    assert document_of("verify", dataset, "--level", "stored", code=0)["stored_bytes"] == read > 0, (
        "files are read"
    )
    assert "no scrub has been recorded" in typed("verify", dataset, "--level", "attested")[1]


@pytest.mark.parametrize("level", ["stored", "read"])
def test_verify_names_what_is_damaged(dataset: Path, level: str) -> None:
    ds = shardkit.open(dataset)
    shard = next(dataset.glob("objects/sha256/*/*.tar"))
    index = ds.reader.index(0)
    data = bytearray(shard.read_bytes())
    data[int(index.block_offset[1]) + 600] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    assert document_of("verify", dataset, "--level", "list")["damaged"] == []
    result = document_of("verify", dataset, "--level", level, code=4)
    (finding,) = result["damaged"]
    assert finding["name"].endswith(shard.name)
    assert finding["expected"] == f"sha256:{shard.name.removesuffix('.tar')}"
    assert finding["got"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert finding["blocks"] == [1]
    assert finding["rows"] == int(index.block_start[2] - index.block_start[1])
    code, out, _ = typed("verify", f"{dataset}@val")
    assert code == 4
    for expected in (
        "Damaged: 1 object",
        shard.name,
        "  blocks    1\n",
        f"do        run: shardkit repair {dataset}, which needs another copy or parity",
    ):
        assert expected in out


def test_a_build_heals_what_verify_finds(dataset: Path, source: Path) -> None:
    shard = next(dataset.glob("objects/sha256/*/*.tar"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert typed("verify", dataset)[0] == 4
    assert typed("scrub", dataset)[0] == 4
    assert typed("verify", dataset, "--level", "attested")[0] == 4
    build = ("build", source, dataset, "--stratify", "label", "--split", "train=0.75,val=0.25")
    assert re.search(r"healed +1 damaged object replaced", typed(*build)[1])
    assert typed("verify", dataset)[0] == 0
    assert typed("verify", dataset, "--level", "attested")[0] == 0
    assert "healed" not in typed(*build)[1]


def test_lineage_shows_settings_as_text(dataset: Path) -> None:
    code, said, _ = typed("show", dataset, "--lineage")
    assert code == 0
    assert "importer folder" in said
    assert "{" not in said


def test_advice_for_a_damaged_newest_log_entry_works_without_a_copy(dataset: Path, source: Path) -> None:
    entry = max((dataset / "log").iterdir())
    entry.chmod(0o644)
    entry.write_bytes(entry.read_bytes()[:-2])
    for command in (("verify", dataset), ("show", dataset), ("scrub", dataset)):
        assert "run: shardkit repair " in " ".join("".join(map(str, typed(*command))).split())
    assert "delete this file and build the same source again" in typed("repair", dataset)[1]
    entry.unlink()
    assert typed("build", source, dataset, "--stratify", "label", "--split", "train=0.75,val=0.25")[0] == 0
    assert typed("verify", dataset)[0] == 0


def test_a_damaged_older_log_entry_may_stay(dataset: Path) -> None:
    assert typed("tag", dataset, "kept", "main")[0] == 0
    entry = min((dataset / "log").iterdir())
    entry.chmod(0o644)
    entry.write_bytes(entry.read_bytes()[:-2])
    said = " ".join(typed("repair", dataset)[1].split())
    assert (
        f"leave it: every version can be opened, and copied to a new root with: shardkit rebuild {dataset}@"
        in said
    )
    new = dataset.parent / "new"
    assert typed("rebuild", f"{dataset}@kept", "--to", new)[0] == 0
    assert typed("verify", new)[0] == 0


@pytest.mark.parametrize("suffix", ["index", "page", "manifest", "selection", "sources", "tar"])
def test_verify_finds_missing_objects(dataset: Path, suffix: str) -> None:
    for path in dataset.glob(f"objects/sha256/*/*.{suffix}"):
        path.unlink()
    result = document_of("verify", dataset, "--level", "list", code=4)
    damaged = result["damaged"]
    assert isinstance(damaged, list)
    assert all(finding["name"].endswith(suffix) for finding in damaged)
    assert {finding["got"] for finding in damaged} == {"nothing of that name"}


def test_verify_finds_a_damaged_log_and_goes_on(dataset: Path) -> None:
    entry = dataset / "log" / f"{2:020d}.json"
    entry.chmod(0o644)
    entry.write_bytes(entry.read_bytes().replace(b'"me"', b'"us"'))
    result = document_of("verify", dataset, code=4)
    assert [finding["name"] for finding in result["damaged"]] == [f"log/{2:020d}.json"]
    assert sorted(result["versions"]) == ["main", "train", "val"]
    code, _, err = typed("ls", dataset)
    assert code == 4
    assert "its digest is" in err


def test_a_log_that_is_gone_is_no_empty_one(dataset: Path) -> None:
    before = {path for path in dataset.glob("objects/**/*") if path.is_file()}
    shutil.rmtree(dataset / "log")
    assert "no entry" in output_of("verify", dataset, code=3)
    for _ in range(2):
        told = output_of("gc", dataset, "--delete", "--grace", "0s", "--history", "0s", code=1)
        assert "the log has no entry, but manifests are stored, so nothing was deleted" in told
    assert {path for path in dataset.glob("objects/**/*") if path.is_file()} == before


def test_verify_samples_repeatably(tmp_path: Path) -> None:
    with shardkit.create(tmp_path / "d", {"x": "bytes"}, shard_size=4096) as writer:
        for number in range(200):
            writer.add({"x": number.to_bytes(2, "big") * 200})
    shards = len(shardkit.open(tmp_path / "d").table)
    first = document_of("verify", tmp_path / "d", "--sample", "10%", "--seed", "a")
    assert first["shards"] == shards
    assert first["shards_seen"] == -(-shards // 10)
    assert (
        "--seed b chooses the same again"
        in typed("verify", tmp_path / "d", "--sample", "0.1", "--seed", "b")[1]
    )
    for share in ("0%", "101%", "many", "1/0"):
        code, _, err = typed("verify", tmp_path / "d", "--sample", share)
        assert (code, "expected a share such as 5%" in err) == (2, True)


def test_export(built: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    assert typed("export", f"{built}@val", "--as", "sha256sums", "-o", sums)[0] == 0
    checked = subprocess.run(["sha256sum", "-c", "--strict", sums], cwd=built, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    kinds = {line.rsplit(".", 1)[1].split(":")[0] for line in checked.stdout.splitlines()}
    assert kinds == {"tar", "index", "page", "manifest", "selection", "sources"}
    _, out, _ = typed("export", built, "--as", "urls")
    assert [Path(line).is_file() for line in out.splitlines()] == [True]
    assert out.endswith(".tar\n")
    assert typed("export", built, "--as", "urls", "-o", sums)[0] == 1
    assert typed("export", built, "--as", "floppies")[0] == 2
    for form in ("urls", "parquet"):
        code, _, said = typed("export", built, "--as", form, "-o", "s3://bucket/out")
        assert (code, "an export writes to a local folder" in said) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "nowhere"], 1, "no dataset at .*nowhere"),
        (["show", "{root}@vall"], 1, "no ref or tag 'vall'; did you mean 'val'"),
        (["show", "{root}@a b"], 2, "ref or tag 'a b'"),
        (["cat", "{root}", "40"], 1, "sample 40 does not exist: this dataset has samples 0 to 39"),
        (["cat", "{root}", "many"], 2, "ROW: 'many' is no sample number"),
        (["show", "nosuch://bucket/x"], 1, "cannot open the root in nosuch://"),
        (["verify", "{root}@nope"], 3, "no ref or tag 'nope'"),
        (["sho", "{root}"], 2, "No such command 'sho'"),
        (["ls"], 2, "Missing argument 'ROOT'"),
        (["build", "nowhere", "{root}"], 1, "nowhere: no such file or folder"),
        (["build", "{source}", "{root}", "--from", "excel"], 2, "no such importer; expected one of"),
        (["build", "{source}", "{root}", "--schema", "image"], 2, "expected field=type"),
        (["build", "{source}", "{root}", "--schema", "image=complex"], 1, "'complex' is unknown"),
        (["build", "{source}", "{root}", "--stratify", "lbl"], 2, "lbl"),
        (["build", "{source}", "{root}", "--split", "a"], 2, "expected names and shares"),
        (["build", "{source}", "{root}", "--split", "a=2"], 2, "share"),
        (["build", "{source}", "{root}", "--compression", "rar"], 2, "rar"),
        (["build", "{source}", "{root}", "--shard-size", "big"], 2, "size 'big'"),
    ],
)
def test_mistakes_are_one_message(
    built: Path, source: Path, arguments: list[str], code: int, message: str
) -> None:
    got, _, err = typed(*(argument.format(root=built, source=source) for argument in arguments))
    assert re.search(message, err), err
    assert got == code, f"exit code {got}: {err}"
    assert "Traceback" not in err


def test_a_current_folder_that_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    code, _, err = outcome("show", "data/cats")
    assert (code, err) == (
        1,
        "shardkit: the current folder no longer exists; change to another one, then run it again\n",
    )


def test_a_bug_shows_its_traceback(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: str) -> dict[str, object]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(ls_command, "list_versions", broken)
    code, _, err = outcome("ls", built)
    assert code == 1
    assert "ZeroDivisionError: oops" in err
    assert "this is a bug in shardkit" in err


def test_too_little_memory_is_no_bug(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(root: str) -> dict[str, object]:
        raise MemoryError

    monkeypatch.setattr(ls_command, "list_versions", greedy)
    code, _, err = typed("ls", built)
    assert code == 1
    assert "memory ran out" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("command", "buffered"), [("show", True), ("verify", False)])
def test_a_reader_that_goes_away_is_no_error(built: Path, command: str, buffered: bool) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    reader, writer = os.pipe()
    os.close(reader)
    words = [*PROGRAM, command, str(built)]
    done = subprocess.run(words, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    ("output", "code", "told"),
    [("/dev/full", 1, "shardkit: the output cannot be written: No space left on device\n"), ("&-", 0, "")],
)
def test_output_that_cannot_be_written_is_no_bug(built: Path, output: str, code: int, told: str) -> None:
    words = f"{shlex.join([*PROGRAM, 'show', str(built)])} >{output}"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, told)


def test_output_is_text(tmp_path: Path) -> None:
    """Class names from a folder's names reach the page escaped."""
    folder = tmp_path / "photos" / "c\x1b[2J"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(PNG)
    assert typed("build", tmp_path / "photos", tmp_path / "d", "--stratify", "label")[0] == 0
    out = io.StringIO(typed("show", tmp_path / "d")[1]).read()
    assert "\x1b" not in out
    assert "c\\x1b[2J" in out
