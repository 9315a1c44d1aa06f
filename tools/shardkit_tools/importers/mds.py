"""Read MDS shards of MosaicML Streaming by their layout; pickled values are refused.

    index.json      {"version": 2, "shards": [{column_names, column_encodings, column_sizes, raw_data, …}]}
    shard           u32 rows | u32 offset of each row, and of the end | JSON of the columns | rows
    row             u32 size of each variable-size field | fields

Numbers are little-endian. Sizes and offsets are validated before any slice is taken, and hashes in the index
before anything is parsed.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import SourceError, UsageError
from shardkit.formats import FieldType
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.numpy_arrays import array_type, check_precision, common_array, float_fields
from shardkit_tools.importers.protocol import (
    FileImporter,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import LeftOut, name_files, open_packed, read_file

MDS_INDEX = "index.json"
_PACKED = {"zstd": "zst", "gz": "gz", "bz2": "bz2"}  # compression in the index → `open_packed`
_SCAN_ROWS = 1_000
SPAN_ROWS = 1 << 16
"""Rows whose fields are located at the same time in a shard that is in memory."""

_MAX_SHARD_BYTES = 2**32  # offsets are 32 bits wide


Encodings = tuple[tuple[str, str, int | None], ...]
"""(column, encoding, fixed size) of each column."""


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard, as the index describes it."""

    file: SourceFile
    rows: int
    raw_bytes: int
    compression: str
    hashes: tuple[tuple[str, str], ...]  # hashes of the file as stored


@dataclass(frozen=True, kw_only=True)
class MdsImporter(FileImporter):
    """MDS shards as a source."""

    name: str = "mds"
    shards: tuple[MdsShard, ...]
    encodings: Encodings

    def _rows(self, task: SourceTask) -> SampleStream:
        """Yield the rows; a field that cannot be decoded is a failure of its row only."""
        shard, floats = self.shards[task.start], float_fields(self.fields, self.options)
        for row, fields in enumerate(_rows(shard, self.encodings)):
            try:
                sample = {
                    name: _value_of(
                        encoding, data, f"{shard.file.path} row {row}, column {name!r}", self.schema[name]
                    )
                    for (name, encoding, _), data in zip(self.encodings, fields, strict=True)
                    if name in self.fields
                }
                for name, dtype in floats.items():
                    check_precision(sample[name], dtype, name, f"{shard.file.path} row {row}")
            except SourceError as error:
                yield SourceFailure(shard.file.name, row, error)
                continue
            yield SourceSample(sample, None, shard.file.name, row)


def open_mds(source: Source, options: ImportOptions) -> MdsImporter:
    """Read the index of an MDS folder."""
    by_name = {file.name: file for file in source.files}
    if MDS_INDEX not in by_name:
        inside = sorted(os.path.dirname(name) for name in by_name if os.path.basename(name) == MDS_INDEX)
        hint = (
            f"name one of its splits, such as {os.path.join(source.given, inside[0])}"
            if inside
            else "give the folder, with its index"
        )
        raise SourceError(f"{source.given}: {MDS_INDEX} is missing; {hint}")
    where = by_name[MDS_INDEX].path
    entries = _entries(parse_json(read_file(by_name[MDS_INDEX]), where), where)
    encodings = _columns(entries[0], where)
    shards = []
    for entry in entries:
        if _columns(entry, where) != encodings:
            raise SourceError(f"{where}: its shards have different columns; import them one by one")
        shards.append(_shard(entry, by_name, where))
    used = {shard.file.name: shard for shard in shards}
    if len(used) < len(shards):
        twice = next(shard.file.name for shard in shards if used[shard.file.name] is not shard)
        raise SourceError(f"{where}: the index lists the shard {twice!r} twice; write the dataset again")
    if unused := [name for name in by_name if ".mds" in os.path.basename(name) and name not in used]:
        source.notes.append(name_files("left out what the index does not list", unused))
    # Streaming writes a shard without rows where the first row is larger than its limit for a shard
    if empty := [shard.file.name for shard in shards if not shard.rows]:
        source.notes.append(name_files("left out shards without rows", empty))
    shards = [shard for shard in shards if shard.rows]
    types = {}
    bad = LeftOut(options.skip_bad_rows)
    rows = itertools.chain.from_iterable(bad.before_damage(_rows(shard, encodings)) for shard in shards)
    examples = list(itertools.islice(rows, _SCAN_ROWS))
    if not examples:
        raise bad.no_samples(source.given, "no shard has rows; write the dataset again")
    for place, (name, encoding, _) in enumerate(encodings):
        if not options.keeps(name):
            continue
        types[name] = options.field_types.get(name) or _common_type(
            encoding, [example[place] for example in examples], f"{where}, column {name!r}"
        )
    schema = options.schema(types, source.given, names=[name for name, _, _ in encodings])
    for name, encoding, _ in encodings:
        if name in schema and schema[name].kind in ("str", "json") and encoding not in _TEXTS:
            raise UsageError(
                f"--schema {name}={schema[name]}: the column is written as {encoding}, which is not text; "
                f"leave the option out, or keep the bytes: --schema {name}=bytes"
            )
    files = tuple(sorted((shard.file for shard in shards), key=lambda file: file.name))
    return MdsImporter(
        source=replace(source, files=files),
        fields=schema,
        options=options,
        cut=tuple(  # in the order of the index
            SourceTask(shard.file.name, (shard.file,), shard.file.size, number, number + 1)
            for number, shard in enumerate(shards)
        ),
        shards=tuple(shards),
        encodings=encodings,
    )


