"""Arrays of NumPy and files of tokens as sources."""

from __future__ import annotations

import contextlib
import shutil
import struct
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
import shardkit_tools
import shardkit_tools.importers.numpy_arrays as numpy_arrays
from shardkit.errors import SchemaError, SourceError, UsageError
from shardkit_tools.importers import ImportOptions, open_source
from tests.importer_conformance import check_importer, read_all

# ---- test_importer_numpy


def test_several_files_are_fields(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    np.save(tmp_path / "y.npy", np.array([5, 6, 7]))
    importer = open_source(str(tmp_path))
    assert {name: str(kind) for name, kind in importer.schema.items()} == {"x": "float64[2]", "y": "int64"}
    assert [int(np.asarray(row.sample["y"])) for row in check_importer(importer)] == [5, 6, 7]
    (tmp_path / "cat").mkdir()
    np.save(tmp_path / "cat" / "x.npy", np.zeros((3, 2)))
    with pytest.raises(SourceError, match=r"in 2 folders .*: say what they are: --arrays"):
        open_source(str(tmp_path))
    shutil.rmtree(tmp_path / "cat")
    np.save(tmp_path / "z.npy", np.zeros(4))
    with pytest.raises(SourceError, match=r"z\.npy: 4 rows, but x\.npy has 3"):
        open_source(str(tmp_path))


def saved(folder: Path, shapes: list[tuple[int, ...]], name: str = "part-{}") -> list[Any]:
    arrays = [np.full(shape, number, np.int16) for number, shape in enumerate(shapes)]
    for number, array in enumerate(arrays):
        np.save(folder / f"{name.format(number)}.npy", array)
    return arrays


def opened(folder: Path, **options: Any) -> tuple[Any, list[str]]:
    importer = open_source(str(folder), None, ImportOptions(**options))
    return importer, [note for note in importer.source.notes if "--arrays" in note]


def test_numbered_files_are_parts_of_one_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_arrays, "_TASK_BYTES", 20)
    arrays = saved(tmp_path, [(3, 2), (5, 2), (1, 2)])
    importer, notes = opened(tmp_path)
    assert notes == [
        "3 arrays are read as parts of one array of 9 rows; --arrays rows, files or fields decides otherwise"
    ]
    rows = check_importer(importer)
    assert np.array_equal(np.stack([np.asarray(row.sample["value"]) for row in rows]), np.concatenate(arrays))
    assert [(row.source_name, row.source_row) for row in rows][2:4] == [("part-0.npy", 2), ("part-1.npy", 0)]
    with pytest.raises(SourceError, match=r"5 rows, but part-0\.npy has 3"):
        opened(tmp_path, arrays="fields")


@pytest.mark.parametrize(
    ("shapes", "kind"), [([(2, 3), (4, 3)], "int16[*,3]"), ([(2,), (2,)], "int16[2]"), ([(), ()], "int16")]
)
def test_files_are_samples(tmp_path: Path, shapes: list[tuple[int, ...]], kind: str) -> None:
    arrays = saved(tmp_path, shapes)
    importer, notes = opened(tmp_path, arrays="files")
    assert (str(importer.schema["value"]), notes) == (kind, [])
    rows = check_importer(importer)
    assert [row.key for row in rows] == ["part-0", "part-1"]
    assert all(
        np.array_equal(np.asarray(row.sample["value"]), array)
        for row, array in zip(rows, arrays, strict=True)
    )


def test_the_reading_follows_names_and_shapes(tmp_path: Path) -> None:
    cases: list[tuple[list[tuple[int, ...]], str, str]] = [
        ([(3, 2), (3, 2)], "x{}-of-2", "parts of one array of 6 rows"),
        ([(3, 2), (3, 4)], "{:04}", "2 samples"),
        ([(2,)] * 65, "{}", "65 samples"),
    ]
    for number, (shapes, name, told) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        saved(folder, shapes, name)
        assert told in opened(folder)[1][0]
    saved(tmp_path / "0", [(3,)], "labels{}")
    assert "3 fields of a sample" in opened(tmp_path / "0")[1][0]


