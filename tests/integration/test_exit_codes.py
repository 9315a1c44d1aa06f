"""Exit codes that a script can trust: every command, in every way it can end."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.stores.file_operations import FileOperations, Handle, substituted
from shardkit_tools.main import COMMANDS
from tests.command_line import ForkedCommand, call, output_of
from tests.integration.forked import OUTPUT, Forked, become_command, launch_forked
from tests.pictures import PNG

README = Path(__file__).parents[2] / "README.md"
CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "lab-8.toml"
EVERY = {name for _, names in COMMANDS for name in names}
CODES = {"success": 0, "usage": 2, "missing": 1, "unreachable": 1, "damaged": 4, "no": 5, "interrupted": 130}
CHECKS = {"verify", "scrub", "repair", "audit", "audit diff", "audit trace"}
"""They are asked whether something is sound: where they cannot look, they could not check."""

# Words in braces are places of the fixture `world`. {none}: nothing is there; {file}/x: nothing can be there.
CASES: dict[str, dict[str, str]] = {
    "build": {
        "success": "{photos} {out}",
        "usage": "{photos} {out} --jobs none",
        "missing": "{none} {out}",
        "unreachable": "{photos} {file}/x",
        "damaged": "{photos} {bad}",
    },
    "adopt": {
        "success": "{tars}/a.tar {out}",
        "usage": "{tars}/a.tar {out} --jobs none",
        "missing": "{none}/a.tar {out}",
        "unreachable": "{tars}/a.tar {file}/x",
        "damaged": "{tars}/a.tar {bad}",
    },
    "ls": {},
    "show": {},
    "log": {},
    "diff": {"success": "{data} {data}@val", "usage": "{data}", "missing": "{data} {none}", "damaged": "{data} {bad}",
             "unreachable": "{data} {file}/x"},
    "cat": {"success": "{data} 3", "usage": "{data} three", "missing": "{none} 3", "damaged": "{bad} 3",
            "unreachable": "{file}/x 3", "missing row": "{data} 3000"},
    "find": {
        "success": "{data} --field key={key}",
        "usage": "{data}",
        "missing": "{none} --field key=a",
        "unreachable": "{file}/x --field key=a",
        "damaged": "{bad} --field key=a",
        "no": "{data} --field key=nobody",
    },
    "tag": {"success": "{copy} v2", "usage": "{copy}", "missing": "{none} v2", "unreachable": "{file}/x v2",
            "damaged": "{bad} v2"},
    "select": {
        "success": "{copy} --rows {somebody} --ref few",
        "usage": "{copy} --ref few",
        "missing": "{none} --rows {somebody} --ref few",
        "unreachable": "{file}/x --rows {somebody} --ref few",
        "damaged": "{bad} --rows {somebody} --ref few",
    },
    "extend": {
        "success": "{copy} --from {scores}/scores.csv",
        "usage": "{copy}",
        "missing": "{none} --from {scores}/scores.csv",
        "unreachable": "{file}/x --from {scores}/scores.csv",
        "damaged": "{bad} --from {scores}/scores.csv",
    },
    "merge": {"success": "a={data} b={data}@val {out}", "usage": "{data}", "missing": "a={data} b={none} {out}",
              "unreachable": "a={data} {file}/x", "damaged": "a={data} b={bad} {out}"},
    "rebuild": {"success": "{copy} --seed 3 --ref again", "usage": "{copy} --seed three"},
    "remove": {
        "success": "{copy} --rows 3 --reason asked",
        "usage": "{copy} --rows three --reason asked",
        "missing": "{none} --rows 3 --reason asked",
        "unreachable": "{file}/x --rows 3 --reason asked",
        "damaged": "{bad} --rows 3 --reason asked",
    },
    "place": {"success": "{copy} --location mirror={out} --copies 2", "usage": "{copy} --copies none",
              "damaged": "{bad} --location mirror={out} --copies 2"},
    "replicate": {"success": "{placed}", "usage": "{placed} --jobs none", "damaged": "{lost}",
                  "no": "{lagging} --dry-run"},
    "scrub": {"usage": "{data} --time-box soon"},
    "repair": {"usage": "{data} --level deep"},
    "gc": {"usage": "{data} --grace soon"},
    "verify": {"usage": "{data} --level deep"},
    "amend": {"success": "{run} --list", "usage": "{run} --skip soon", "missing": "{none} --list",
              "unreachable": "{file}/x --list", "damaged": "{bad_run} --skip 2:3"},
    "audit": {"success": "{run} --manifest-only", "usage": "{run} --level deep", "missing": "{none}",
              "unreachable": "{file}/x", "damaged": "{bad_run}"},
    "audit diff": {"success": "{run} {run}", "usage": "{run}", "missing": "{run} {none}", "no": "{run} {other_run}"},
    "audit trace": {
        "success": "{run} --exclude {nobody} --field number",
        "usage": "{run}",
        "missing": "{none} --step 1",
        "no": "{run} --exclude {somebody} --field number",
    },
    "export": {
        "success": "{data} --as sha256sums",
        "usage": "{data} --as paper",
        "missing": "{none} --as sha256sums",
        "unreachable": "{file}/x --as sha256sums",
        "damaged": "{bad} --as sha256sums",
    },
    "plan": {"success": "{data} --global-batch 8", "usage": "{data} --global-batch eight"},
    "train": {
        "success": "{config} run.directory={out}",
        "usage": "{config} run.stepz=3",
        "missing": "{config} data.dataset={none} run.directory={out}",
        "damaged": "{config} data.dataset={bad} run.directory={out}",
        "interrupted": "{config} run.steps=1000000 run.directory={out}",
    },
    "top": {"success": "{run} --once", "usage": "{run} --interval soon", "missing": "{none} --once"},
    "dashboard": {"usage": "{run} --port none", "missing": "{none}", "interrupted": "{run}"},
    "tune": {"usage": "{data} --disk"},
    "simulate": {
        "success": f"{CLUSTER} --rows 10000 --bytes 1GB --strata 2",
        "usage": f"{CLUSTER} nodes=2",
        "missing": "{none}",
    },
}  # fmt: skip
"""Command → how it ends → its arguments. What is not given is asked of ROOT alone."""

PLAIN = {"success": "{data}", "usage": "{data} --no-such-option", "missing": "{none}", "unreachable": "{file}/x",
         "damaged": "{bad}"}  # fmt: skip

APART = {
    ("dashboard", "success"): "it ends when it is interrupted",
    ("dashboard", "damaged"): "it shows what can be read of a run",
    ("top", "damaged"): "it shows what can be read of a run",
    ("audit diff", "damaged"): "see audit: the record is the same",
    ("audit trace", "damaged"): "see audit: the record is the same",
    ("replicate", "success"): "see `world`: the placed one is what place made",
    ("simulate", "damaged"): "it opens no dataset here",
    ("tune", "success"): "takes a minute: tests/integration/test_sizing_commands.py",
}
"""Cases that a command has not, and why."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """Sources, datasets sound and damaged, with copies and without, runs and figures."""
    home = tmp_path_factory.mktemp("world")
    digits, tars = home / "data", home / "tars"
    with shardkit.create(digits, {"image": "uint8[8,8]", "label": "int64"}, stratify="label") as writer:
        for number in range(64):
            writer.add({"image": np.full((8, 8), number, np.uint8), "label": number % 2}, key=f"key-{number}")
    (home / "nobody").write_text("63\n")
    (home / "somebody").write_text("\n".join(map(str, range(60))) + "\n")
    (home / "scores").mkdir()
    scores = "".join(f"key-{number},{number}\n" for number in range(64))
    (home / "scores" / "scores.csv").write_text(f"key,score\n{scores}")
    output_of("select", str(digits), "--rows", str(home / "somebody"), "--ref", "val")
    for name in ("cat", "dog"):
        (home / "photos" / name).mkdir(parents=True)
        (home / "photos" / name / "1.png").write_bytes(PNG + name.encode())
    output_of("build", str(home / "photos"), str(home / "tarred"))
    tars.mkdir()
    shutil.copy(next((home / "tarred" / "objects").rglob("*.tar")), tars / "a.tar")
    for name in ("placed", "lagging", "lost"):
        shutil.copytree(digits, home / name)
        placing = ["--location", f"mirror={home / name}-mirror", "--copies", "2"]
        output_of("place", str(home / name), *placing)
    next((home / "lagging-mirror" / "objects").rglob("*.tar")).unlink()
    shutil.copytree(digits, home / "bad")
    for name in ("bad", "lost", "lost-mirror"):
        head = max((home / name / "log").iterdir())
        head.chmod(0o644)
        head.write_bytes(head.read_bytes().replace(b'"author"', b'"writer"'))
    config = home / "run.toml"
    config.write_text(
        f'[run]\ndirectory = "{home / "run"}"\nsteps = 4\n\n[data]\ndataset = "{digits}"\nglobal_batch = 8\n'
        'lanes = 4\n\n[model]\nkind = "classifier"\nwidth = 8\nstages = 1\n'
    )
    for name, seed, data in (("run", 0, "placed"), ("other_run", 1, "data")):
        settings = [
            f"run.directory={home / name}", "run.steps=4", f"data.dataset={home / data}", f"data.seed={seed}",
            "data.global_batch=8", "data.lanes=4", "model.kind=classifier", "model.width=8", "model.stages=1",
        ]  # fmt: skip
        done = launch_forked(1, settings, os.environ, tmp_path_factory.mktemp("trainer") / "said")
        assert done.returncode == 0, done.stderr
    shutil.copytree(home / "run", home / "bad_run")
    for journal in (home / "bad_run").rglob("steps*"):
        journal.chmod(0o644)
        journal.write_bytes(bytes(byte ^ 255 for byte in journal.read_bytes()))
    (home / "file").write_text("a file\n")
    return {"home": home, "config": config, **{path.name: path for path in home.iterdir()}}


def interrupt_at(place: str) -> Callable[[], None]:
    """Makes the process interrupt itself when it first touches that place."""

    def install() -> None:
        events, is_due = (
            {"open", "os.listdir", "os.scandir", "os.mkdir", "tempfile.mkdtemp", "socket.bind"},
            True,
        )

        def interrupt(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal is_due
            if is_due and event in events and any(place in str(argument) for argument in arguments):
                is_due = False
                os.kill(os.getpid(), signal.SIGINT)

        sys.addaudithook(interrupt)

    return install


def arguments_of(name: str, case: str, world: dict[str, Path | str], tmp_path: Path) -> list[str]:
    """As they are typed; {copy} and {out} are the case's own."""
    cases = CASES[name]
    if case == "interrupted":
        text = cases.get(case) or cases.get("success") or PLAIN["success"]
    else:
        text = cases[case] if case in cases else PLAIN[case]
    own: dict[str, Path | str] = {"copy": tmp_path / "copy", "out": tmp_path / "out", "none": tmp_path / "none",
                                  "key": "key-3"}  # fmt: skip
    if "{copy}" in text:
        shutil.copytree(world["data"], tmp_path / "copy")
    if "{bad}" in text:
        own["bad"] = Path(shutil.copytree(world["bad"], tmp_path / "bad"))
    return [*name.split(), *text.format_map({**world, **own}).split()]


