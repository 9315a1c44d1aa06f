"""What one rank consumed, as it happened: an append-only file, one entry per step or event (SPEC.md, "Journal").

Written without a collective and without a wait: one `write` per step. Each entry's checksum goes on from the
one before.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import StoreError
from shardkit.formats.canonical_json import dumps
from shardkit.ledger.bindings import BINDINGS
from shardkit.ledger.journal_format import (
    CELLS,
    CHECK,
    EVENT,
    FILE_NAME,
    HEAD,
    HEADER,
    MAGIC,
    META,
    Header,
    xxh3,
)
from shardkit.stores.file_operations import explained

ROTATE_BYTES: Final = 1 << 20
"""A rank goes on in a new file from here on, so that files whose steps are merged can be removed."""

_sha256 = hashlib.sha256


class Journal:
    """Appends what a rank handed to its trainer.

    Args:
        directory: ``journal/`` of a run directory; made if absent. Every start of a rank writes files of its own,
            ``<rank>-<number>.cells``, so that nothing written earlier is ever touched again.
        manifest: "sha256:…" of the dataset.
        plan: hex digest of the plan.
        lanes: lanes of the plan, by which it is known when a step is complete; 0 if unknown (such steps are never
            merged).
        meta: written once at the start: what somebody needs to make the plan again.
        worker, workers: this process records the steps ≡ worker modulo workers.
    """

    def __init__(
        self,
        directory: Path,
        *,
        manifest: str,
        plan: str,
        rank: int,
        world: int,
        lanes: int = 0,
        meta: Mapping[str, Any] | None = None,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._directory = directory
        self._header = Header(manifest, plan, rank, world, lanes, worker, workers, 0, time.time_ns())
        self._guard = threading.Lock()  # events come from the thread that prepares steps
        self._packed: tuple[tuple[int, ...], bytes] = ((), b"")
        with explained(f"write a journal in {directory}", writing=True):
            directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        self._size = self._check = 0
        self._open()
        if meta is not None:
            self._append(0, META, dumps({**meta, BINDINGS: 1}))

    def record_step(
        self, step: int, lanes: Sequence[int], counts: Sequence[int], samples: NDArray[np.int64]
    ) -> None:
        """Append one step, in one write: about 0.8 microseconds a cell.

        Args:
            step: counted over the whole run.
            lanes: ascending.
            counts: rows of each lane's cell.
            samples: int64[sum(counts)], sample numbers as gathered, cell after cell, without empty slots.

        Raises:
            StoreError: the disk is full or gone; training must not go on unrecorded.
        """
        key = tuple(lanes)
        if self._packed[0] != key:
            self._packed = (key, struct.pack(f"<{len(key)}I", *key))
        data = _little_endian(samples).data.cast("B")
        digests, first = [self._packed[1], struct.pack(f"<{len(counts)}I", *counts)], 0
        for count in counts:
            last = first + 8 * count
            digests.append(_sha256(data[first:last]).digest()[:16])
            first = last
        self._append(step, CELLS, b"".join(digests))

    def event(self, step: int, kind: str, **details: Any) -> None:
        """Append an event: what happened at a step that somebody who checks the run should know.

        Args:
            step: the step that it belongs to.
            kind: such as "failover", "substituted", "masked", "repair"; see SPEC.md.
            details: integers, strings, lists and objects of these.
        """
        text = {name: _unicode(value) if isinstance(value, str) else value for name, value in details.items()}
        self._append(step, EVENT, dumps({"kind": kind, **text}))

    def close(self) -> None:
        """Sync and close; may be called twice."""
        if self._descriptor >= 0:
            with explained(f"close {self.path}", writing=True):
                os.fsync(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, step: int, kind: int, body: bytes) -> None:
        with self._guard:
            if self._size >= ROTATE_BYTES:
                self.close()
                self._header = self._header._replace(part=self._header.part + 1)
                self._open()
            head = HEAD.pack(step, kind, len(body), 0)[:-8]
            head_check = xxh3(head, seed=self._check)
            self._check = xxh3(body, seed=head_check)
            self._write(b"".join((head, CHECK.pack(head_check), body, CHECK.pack(self._check))))

    def _write(self, data: bytes) -> None:
        with explained(f"write {self.path}", writing=True):
            written = os.write(self._descriptor, data)
        if written != len(data):
            raise StoreError(
                f"{self.path}: only {written} of {len(data)} bytes were written; make room and resume"
            )
        self._size += written

    def _open(self) -> None:
        header = self._header
        with explained(f"write a journal in {self._directory}", writing=True):
            self.path, self._descriptor = _new_file(self._directory, header.rank)
            # Held as long as this process lives: a file whose lock is free is never written again (SPEC.md).
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = 0
        packed = HEADER.pack(MAGIC, _raw(header.manifest), _raw(header.plan), *header[2:], 0)[:-8]
        self._check = xxh3(packed)
        self._write(packed + CHECK.pack(self._check))


def _little_endian(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """The buffer that is hashed; a view wherever it can be one."""
    if samples.dtype != np.int64 or sys.byteorder != "little":
        return samples.astype("<i8")
    return np.ascontiguousarray(samples)


def _unicode(text: str) -> str:
    """Text without lone surrogates, which file names may hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))


def _new_file(directory: Path, rank: int) -> tuple[Path, int]:
    """A new file of the rank, numbered after all it has had; removed ones leave no number free (SPEC.md)."""
    numbers = [int(match[2]) for name in os.listdir(directory) if (match := FILE_NAME.fullmatch(name))
               and int(match[1]) == rank]  # fmt: skip
    number = max(numbers, default=-1) + 1
    while True:
        path = directory / f"{rank:05d}-{number:05d}.cells"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            return path, os.open(path, flags, 0o644)
        except FileExistsError:
            number += 1
