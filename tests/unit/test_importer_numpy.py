from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardkit_tools.importers.numpy_rows as numpy_rows
from shardkit.errors import SourceError
from shardkit_tools.importers import open_source
from shardkit_tools.importers.conformance import check_importer, read_all


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i4", ">i4", "bool", "<f2", "<u8"])
def test_rows_of_the_first_axis(
    tmp_path: Path, dtype: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_rows, "_TASK_BYTES", 40)
    monkeypatch.setattr(numpy_rows, "_PIECE_BYTES", 15)
    values = np.asarray(np.arange(60).reshape(10, 2, 3) % 7, dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", values)
    importer = open_source(str(tmp_path / "a.npy"))
    assert str(importer.schema["value"]) == f"{values.dtype.newbyteorder('=').name}[2,3]"
    samples = check_importer(importer)
    assert len(importer.tasks()) > 1
    assert np.array_equal(np.stack([np.asarray(row.sample["value"]) for row in samples]), values)
    assert [row.source_row for row in samples] == list(range(10))


def test_several_files_are_fields(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    np.save(tmp_path / "y.npy", np.array([5, 6, 7]))
    importer = open_source(str(tmp_path))
    assert {name: str(kind) for name, kind in importer.schema.items()} == {"x": "float64[2]", "y": "int64"}
    assert [int(np.asarray(row.sample["y"])) for row in check_importer(importer)] == [5, 6, 7]
    np.save(tmp_path / "z.npy", np.zeros(4))
    with pytest.raises(SourceError, match=r"z\.npy: 4 rows, but x\.npy has 3"):
        open_source(str(tmp_path))


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
