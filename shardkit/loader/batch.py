"""Batches that the loader returns, the batches of one step, and the counters of loops and windows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.errors import ConfigurationError, MissingDependency, SampleError, UsageError
from shardkit.extras import install_command
from shardkit.formats import Schema, presence_of
from shardkit.formats.schema import BOUNDARIES
from shardkit.loader.packed_rows import Documents, documents_of
from shardkit.notebook import value_text

__all__ = [
    "Batch",
    "EpochCounts",
    "LoaderCounts",
    "MissingValues",
    "StepBatches",
    "WindowCounts",
    "gathered_fields",
    "makes_tensors",
    "may_pin",
    "to_tensors",
]


_KNOWN_FIRST = ("lane", "slots", "weight", "valid")
"""Attributes that are lost in a copy that a framework makes of the fields."""


class Batch(dict[str, Any]):
    """One rank's samples of one step (or one cell of it): a dict of fields, with "step" and "samples" among them.

    The arrays belong to the holder of the batch: the loader never writes to them again.

    Attributes:
        step: the step, counted over the whole run.
        lane: the lane of a cell; −1 if several lanes are concatenated.
        samples: (n,) int64 sample numbers (selected rows in manifest order), in the order of the rows.
        slots: (n,) int64 places in the grid: lane · cell_size + slot of each row inside its cell.
        weight: factor for a rank's *mean* loss so that the average over ranks is the mean over the global batch;
            1.0 if all ranks hold equally many samples.
        valid: optional field → (n,) bool, True for rows that have a value.
    """

    __slots__ = ("lane", "samples", "slots", "step", "valid", "weight")

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        step: int | None = None,
        lane: int | None = None,
        samples: NDArray[np.int64] | None = None,
        slots: NDArray[np.int64] | None = None,
        weight: float | None = None,
        valid: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> None:
        """Make a batch from its fields; frameworks call `Batch(fields)` when they move a batch to a device.

        Such a copy has `step` and `samples`, which are fields. Its other attributes raise AttributeError.
        """
        super().__init__(fields)
        self.step = int(self["step"]) if step is None else step
        self.samples: NDArray[np.int64] = self["samples"] if samples is None else samples
        if lane is not None and slots is not None and weight is not None:
            self.lane, self.slots, self.weight, self.valid = lane, slots, weight, dict(valid or {})
        self["step"] = self.step
        self["samples"] = self.samples

    def __getattr__(self, name: str) -> Any:
        if name in _KNOWN_FIRST:
            raise AttributeError(
                f"this copy of a batch has no {name}: the framework that moved it kept its fields only; take it "
                "from the batch as the loader handed it out"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        lines = (f"\n  {name}: {value_text(value)}" for name, value in self.items() if name != "step")
        return f"Batch(step={self.step}, {len(self.samples)} samples){''.join(lines)}"

    def array(self, name: str) -> NDArray[Any]:
        """Return a field as a numpy array; the array of a CPU tensor shares the tensor's memory.

        Raises:
            UsageError: the field is a list or ragged.

        Examples:
            >>> batch.array("label").dtype.name
            'int64'
        """
        value = self[name]
        if isinstance(value, list | tuple):
            kind = type(value).__name__
            raise UsageError(f"batch.array({name!r}): the field is a {kind}, no array; take batch[{name!r}]")
        array: NDArray[Any] = value if isinstance(value, np.ndarray) else value.numpy(force=True)
        return array

    def documents(self, field: str = "tokens", boundaries: str = BOUNDARIES) -> Documents:
        """Return where documents begin in packed rows, for attention that stays inside them.

        Args:
            field: (rows, length) tokens.
            boundaries: ragged field with the documents of each row, as ``build --pack`` writes it; without such a
                field each row is one document.

        Raises:
            UsageError: the field does not hold rows of one length.
            SampleError: a row has a boundary outside of its tokens.
        """
        return documents_of(self, field, boundaries)

    def to(self, device: Any, non_blocking: bool = False, **_: Any) -> Batch:
        """Return a copy of this batch with its tensors on `device`; frameworks call this method by name.

        From pinned memory and with ``non_blocking=True`` the copy overlaps with other work of the device.
        """
        fields = {name: _move(value, device, non_blocking) for name, value in self.items()}
        copy = Batch(fields, step=self.step, samples=fields["samples"])
        for name in _KNOWN_FIRST:
            if hasattr(self, name):
                setattr(copy, name, getattr(self, name))
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: value for name, value in self.items() if name not in ("step", "samples")}
        rest = [getattr(self, name, None) for name in ("lane", "samples", "slots", "weight", "valid")]
        # an array is cheaper to send than the tensor that `to_tensors` made of it
        as_tensor = type(self.get("samples")) is not type(self.samples)
        return _rebuild, (fields, self.step, *rest, as_tensor)


def _rebuild(
    fields: dict[str, Any],
    step: int,
    lane: int | None,
    samples: NDArray[np.int64],
    slots: NDArray[np.int64] | None,
    weight: float | None,
    valid: dict[str, NDArray[np.bool_]] | None,
    as_tensor: bool,
) -> Batch:
    batch = Batch(fields, step=step, lane=lane, samples=samples, slots=slots, weight=weight, valid=valid)
    if as_tensor:
        import torch  # a process that receives a batch may not have imported it

        batch["samples"] = torch.from_numpy(samples)
    return batch


def _move(value: Any, device: Any, non_blocking: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(part, device, non_blocking) for part in value)
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


def may_pin() -> bool:
    """Return True if this process has initialised CUDA; `cuda.is_available` would break a later fork."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())


