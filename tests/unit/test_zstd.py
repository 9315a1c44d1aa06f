"""zstd by Python's own module, in whose place another with the same functions stands where Python has none yet."""

from __future__ import annotations

import importlib
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import FormatError, MissingDependency
from shardkit.formats import compression


def _stand_in() -> types.ModuleType:
    """The functions of compression.zstd (Python 3.14) that are called, by the package zstandard."""

    class Decompressor:
        def __init__(self) -> None:
            self._made = zstandard.ZstdDecompressor().decompressobj()

        eof = property(lambda self: self._made.eof)
        unused_data = property(lambda self: self._made.unused_data)

        def decompress(self, data: Any, max_length: int = -1) -> bytes:
            raw = self._made.decompress(data)
            return raw if max_length < 0 else raw[:max_length]

    def compress(data: Any, level: int | None = None, options: dict[str, int] | None = None) -> bytes:
        assert level is None
        assert options is not None
        return zstandard.ZstdCompressor(
            level=options["level"], write_checksum=bool(options["checksum"]),
            write_content_size=bool(options["size"]),
        ).compress(data)  # fmt: skip

    module = types.ModuleType("compression.zstd")
    names = types.SimpleNamespace(
        compression_level="level", checksum_flag="checksum", content_size_flag="size"
    )
    module.__dict__.update(
        compress=compress,
        ZstdDecompressor=Decompressor,
        ZstdError=zstandard.ZstdError,
        CompressionParameter=names,
    )
    return module


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """shardkit.formats.compression as it is where zstandard is not installed."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        if sys.version_info < (3, 14):
            patch.setitem(sys.modules, "compression", types.ModuleType("compression"))
            patch.setitem(sys.modules, "compression.zstd", _stand_in())
        importlib.reload(compression)
        yield
    importlib.reload(compression)


RAW = b"a frame of a shard, " * 500


@pytest.mark.usefixtures("without_package")
def test_python_alone_writes_and_reads_frames() -> None:
    frame = compression.compress_frame(RAW, 3)
    assert compression._library.__name__ == "compression.zstd"
    header = compression.read_header(frame)
    assert (header.content_size, header.dictionary, header.has_checksum) == (len(RAW), 0, True)
    assert compression.decompress_frame(memoryview(frame), len(RAW), "block") == RAW
    piecewise = compression.new_decompressor()
    assert b"".join(piecewise.decompress(frame[at : at + 7]) for at in range(0, len(frame), 7)) == RAW
    assert piecewise.eof
    damaged = frame[:-1] + bytes([frame[-1] ^ 1])
    for wrong in (frame + frame, frame + b"x", frame[:-3], damaged, b"", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(FormatError, match=r"^block: "):
            compression.decompress_frame(wrong, len(RAW), "block")


def test_frames_of_the_package_are_read_without_it(request: pytest.FixtureRequest) -> None:
    frame = compression.compress_frame(RAW, 9)
    request.getfixturevalue("without_package")
    assert compression.decompress_frame(frame, len(RAW), "block") == RAW


def test_without_either_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(MissingDependency, match="pip install zstandard"):
        compression._find("zstandard", "compression.zstd")


@given(descriptor=st.integers(0, 255), rest=st.binary(min_size=1, max_size=13))
def test_every_header_is_read_as_the_package_reads_it(descriptor: int, rest: bytes) -> None:
    frame = struct.pack("<IB", 0xFD2FB528, descriptor) + rest
    try:
        wanted = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError:
        return  # more is refused there: windows of 4 GiB
    found = compression.read_header(frame)
    unknown = wanted.content_size == 2**64 - 1
    assert (found.content_size is None) or found.content_size == wanted.content_size or unknown
    assert (found.window_size, found.dictionary) == (wanted.window_size, wanted.dict_id)
