from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import SourceError, UsageError
from shardkit_tools.importers import ImportOptions, open_source
from tests.importer_conformance import check_importer, read_all

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
    with pytest.raises(SourceError, match=r"b\.idx is missing"):
        open_source(str(tmp_path), "tokens")
    (tmp_path / "b.idx").write_bytes(megatron("uint16", [[1]], [0, 1]))
    with pytest.raises(UsageError, match=r"--dtype and --row are for files of tokens without an index"):
        open_source(str(tmp_path), "tokens", ImportOptions(dtype="uint16", row=1))


def test_documents_follow_in_the_order_of_the_files(tmp_path: Path) -> None:
    for number, name in enumerate(("a-b", "a")):  # by name, ``-`` precedes ``.``
        write(tmp_path, [[[number]]], "uint16", "megatron", name)
    rows = read_all(open_source(str(tmp_path), "tokens"))
    assert [row.source_name for row in rows] == ["a-b.bin", "a.bin"]