ALL = [*sorted(EVERY), "audit diff", "audit trace"]


def cases() -> list[tuple[str, str]]:
    listed = []
    for name in ALL:
        asked = dict.fromkeys(["success", "usage", "missing", "damaged", *CASES[name]])
        if "missing" not in CASES[name] and "success" not in CASES[name]:
            asked["unreachable"] = None
        listed += [(name, case) for case in asked if (name, case) not in APART and case != "interrupted"]
    return listed


def test_the_table_has_every_command() -> None:
    assert {name.split()[0] for name in CASES} == EVERY
    assert {case for cases in CASES.values() for case in cases} <= {*CODES, "missing row"}
    assert {name for name, _ in APART} <= set(CASES)


@pytest.mark.parametrize(("name", "case"), cases())
def test_a_command_ends_with_the_code_of_the_table(
    name: str, case: str, world: dict[str, Path | str], tmp_path: Path
) -> None:
    arguments = arguments_of(name, case, world, tmp_path)
    expected = CODES.get(case, 1)
    if case in ("missing", "unreachable") and name in CHECKS:
        expected = 3
    if name == "train":
        environment = {**os.environ, OUTPUT: str(tmp_path / "said")}
        code = Forked(become_command, arguments, environment=environment).wait(300) or 0
        told = "".join(path.read_text() for path in tmp_path.glob("said.*"))
    else:
        code, told = call(*arguments)
    assert code == expected, (arguments, told)
    assert "Traceback" not in told
    assert told or code == 0, "what is no success says why"


