"""`CheckpointWriter` and `CheckpointReader`, plug-ins for torch.distributed.checkpoint (DCP), and `FlatSlice` for them.

An extent is [object hex, object size, offset in the object, length]. A chunk (a box of a tensor) is a list of extents.
`export_safetensors` writes weights for programs that do not use shardkit.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardkit.documents import encode, parse_digest, sha256_digest
from shardkit.errors import ConfigurationError, FormatError, RunError, ShardkitError
from shardkit.ledger import bind_checkpoint
from shardkit.stores.store import Store, object_name

from .checkpoint_format import (
    NAME,
    REF_BYTES,
    as_store,
    checkpoint_names,
    decode_value,
    encode_value,
    get_verified,
    read_checkpoint_manifest,
    ref_name,
)

PIECE_BYTES = 16 << 20  # larger tensors are cut: bounds memory, and unchanged pieces are shared
PACK_BYTES = 64 << 10  # smaller tensors share an object, because an fsync costs more than their bytes
PACK_TARGET_BYTES = 1 << 20
SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Dtypes that a checkpoint may contain → their names in safetensors."""

DTYPES = {name: getattr(torch, name) for name in SAFETENSORS}

Extent = list[Any]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in C order, little-endian, as bytes; a view if the tensor is contiguous on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


@dataclass
class _OneCheckpoint:
    """Base class of a writer or reader of one checkpoint; it does not change DCP's plans."""

    location: Store | str | os.PathLike[str]
    name: str | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to the checkpoint that ``checkpoint_id`` names, if given."""
        if checkpoint_id is not None:
            self.name = os.path.basename(os.fspath(checkpoint_id))

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged: object names follow from their bytes."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans unchanged: ranks cannot collide in a content-addressed store."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if DCP may use ``checkpoint_id`` as the checkpoint's name."""
        return NAME.fullmatch(os.path.basename(os.fspath(checkpoint_id))) is not None


