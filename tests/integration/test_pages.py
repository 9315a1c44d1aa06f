"""Pages, guides, notebooks and the demo run as printed, and say what they promise."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import ShardkitError
from tests.command_line import ForkedCommand, call
from tests.drills import drill_cases
from tests.integration.forked import OUTPUT, Forked, become_program
from tests.servers.object_stores import moto, s3_environment

# ---- Pages of docs from top to bottom in an empty folder: commands end as a page says and print what it shows


DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each command of a console block, its exit code, and the lines that the page shows of its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        command, _, remark = line.partition("#")
        code = re.search(r"exit code (\d+)", remark)
        yield command.strip(), int(code[1]) if code else 0, shown


def shape(line: str) -> str:
    """Return a line without what differs between machines: sizes, times, rates, digests and widths."""
    line = re.sub(r"sha256:[0-9a-f]+…?|\b[0-9a-f]{16,}\b", "DIGEST", line)
    line = re.sub(r"[\d.]+ (?:[KMG]i)?B(?:/s)?\b|[\d.]+ m?s\b", "AMOUNT", line)
    return " ".join(line.split())


def test_shape_keeps_counts_and_drops_measurements() -> None:
    assert shape("read  366 KiB in 300 ms, 1.19 MiB/s") == "read AMOUNT in AMOUNT, AMOUNT"
    assert shape("split val    48 samples, sha256:e513e1225e0e…") == "split val 48 samples, DIGEST"
    assert shape("epoch 0  552 samples of 552") != shape("epoch 0  551 samples of 552")


WARM = {"training_programs"}
"""Pages whose programs cost imports, and start no processes of their own: they are forked with torch in them."""


def run_command(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str, str]:
    """Exit code and outputs of a command in a folder; programs are forked, with their common imports done."""
    if words[0] == "shardkit" and words[1] != "train":

        def enter() -> None:
            os.chdir(folder)
            os.environ.update(environment)

        return ForkedCommand(*words[1:], before=enter).ended()
    if words[0] == "python" and folder.name in WARM:
        output = folder / ".said"
        code = Forked(
            become_program, folder, words[1:], environment={**environment, OUTPUT: str(output)}
        ).wait(600)
        said = [Path(f"{output}.{kind}").read_text(encoding="utf-8") for kind in ("out", "err")]
        for kind in ("out", "err"):
            Path(f"{output}.{kind}").unlink()
        return code, said[0], said[1]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run_page(page: Path, folder: Path, **variables: str) -> int:
    """Run the commands of a page in a folder, in order, and return their number."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "COLUMNS": "120",
        "NO_COLOR": "1",
    } | variables
    ran = 0
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        if language != "console":
            continue
        for command, expected_code, shown in commands(text):
            code, out, err = run_command(shlex.split(command), folder, environment)
            assert code == expected_code, f"{command}\n{out}{err}"
            printed = iter([shape(line) for line in out.splitlines()])
            for line in shown:
                if line != "…":
                    expected = shape(line.removeprefix("…"))
                    assert any(one.endswith(expected) for one in printed), f"{command}: {line}\n{out}"
            ran += 1
    return ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "packages", "number"),
    [
        ("tutorial", ("torch", "PIL"), 8),
        ("dataloader_workers", ("torch",), 3),
        ("transforms", ("torch",), 3),
        ("own_stores_and_sources", ("fsspec",), 6),
        ("upgrades", (), 6),
        ("trackers", ("mlflow",), 2),
        ("training_programs", ("accelerate", "transformers", "pytorch_lightning"), 7),
    ],
)
def test_a_page_runs_and_prints_what_it_shows(
    page: str, packages: tuple[str, ...], number: int, tmp_path: Path
) -> None:
    for package in packages:
        pytest.importorskip(package)
    folder = tmp_path / page
    folder.mkdir()
    assert run_page(DOCS / f"{page}.md", folder) == number


@pytest.mark.slow
def test_the_page_of_object_stores_runs_on_a_bucket(tmp_path: Path) -> None:
    for package in ("moto", "obstore", "boto3", "PIL"):
        pytest.importorskip(package)
    with moto("my-bucket") as endpoint:
        assert run_page(DOCS / "object_stores.md", tmp_path, **s3_environment(endpoint)) == 5


