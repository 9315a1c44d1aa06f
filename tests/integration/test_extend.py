"""`shardkit extend`: fields in shards of their own, aligned row by row, under every command that covers a version."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.audit.auditing import audit_run
from shardkit.copies.verify import verify
from shardkit.dataset import Dataset
from shardkit.errors import (
    FormatError,
    IntegrityError,
    SampleError,
    SchemaError,
    SourceError,
    StoreError,
    UsageError,
)
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest, put_manifest
from shardkit.stores.store import object_name
from shardkit_tools.adopting import adopt
from shardkit_tools.building import extending
from shardkit_tools.building.extending import extend
from shardkit_tools.importers import ImportOptions
from tests.command_line import document_of, output_of
from tests.flips import flip

ROWS = 120
FORMATS = pytest.mark.parametrize("root", ["tar", "arrow"], indirect=True)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = str(tmp_path / "data")
    with shardkit.create(
        place, schema={"text": "str", "label": "int64"}, stratify="label", format=getattr(request, "param", "arrow"),
        shard_size=8000, block_size=1000,
    ) as writer:  # fmt: skip
        for number in range(ROWS):
            writer.add({"text": f"{number} " * 9, "label": number % 3}, key=f"k-{number}")
    return place


def table(folder: Path, numbers: Any = range(ROWS), **columns: Any) -> str:
    """A shuffled table of what `value_of` gives, and one more row if all samples are in it."""
    order = np.random.default_rng(3).permutation(list(numbers)).tolist()
    found = {
        "key": [f"k-{n}" for n in order],
        "score": [n / 2 for n in order],
        "vector": [[n, n + 1] for n in order],
    }
    pq.write_table(pa.table(found | columns), folder / "scores.parquet", row_group_size=17)
    return str(folder / "scores.parquet")


def extend_twice(root: str, folder: Path) -> None:
    extend(root, from_=table(folder))
    again = ImportOptions(columns=("key", "score"), rename={"score": "second"})
    extend(root, from_=table(folder), options=again)


def number_of(dataset: Dataset, sample: int) -> int:
    return int(dataset.key(sample).removeprefix("k-"))


def check(dataset: Dataset) -> None:
    for place in range(len(dataset)):
        number, sample = number_of(dataset, place), dataset[place]
        assert (sample["text"], sample["label"], sample["score"]) == (
            f"{number} " * 9,
            number % 3,
            number / 2,
        )
        assert sample["vector"].tolist() == [number, number + 1]


@FORMATS
def test_samples_batches_and_tables_have_old_and_new_fields(root: str, tmp_path: Path) -> None:
    before = shardkit.open(root)
    made = extend(root, from_=table(tmp_path, numbers=range(ROWS + 1)))
    dataset = shardkit.open(root)
    assert made.unused == 1
    assert list(dataset.schema) == ["text", "label", "score", "vector"]
    assert np.array_equal(dataset.table.digest, before.table.digest)
    assert dataset.manifest.pages == before.manifest.pages
    check(dataset)
    assert dataset.to_arrow().column("score").to_pylist() == [number_of(dataset, n) / 2 for n in range(ROWS)]
    assert len(dataset.select(where="score < 5 and label == 0")) == 4
    plan = dataset.plan(global_batch=24, seed=1)
    for fields in (None, ["score"], ["text"], ["label", "vector", "score"]):
        with dataset.loader(plan, fields=fields, rank=0, world=1, tensors=False) as loader:
            for batch in loader:
                for row, sample in enumerate(batch["samples"].tolist()):
                    number = number_of(dataset, sample)
                    if fields is None or "text" in fields:
                        assert batch["text"][row] == f"{number} " * 9
                    if fields is None or "score" in fields:
                        assert batch["score"][row] == number / 2
                    if fields is None or "vector" in fields:
                        values, offsets = batch["vector"]
                        assert values[offsets[row] : offsets[row + 1]].tolist() == [number, number + 1]


def flip_object(root: str, digest: str, suffix: str, offset: int) -> Path:
    file = Path(root, object_name(digest, suffix))
    flip(file, offset)
    return file


@FORMATS
def test_a_loader_reads_the_shards_of_its_fields_alone(root: str, tmp_path: Path) -> None:
    extend(root, from_=table(tmp_path))
    dataset = shardkit.open(root)
    index = dataset.reader.index(0)
    flip_object(root, dataset.table.digest_text(0), dataset.manifest.format, int(index.block_offset[0]) + 8)
    plan = dataset.plan(global_batch=24, seed=1)
    with dataset.loader(plan, fields=["score"], rank=0, world=1) as loader:
        assert sum(len(batch["score"]) for batch in loader) == ROWS
    with pytest.raises(IntegrityError), dataset.loader(plan, rank=0, world=1) as loader:
        list(loader)


def test_an_audit_covers_both(root: str, tmp_path: Path) -> None:
    extend(root, from_=table(tmp_path))
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=24, seed=1)
    with dataset.loader(plan, rank=0, world=1, run=tmp_path / "run") as loader:
        assert len(list(loader)) == ROWS // 24
    assert audit_run(tmp_path / "run").exit_code == 0
    added = dataset.version.added[0]
    flip_object(root, added.table.digest_text(0), "arrow", int(added.table.size[0]) // 2)
    assert audit_run(tmp_path / "run").exit_code == 4


@FORMATS
def test_verify_repair_and_gc_cover_both(root: str, tmp_path: Path) -> None:
    extend(root, from_=table(tmp_path))
    dataset = shardkit.open(root)
    assert verify(root, level="decode").shards == 2 * len(dataset.table)
    output_of("place", root, "--location", f"mirror={tmp_path / 'mirror'}", "--copies", "2")
    output_of("replicate", root)
    added = dataset.version.added[0]
    offset = int(dataset.version.added[0].table.size[0]) // 2
    flip_object(root, added.table.digest_text(0), "arrow", offset)
    assert [one.name for one in verify(root).damaged] == [object_name(added.table.digest_text(0), "arrow")]
    with pytest.raises(IntegrityError):
        list(dataset)
    output_of("repair", root)
    Path(root, object_name(added.table.digest_text(0), "arrow")).unlink()
    output_of("repair", root)
    output_of("gc", root, "--delete", "--grace", "0s")
    assert not verify(root, level="decode").damaged
    check(shardkit.open(root))


def test_selections_and_removals_keep_the_new_fields(root: str, tmp_path: Path) -> None:
    extend(root, from_=table(tmp_path))
    output_of("select", root, "--where", "score >= 10", "--ref", "good")
    output_of("remove", f"{root}@good", "--rows", "0", "--reason", "asked")
    found = shardkit.open(f"{root}@good")
    assert len(found) == ROWS - 21
    check(found)


def test_a_selection_is_extended_for_its_samples_alone(root: str, tmp_path: Path) -> None:
    output_of("select", root, "--where", "label == 1", "--ref", "ones")
    with pytest.raises(SourceError, match=r"80 of 120 samples have no row"):
        extend(root, from_=table(tmp_path, numbers=range(1, ROWS, 3)))
    extend(f"{root}@ones", from_=table(tmp_path, numbers=range(1, ROWS, 3)))
    found = shardkit.open(f"{root}@ones")
    check(found)
    assert not verify(f"{root}@ones", level="decode").damaged


def test_missing_rows_are_missing_values_if_the_type_says_so(root: str, tmp_path: Path) -> None:
    options = ImportOptions(field_types={"score": "float64?"}, columns=("key", "score"))
    extend(root, from_=table(tmp_path, numbers=range(0, ROWS, 2)), options=options)
    dataset = shardkit.open(root)
    for place in range(ROWS):
        number = number_of(dataset, place)
        assert dataset[place]["score"] == (None if number % 2 else number / 2)


def test_a_column_that_cannot_be_stored_is_left_out_as_the_message_says(root: str, tmp_path: Path) -> None:
    wrong = {"step": list(range(ROWS))}
    said = output_of("extend", root, "--from", table(tmp_path, **wrong), code=1)
    assert "leave it out: --drop step" in " ".join(said.split())
    output_of("extend", root, "--from", table(tmp_path, **wrong), "--drop", "step")
    assert list(shardkit.open(root).schema) == ["text", "label", "score", "vector"]


def test_an_error_of_a_source_is_not_one_of_the_scratch_folder(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*given: Any) -> None:
        raise OSError(5, "Input/output error", "scores.parquet")

    monkeypatch.setattr(extending, "digest_file", lost)
    with pytest.raises(OSError, match="Input/output error"):
        extend(root, from_=table(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(pa.ipc, "new_file", lost)
    with pytest.raises(StoreError, match=r"write the table to .*table\.arrow"):
        extend(root, from_=table(tmp_path))


def test_rows_are_joined_by_a_field(root: str, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"of": pa.array([2, 0, 1], pa.int8()), "name": ["b", "z", "a"]}), tmp_path / "n.parquet"
    )
    extend(root, from_=tmp_path / "n.parquet", on="label=of")
    dataset = shardkit.open(root)
    assert all(sample["name"] == "zab"[sample["label"]] for sample in dataset)
    pq.write_table(pa.table({"label": [0, 1, 2, 2], "other": [1, 2, 3, 4]}), tmp_path / "n.parquet")
    with pytest.raises(SourceError, match=r"several rows have the label"):
        extend(root, from_=tmp_path / "n.parquet", on="label")


@pytest.mark.parametrize(("kind", "values"), [("int64", [7, 0]), ("str", ["a", ""]), ("bytes", [b"a", b""])])
@FORMATS
def test_a_sample_without_a_value_joins_no_row(
    root: str, tmp_path: Path, kind: str, values: list[Any]
) -> None:
    of, first = str(tmp_path / "optional"), shardkit.open(root)
    with shardkit.create(
        of, schema={"of": f"{kind}?", "n": "int64"}, format=first.manifest.format, block_size=1000
    ) as writer:
        for n in range(ROWS):
            writer.add({"of": [*values, None][n % 3], "n": n})
    pq.write_table(pa.table({"of": values, "name": ["one", "two"]}), tmp_path / "n.parquet")
    with pytest.raises(SourceError, match=r"40 of 120 samples have no row"):
        extend(of, from_=tmp_path / "n.parquet", on="of")
    extend(of, from_=tmp_path / "n.parquet", on="of", options=ImportOptions(field_types={"name": "str?"}))
    assert all(sample["name"] == ["one", "two", None][sample["n"] % 3] for sample in shardkit.open(of))


def test_columns_that_cannot_join_are_named(root: str, tmp_path: Path) -> None:
    for column in ([[1], [2]], ["one", "two"], [{"a": 1}, {"a": 2}], [1.5, 2.5]):
        pq.write_table(pa.table({"of": column, "name": ["a", "b"]}), tmp_path / "n.parquet")
        with pytest.raises(SchemaError, match=r"column of .* does not become int64"):
            extend(root, from_=tmp_path / "n.parquet", on="label=of")


def test_a_key_of_several_samples_joins_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for n in range(3):
                member = tarfile.TarInfo(f"{n}.txt")
                data = f"{name} {n}".encode()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    adopt([tmp_path / "a.tar", tmp_path / "b.tar"], tmp_path / "tars")
    scores = {"key": ["0", "1", "2"], "score": [0.0, 1.0, 2.0]}
    pq.write_table(pa.table(scores), tmp_path / "scores.parquet")
    with pytest.raises(SourceError, match=r"several samples have the key '0'"):
        extend(tmp_path / "tars", from_=tmp_path / "scores.parquet")


@FORMATS
def test_costs_of_added_fields_without_values_are_counted_as_0(root: str, tmp_path: Path) -> None:
    options = ImportOptions(field_types={"tokens": "int64?"})
    even = {"key": [f"k-{n}" for n in range(0, ROWS, 2)], "tokens": list(range(0, ROWS, 2))}
    pq.write_table(pa.table(even), tmp_path / "tokens.parquet")
    extend(root, from_=tmp_path / "tokens.parquet", options=options)
    output_of("rebuild", root, "--cost", "tokens + 1")
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=24, seed=1, cost="tokens + 1")
    with dataset.loader(plan, fields=["tokens"], rank=0, world=1, tensors=False) as loader:
        assert sum(len(batch["samples"]) for batch in loader) == ROWS


@FORMATS
def test_lookups_and_costs_stay(root: str, tmp_path: Path) -> None:
    output_of("rebuild", root, "--lookup", "key,text", "--cost", "label + 1")
    before = shardkit.open(root).manifest
    extend_twice(root, tmp_path)
    dataset = shardkit.open(root)
    check(dataset)
    assert (dataset.manifest.lookups, dataset.manifest.costs) == (before.lookups, before.costs)
    found = document_of("find", root, "--field", f"text={dataset[5]['text']}")
    assert [one["sample"] for one in found["found"]] == [5]
    assert dataset.plan(global_batch=24, cost="label + 1").step(0).shape


def test_a_function_makes_the_fields(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, "quality_of_rows.py").write_text(
        "def length(sample):\n    return {'length': len(sample['text'])}\n"
        "def same(sample):\n    return {'label': 3}\n"
        "def none(sample):\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    extend(root, apply="quality_of_rows:length")
    assert all(sample["length"] == len(sample["text"]) for sample in shardkit.open(root))
    with pytest.raises(UsageError, match=r"has a field 'label' already"):
        extend(root, apply="quality_of_rows:same")
    with pytest.raises(SampleError, match=r"expected a dict of new fields"):
        extend(root, apply="quality_of_rows:none")


@FORMATS
def test_a_version_is_extended_twice_and_rebuilt_into_one(root: str, tmp_path: Path) -> None:
    extend_twice(root, tmp_path)
    dataset = shardkit.open(root)
    assert len(dataset.manifest.added) == 2
    assert all(sample["score"] == sample["second"] for sample in dataset)
    output_of("rebuild", root, "--to", tmp_path / "one")
    whole = shardkit.open(tmp_path / "one")
    assert not whole.manifest.added
    assert sorted(map(repr, whole)) == sorted(map(repr, dataset))


def test_what_needs_whole_shards_refuses_and_says_what_to_do(root: str, tmp_path: Path) -> None:
    extend(root, from_=table(tmp_path))
    with pytest.raises(UsageError, match=r"shardkit rebuild"):
        shardkit.open({"a": root, "b": root})
    with (
        pytest.raises(UsageError, match=r"shardkit rebuild"),
        shardkit.create(root, schema=shardkit.open(root).schema, append=True) as writer,
    ):
        writer.add({"text": "", "label": 0, "score": 0.0, "vector": [1, 2]})
    output_of("remove", root, "--rows", "0", "--reason", "asked", "--erase", code=2)
    with pytest.raises(SchemaError, match=r"nothing to add"):
        extend(root, from_=table(tmp_path), options=ImportOptions(columns=("key",)))


def test_sums_urls_diff_and_show_name_both(root: str, tmp_path: Path) -> None:
    before = shardkit.open(root).manifest.id
    document = document_of("extend", root, "--from", table(tmp_path))
    assert document["added"] == {"score": "float64", "vector": "int64[*]"}
    dataset = shardkit.open(root)
    digest = dataset.version.added[0].table.digest_text(0)
    for form in ("sha256sums", "urls", "croissant"):
        assert object_name(digest, "arrow") in output_of("export", root, "--as", form)
    assert document_of("show", root)["added"][0]["fields"] == ["score", "vector"]
    shards = document_of("diff", f"{root}@{before}", f"{root}@main")["shards"]
    assert shards["shared"]["count"] == shards["added"]["count"] == len(dataset.table)


def test_an_added_version_of_other_rows_is_refused(root: str, tmp_path: Path) -> None:
    before = shardkit.open(root).manifest
    extend(root, from_=table(tmp_path))
    repository = Repository.open(root)
    extended = shardkit.open(root).manifest
    for changes in (
        {"added": (extended.parent,)},
        {"schema": before.schema},
    ):
        forged = msgspec.structs.replace(extended, **changes)
        put_manifest(repository, forged, [])
        with pytest.raises(FormatError, match=r"do not trust"):
            load_manifest(repository, forged.id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--apply", "json:dumps", "--on", "label"], "--on: expected only with --from"),
        (
            ["--apply", "json:dumps", "--schema", "a=int32"],
            "--schema, --columns, --drop, --rename, --encoding or --quote: expected only with",
        ),
        (
            ["--apply", "json:dumps", "--columns", "a"],
            "--schema, --columns, --drop, --rename, --encoding or --quote: expected only with",
        ),
        (
            ["--apply", "json:dumps", "--rename", "a=b"],
            "--schema, --columns, --drop, --rename, --encoding or --quote: expected only with",
        ),
        (
            ["--apply", "json:dumps", "--drop", "a"],
            "--schema, --columns, --drop, --rename, --encoding or --quote: expected only with",
        ),
        (["--apply", "json:dumps", "--scratch", "/"], "--scratch: expected only with --from"),
        (["--output-schema", "a=int32"], "--output-schema: expected only with --apply"),
        (["--scratch", "no/such/folder"], "--scratch no/such/folder: no such folder; make it"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    root: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    source = [] if "--apply" in arguments else ["--from", table(tmp_path)]
    assert message in output_of("extend", root, *source, *arguments, code=2)


def test_added_fields_of_added_fields_are_refused_before_they_are_loaded(root: str, tmp_path: Path) -> None:
    """Each of 64 versions could name 64 more, and so on."""
    extend(root, from_=table(tmp_path), options=ImportOptions(columns=("key", "score")))
    repository = Repository.open(root)
    extended = load_manifest(repository, repository.refs["main"]).manifest
    inner = load_manifest(repository, extended.added[0]).manifest
    nested = msgspec.structs.replace(inner, added=("sha256:" + "0" * 64,))
    put_manifest(repository, nested, [])
    outer = msgspec.structs.replace(extended, added=(nested.id,))
    put_manifest(repository, outer, [])
    with pytest.raises(FormatError, match="its added fields have added fields; do not trust it"):
        load_manifest(repository, outer.id)
