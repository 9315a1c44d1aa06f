"""Members whose headers are read at once are those that are read one by one, damage included."""

from __future__ import annotations

import io
import tarfile
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit_tools.importers import tar_members
from shardkit_tools.importers.tar_members import Member, read_members

NAMES = st.one_of(
    st.from_regex(r"[a-z./0-9_ -]{1,12}", fullmatch=True), st.text("aä./\\\n", min_size=1, max_size=6),
    st.just("long/" * 25 + "x"), st.just("x" * 120),
)  # fmt: skip
TIMES = st.one_of(st.integers(0, 2**31), st.floats(0, 2**31), st.just(-5))


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """A tar as common writers make it, of which some bytes are changed."""
    kinds = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=draw(st.sampled_from(kinds))) as tar:
        for _ in range(draw(st.integers(0, 6))):
            info = tarfile.TarInfo(draw(NAMES))
            info.mtime = draw(TIMES) if tar.format == tarfile.PAX_FORMAT else 7
            data = draw(st.binary(max_size=3)) * draw(st.integers(0, 400))
            info.type = draw(st.sampled_from([tarfile.REGTYPE] * 8 + [tarfile.DIRTYPE, tarfile.SYMTYPE]))
            info.size = len(data) if info.type == tarfile.REGTYPE else 0
            try:
                tar.addfile(info, io.BytesIO(data))
            except (ValueError, UnicodeError):
                continue  # the name does not fit this format
    made = bytearray(out.getvalue())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(made) - 1)) % 4096 % len(made)
        made[at] = draw(st.sampled_from([*b"\0 019x-"]))
    return bytes(made[: draw(st.sampled_from([len(made), len(made), len(made) // 2]))])


def members(data: bytes) -> tuple[list[Member], str]:
    found: list[Member] = []
    try:
        for member in read_members(io.BytesIO(data), "a.tar", one_name=True):
            found.append(member)  # noqa: PERF402  those before an error are kept
    except SourceError as error:
        return found, str(error)
    return found, ""


@given(data=tars(), ahead=st.sampled_from([512, 2048, 5000, 1 << 20]), few=st.integers(1, 6))
def test_headers_read_at_once_are_those_read_one_by_one(data: bytes, ahead: int, few: int) -> None:
    nothing = tar_members._Headers([], ([], [], []))
    with mock.patch.object(tar_members, "plain_headers", return_value=nothing):
        expected = members(data)
    with (
        mock.patch.object(tar_members, "_BUFFER_BYTES", ahead),
        mock.patch.object(tar_members, "_FEW_HEADERS", few),
    ):
        assert members(data) == expected


def test_plain_headers_are_read_at_once() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(100):
            info = tarfile.TarInfo(f"{number:05d}.txt")
            info.size, info.mtime = number, number + 0.5  # as webdataset.TarWriter has it
            tar.addfile(info, io.BytesIO(bytes(number)))
    found = tar_members.plain_headers(out.getvalue(), 0, 1000)
    assert len(found.names) == 100