def makes_tensors(wanted: bool | None, *, on_device: bool) -> bool:
    """Return True if batches hold torch tensors; import torch if tensors or a device were requested."""
    wanted = "torch" in sys.modules if wanted is None else wanted
    if not wanted and not on_device:
        return False
    try:
        __import__("torch")
    except ImportError as error:
        raise MissingDependency(
            f"ds.loader(tensors=True) needs torch; run: {install_command('train')}, or take numpy arrays: "
            "tensors=False"
        ) from error
    return True


def to_tensors(batch: Batch, *, pin: bool = False) -> Batch:
    """Turn the arrays of a batch into torch tensors that share their memory, or into pinned copies.

    Lists stay lists, and arrays of a type that torch lacks (text, times, objects) become lists of their rows. The
    program must have imported torch.
    """
    torch = sys.modules["torch"]

    def tensor(array: NDArray[Any]) -> Any:
        try:
            made = torch.from_numpy(array)
        except TypeError:
            return list(array)
        return (
            made.pin_memory() if pin else made
        )  # torch reuses a pinned block after the copies from it are done

    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            batch[name] = tensor(value)
        elif isinstance(value, tuple):
            batch[name] = tuple(tensor(part) for part in value)
    return batch


# ---- rows of optional fields that have no value

_RAGGED = ("ragged", "varying")


def gathered_fields(schema: Schema, chosen: Sequence[str] | None) -> list[str]:
    """Return the columns to gather in the requested order, with the presence columns of optional fields at the end."""
    fields = list(schema if chosen is None else chosen)
    for name in fields:
        if name not in schema:
            raise ConfigurationError(f"fields: {name!r} is not in the schema; it has {', '.join(schema)}")
    gathered = dict.fromkeys(fields)
    for name in fields:
        if schema[name].optional:
            gathered[presence_of(name)] = None
    return list(gathered)