# ---- Every guide runs to its end, says what it promises, and leaves nothing behind


GUIDES = Path(__file__).parents[2] / "examples" / "guides"
ALL = sorted({path.stem for path in GUIDES.glob("*.py")} - {"guide_shell"} - {"ray_train"})
# Ray waits minutes for the workers that this guide kills
NAMES = drill_cases([*ALL, "ray_train"], range(len(ALL)))
NEEDS = {
    "clips_of_videos": ("torchcodec",),
    "images_from_s3": ("moto", "PIL", "obstore"),
    "ray_train": ("ray", "torch"),
    "training_on_images": ("PIL", "sklearn", "torch"),
    "tokens_for_language_models": ("tokenizers",),
}
SAYS = {
    "clips_of_videos": r"\(4, 8, 3, 32, 32\) uint8; each frame over the one before: 4 levels(?s:.*): the same clips",
    "images_from_s3": r"after epoch 0: ([\d,]+) bytes came from the bucket\nafter epoch 1: \1 bytes",
    "tokens_for_language_models": r"share of web: 0\.750 before step 40, 0\.500 after",
    "training_on_images": r"held out: 0\.[6-9]\d(?s:.*)resumed: the same weights",
    "costs_of_packed_rows": r"Cost squares\(boundaries\): dearest rank(?s:.*)rows of \d+ documents on rank 0 of 8",
    "costs_of_pictures": r"step 2: \d+ patches on rank 0 of 4",
    "migrating": r"data/from-mds: 300 samples",
    "elastic_training": r"read ahead by 3 and thrown away: the same 60 batches, the same weights",
    "ray_train": r"runs/ray: clean: the run consumed exactly(?s:.*)workers of each start: 2 1 (?:2 )?3",
    "quorums_of_torchft": r"24 steps in 25 tries with 6 quorums: every step is the plan's",
    "auditing": r"runs/b: clean: the run consumed exactly what its plan says(?s:.*)runs/c: violated",
    "copies_and_parity": r"missing +parity(?s:.*)data/cats: clean",
    "operating_a_cluster": r"lag: 0 bytes below policy(?s:.*)clean: the run consumed exactly what its plan says",
    "virtual_epochs": r"epoch 3: trained to step 19, validated on steps \[0, 1, 2\]\n640 rows, 640 of them different",
}