def _entries(index: object, where: str) -> list[dict[str, Any]]:
    shards = index.get("shards") if isinstance(index, dict) and index.get("version") == 2 else None
    if shards == []:
        raise SourceError(
            f"{where}: the index lists no shards, so there are no samples; write the dataset again"
        )
    if not isinstance(shards, list) or not all(isinstance(entry, dict) for entry in shards):
        raise SourceError(f"{where}: not an index of MDS shards of version 2; write the dataset again")
    for entry in shards:
        if entry.get("format") != "mds":
            raise SourceError(
                f"{where}: a shard has the format {entry.get('format')!r}, and only mds is read by its index; give "
                f"a glob of the shards, such as '{os.path.dirname(where)}/shard.*.{entry.get('format')}'"
            )
    return shards


def _columns(entry: dict[str, Any], where: str) -> Encodings:
    names, encodings, sizes = (entry.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    lists = [value for value in (names, encodings, sizes) if isinstance(value, list)]
    if len(lists) != 3 or len({len(value) for value in lists}) != 1 or not names:
        raise SourceError(f"{where}: a shard's column names, encodings and sizes do not belong together")
    for name, encoding, size in zip(*lists, strict=True):
        if (
            not isinstance(name, str)
            or not isinstance(encoding, str)
            or not (size is None or isinstance(size, int))
        ):
            raise SourceError(f"{where}: a shard's column {name!r} is not described by texts and a size")
        if names.count(name) > 1:
            raise SourceError(f"{where}: two columns are called {name!r}; write the dataset again")
    return tuple((name, encoding, size or None) for name, encoding, size in zip(*lists, strict=True))


def _shard(entry: dict[str, Any], by_name: dict[str, SourceFile], where: str) -> MdsShard:
    raw, packed = entry.get("raw_data"), entry.get("zip_data")
    rows = entry.get("samples")
    if not isinstance(raw, dict) or not isinstance(raw.get("bytes"), int) or not isinstance(rows, int):
        raise SourceError(f"{where}: a shard without raw_data or samples; write the dataset again")
    if not 0 <= raw["bytes"] < _MAX_SHARD_BYTES:
        raise SourceError(
            f"{where}: a shard claims {raw['bytes']} bytes; an MDS shard has less than {_MAX_SHARD_BYTES}"
        )
    # Readers leave the decompressed shard next to the compressed one; then it is read instead.
    lies, kind = (
        (raw, "") if raw.get("basename") in by_name or not isinstance(packed, dict) else (packed, "packed")
    )
    name = lies.get("basename")
    if name not in by_name:
        raise SourceError(f"{where}: the shard {name!r} is missing; give the folder with all of its files")
    file = by_name[str(name)]
    if file.size != lies.get("bytes"):
        raise SourceError(
            f"{file.path}: {file.size} bytes, the index says {lies.get('bytes')}; fetch it again"
        )
    hashes = lies.get("hashes")
    known = tuple(sorted((str(k), str(v)) for k, v in hashes.items())) if isinstance(hashes, dict) else ()
    return MdsShard(file, rows, raw["bytes"], str(entry.get("compression")) if kind else "", known)


def _rows(shard: MdsShard, encodings: Encodings) -> Iterator[list[bytes]]:
    """Yield the encoded fields of every row."""
    stored = read_file(shard.file)
    hashes = ShardHashes(shard)
    hashes.update(stored)
    hashes.check()
    data = memoryview(_unpack(shard, stored))
    if len(data) != shard.raw_bytes:
        raise _no_rows(shard, len(data))
    borders, where = row_offsets(shard, data[: head_bytes(shard)]), shard.file.path
    for first in range(0, shard.rows, SPAN_ROWS):
        spans, error = field_spans(data, borders[first : first + SPAN_ROWS + 1], encodings, where, first)
        for row in spans.tolist():
            yield [bytes(data[start : start + size]) for start, size in row]
        if error is not None:
            raise error


def head_bytes(shard: MdsShard) -> int:
    """Return the size of the row count and the row offsets."""
    return 4 * (shard.rows + 2)


def row_offsets(shard: MdsShard, head: bytes | memoryview) -> NDArray[np.int64]:
    """Return where each row begins, and where the last one ends, given the first `head_bytes` of a raw shard."""
    if len(head) < head_bytes(shard) or int.from_bytes(head[:4], "little") != shard.rows:
        raise _no_rows(shard, shard.raw_bytes)
    offsets = np.frombuffer(head, "<u4", shard.rows + 1, 4).astype(np.int64)
    if (
        int(offsets[0]) < head_bytes(shard)
        or int(offsets[-1]) != shard.raw_bytes
        or bool((np.diff(offsets) < 0).any())
    ):
        raise SourceError(f"{shard.file.path}: its row offsets do not follow one another; fetch it again")
    return offsets


def _no_rows(shard: MdsShard, size: int) -> SourceError:
    return SourceError(
        f"{shard.file.path}: {size} bytes that are not the {shard.rows} rows of the index; fetch it again"
    )


def field_spans(
    data: bytes | memoryview, borders: NDArray[np.int64], encodings: Encodings, where: str, first: int
) -> tuple[NDArray[np.int64], SourceError | None]:
    """Return the (offset, bytes) of each field of rows, and the error of the first row whose sizes do not add up.

    Args:
        data: bytes that contain the rows.
        borders: (rows + 1,) offset of each row, and the end of the last.
        encodings: the columns.
        where: name of the file, for messages.
        first: number of the first row, for messages.

    Returns:
        (rows, fields, 2), without the bad row and those after it.
    """
    own = np.diff(borders)
    varying = [place for place, (_, _, size) in enumerate(encodings) if size is None]
    head_size = 4 * len(varying)
    count = len(own) if bool((own >= head_size).all()) else int(np.argmax(own < head_size))
    places = borders[:count, None] + np.arange(head_size)
    sizes = np.empty((len(own), len(encodings)), np.int64)
    sizes[:] = [2**32 if size is None else size for _, _, size in encodings]
    if varying:
        sizes[:count, varying] = np.frombuffer(data, np.uint8)[places].view("<u4")
    wrong = head_size + sizes.sum(axis=1) != own
    error = None
    if bool(wrong.any()):
        count = int(np.argmax(wrong))
        error = SourceError(
            f"{where} row {first + count}: {own[count]} bytes, its fields ask for "
            f"{head_size + sizes[count].sum()}; fetch it again"
        )
    starts = borders[:-1, None] + head_size + np.cumsum(sizes, axis=1) - sizes
    return np.stack([starts, sizes], 2)[:count], error


class ShardHashes:
    """Compares the bytes of a stored shard with the hashes in the index."""

    def __init__(self, shard: MdsShard) -> None:
        self._shard = shard
        self._hashes: dict[str, Any] = {}
        for name, _ in shard.hashes:
            if name in hashlib.algorithms_available:
                self._hashes[name] = hashlib.new(name, usedforsecurity=False)
            elif name in xxhash.algorithms_available:
                self._hashes[name] = getattr(xxhash, name)()

    def update(self, data: bytes) -> None:
        for one in self._hashes.values():
            one.update(data)

    def check(self) -> None:
        """Raise SourceError if a hash differs."""
        for name, expected in self._shard.hashes:
            if name in self._hashes and (found := self._hashes[name].hexdigest()) != expected:
                raise SourceError(
                    f"{self._shard.file.path}: {name} is {found}, the index says {expected}; fetch it again"
                )


def _unpack(shard: MdsShard, data: bytes) -> bytes:
    """Return the raw shard; at most one byte more than the index says is decompressed."""
    kind = shard.compression.partition(":")[0]
    if not kind:
        return data
    if kind not in _PACKED:
        raise SourceError(
            f"{shard.file.path}: compressed with {kind!r}; zstd, gz and bz2 are read: write the dataset again with one "
            "of them"
        )
    with open_packed(io.BytesIO(data), _PACKED[kind], shard.file.path) as stream:
        return stream.read(shard.raw_bytes + 1)


_SCALAR = re.compile(r"u?int(?:8|16|32|64)|float(?:16|32|64)")
_SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
           64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
_PIXELS = {"L": (), "RGB": (3,), "RGBA": (4,)}
_PLAIN = {"bytes": "bytes", "jpeg": "bytes", "png": "bytes", "jpeg_array": "bytes",
          "jpegarray": "bytes", "json": "json", "str": "str",
          "str_decimal": "str", "int": "int64", "str_int": "int64", "str_float": "float64"}  # fmt: skip
_TEXTS = ("str", "json", "str_int", "str_float", "str_decimal", "bytes")
_ARRAYS = ("ndarray", "pil")


def _common_type(encoding: str, examples: Sequence[bytes], where: str) -> str:
    """Return the type of a column from its first rows; a dimension with several sizes is free."""
    name, _, settings = encoding.partition(":")
    has_shape = name not in _ARRAYS or ":" in settings
    found = _field_type(encoding, examples[0], where)
    for example in () if has_shape else examples[1:]:
        one = _field_type(encoding, example, where)
        common = found if one == found else common_array(found, one)
        if common is None:
            raise SourceError(
                f"{where}: arrays of type {found} and {one}; write them alike, or apart: they have no common type"
            )
        found = common
    return found


def _field_type(encoding: str, example: bytes, where: str) -> str:
    """Return the field type of a column; an array without a declared shape has the type of the example."""
    name, _, settings = encoding.partition(":")
    if name == "pkl":
        raise SourceError(
            f"{where}: a pickle can run any code when it is loaded, so it is never read; write it as json, or leave it "
            "out with --drop"
        )
    if _SCALAR.fullmatch(name):
        return name
    if name in _PLAIN:
        return _PLAIN[name]
    if name not in _ARRAYS:
        raise SourceError(
            f"{where}: the encoding {encoding!r} is not read; keep its bytes with --schema and the type bytes, leave "
            "it out with --drop, or write the column as bytes, json or an array"
        )
    array = np.asarray(_value_of(encoding, example, where))
    if name == "ndarray" and ":" not in settings and array.ndim == 1:
        return f"{array.dtype.name}[*]"
    return array_type(array.dtype, array.shape)


def _value_of(encoding: str, data: bytes, where: str, kind: FieldType | None = None) -> object:
    """Return the value of one field; as bytes, text or JSON it is what the shard stores."""
    name, _, settings = encoding.partition(":")
    stored = kind.kind if kind is not None and kind.is_opaque else _PLAIN.get(name)
    if stored == "json":
        return parse_json(data, where)
    if stored == "bytes":
        return data
    try:
        if stored == "str":
            return data.decode()
        if name == "ndarray":
            return _array(settings, data)
        if name == "pil":
            return _image(data)
        if name == "int" or _SCALAR.fullmatch(name):
            (value,) = np.frombuffer(data, np.dtype("int64" if name == "int" else name).newbyteorder("<"))
            return value
        return int(data) if name == "str_int" else float(data)
    except (ValueError, IndexError, KeyError) as error:
        raise SourceError(
            f"{where}: {len(data)} bytes that are not what {encoding} writes ({error}); fetch it again, or write the "
            "column in another encoding"
        ) from error


def _array(settings: str, data: bytes) -> NDArray[np.generic]:
    dtype, shape, at = array_head(settings, data)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape)


def array_head(settings: str, data: bytes) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and offset of the values of an array; a dtype or shape without setting precedes them.

    Raises:
        ValueError, IndexError, KeyError: The bytes do not state them.
    """
    dtype, _, text = settings.partition(":")
    at = 0
    if not dtype:
        dtype, at = _DTYPES[data[0]], 1
    if text:
        shape = tuple(map(int, text.split(",")))
    else:
        axes, width = data[at] >> 2, 1 << data[at] % 4
        shape = tuple(np.frombuffer(data, _SHAPE_DTYPES[data[at] % 4], axes, at + 1).tolist())
        at += 1 + axes * width
    if dtype not in _DTYPES.values():
        raise ValueError(f"dtype {dtype!r}")
    return dtype, shape, at


def _image(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a raw image: width, height, length of the mode (u32 each), mode, pixels."""
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + length].decode("ascii")
    if mode not in _PIXELS:
        raise ValueError(f"mode {mode!r}: L, RGB and RGBA are read")
    return np.frombuffer(data, np.uint8, offset=12 + length).reshape(height, width, *_PIXELS[mode])