OUT_OF_RANGE = [
    "plan {data} --global-batch 0",
    "plan {data} --global-batch 8 --seed -1",
    "plan {data} --global-batch 8 --lanes 0",
    "plan {data} --global-batch 8 --window-blocks 99999999999999999999",
    "plan {data} --global-batch 8 --step -1",
    "plan {data} --global-batch 8 --step 0 --lane 99",
    "plan {data} --global-batch 8 --remainder some",
    "plan {data} --global-batch 8 --shuffle some",
    "plan {data} --global-batch 8 --weights [",
    "plan {data} --nodes 0",
    "build {photos} {out} --compression zstd:99",
    "rebuild {data} --compression lz4",
    "replicate {placed} --bandwidth=",
    "scrub {data} --between=",
    f"simulate {CLUSTER} --rows 99999999999999999999",
]


@pytest.mark.parametrize("typed", OUT_OF_RANGE)
def test_a_value_out_of_range_is_a_wrong_command_line(
    typed: str, world: dict[str, Path | str], tmp_path: Path
) -> None:
    output_of(*typed.format_map({**world, "out": tmp_path / "out"}).split(), code=2)


class _ReadOnlyMount(FileOperations):
    def create_file(self, parent: Handle, name: str) -> Handle:
        raise OSError(errno.EROFS, "Read-only file system", name)


