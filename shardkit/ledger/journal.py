"""What one rank consumed, as it happened: an append-only file of fixed-size records, one per cell.

Written without a collective and without a wait: one `write` per step. A record that a SIGKILL tore is recognised by
its checksum and cut (SPEC.md).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import FormatError, StoreError
from shardkit.plan import cell_digest

__all__ = ["CellRecord", "Journal", "read_journal"]

_MAGIC = b"shardkit cells 1\n"
_HEADER = struct.Struct(
    "<17s7x32s32sIIQ"
)  # magic, manifest id, plan digest, rank, world, XXH3 of what is before it
_RECORD = struct.Struct("<QII16sQ")  # step, lane, rows, cell digest, XXH3 of what is before it


class CellRecord(NamedTuple):
    """One consumed cell."""

    step: int
    lane: int
    rows: int
    digest: str  # hex, 32 characters


class Journal:
    """Appends the cells that a rank handed to its trainer.

    Args:
        directory: `journal/` of a run directory; made if absent. Every start of a rank writes a file of its own,
            `<rank>-<attempt>.cells`, so that nothing written earlier is ever touched again.
        manifest: "sha256:…" of the dataset.
        plan: hex digest of the plan.
    """

    def __init__(self, directory: Path, *, manifest: str, plan: str, rank: int, world: int) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor = _new_file(directory, rank)
            body = _HEADER.pack(_MAGIC, _raw(manifest), _raw(plan), rank, world, 0)[:-8]
            os.write(self._descriptor, body + xxhash.xxh3_64_digest(body)[::-1])
        except OSError as error:
            raise StoreError(f"the journal in {directory} cannot be written: {error.strerror}") from error

    def record(self, step: int, cells: Iterable[tuple[int, NDArray[np.int64]]]) -> None:
        """Append one step: (lane, samples) per cell.

        Raises:
            StoreError: the disk is full or gone; training must not go on unrecorded.
        """
        chunk = bytearray()
        for lane, samples in cells:
            body = _RECORD.pack(step, lane, len(samples), bytes.fromhex(cell_digest(samples)), 0)[:-8]
            chunk += body + xxhash.xxh3_64_digest(body)[::-1]
        try:
            written = os.write(self._descriptor, chunk)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written: {error.strerror}; make room and resume"
            ) from error
        if written != len(chunk):
            raise StoreError(
                f"{self.path}: only {written} of {len(chunk)} bytes were written; make room and resume"
            )

    def close(self) -> None:
        """Sync and close; may be called twice."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def read_journal(path: Path, *, manifest: str | None = None, plan: str | None = None) -> Iterator[CellRecord]:
    """The whole records of a journal; a torn last record is left out.

    Raises:
        FormatError: not a journal, of another dataset or plan than asked for, or damaged before its last record.
    """
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        return  # killed while it was being made: nothing was consumed yet
    fields = _HEADER.unpack_from(data)
    if fields[0] != _MAGIC or not _checked(data, 0, _HEADER.size):
        raise FormatError(f"{path} is not a cell journal of this version, or its header is damaged")
    for what, expected, got in (("manifest", manifest, fields[1]), ("plan", plan, fields[2])):
        if expected is not None and _raw(expected) != got:
            raise FormatError(f"{path} was written for {what} {got.hex()[:12]}…, expected {expected[:19]}…")
    end = len(data) - (len(data) - _HEADER.size) % _RECORD.size
    for offset in range(_HEADER.size, end, _RECORD.size):
        if not _checked(data, offset, _RECORD.size):
            if offset + _RECORD.size >= end:
                return
            raise FormatError(f"{path}: the record at byte {offset} is damaged; its checksum does not match")
        step, lane, rows, digest, _ = _RECORD.unpack_from(data, offset)
        yield CellRecord(step, lane, rows, digest.hex())


def _checked(data: bytes, offset: int, size: int) -> bool:
    body = data[offset : offset + size - 8]
    return xxhash.xxh3_64_digest(body)[::-1] == data[offset + size - 8 : offset + size]


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))


def _new_file(directory: Path, rank: int) -> tuple[Path, int]:
    attempt = 0
    while True:
        path = directory / f"{rank:05d}-{attempt:05d}.cells"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            return path, os.open(path, flags, 0o644)
        except FileExistsError:
            attempt += 1
