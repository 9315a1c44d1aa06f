"""`shardkit audit`: clean runs pass, and what differs is named; tests/faults/test_tampering.py has the table."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.audit import Audit, audit_run
from shardkit.ledger import Journal, Ledger, ledger_head
from shardkit.ledger.journal import HEADER
from shardkit.ledger.ledger import step_digest
from shardkit.stores.store import object_name
from tests.command_line import document_of, output_of, typed
from tests.consumed_steps import batches_until
from tests.faults.audit_ranks import save_checkpoint
from tests.journal_cells import record_cells

BATCH, LANES, STEPS = 20, 4, 60
SETTINGS = {"global_batch": BATCH, "lanes": LANES, "seed": 5}
ROWS = 403


def build(root: Path, *, changed: int | None = None, block_size: str = "1KiB") -> str:
    schema = {"value": "int64", "label": "int64"}
    with shardkit.create(
        str(root), schema=schema, stratify="label", format="tar", shard_size="64KiB", block_size=block_size
    ) as writer:
        for number in range(ROWS):
            value = -1 if number == changed else number
            writer.add(
                {"value": value, "label": number % 3}, key=f"n{number}", source=("numbers.csv", number)
            )
    return str(root)


def consume(root: str, run: Path, first: int, last: int, world: int = 1, **settings: Any) -> None:
    dataset = shardkit.open(root)
    plan = dataset.plan(**(SETTINGS | settings))
    for rank in range(world):
        with dataset.loader(plan, rank=rank, world=world, run=run, tensors=False) as loader:
            loader.seek(first)
            for _ in batches_until(loader, last):
                pass


def save(run: Path, step: int, root: str) -> None:
    dataset = shardkit.open(root)
    plan = dataset.plan(**SETTINGS).digest
    save_checkpoint(run, step, dataset.manifest.id, plan, ledger_head(run, step))


def write_settings(run: Path, root: str, **changed: Any) -> None:
    dataset = shardkit.open(root)
    plan = dataset.plan(**SETTINGS)
    data = {"dataset": root, "parts": {}, "weights": {}, "window_blocks": 0, **SETTINGS, **changed}
    record = {"format": "shardkit-run", "version": 1, "configuration": {"data": data},
              "manifest": dataset.manifest.id, "plan": plan.digest, "software": {"shardkit": "0.1.0"}}  # fmt: skip
    (run / "run.json").write_text(json.dumps(record))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and run/: 60 steps on two ranks, restarted once on one rank, two checkpoints."""
    home = tmp_path_factory.mktemp("model")
    root, run = build(home / "data"), home / "run"
    consume(root, run, 0, 30, world=2)
    save(run, 20, root)
    consume(root, run, 20, STEPS)
    save(run, 50, root)
    write_settings(run, root)
    return home


