"""`shardkit.create`: add samples, commit a version."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from shardkit.dataset.committing import Destination, block_size_for, version_of_ref, write_version
from shardkit.dataset.encoding import (
    RowEncoder,
    RowOrigin,
    check_source,
    ordinal_identity,
    part_identity,
)
from shardkit.dataset.parts import PartFolder, check_part_name, part_folder, settings_of
from shardkit.dataset.scratch import PartFiles, RowSpool, scratch_folder
from shardkit.dataset.version_plan import NewVersion, VersionSettings
from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.manifest import Manifest
from shardkit.ranges import shown
from shardkit.repository.log import check_ref_name
from shardkit.repository.repository import Repository
from shardkit.stores.local import temporary_name

_MAX_ROWS, _MAX_BYTES = 4096, 2**20  # added samples become a record batch at these limits


def create(
    root: str | os.PathLike[str],
    schema: Mapping[str, str] | Schema,
    *,
    stratify: str | Sequence[str] | None = None,
    format: str | None = None,
    compression: str | None = None,
    shard_size: int | str = "256MiB",
    block_size: int | str | None = None,
    seed: int = 0,
    shuffle: bool = True,
    classes: Sequence[str] = (),
    split: Mapping[str, float | str] | None = None,
    split_by: str | None = None,
    append: bool = False,
    single_writer: bool = False,
    about: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] = (),
    cost: str | Sequence[str] = (),
    ref: str = "main",
    replace: bool = False,
    message: str = "",
    part: str | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> Writer:
    """Open a writer of a new version of the dataset at ``root``; a context manager.

    The manifest depends only on the samples and these settings. Samples with keys may be added in any order
    and from any thread (with ``shuffle=False`` the order of adding is the order of the dataset). Samples
    without keys are named by the order of adding.

    Args:
        root: a directory, new or with versions in it.
        schema: field → type, such as ``{"image": "bytes", "label": "int64"}``.
        stratify: field or fields (str, int or bool scalars) to balance batches by; ``"__class__"``
            for the class names of ``label``.
        format: ``"tar"`` for files, ``"arrow"`` for numbers, arrays and text, which take less space there. The default
            is the format of the version that samples are appended to, otherwise tar, or arrow with a compression.
        compression: ``"none"``, or for arrow also ``"zstd"`` or ``"zstd:9"``.
        shard_size: raw bytes per shard.
        block_size: raw bytes per block; by default as in the version that ``ref`` names, or 256 KiB, which is up to 1
            MiB for rows of more than 32 KiB, without ``stratify`` and ``split``, from 256 MiB of rows on.
        seed: seed of the shuffle.
        shuffle: False keeps the order of adding within each stratum.
        classes: names of the values 0, 1, … of the field ``label``.
        split: shares such as ``{"train": 0.9, "val": 0.1}``; each becomes a ref, and ``ref`` holds all rows.
        split_by: field whose equal values stay in one split.
        append: add the samples to the version that ``ref`` names; schema, format, compression, stratify and
            classes must be the same.
        single_writer: for a new root on a store without put-if-absent: promise that there is no other writer.
        about: licence, source and contact, also per stratum: an ``about.toml`` file, or a mapping with its
            content.
        lookup: fields by whose values samples can be found, such as ``"key,url,image:sha256"``.
        cost: cost of a row, for plans with ``cost=``, such as ``"len(tokens)**2"``; or several expressions.
        ref: the ref that is moved to the new version.
        replace: move the refs even from another schema, and over concurrent commits.
        message: message of the commit.
        part: name of a part of a version that several writers make, on one machine or on many that share the
            root. Closing commits nothing; it publishes the part for `commit_parts`, replacing one of the same
            name. All parts need the same settings; ref, message, append, about, lookup and cost are given to
            `commit_parts`.
        scratch: directory for the rows until they are written; by default inside ``root``. Parts of a root
            that is not a local folder need one that all writers share.

    Raises:
        SchemaError, ConfigurationError: A setting is invalid.
        UsageError: A ref names samples of another schema, without ``replace``.
        StoreError: ``root`` cannot be written.

    Examples:
        >>> with shardkit.create("data/new", schema={"x": "float32[2]", "label": "int64"}) as writer:
        ...     for n in range(100):
        ...         writer.add({"x": [n, n], "label": n % 10}, key=f"row-{n}")
        >>> len(shardkit.open("data/new"))
        100
    """
    check_ref_name(ref)
    if not isinstance(message, str):
        raise UsageError(f"create(message={shown(message)}): text is expected")
    parsed = Schema.parse(schema)
    held = version_of_ref(root, ref)
    base = held if append else None
    if format is None and base is None and compression is None:
        format = "tar"  # unlike `build`, which sees the rows first
    settings = VersionSettings(
        stratify=stratify,
        format=format,
        compression=compression,
        shard_size=shard_size,
        block_size=block_size_for(held, block_size),
        seed=seed,
        shuffle=shuffle,
        split=split,
        split_by=split_by,
        about=about,
        lookup=lookup,
        cost=cost,
    ).for_rows(parsed, base)
    version = settings.version(parsed, classes, ref=ref)
    encoder = settings.encoder(version.schema, version.classes)
    if part is not None and (
        append or about is not None or lookup or cost or message or replace or ref != "main"
    ):
        raise UsageError(
            f"part={part!r} with append, about, lookup, cost, message, replace or ref: a part commits nothing; "
            "give them to commit_parts"
        )
    repository = Repository.open(root) if append else Repository.create(root, single_writer=single_writer)
    if part is not None:
        check_part_name(part)
        folder = part_folder(repository, scratch)
        return Writer(
            Destination(repository=repository, ref=ref), version, encoder, folder.path, part=(folder, part)
        )
    to = Destination.begin(repository, version, ref, append=append, replace=replace, message=message)
    return Writer(to, version, encoder, scratch_folder(repository, scratch))


class Writer:
    """Takes samples and commits them as one version on `close`; made by `create`.

    An exception inside the ``with`` block aborts: no ref moves and the scratch file is removed. Shards
    published before remain as objects that nothing names; the next build of the same samples uses them.
    """

    def __init__(
        self,
        to: Destination,
        version: NewVersion,
        encoder: RowEncoder,
        scratch: str,
        *,
        part: tuple[PartFolder, str] | None = None,
    ) -> None:
        self._to = to
        self._version = version
        self._encoder = encoder
        self._part = part
        self._first = to.base.first_ordinal if to.base else 0
        self._lock = threading.Lock()
        self._spooled = temporary_name("spool")
        self._spool: RowSpool | None = RowSpool(
            scratch,
            self._spooled,
            version.schema,
            seed=version.settings.seed if version.settings.shuffle else None,
        )
        # (payloads, key, source) of the rows added after the rows in `_spool`
        self._rows: list[tuple[tuple[bytes, ...], str | None, tuple[str, int] | None]] = []
        self._rows_bytes = 0
        self._manifest: Manifest | None = None
        self._is_written = False

    def __repr__(self) -> str:
        if self._manifest is not None:
            state = f"committed as {self._manifest.id[:19]}…, {self._manifest.selected:,} samples"
        elif self._is_written and self._part is not None:
            state = f"part {self._part[1]!r} is written"
        else:
            state = "closed" if self._spool is None else f"{self._count():,} samples added"
        return f"<shardkit writer for {self._to.repository.url}@{self._to.ref}: {state}>"

    def add(
        self, sample: Mapping[str, object], key: str | None = None, *, source: tuple[str, int] | None = None
    ) -> None:
        """Add a sample. Thread-safe.

        Args:
            sample: field → value: numbers, text, bytes, lists, arrays, or any object with ``__array__``.
            key: any text, unique in the dataset; by default the number of the sample.
            source: (name, row) of the sample's origin, stored with it.

        Raises:
            SampleError: A field does not fit; the message names sample and field.
            StoreFullError: The scratch disk is full.

        Examples:
            >>> with shardkit.create("data/one", schema={"text": "str"}) as writer:
            ...     writer.add({"text": "hello"}, key="greeting")
            >>> shardkit.open("data/one")[0]
            {'text': 'hello'}
        """
        self._open()
        name = f"sample {key!r}" if key is not None else f"sample {self._count()}"
        payloads = self._encoder.schema.encode(sample, where=name)
        self._encoder.check_row(payloads, key, where=name)
        if source is not None:
            check_source(source, name)
        with self._lock:
            spool = self._open()
            self._rows.append((payloads, key, source))
            self._rows_bytes += sum(map(len, payloads))
            if len(self._rows) >= _MAX_ROWS or self._rows_bytes >= _MAX_BYTES:
                self._flush(spool)

    def _count(self) -> int:
        return len(self._rows) + (len(self._spool) if self._spool is not None else 0)

    def _flush(self, spool: RowSpool) -> None:
        if not self._rows:
            return
        payloads, keys, sources = zip(*self._rows, strict=True)
        names, numbers = zip(*(source or ("", -1) for source in sources), strict=True)
        origin = RowOrigin(names, np.array(numbers, np.int64), keys)
        encoded = self._encoder.encode_rows(list(zip(*payloads, strict=True)), origin, str)
        assert isinstance(encoded, tuple), "rows are checked when they are added"
        rows, batch = encoded
        for place, (_, key, source) in enumerate(self._rows):
            if key is None and source is None:
                number = len(spool) + place
                rows.identity[place] = (
                    part_identity(self._part[1], number)
                    if self._part
                    else ordinal_identity(self._first + number)
                )
        spool.append(rows, batch)
        self._rows, self._rows_bytes = [], 0

    @property
    def manifest(self) -> Manifest:
        """The manifest that `close` committed.

        Raises:
            UsageError: The writer has not committed, or was aborted.
        """
        if self._part is not None:
            raise UsageError(f"part {self._part[1]!r} is no version; commit all parts with commit_parts")
        if self._manifest is None:
            raise UsageError("this writer has not committed; leave its with-block, or call close(), first")
        return self._manifest

    def close(self) -> None:
        """Write the added samples as shards and commit them; a second call does nothing.

        Raises:
            UsageError: No sample was added, or the writer was aborted.
            SampleError: Two samples have the same key.
            StoreError: The root or the scratch disk failed; nothing was committed.
            CommitConflict: Another commit moved the ref meanwhile.
        """
        if self._manifest is not None or self._is_written:
            return
        with self._lock:
            spool = self._open()
            try:
                self._flush(spool)
                rows = spool.finish()
                if self._part is not None:
                    folder, name = self._part
                    folder.publish(name, self._spooled, settings_of(self._version), rows)
                    self._is_written = True
                else:
                    parts = PartFiles(spool.folder, [self._spooled])
                    self._manifest = write_version(self._to, self._version, [rows], parts)
            finally:
                self._drop()

    def abort(self) -> None:
        """Discard the added samples; nothing is committed."""
        with self._lock:
            self._drop()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _drop(self) -> None:
        if self._spool is not None:
            self._spool.drop()
        self._spool, self._rows = None, []

    def _open(self) -> RowSpool:
        if self._spool is None:
            raise UsageError("this writer is closed; open another with shardkit.create")
        return self._spool