def test_every_guide_is_listed_and_checked() -> None:
    page = (GUIDES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.py\)", page)) == {*ALL, "ray_train"} == set(SAYS)


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.timeout(1000)  # longer than the limit of the program: Ray waits a minute for lost workers
@pytest.mark.parametrize("name", NAMES)
def test_a_guide_runs(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    private = {n: v for n, v in os.environ.items() if not n.startswith("AWS_") and n != "BUCKET"}
    private["RAY_TMPDIR"] = "/tmp"  # paths of sockets are short
    # Ray looks for lost machines every second, and waits 15 s for those that it has not missed yet.
    private |= {"RAY_health_check_period_ms": "1000", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(GUIDES / f"{name}.py")],
        env={**private, "TMPDIR": str(tmp_path), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert re.search(SAYS[name], done.stdout), done.stdout[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("shardkit-guide-*"))


# ---- The notebooks run from top to bottom in an empty folder and print the text that is stored in them


NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOK_NEEDS = {"pictures": ("PIL", "torch"), "text": ("PIL", "tokenizers")}


def printed(notebook: Any) -> list[str]:
    """Text that each cell prints; pages and pictures are left out, because they depend on versions of libraries."""
    outputs = [cell.get("outputs", ()) for cell in notebook.cells]
    return ["".join(one["text"] for one in found if one.output_type == "stream") for found in outputs]


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NOTEBOOK_NEEDS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sorted(NOTEBOOK_NEEDS))
def test_a_notebook_runs_and_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NOTEBOOK_NEEDS[name]:
        pytest.importorskip(package)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    shown = printed(notebook)
    assert sum(map(bool, shown)) > 3
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(notebook) == shown


# ---- `make demo` runs as a stranger would run it, and its claims hold


DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_builds_trains_resumes_and_proves(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, str(DEMO), "--dir", str(place)],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "with SIGKILL" in done.stdout
    assert re.search(r"resumed at step \d+ of \d+ on 1 rank", done.stdout)
    assert "data/stdlib: damaged" in done.stdout
    assert re.search(r"each as it was before; 1 block came from\s+the mirror", done.stdout)
    assert "data/stdlib: repaired" in done.stdout
    # what it claims to have proven, proven again from the files that it left
    audit = subprocess.run(
        [sys.executable, "-m", "shardkit_tools", "audit", "runs/gpt", "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    ds = shardkit.open(str(place / "data" / "stdlib"))
    assert ds.plan(global_batch=16, lanes=8).digest in audit.stdout
    assert ds.manifest.id in audit.stdout
    assert not list((place / "data" / "stdlib" / "tmp").glob("*"))
    shards = list((place / "data" / "stdlib" / "objects").rglob("*.arrow"))
    assert shards
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.stem for path in shards)


def test_the_demo_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "keep me"


# ---- The page of errors speaks of messages that there are: each heading is a part of one that a user's mistake brings


PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
HEADINGS = re.findall(r"(?m)^## (.*)$", PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def ds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shardkit.Dataset:
    monkeypatch.chdir(tmp_path)
    with shardkit.create("cats", schema={"x": "float32[4]", "label": "int64"}) as writer:
        for number in range(96):
            writer.add({"x": np.full(4, number, np.float32), "label": number % 3})
    return shardkit.open("cats")


def other_state(ds: shardkit.Dataset) -> None:
    with ds.loader(ds.plan(global_batch=32, seed=0), rank=0, world=1) as loader:
        state = loader.state_dict()
    with ds.loader(ds.plan(global_batch=32, seed=1), rank=0, world=1) as loader:
        loader.load_state_dict(state)


def wrong_sample(ds: shardkit.Dataset) -> None:
    with shardkit.create("dogs", schema=ds.schema) as writer:
        writer.add({"x": np.zeros(4, np.float32), "label": "a dog"})


def flipped(ds: shardkit.Dataset) -> None:
    plan = ds.plan(global_batch=32)
    for shard in Path("cats").rglob("*.tar"):
        shard.chmod(0o644)
        shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    with ds.loader(plan, rank=0, world=1) as loader:
        list(loader)


def said_by_command(*words: str) -> None:
    code, said = call(*words)
    if code:
        raise ShardkitError(said)


def kinds(ds: shardkit.Dataset) -> None:
    Path("mixed").mkdir()
    Path("mixed/a.csv").write_text("a,b\n1,2\n")
    Path("mixed/b.unknown").write_text("?")
    said_by_command("build", "mixed", "data")


MISTAKES: dict[str, Callable[[shardkit.Dataset], object]] = {
    "make no full step of": lambda ds: ds.plan(global_batch=512),
    "expected a divisor of the global batch": lambda ds: ds.plan(global_batch=32, lanes=7),
    "do not divide evenly over": lambda ds: ds.loader(ds.plan(global_batch=32), rank=0, world=3),
    "cannot share": lambda ds: ds.loader(ds.plan(global_batch=32), rank=0, world=1000),
    "this state belongs to": other_state,
    "a loader takes a plan": lambda ds: ds.loader(512),  # type: ignore[arg-type]
    "cannot take": wrong_sample,
    "names sha256": lambda ds: shardkit.create("cats", schema={"x": "int8"}),
    "holds files of several kinds": kinds,
    "XXH3 mismatch": flipped,
    "has no ref or tag": lambda ds: shardkit.open("cats@v9"),
    "has neither a ledger": lambda ds: said_by_command("audit", "cats"),
}


@pytest.mark.parametrize("heading", MISTAKES)
def test_a_mistake_brings_the_message(heading: str, ds: shardkit.Dataset) -> None:
    with pytest.raises(ShardkitError, match=re.escape(heading)):
        MISTAKES[heading](ds)


def test_every_heading_is_a_message() -> None:
    assert list(MISTAKES) == HEADINGS