def test_arrays_that_do_not_fit_their_reading_are_named(tmp_path: Path) -> None:
    saved(tmp_path, [(3, 2), (3, 4)])
    with pytest.raises(SourceError, match=r"part-1\.npy: rows of int16\[4\], but part-0\.npy has int16\[2\]"):
        opened(tmp_path, arrays="rows")
    saved(tmp_path, [(3, 2), (3,)])
    with pytest.raises(SourceError, match=r"part-1\.npy: an array of int16\[3\], but those before"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{"a": 1}]), "pickled Python objects, which are never loaded"),
        (np.array(["a", "b"]), "dtype <U1: only booleans, integers and floats"),
        (np.zeros(2, "complex64"), "dtype complex64: only booleans"),
        (np.array(3), "without axes has no rows"),
        (np.zeros((0, 3)), "the array has no rows"),
        (np.zeros(2, [("a", "i4")]), "only booleans"),
    ],
)
def test_arrays_that_cannot_be_stored(
    tmp_path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], message: str
) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(SourceError, match=rf"a\.npy.*{message}"):
        open_source(str(tmp_path / "a.npy"))


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for data, message in (
        (whole[:-8], "its header .* asks for"),
        (whole + b"\0" * 8, "its header .* asks for"),
        (whole[:5], "not a readable .npy file"),
        (b"PK" + whole[2:], "not a readable .npy file"),
        (whole.replace(b"'shape'", b"'shope'"), "not a readable .npy file"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=message):
            read_all(open_source(str(path)))


def test_fields_are_called_as_their_files(tmp_path: Path) -> None:
    """0.1 made ``a_b`` of both, and one of them was lost without a word."""
    for number, name in enumerate(("a-b", "a_b", "a b")):
        np.save(tmp_path / f"{name}.npy", np.full(3, number))
    assert [one.sample for one in read_all(open_source(str(tmp_path)))] == [
        {"a b": 2, "a-b": 0, "a_b": 1}
    ] * 3
    arrays: dict[str, Any] = {"a b": np.arange(2), "a_b": np.arange(2)}
    np.savez(tmp_path / "all.npz", **arrays)
    assert list(open_source(str(tmp_path / "all.npz")).schema) == ["a b", "a_b"]


def test_a_file_that_is_left_out_may_have_other_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    np.save(tmp_path / "mean.npy", np.arange(2))
    for options in (ImportOptions(columns=("x",)), ImportOptions(drop=("mean",))):
        importer = open_source(str(tmp_path), options=options)
        assert [int(np.asarray(row.sample["x"])) for row in check_importer(importer)] == [0, 1, 2]


class TestArchives:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_arrays_are_fields(
        self, tmp_path: Path, save: Any, order: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of several archives the rows follow each other, in the order of their names."""
        monkeypatch.setattr(numpy_arrays, "PIECE_BYTES", 50)
        images = np.asarray(np.arange(60).reshape(10, 2, 3), dtype=">i4", order=order)  # type: ignore[call-overload]
        labels = np.arange(10) % 3
        save(tmp_path / "0.npz", image=images[:7], label=labels[:7])
        save(tmp_path / "1.npz", image=images[7:], label=labels[7:])
        importer = open_source(str(tmp_path))
        assert {name: str(kind) for name, kind in importer.schema.items()} == {
            "image": "int32[2,3]",
            "label": "int64",
        }
        samples = check_importer(importer)
        assert np.array_equal(np.stack([np.asarray(row.sample["image"]) for row in samples]), images)
        assert [int(np.asarray(row.sample["label"])) for row in samples] == labels.tolist()
        assert [(row.source_name, row.source_row) for row in samples][6:8] == [("0.npz", 6), ("1.npz", 0)]

    def test_one_split_of_an_archive_of_two(self, tmp_path: Path) -> None:
        """As Keras keeps MNIST."""
        path = tmp_path / "mnist.npz"
        np.savez_compressed(
            path, x_train=np.zeros((6, 2)), y_train=np.arange(6), x_test=np.zeros((2, 2)), y_test=np.arange(2)
        )
        with pytest.raises(SourceError, match=r"x_test\.npy: 2 rows, but .*x_train\.npy has 6.*--columns"):
            open_source(str(path))
        options = ImportOptions(columns=("x_train", "y_train"), rename={"y_train": "label"})
        importer = open_source(str(path), options=options)
        assert list(importer.schema) == ["x_train", "label"]
        assert [int(np.asarray(row.sample["label"])) for row in check_importer(importer)] == list(range(6))
        with pytest.raises(SchemaError, match="did you mean 'x_train'"):
            open_source(str(path), options=ImportOptions(columns=("x_trian", "y_train")))
        with pytest.raises(SchemaError, match="leave no field; its fields are x_train, y_train"):
            open_source(str(path), options=ImportOptions(drop=("x_train", "y_train", "x_test", "y_test")))

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_no_flipped_bit_and_no_cut_goes_unseen(self, tmp_path: Path, save: Any) -> None:
        """A row is handed out right, or none of its archive is: with --on-error skip rows would stay otherwise."""
        path = tmp_path / "a.npz"
        expected = np.random.default_rng(1).integers(0, 9, (50, 3))
        save(path, a=expected, b=np.arange(50))
        whole = path.read_bytes()
        seen = 0
        for at in range(0, len(whole), 7):
            for data in (whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], whole[:at]):
                path.write_bytes(data)
                rows: list[Any] = []
                try:
                    importer = open_source(str(path))
                    for task in importer.tasks():
                        rows.extend(importer.read(task))
                except (SourceError, SchemaError):
                    assert not rows
                    seen += 1
                else:  # a date, say
                    found = importer.schema
                    if list(found) == ["a", "b"]:
                        assert np.array_equal(np.stack([row.sample["a"] for row in rows]), expected)
        assert seen > len(whole) // 7 * 1.2

    def test_what_cannot_be_stored(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        for arrays, message in (
            ({"a": np.array([{"b": 1}], dtype=object)}, "a.npy: an array of dtype object holds pickled"),
            ({"a": np.arange(3), "scale": np.array(2.0)}, "scale.npy: an array without axes has no rows"),
            ({"a": np.zeros((0, 2))}, "the array has no rows"),
            ({}, "holds no array"),
        ):
            np.savez(path, **arrays)
            with pytest.raises(SourceError, match=message):
                open_source(str(path))
        path.write_bytes(b"no archive")
        with pytest.raises(SourceError, match=r"a\.npz: not a readable \.npz archive"):
            open_source(str(path))
        np.savez(path, a=np.arange(2))
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("notes.txt", "text")
        with pytest.raises(SourceError, match=r"holds 'notes\.txt', which is no array"):
            open_source(str(path))

    def test_archives_with_other_arrays(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "0.npz", a=np.arange(3))
        np.savez(tmp_path / "1.npz", a=np.arange(3, dtype="int32"))
        with pytest.raises(
            SourceError, match=r"1\.npz: its arrays are a int32, the arrays of 0\.npz are a int64"
        ):
            open_source(str(tmp_path))


@pytest.mark.parametrize("format", ["tar", "arrow"])
def test_bools_of_any_byte_are_normalised(tmp_path: Path, format: str) -> None:
    """A mask of `view(bool)` may hold 255: what is written must be readable again."""
    mask = np.array([0, 1, 2, 255], np.uint8).view(bool)
    np.save(tmp_path / "a.npy", np.stack([mask, mask]))
    shardkit_tools.build(tmp_path / "a.npy", tmp_path / "built", format=format)
    schema = {
        "fixed": "bool[4]",
        "ragged": "bool[*]",
        "varying": "bool[*,1]",
        "one": "bool",
        "maybe": "bool[4]?",
    }
    with shardkit.create(tmp_path / "made", schema, format=format) as writer:
        for maybe in (mask, None):
            sample = {"fixed": mask, "ragged": mask, "varying": mask[:, None], "one": mask[3], "maybe": maybe}
            writer.add(sample)
    expected = [False, True, True, True]
    assert [sample["value"].tolist() for sample in shardkit.open(tmp_path / "built")] == [expected, expected]
    for sample in shardkit.open(tmp_path / "made"):
        assert sample["fixed"].tolist() == sample["ragged"].tolist() == expected
        assert sample["varying"].ravel().tolist() == expected
        assert sample["one"] is True
        assert sample["maybe"] is None or sample["maybe"].tolist() == expected


def test_files_of_tokens_are_rows_of_the_stated_size(tmp_path: Path) -> None:
    values = np.arange(70, dtype=np.uint16)
    values.tofile(tmp_path / "train.bin")
    values[:33].tofile(tmp_path / "val.bin")
    options = ImportOptions(dtype="uint16", row=8, rename={"tokens": "ids"})
    importer = open_source(str(tmp_path), options=options)
    samples = check_importer(importer)
    assert importer.schema.to_json() == [["ids", "uint16[8]"]]
    expected = [*values[:64].reshape(8, 8).tolist(), *values[:32].reshape(4, 8).tolist()]
    assert [np.asarray(row.sample["ids"]).tolist() for row in samples] == expected
    assert [(row.source_name, row.source_row) for row in samples[-4:]] == [("val.bin", n) for n in range(4)]
    notes = open_source(str(tmp_path / "val.bin"), None, options).source.notes
    assert notes == ["val.bin: its last 2 bytes do not fill a row and are left out"]
    with pytest.raises(UsageError, match="--dtype float32 --row 8: expected one of uint8"):
        open_source(str(tmp_path), options=ImportOptions(dtype="float32", row=8))
    with pytest.raises(SourceError, match=r"val\.bin: 66 bytes, less than a row of 40"):
        open_source(str(tmp_path), options=ImportOptions(dtype="uint16", row=40))


# ---- test_importer_tokens


CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 100), max_size=4), max_size=3), min_size=1, max_size=6)


def megatron(dtype: str, sequences: list[list[int]], borders: list[int]) -> bytes:
    """As `_IndexWriter` of Megatron Core writes it."""
    lengths = np.array([len(one) for one in sequences], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])[: len(lengths)]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(borders))
    places = (pointers * np.dtype(dtype).itemsize).astype(np.int64)
    return header + lengths.tobytes() + places.tobytes() + np.array(borders, np.int64).tobytes()


def fairseq(dtype: str, sequences: list[list[int]], borders: list[int]) -> bytes:
    """As `IndexedDatasetBuilder` of older Megatron writes it."""
    sizes = np.array([len(one) for one in sequences], np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    dims = np.arange(len(sizes) + 1, dtype=np.int64)
    item = np.dtype(dtype).itemsize
    header = b"TNTIDX\0\0" + struct.pack("<6Q", 1, CODES[dtype], item, len(sizes), len(sizes), len(borders))
    return (
        header + dims.tobytes() + offsets.tobytes() + sizes.tobytes() + np.array(borders, np.int64).tobytes()
    )


WRITERS = {"megatron": megatron, "fairseq": fairseq}


def write(folder: Path, documents: list[list[list[int]]], dtype: str, writer: str, name: str = "a") -> None:
    sequences = [one for document in documents for one in document]
    borders = np.cumsum([0, *map(len, documents)]).tolist()
    np.array([token for one in sequences for token in one], dtype).tofile(folder / f"{name}.bin")
    (folder / f"{name}.idx").write_bytes(WRITERS[writer](dtype, sequences, borders))


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.sampled_from(sorted(CODES)), st.sampled_from(sorted(WRITERS)))
def test_documents_of_an_index(documents: list[list[list[int]]], dtype: str, writer: str) -> None:
    with TemporaryDirectory() as text:
        write(Path(text), documents, dtype, writer)
        importer = open_source(text, "tokens")
        assert str(importer.schema["tokens"]) == f"{dtype}[*]"
        found = [np.asarray(row.sample["tokens"]).tolist() for row in check_importer(importer)]
    assert found == [[token for one in document for token in one] for document in documents]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(WRITERS)))
def test_a_damaged_index_is_an_error_or_names_other_tokens_of_the_file(
    data: st.DataObject, writer: str
) -> None:
    with TemporaryDirectory() as text:
        write(Path(text), [[[1, 2], [3]], [[4, 5, 6]]], "uint16", writer)
        path = Path(text, "a.idx")
        whole = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del whole[data.draw(st.integers(0, len(whole) - 1)) :]
        else:
            whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        lengths = [0]
        with contextlib.suppress(SourceError):
            rows = read_all(open_source(text, "tokens"))
            lengths = [len(np.asarray(row.sample["tokens"])) for row in rows]
        assert max(lengths) <= 12  # bytes of the file


def test_files_without_their_index(tmp_path: Path) -> None:
    write(tmp_path, [[[1]]], "uint16", "megatron")
    (tmp_path / "b.bin").write_bytes(bytes(2))
    with pytest.raises(SourceError, match=r"look like files of tokens.*--from tokens"):
        open_source(str(tmp_path))
    with pytest.raises(SourceError, match=r"b\.idx is not among the files"):
        open_source(str(tmp_path), "tokens")
    (tmp_path / "b.idx").write_bytes(megatron("uint16", [[1]], [0, 1]))
    with pytest.raises(UsageError, match=r"--dtype and --row are for files of tokens without an index"):
        open_source(str(tmp_path), "tokens", ImportOptions(dtype="uint16", row=1))


def test_documents_follow_in_the_order_of_the_files(tmp_path: Path) -> None:
    for number, name in enumerate(("a-b", "a")):  # by name, ``-`` precedes ``.``
        write(tmp_path, [[[number]]], "uint16", "megatron", name)
    rows = read_all(open_source(str(tmp_path), "tokens"))
    assert [row.source_name for row in rows] == ["a-b.bin", "a.bin"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i4", ">i4", "bool", "<f2", "<u8"])
def test_rows_of_the_first_axis(
    tmp_path: Path, dtype: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_arrays, "_TASK_BYTES", 40)
    monkeypatch.setattr(numpy_arrays, "PIECE_BYTES", 15)
    values = np.asarray(np.arange(60).reshape(10, 2, 3) % 7, dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", values)
    importer = open_source(str(tmp_path / "a.npy"))
    assert str(importer.schema["value"]) == f"{values.dtype.newbyteorder('=').name}[2,3]"
    samples = check_importer(importer)
    assert len(importer.tasks()) > 1
    assert np.array_equal(np.stack([np.asarray(row.sample["value"]) for row in samples]), values)
    assert [row.source_row for row in samples] == list(range(10))