class MissingValues:
    """Presence masks and fill values of the optional fields of one loader.

    Args:
        schema: types of the stored columns.
        fields: names of the gathered columns.
        fill: optional field → value of rows that have none.

    Raises:
        ConfigurationError: `fill` names a field that is not optional, or has a value that the field does not take.
    """

    def __init__(self, schema: Schema, fields: Sequence[str], fill: Mapping[str, Any]) -> None:
        self._kinds = {name: schema[name] for name in fields if schema[name].optional}
        self._fill: dict[str, Any] = {}
        for name, value in fill.items():
            kind = self._kinds.get(name)
            if kind is None or kind.kind in _RAGGED:
                able = [one for one, held in self._kinds.items() if held.kind not in _RAGGED]
                raise ConfigurationError(
                    f"fill: {name!r} is no optional field that is loaded and takes one; "
                    + (f"these are {', '.join(able)}" if able else "there is none")
                )
            one = Schema({name: kind.required})
            try:
                given = np.broadcast_to(np.asarray(value), kind.shape) if kind.kind == "array" else value
                self._fill[name] = one.decode(one.encode({name: given}, where="fill"))[name]
            except (SampleError, ValueError) as error:
                raise ConfigurationError(
                    f"fill={{{name!r}: {value!r:.80}}}: not of type {kind}: {error}"
                ) from None

    def split(self, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[np.bool_]]]:
        """Split gathered columns into fields, with missing values filled, and presence masks, (n,) bool by field."""
        if not self._kinds:
            return columns, {}
        valid = {name: columns.pop(presence_of(name)) for name in self._kinds}
        for name, mask in valid.items():
            if mask.all():
                continue
            column = columns[name]
            if isinstance(column, list):
                fill = self._fill.get(name)
                columns[name] = [value if has else fill for value, has in zip(column, mask, strict=True)]
            elif name in self._fill:
                column[~mask] = self._fill[name]
        return columns, valid

    def of_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample as a row of gathered columns."""
        row = dict(sample)
        for name, kind in self._kinds.items():
            row[presence_of(name)] = row[name] is not None
            if row[name] is None:
                row[name] = self._fill.get(name)
                if row[name] is None and kind.kind == "varying" and kind.items is not None:
                    row[name] = np.zeros(kind.items.shape, kind.items.dtype)
                elif row[name] is None and kind.dtype:
                    row[name] = np.zeros(kind.shape or (0,), kind.dtype) if kind.kind != "scalar" else 0
        return row


class LoaderCounts(msgspec.Struct):
    """Counters of one loop. Each is a key of `Loader.stats`; times are in seconds."""

    assembly_blocked_s: float = 0.0  # the assembly thread waited for room
    assembly_starved_s: float = 0.0  # the trainer waited for it
    computed_s: float = 0.0  # the rank's own part of steps, if it is reported
    consumer_wait_s: float = 0.0  # the trainer waited in `next`
    gather_s: float = 0.0
    last_wait_s: float = 0.0  # of the step handed out last
    load_wait_s: float = 0.0  # gathering waited for blocks
    plan_blocked_s: float = 0.0  # the plan thread waited for room
    plan_s: float = 0.0
    plan_starved_s: float = 0.0  # gathering waited for it
    samples: int = 0
    stalls: int = 0  # reports of the watchdog
    steps: int = 0
    substitutions: int = 0  # rows replaced or masked
    transform_s: float = 0.0  # time of the assembling thread in decoding and transforms


class WindowCounts(msgspec.Struct):
    """Counters of one window; plain numbers, read without a lock."""

    block_loads: int = 0
    block_reloads: int = 0  # blocks loaded again because they were evicted earlier in the epoch
    block_uses: int = 0
    bytes_loaded: int = 0
    evictions: int = 0
    load_s: float = 0.0  # seconds, summed over threads
    peak_bytes: int = 0


class EpochCounts(msgspec.Struct):
    """Counters of a window since an epoch began, or since memory grew."""

    loads: int = 0
    reloads: int = 0  # blocks loaded again because they were evicted earlier in the epoch
    soon_again: int = 0  # reloads that twice the memory would have avoided


class StepBatches(NamedTuple):
    """One step in the form that the trainer gets."""

    step: int
    batches: list[Batch]  # a single batch, or with `by_cell` one per lane
    samples: Int64s  # (n,) all samples of the step, lane after lane
    lane_counts: Int64s  # (lanes,) rows of each lane
    replaced: list[dict[str, Any]]  # rows that were substituted or masked, as the journal records them