@dataclass
class CheckpointWriter(_OneCheckpoint, StorageWriter):
    """Writer of one checkpoint: objects first, then the manifest, then the ref.

    If writing stops at any time, there is no ref, so the checkpoint does not exist and earlier checkpoints are intact.
    Objects of earlier checkpoints are not written again.

    Attributes:
        location: run directory: a path, a URL or a store.
        name: name of the checkpoint, by default DCP's checkpoint_id. Names sort by age: number them with leading zeros.
        meta: plain data stored in the manifest (loader state, step, configuration).
        threads: concurrent writes per rank.
        distrust: read objects that already exist, and replace damaged ones.
    """

    meta: Mapping[str, object] = field(default_factory=dict)
    threads: int = 4
    distrust: bool = False
    written_bytes: int = field(default=0, init=False)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the name before anything is written."""
        if self.name is None:
            raise ConfigurationError("CheckpointWriter has no name; pass name= or dcp.save(checkpoint_id=…)")
        ref_name(self.name)
        self.location = as_store(self.location)
        self.written_bytes = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's objects; each result carries extents, or the encoded value."""
        store = as_store(self.location)
        results: list[WriteResult] = []
        pack: list[tuple[WriteItem, memoryview]] = []
        with ThreadPoolExecutor(self.threads) as pool:
            for item in plan.items:
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    value = encode_value(_plain(data, item.index.fqn), item.index.fqn)
                    results.append(WriteResult(item.index, 0, {"value": value}))
                    continue
                assert isinstance(data, torch.Tensor)
                content = tensor_bytes(data)
                if len(content) < PACK_BYTES:
                    pack.append((item, content))
                else:
                    pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
                    extents = self._count(pool.map(lambda piece: self._put(store, piece), pieces))
                    results.append(WriteResult(item.index, len(content), {"extents": extents}))
            results.extend(self._write_packs(store, pack))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _put(self, store: Store, content: memoryview | bytes) -> tuple[Extent, bool]:
        """Store ``content``; return its extent, and whether it was written. Thread-safe."""
        digest = sha256_digest(content)
        is_new = self._put_object(store, object_name(digest, "tensor"), bytes(content))
        return [parse_digest(digest), len(content), 0, len(content)], is_new

    def _count(self, puts: Iterable[tuple[Extent, bool]]) -> list[Extent]:
        done = list(puts)
        self.written_bytes += sum(extent[1] for extent, is_new in done if is_new)
        return [extent for extent, _ in done]

    def _put_object(self, store: Store, name: str, content: bytes) -> bool:
        """Write the object if it is missing or damaged; return True if it was written."""
        if store.put_new(name, content):
            return True
        if not self.distrust:
            return False
        known = store.head(name)
        same_size = known is not None and known.size == len(content)
        if same_size and store.get(name, max_bytes=len(content)) == content:
            return False
        store.replace(name, content)
        return True

    def _write_packs(self, store: Store, small: Sequence[tuple[WriteItem, memoryview]]) -> list[WriteResult]:
        """Write small tensors in packs per top-level key, so that the packs of a frozen model stay the same."""
        results: list[WriteResult] = []
        packs: list[list[tuple[WriteItem, memoryview]]] = []
        room, group = 0, ""
        for item, data in small:
            key = item.index.fqn.partition(".")[0]
            if key != group or len(data) > room:
                packs.append([])
                room, group = PACK_TARGET_BYTES, key
            packs[-1].append((item, data))
            room -= len(data)
        for pack in packs:
            (extent,) = self._count([self._put(store, b"".join(data for _, data in pack))])
            digest, size, at = *extent[:2], 0
            for item, data in pack:
                results.append(
                    WriteResult(item.index, len(data), {"extents": [[digest, size, at, len(data)]]})
                )
                at += len(data)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, then the ref; called on the coordinator after all objects are durable."""
        assert self.name is not None
        store = as_store(self.location)
        stored = {result.index: result.storage_data for rank in results for result in rank}
        body = encode(_manifest(self.name, self.meta, metadata, stored))
        digest = sha256_digest(body)
        self._put_object(store, object_name(digest, "checkpoint"), body)
        ref: dict[str, object] = {"checkpoint": digest, "name": self.name, "size": len(body)}
        ref["digest"] = sha256_digest(encode(ref))
        if self.name in checkpoint_names(store):
            if store.get(ref_name(self.name), max_bytes=REF_BYTES) == encode(ref):
                return
            raise RunError(
                f"checkpoint {self.name} exists in {store.url} with other content; choose another name"
            )
        if "://" not in store.url and any(Path(store.url, part).is_dir() for part in ("journal", "ledger")):
            # the ledger of the run directory records the checkpoint first, which reserves its name
            step = self.meta.get("step")
            step = step if type(step) is int else None
            bind_checkpoint(store.url, name=self.name, checkpoint=digest, step=step)
        if not store.put_new(ref_name(self.name), encode(ref)):
            raise RunError(f"checkpoint {self.name} was written to {store.url} by another process meanwhile")


def _plain(data: object, where: str) -> object:
    """Return plain data from DCP's planner, which pickles non-tensors; loaded in the mode for plain data only."""
    if not isinstance(data, io.BytesIO):
        return data
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise ConfigurationError(
            f"checkpoint entry {where}: only tensors and plain data can be saved ({type(error).__name__})"
        ) from error