@pytest.fixture
def home(model: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "home"
    shutil.copytree(model, copy)
    settings = json.loads((copy / "run" / "run.json").read_text())
    settings["configuration"]["data"]["dataset"] = str(copy / "data")
    (copy / "run" / "run.json").write_text(json.dumps(settings))
    return copy


def named(audit: Audit, *words: str, code: int = 4) -> None:
    """The audit ends with `code`, and one of its findings of that severity names all the words."""
    assert audit.exit_code == code, audit.findings
    severity = {0: "explained", 4: "violated", 3: "unknown"}[code]
    texts = [f"{one.kind} {one.subject} {one.text}" for one in audit.findings if one.severity == severity]
    assert any(all(word in text for word in words) for text in texts), texts


# ---- clean


def test_a_clean_run_is_clean_in_every_respect(home: Path) -> None:
    audit = audit_run(home / "run")
    assert audit.exit_code == 0, audit.findings
    assert (audit.first, audit.steps, audit.checked, audit.samples) == (0, STEPS, STEPS, STEPS * BATCH)
    assert [(name, fits) for name, _, fits in audit.checkpoints] == [
        ("step-000000000020", True), ("step-000000000050", True),
    ]  # fmt: skip
    assert [(one.epoch, one.last - one.first, one.is_whole, one.is_exact) for one in audit.coverage] == [
        (0, 20, True, True), (1, 20, True, True), (2, 20, True, True),
    ]  # fmt: skip
    assert {one.kind for one in audit.findings} == {"restart", "settings"}
    assert audit.bound_checkpoints == 2
    assert audit.verified is not None
    assert audit.verified["shards_seen"] == audit.verified["shards"] > 1


def test_the_audit_changes_nothing(home: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    audit_run(home / "run")
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def test_a_run_without_settings_of_a_trainer_is_checked_by_the_ledger_alone(home: Path) -> None:
    (home / "run" / "run.json").unlink()
    audit = audit_run(home / "run", dataset=str(home / "data"))
    assert audit.exit_code == 0, audit.findings
    assert audit.checked == STEPS


def test_a_dataset_that_is_gone_cannot_be_checked(home: Path) -> None:
    shutil.rmtree(home / "data")
    named(audit_run(home / "run"), "manifest", "--dataset", code=3)


def test_a_ledger_forged_throughout_contradicts_checkpoints_and_plan(home: Path, tmp_path: Path) -> None:
    """Somebody hides step 12 in a ledger that is whole in itself: trees and state all fit."""
    run = home / "run"
    dataset = shardkit.open(str(home / "data"))
    plan = dataset.plan(**SETTINGS)
    for name in ("ledger", "journal"):
        shutil.rmtree(run / name)
    with closing(Journal(run / "journal", manifest=dataset.manifest.id, plan=plan.digest, rank=0, world=1, lanes=LANES,
                 meta={"history": plan.history(), "dataset": [str(home / "data")]})) as journal:  # fmt: skip
        for step in range(STEPS):
            cells = plan.step(step) if step != 12 else plan.step(13)
            record_cells(journal, step, list(enumerate(cells)))
    ledger_head(run)
    audit = audit_run(run, level=None)
    named(audit, "step 12", "consumed other samples")
    named(
        audit, "checkpoint step-000000000050", "the ledger was changed, or this checkpoint is of another run"
    )


# ---- tampering: data, settings, checkpoints


def test_a_swapped_shard(home: Path) -> None:
    shards = sorted((home / "data" / "objects").rglob("*.tar"))
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    for path, data in ((shards[0], second), (shards[1], first)):
        path.chmod(0o644)
        path.write_bytes(data)
    named(audit_run(home / "run"), shards[0].name)
    named(audit_run(home / "run"), shards[1].name)


def test_a_manifest_with_one_changed_byte(home: Path) -> None:
    for suffix in ("page", "manifest"):
        path = next((home / "data" / "objects").rglob(f"*.{suffix}"))
        clean = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(clean[:-2] + bytes([clean[-2] ^ 1]) + clean[-1:])
        named(audit_run(home / "run", level=None), "manifest", path.stem[:12])
        path.write_bytes(clean)


# ---- deviations that are explained


@pytest.mark.parametrize(("on_error", "kind"), [("substitute", "substituted"), ("mask", "masked")])
def test_what_a_loader_substitutes_or_masks_is_explained(tmp_path: Path, on_error: Any, kind: str) -> None:
    """A real loader over rows of which one does not decode: its own record accounts for the digests."""
    root, run = tmp_path / "data", tmp_path / "run"
    with shardkit.create(root, {"x": "bytes"}) as writer:
        for number in range(40):
            writer.add({"x": b"{" if number == 7 else b'{"n": %d}' % number})
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=8, lanes=4, seed=2)
    with dataset.loader(
        plan, rank=0, world=1, run=run, tensors=False, decode={"x": "json"}, on_error=on_error
    ) as loader:
        handed_out = [int(one) for batch in loader for one in batch.samples]
    (bad,) = (number for number in range(40) if dataset[number]["x"] == b"{")
    assert (bad in handed_out) == (on_error == "mask")
    audit = audit_run(run, level=None)
    assert audit.exit_code == 0, audit.findings
    (one,) = (finding for finding in audit.findings if finding.severity == "explained")
    step, lane, slot = plan.locate(bad) or (-1, -1, -1)
    assert (one.kind, one.subject) == (kind, f"step {step} lane {lane} slot {slot}")


# ---- the command


def command(*arguments: object) -> tuple[int, str]:
    code, out, _ = typed("audit", *arguments)
    return code, out


def test_the_command_prints_a_page_json_and_html(home: Path) -> None:
    run, page = str(home / "run"), home / "audit.html"
    code, out = command(run, "--html", str(page), "--jobs", "1")
    assert code == 0
    assert "clean" in out
    assert "2 of 2 hold a head of this ledger" in out
    code, out = command(run, "--json", "--level", "list")
    document = json.loads(out)
    assert (code, document["exit_code"], document["steps"]) == (0, 0, STEPS)
    assert document["coverage"][0]["exact"] is True
    text = page.read_text()
    assert "Clean" in text
    assert "<script" not in text
    assert "src=" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_what_the_html_page_shows_is_escaped(home: Path) -> None:
    from shardkit.audit import Finding, html_report

    audit = audit_run(home / "run", level=None)
    audit.findings.append(Finding("violated", "x", "<script>alert(1)</script>", "<img src=x>"))
    text = html_report(audit)
    assert "<script" not in text
    assert "<img" not in text


# ---- diff


def test_diff_of_equal_runs_on_other_ranks(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    consume(str(home / "data"), other, 0, 25, world=4)
    code, out = command("diff", str(home / "run"), str(other))
    assert code == 0
    assert "the same samples at all 25 steps" in out


def test_diff_names_the_setting_and_the_first_step(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    consume(str(home / "data"), other, 0, 25, seed=6)
    code, out = command("diff", str(home / "run"), str(other), "--json")
    document = json.loads(out)
    assert code == 5
    assert document["diverges"] == 0
    assert document["settings"] == {"seed": [5, 6]}
    assert document["cells"]


def test_diff_names_the_shards_of_another_manifest(home: Path, tmp_path: Path) -> None:
    root, other = build(tmp_path / "changed", changed=17), tmp_path / "other"
    consume(root, other, 0, 25)
    code, out = command("diff", str(home / "run"), str(other), "--json")
    document = json.loads(out)
    assert code in (0, 5)
    assert document["manifests"]["only_a"] == document["manifests"]["only_b"] >= 1
    assert document["manifests"]["shared"] >= 1
    assert document["manifests"]["examples_a"]


def test_diff_knows_rebuilt_data_with_equal_content(tmp_path: Path) -> None:
    schema = {"value": "int64", "label": "int64"}
    for compression in ("none", "zstd"):
        root = str(tmp_path / f"data-{compression}")
        with shardkit.create(root, schema=schema, stratify="label", shard_size="64KiB", block_size="1KiB",
                             format="arrow", compression=compression) as writer:  # fmt: skip
            for number in range(ROWS):
                writer.add({"value": number, "label": number % 3}, key=f"n{number}")
        consume(root, tmp_path / compression, 0, 25)
    _, out = command("diff", str(tmp_path / "none"), str(tmp_path / "zstd"), "--json")
    document = json.loads(out)
    assert document["content"] == [BATCH, BATCH]
    assert document["diverges"] is None
    assert "rebuilt data" in document["reasons"][-1]


@pytest.mark.parametrize("changed", [None, 17])
def test_diff_follows_both_runs_through_changes_of_their_plans(tmp_path: Path, changed: int | None) -> None:
    """Over the same data, and over data with one other sample."""
    roots = [build(tmp_path / "a"), build(tmp_path / "b", changed=changed)]
    changes: list[dict[str, Any]] = [{}, {"weights": {"1": 3}}]
    for root, run, more in zip(roots, ("one", "other"), changes, strict=True):
        dataset = shardkit.open(root)
        first = dataset.plan(**SETTINGS)
        for plan, begin, end in ((first, 0, 10), (first.amend(from_step=10, skip=(10, 12), **more), 10, 20)):
            with dataset.loader(plan, rank=0, world=1, run=tmp_path / run, tensors=False) as loader:
                loader.seek(begin)
                for _ in batches_until(loader, end):
                    pass
    for run, step in (("one", None), ("other", 10)):
        document = document_of(
            "audit", "diff", str(tmp_path / "one"), str(tmp_path / run), code=0 if step is None else 5
        )
        assert document["diverges"] == step
        assert (document["cells"] == []) == (step is None)
    assert "stages" in document["settings"]


# ---- trace


def test_trace_of_a_sample_names_epoch_step_lane_rank_and_checkpoint(home: Path) -> None:
    dataset = shardkit.open(str(home / "data"))
    plan = dataset.plan(**SETTINGS)
    sample = int(plan.step(25)[3, 2])
    for asked in (str(sample), dataset.key(sample)):
        code, out = command("trace", str(home / "run"), "--sample", asked, "--json")
        uses = json.loads(out)["uses"]
        places = [(one["step"], one["lane"], one["slot"]) for one in uses]
        expected = [
            (step, *map(int, np.argwhere(plan.step(step) == sample)[0]))
            for step in range(STEPS)
            if sample in plan.step(step)
        ]
        assert (code, places) == (0, expected)
        by_step = {one["step"]: one for one in uses}
        assert by_step[25]["ranks"] == [
            1,
            0,
        ]  # rank 1 of 2, and again rank 0 alone after the restart at step 20
        assert by_step[25]["checkpoint"] == "step-000000000050"


def test_trace_of_a_step_says_where_its_bytes_came_from(home: Path) -> None:
    dataset = shardkit.open(str(home / "data"))
    plan = dataset.plan(**SETTINGS)
    _, out = command("trace", str(home / "run"), "--step", "7", "--json")
    samples = json.loads(out)["samples"]
    assert [one["sample"] for one in samples] == plan.step(7).ravel().tolist()
    for one in samples[:5]:
        assert one["key"] == dataset.key(one["sample"]) == f"n{one['source'][1]}"
        assert one["source"][0] == "numbers.csv"
        assert (home / "data" / object_name(one["shard"], "tar")).exists()
    code, _ = command("trace", str(home / "run"), "--step", str(STEPS), "--json")
    assert code == 3


@pytest.mark.parametrize("many", [False, True])
def test_trace_of_a_list_proves_that_none_was_used(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    many: bool,
) -> None:
    from shardkit.audit import trace

    monkeypatch.setattr(trace, "_MANY", 0 if many else 1000)
    dataset = shardkit.open(str(home / "data"))
    plan = dataset.plan(**SETTINGS)
    run = tmp_path / "short"
    consume(str(home / "data"), run, 0, 10)
    used = set(plan.steps(0, 10).ravel().tolist())
    unused = [sample for sample in range(ROWS) if sample not in used]
    listed = tmp_path / "list"
    listed.write_text("".join(f"{dataset.key(sample)}\n" for sample in unused) + "elsewhere\n")
    for more, expected in (([], 5), (["--allow-absent"], 0)):
        code, out = command("trace", str(run), "--exclude", str(listed), *more, "--json")
        document = json.loads(out)
        assert (code, document["uses"], document["absent"]) == (expected, [], ["elsewhere"])
        assert document["in_dataset"] == unused
    listed.write_text(f"{unused[0]}\n{plan.cell(4, 1)[2]}\n")
    code, out = command("trace", str(run), "--exclude", str(listed), "--field", "number", "--json")
    document = json.loads(out)
    assert code == 5
    assert [(one["step"], one["lane"], one["slot"]) for one in document["uses"]] == [(4, 1, 2)]


def test_trace_of_a_list_of_numbers_takes_them_for_sample_numbers(home: Path, tmp_path: Path) -> None:
    listed, run = tmp_path / "list", str(home / "run")
    used = shardkit.open(str(home / "data")).plan(**SETTINGS).cell(4, 1).tolist()
    listed.write_text("".join(f"{sample}\n" for sample in used))
    code, out = command("trace", run, "--exclude", str(listed), "--json")
    document = json.loads(out)
    assert (code, document["field"], document["used"]) == (5, "number", sorted(used))
    assert document["answer"] == "these were used"


@pytest.mark.parametrize(
    ("lines", "field", "taken"),
    [
        ("elsewhere\nnowhere\n", None, "key"),
        (f"{ROWS}\n{ROWS + 7}\n", None, "number"),
        ("17\n18\n", "key", "key"),
    ],
)
def test_a_list_of_which_nothing_is_there_proves_nothing(
    home: Path, tmp_path: Path, lines: str, field: str | None, taken: str
) -> None:
    listed = tmp_path / "list"
    listed.write_text(lines)
    more = ["--field", field] if field else []
    code, out = command("trace", str(home / "run"), "--exclude", str(listed), *more)
    assert code == 5
    assert f"nothing of the list is in the dataset, taken as {taken}: this proves nothing" in out
    assert "ever used" not in out


def test_a_list_that_may_be_of_keys_or_of_numbers_is_asked_about(tmp_path: Path) -> None:
    root, run, listed = tmp_path / "data", tmp_path / "run", tmp_path / "list"
    with shardkit.create(root, {"value": "int64"}) as writer:
        for number in range(60):
            writer.add({"value": number}, key=str((number + 30) % 60))
    dataset = shardkit.open(root)
    with dataset.loader(dataset.plan(**SETTINGS), rank=0, world=1, run=run, tensors=False) as loader:
        next(iter(loader))
    listed.write_text("3\n4\n")
    code, _ = command("trace", str(run), "--exclude", str(listed))
    assert code == 2
    for field in ("key", "number"):
        code, out = command("trace", str(run), "--exclude", str(listed), "--field", field, "--json")
        assert len(json.loads(out)["in_dataset"]) == 2
        assert code in (0, 5)
    listed.write_text("3\nfour\n")
    code, _ = command("trace", str(run), "--exclude", str(listed), "--field", "number")
    assert code == 2


def test_nothing_is_proven_from_a_record_that_is_not_sound(home: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text(f"{shardkit.open(str(home / 'data')).key(0)}\n")
    path = home / "run" / "ledger" / "steps"
    path.write_bytes(path.read_bytes()[:-30] + b"?" * 30)
    code, _ = command("trace", str(home / "run"), "--exclude", str(listed))
    assert code == 4


# ---- amended plans


@pytest.mark.parametrize("settings", [{"group_by": {"0": 4, "*": 8}}, {"sequence": 64, "global_batch": 4}])
def test_grouped_and_joined_plans_are_checked(tmp_path: Path, settings: dict[str, Any]) -> None:
    root, run = tmp_path / "data", tmp_path / "run"
    with shardkit.create(root, {"tokens": "int32[16]", "kind": "int64"}, stratify="kind") as writer:
        for number in range(600):
            writer.add({"tokens": [number] * 16, "kind": number % 3})
    dataset = shardkit.open(root)
    arguments = {"global_batch": 16, "lanes": 4, "seed": 3} | settings
    if "sequence" in settings:
        arguments["sequence"] = 64
    plan = dataset.plan(**arguments)
    with dataset.loader(plan, rank=0, world=1, run=run, tensors=False) as loader:
        for _ in range(2):
            for batch in loader:
                step = batch.step
    audit = audit_run(run, level=None)
    assert audit.exit_code == 0, audit.findings
    assert (audit.steps, audit.checked) == (step + 1, step + 1)
    other = plan.cell(step, 0)[0] - 1  # one sample of the last step was another one
    journal_says(run, dataset, plan, step + 1, changed=int(other))
    assert audit_run(run, level=None).exit_code == 4


def journal_says(run: Path, dataset: shardkit.Dataset, plan: Any, step: int, *, changed: int) -> None:
    """One more step in the journal of a rank 0, with another first sample than the plan's."""
    cells = plan.step(step).copy()
    cells[0, 0] = changed
    meta = {"history": plan.history(), "dataset": [dataset.repository.url]}
    journal = Journal(run / "journal", manifest=dataset.manifest.id, plan=plan.digest, rank=0, world=1,
                      lanes=plan.lanes, meta=meta)  # fmt: skip
    with closing(journal):
        record_cells(journal, step, [(lane, cell[cell >= 0]) for lane, cell in enumerate(cells)])


# ---- events


def test_stages_and_failovers_are_events_of_the_ledger(tmp_path: Path) -> None:
    """A mirror takes over where the root has lost its shards: noted by the audit, which stays clean."""
    root, mirror, run = tmp_path / "data", tmp_path / "mirror", tmp_path / "run"
    build(root)
    shutil.copytree(root, mirror)
    lost = list((root / "objects").rglob("*.tar"))
    for path in lost:
        path.unlink()
    dataset = shardkit.open(root, locations={"mirror": str(mirror)})
    plan = dataset.plan(**SETTINGS, weights={"0": 2}, stages=[(7, {"1": 5}), (15, None)])
    with dataset.loader(plan, rank=0, world=1, run=run, tensors=False) as loader:
        for _ in batches_until(loader, 20):
            pass
    audit = audit_run(run, level=None)
    assert audit.exit_code == 0, audit.findings
    stages = [one.subject for one in audit.findings if one.kind == "stage"]
    assert stages == ["step 7", "step 15"]
    reads = [one for one in audit.findings if one.kind in ("missing", "failover", "location_lost")]
    assert lost
    assert reads
    assert all(one.severity == "note" for one in reads)


# ---- lineage


def test_show_lineage_leads_from_a_sample_to_its_source(home: Path) -> None:
    root = str(home / "data")
    number = int(shardkit.open(root)[11]["value"])
    for asked in ("11", f"n{number}"):
        document = document_of("show", root, "--lineage", "--sample", asked)
        assert (document["sample"], document["source"]["name"]) == (11, "numbers.csv")
        assert document["source"]["row"] == number
    text = output_of("show", root, "--sample", "11")
    assert f"numbers.csv, row {number}" in text
    assert "made with" in text


# ---- replay in processes


def test_replay_in_processes_gives_the_same_digests(home: Path) -> None:
    code = f"""
if __name__ == "__main__":
    import shardkit
    from shardkit.audit.replay import replay
    ds = shardkit.open({str(home / "data")!r})
    plan = ds.plan(**{SETTINGS!r}, remainder="short")
    results = []
    for jobs in (1, 3):
        coverage = []
        chunks = replay(plan, 5, 70, jobs=jobs, coverage=coverage)
        steps = [(c.first, c.digests.tobytes(), c.rows.tolist()) for c in chunks]
        results.append((b"".join(one[1] for one in steps), [n for one in steps for n in one[2]], coverage))
    assert results[0] == results[1]
    assert sum(results[0][1]) == sum(int((plan.step(k) >= 0).sum()) for k in range(5, 70))
    assert [c.is_exact for c in results[0][2]] == [True] * 4 and results[0][2][1].remainder == 0
"""
    script = home / "replay.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_step_digest_is_what_the_specification_says(home: Path) -> None:
    import hashlib
    import struct

    dataset = shardkit.open(str(home / "data"))
    plan = dataset.plan(**SETTINGS)
    cells = b"".join(hashlib.sha256(cell.astype("<i8").tobytes()).digest()[:16] for cell in plan.step(9))
    text = bytes.fromhex(dataset.manifest.id[7:]) + bytes.fromhex(plan.digest) + struct.pack("<Q", 9) + cells
    with Ledger(home / "run") as ledger:
        assert ledger.digest_of(9) == hashlib.sha256(text).digest()
    assert step_digest(dataset.manifest.id, plan.digest, 9, cells) == hashlib.sha256(text).digest()


def test_a_start_that_was_killed_before_its_first_entry_is_no_start(tmp_path: Path) -> None:
    root, run = build(tmp_path / "data"), tmp_path / "run"
    consume(root, run, 0, 3, 2)
    consume(root, tmp_path / "killed", 3, 4, 1)
    (journal,) = (tmp_path / "killed" / "journal").glob("*")
    for number, length in ((7, HEADER.size), (8, HEADER.size + 20)):  # only a header; a part of an entry
        (run / "journal" / f"00000-{number:05d}.cells").write_bytes(journal.read_bytes()[:length])
    consume(root, run, 3, 6, 4)
    audit = audit_run(run)
    assert (audit.exit_code, [start["ranks"] for start in audit.starts]) == (0, [2, 4]), audit.findings