@pytest.mark.parametrize("command", ["scrub", "repair"])
def test_a_check_that_cannot_write_what_it_finds_has_not_done_its_work(
    command: str, world: dict[str, Path | str], tmp_path: Path
) -> None:
    copy = shutil.copytree(world["data"], tmp_path / "copy")
    with substituted(_ReadOnlyMount()):
        told = output_of(command, copy, code=1)
    assert re.search(r"^shardkit: cannot [^\n]*mounted read-only; mount it for writing", told, re.MULTILINE)


SERVING = ("dashboard",)


@pytest.mark.parametrize("name", [name for name in ALL if name not in SERVING])
def test_an_interrupted_command_ends_with_130_and_a_word(
    name: str, world: dict[str, Path | str], tmp_path: Path
) -> None:
    arguments = arguments_of(name, "interrupted", world, tmp_path)
    place = "lab-8" if name == "simulate" else os.path.commonpath([world["home"], tmp_path])
    code, out, err = ForkedCommand(*arguments, before=interrupt_at(place)).ended()
    assert code == 130, (arguments, out, err)
    assert "interrupted" in err + out
    assert "Traceback" not in err


@pytest.mark.parametrize("name", SERVING)
def test_what_serves_until_it_is_interrupted_ends_with_130(
    name: str, world: dict[str, Path | str], tmp_path: Path
) -> None:
    program = [
        sys.executable,
        "-u",
        "-m",
        "shardkit_tools",
        *arguments_of(name, "interrupted", world, tmp_path),
    ]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("Ctrl-C ends it" in line for line in process.stdout)
        time.sleep(1)  # until it listens, or a moment before: both end alike
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "interrupted" in told
    assert "Traceback" not in told