def _manifest(
    name: str, meta: Mapping[str, object], metadata: Metadata, stored: Mapping[MetadataIndex, Any]
) -> dict[str, object]:
    paths: Mapping[str, Sequence[str | int]] = metadata.planner_data or {}
    tensors: dict[str, object] = {}
    values: dict[str, object] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        path = list(paths[fqn]) if fqn in paths else None
        if isinstance(entry, BytesStorageMetadata):
            values[fqn] = {"path": path, "value": stored[MetadataIndex(fqn)]["value"]}
            continue
        chunks = [
            [list(c.offsets), list(c.sizes), stored[MetadataIndex(fqn, c.offsets)]["extents"]]
            for c in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigurationError(
                f"checkpoint entry {fqn}: dtype {dtype}; expected one of {', '.join(DTYPES)}"
            )
        tensors[fqn] = {"dtype": dtype, "shape": list(entry.size), "path": path, "chunks": chunks}
    return {"format": "shardkit-checkpoint", "version": 1, "name": name, "meta": encode_value(dict(meta), "meta"),
            "tensors": tensors, "values": values}  # fmt: skip


@dataclass
class CheckpointReader(_OneCheckpoint, StorageReader):
    """Reader of one checkpoint for any world size and sharding; bytes are verified before they reach a tensor.

    Attributes:
        location: run directory: a path, a URL or a store.
        name: name of the checkpoint; None for the newest.
        meta: ``meta`` of the writer, set when the metadata is read.
        failure: error on this rank, which DCP's own exception does not always include.
    """

    meta: dict[str, Any] = field(default_factory=dict, init=False)
    failure: ShardkitError | None = field(default=None, init=False)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata, rebuilt from the verified manifest, and set `meta`."""
        try:
            manifest = read_checkpoint_manifest(self.location, self.name)
        except ShardkitError as error:
            self.failure = error
            raise
        self.meta = decode_value(manifest["meta"])
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage: dict[MetadataIndex, Any] = {}
        for fqn, tensor in manifest["tensors"].items():
            if tensor["dtype"] not in DTYPES:
                raise FormatError(
                    f"checkpoint entry {fqn}: dtype {tensor['dtype']!r}; expected one of {', '.join(DTYPES)}"
                )
            chunks = []
            for offsets, sizes, extents in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                storage[MetadataIndex(fqn, chunks[-1].offsets)] = extents
            properties = TensorProperties(DTYPES[tensor["dtype"]])
            entries[fqn] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        for fqn, value in manifest["values"].items():
            entries[fqn] = BytesStorageMetadata()
            storage[MetadataIndex(fqn)] = value["value"]
        everything = {**manifest["tensors"], **manifest["values"]}
        paths = {fqn: tuple(entry["path"]) for fqn, entry in everything.items() if entry["path"] is not None}
        return Metadata(entries, planner_data=paths or None, storage_data=storage)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the result of `read_metadata`."""
        self.location = as_store(self.location)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, verify and copy each item of the plan."""
        try:
            self._read_items(plan, planner)
        except ShardkitError as error:
            self.failure = error
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        store = as_store(self.location)

        @lru_cache(maxsize=4)  # packed tensors come in runs
        def opened(digest: str, size: int) -> bytes:
            return get_verified(store, digest, "tensor", size)

        def read(extent: Extent) -> bytes:
            digest, size, offset, length = extent
            if not (isinstance(size, int) and 0 <= offset <= offset + length <= size <= PIECE_BYTES):
                raise FormatError(f"checkpoint extent {extent!r} lies outside its object")
            return opened(digest, size)[offset : offset + length]

        for item in plan.items:
            stored = self._metadata.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                # DCP's planner insists on torch.save bytes; these were made here, from plain data, a line above
                buffer = io.BytesIO()
                torch.save(decode_value(stored), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
            else:
                source = self._chunk(item, b"".join(map(read, stored)), store)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)

    def _chunk(self, item: ReadItem, data: bytes, store: Store) -> torch.Tensor:
        """Return the part of a stored chunk that ``item`` requests."""
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(c for c in entry.chunks if c.offsets == item.storage_index.offset)
        dtype = entry.properties.dtype
        if len(data) != math.prod(chunk.sizes) * dtype.itemsize:
            raise FormatError(f"checkpoint entry {item.storage_index.fqn} in {store.url}: chunk {list(chunk.sizes)}"
                              f" of {dtype} has {len(data)} bytes")  # fmt: skip
        whole = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        whole = whole.reshape(chunk.sizes)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            whole = whole.narrow(dimension, start, length)
        return whole


# ---- parts of tensors (the trainer's SPEC.md §3)


def rectangles(shape: Sequence[int], low: int, high: int) -> list[tuple[list[int], list[int]]]:
    """Return elements low … high−1 of a C-order tensor as at most 2·dimensions − 1 boxes (offsets, sizes), in order."""
    if low >= high:
        return []
    if not shape:
        return [([], [])]
    rest = list(shape[1:])
    row = math.prod(rest)

    def inside(at: int, low: int, high: int) -> list[tuple[list[int], list[int]]]:
        return [([at, *offsets], [1, *sizes]) for offsets, sizes in rectangles(rest, low, high)]

    first, last = low // row, high // row  # rows that contain low and high
    if first == last:
        return inside(first, low % row, high % row)
    boxes = []
    if low % row:
        boxes += inside(first, low % row, row)
        first += 1
    if first < last:
        boxes.append(([first] + [0] * len(rest), [last - first, *rest]))
    return boxes + inside(last, 0, high % row)


class FlatSlice(torch.Tensor):
    """A run of elements of a larger tensor, for torch.distributed.checkpoint; it has the shape of the larger tensor.

    Implements DCP's protocol for tensors that know their own parts: a slice is saved as boxes, and other shardings can
    be loaded from it or into it. Arithmetic on it is an error.
    """

    run: torch.Tensor
    low: int
    boxes: list[tuple[list[int], list[int]]]

    @staticmethod
    def __new__(cls, run: torch.Tensor, shape: Sequence[int], low: int) -> FlatSlice:
        """Wrap ``run``, the elements low … low + len(run) − 1 of a tensor of ``shape``; shares its memory."""
        made: FlatSlice = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way to make one
            cls, torch.Size(shape), dtype=run.dtype, device=run.device
        )
        made.run, made.low = run, low
        made.boxes = rectangles(shape, low, low + run.numel())
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise an error for every operation except detach, which planners call."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"FlatSlice only describes a part of a tensor; {func} is not defined on it")

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.run.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for offsets, sizes in self.boxes:
            length = math.prod(sizes)
            if index.offset is not None and list(index.offset) == offsets:
                return self.run[at : at + length].view(sizes)
            at += length
        raise ValueError(f"no part of this slice starts at {index.offset}; it has {self.boxes}")


# ---- for other programs


def export_safetensors(
    location: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    part: str = "model",
) -> int:
    """Write one part of a checkpoint to ``path`` and return the number of tensors; needs no process group.

    Args:
        location: run directory: a path, a URL or a store.
        path: path of the file to write.
        name: name of the checkpoint; None for the newest. Any number of ranks and sharding is accepted.
        part: top-level key of the saved state; names in the file are the keys below it.

    Raises:
        NotFoundError, IntegrityError: there is no such checkpoint, or it is damaged.
        FormatError: it has no tensors in ``part``.
    """
    store = as_store(location)
    manifest = read_checkpoint_manifest(store, name)
    tensors = {
        fqn: torch.empty(saved["shape"], dtype=getattr(torch, saved["dtype"]))
        for fqn, saved in sorted(manifest["tensors"].items())
        if fqn.startswith(f"{part}.")
    }
    if not tensors:
        raise FormatError(f"checkpoint {manifest['name']} has no tensors under {part}.; nothing to export")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        load_state(tensors, storage_reader=CheckpointReader(store, manifest["name"]), no_dist=True)
    header: dict[str, object] = {"__metadata__": {"checkpoint": manifest["name"], "format": "pt"}}
    end = 0
    for fqn, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = SAFETENSORS[str(tensor.dtype).removeprefix("torch.")]
        described = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[fqn.removeprefix(f"{part}.")] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))
    return len(tensors)
