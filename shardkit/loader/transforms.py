"""Decoders, transforms and substitutes, with randomness that does not depend on rank or worker."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import methodcaller
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, RunError
from shardkit.formats import FieldType, Schema, sha256_digest
from shardkit.loader.global_generators import GeneratorWatch, work_seeded
from shardkit.plan import Place, Population
from shardkit.ranges import shown

__all__ = [
    "DECODERS",
    "BatchTransform",
    "Decoder",
    "LazyGenerators",
    "RowDecoder",
    "RowFailure",
    "RowFunction",
    "SampleTransform",
    "SubstituteDraw",
    "columns_of_rows",
    "find_decoders",
    "row_reader",
    "sample_generator",
    "split_decoders",
    "stack_samples",
    "with_generator",
]


@runtime_checkable
class RowDecoder(Protocol):
    """A decoder whose results have a fixed shape and dtype; it writes each into its row of the batch.

    Attributes:
        shape: shape of a row.
        dtype: dtype of a row.
        made_by: libraries and versions that determine the results; all ranks must have the same.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def made_by(self) -> str: ...

    def __call__(self, value: Any, /, *, place: Place, out: NDArray[Any]) -> None:
        """Decode `value` into all of `out`; random draws depend on `place` alone."""


Decoder: TypeAlias = Callable[[Any], Any] | RowDecoder
"""Maps a stored value to the value in the batch."""

SampleTransform = Callable[[dict[str, Any], "np.random.Generator"], Mapping[str, Any]]
"""Maps a sample and its own random generator to a sample."""


class _OfSampleAlone(msgspec.Struct, frozen=True, eq=False):
    """A transform that draws no random numbers."""

    function: Callable[[dict[str, Any]], Mapping[str, Any]]

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        return self.function(sample)


def with_generator(transform: Callable[..., Mapping[str, Any]]) -> SampleTransform:
    """Return a transform of a sample and a generator, for one that may take the sample alone.

    Raises:
        ConfigurationError: it takes neither one argument nor two.
    """
    try:
        signature = inspect.signature(transform)
    except (TypeError, ValueError):  # of C code, which does not say
        return transform
    for arguments, found in (((None, None), transform), ((None,), _OfSampleAlone(transform))):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return found
    raise ConfigurationError(
        f"transform={shown(transform)}: it takes {signature}; expected transform(sample, rng) or transform(sample)"
    )


BatchTransform = Callable[[dict[str, Any], "LazyGenerators"], Mapping[str, Any]]
"""Maps a batch and the random generators of its samples to a batch."""


# ---- decoders: each raises an error for bytes of another format


def _whole_picture(payload: bytes, mode: Any) -> NDArray[np.uint8]:
    from shardkit.images.decoding import decode_picture

    return decode_picture(payload, mode)


def _numpy_file(payload: bytes) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(payload), allow_pickle=False)  # object arrays hold pickles
    return array


DECODERS: Mapping[str, Decoder] = {
    "rgb8": partial(_whole_picture, mode="RGB"),  # (height, width, 3) uint8
    "gray8": partial(_whole_picture, mode="L"),  # (height, width) uint8
    "numpy": _numpy_file,
    "json": json.loads,
    "text": methodcaller("decode", "utf-8"),
}
"""Built-in decoders by name; all can be pickled."""


def find_decoders(decode: Mapping[str, str | Decoder], schema: Schema) -> dict[str, Decoder]:
    """Return the decoder of each field.

    Raises:
        ConfigurationError: a field or a decoder is unknown, or the field's type cannot be decoded.
        MissingDependency: pictures are to be decoded and Pillow is not installed.
    """
    found: dict[str, Decoder] = {}
    for name, wanted in decode.items():
        if name not in schema:
            raise ConfigurationError(f"decode: {name!r} is not in the schema; it has {', '.join(schema)}")
        if schema[name].kind not in ("bytes", "str", "list"):
            raise ConfigurationError(
                f"decode: {name!r} is {schema[name]}; only bytes, str and lists of them are decoded"
            )
        if not isinstance(wanted, str):
            found[name] = _of_each(name, wanted, schema[name])
            continue
        if wanted not in DECODERS:
            raise ConfigurationError(
                f"decode: {name!r} has decoder {wanted!r}; known are {', '.join(DECODERS)}, or pass a function"
            )
        if wanted in ("rgb8", "gray8"):
            from shardkit.images.decoding import find_decoder

            find_decoder()
        found[name] = _of_each(name, DECODERS[wanted], schema[name])
    return found


def split_decoders(decoders: Mapping[str, Decoder], device: Any) -> tuple[dict[str, Decoder], dict[str, Any]]:
    """Split decoders into a part on the host and, by field, a part on the device.

    A `RowDecoder` is split if it has ``for_device(device)``, which returns a decoder of smaller rows and the function
    to apply to a batch of them on the device. Other decoders stay as they are.
    """
    host, finish = dict(decoders), {}
    for name, one in decoders.items():
        split = getattr(one, "for_device", lambda _: None)(device)
        if split is not None:
            host[name], finish[name] = split
    return host, finish


def _of_each(name: str, decode: Decoder, kind: FieldType) -> Decoder:
    """Return a decoder for the field; it decodes each item of a list."""
    if kind.kind != "list":
        return decode
    if isinstance(decode, RowDecoder):
        raise ConfigurationError(
            f"decode: {name!r} is {kind}, and its decoder makes one array of each row; decode its items with "
            '"rgb8" or a function of one, and crop or resize them in transform='
        )
    return partial(_decode_items, decode)


def _decode_items(decode: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [decode(item) for item in items]


# ---- transforms


def sample_generator(seed: int, step: int, lane: int, slot: int) -> np.random.Generator:
    """Return the random generator of one place in the grid, the same on any rank and worker and after a resume.

    It is Philox keyed by SHA-256 of the place (SPEC.md §4). It serves augmentation only; plans do not draw from it.
    """
    digest = bytes.fromhex(
        sha256_digest(struct.pack("<qqqq", seed, step, lane, slot)).removeprefix("sha256:")
    )
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


class LazyGenerators(Sequence["np.random.Generator"]):
    """Sequence of the random generators of a batch's samples; each is made on access."""

    def __init__(self, seed: int, step: int, slots: NDArray[np.int64], cell_size: int) -> None:
        self._seed, self._step, self._slots, self.cell_size = seed, step, slots, cell_size

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return sample_generator(*self.place(index))

    def place(self, index: int) -> Place:
        """Return the place in the grid of a sample of the batch."""
        lane, slot = divmod(int(self._slots[index]), self.cell_size)
        return Place(self._seed, self._step, lane, slot)


class RowFailure(NamedTuple):
    """The reason why a row has no value; can be sent between processes."""

    decoding: str  # the field that failed to decode; "" if the transform failed
    reason: str  # "ValueError: no such thing"
    details: str = ""  # the traceback, for exceptions that stay in another process
    error: BaseException | None = None


class RowFunction(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Function applied to each row: decode fields, then transform. Picklable if its functions are."""

    seed: int
    decoders: Mapping[str, Decoder] = msgspec.field(default_factory=dict)
    transform: SampleTransform | None = None
    is_seeded: bool = False  # seed the global generators for each row

    def __call__(
        self,
        columns: Mapping[str, Any],
        step: int,
        slots: NDArray[np.int64],
        cell_size: int,
        into: Mapping[str, NDArray[Any]] | None = None,
        watch: GeneratorWatch | None = None,
    ) -> list[Mapping[str, Any] | RowFailure]:
        """Return one result per row, in order.

        Without a transform, `columns` contains only the fields to decode. `into` contains, for fields with a
        `RowDecoder`, the rows of the batch to write to; without it each row gets a new array.
        """
        readers = {name: row_reader(value) for name, value in columns.items()}
        generators = LazyGenerators(self.seed, step, slots, cell_size)
        rows: list[Mapping[str, Any] | RowFailure] = []
        for position in range(len(slots)):
            work = partial(self._one, readers, position, generators, into or {})
            if self.is_seeded:
                rows.append(work_seeded(generators.place(position), work))
            else:
                rows.append(work() if watch is None else watch.observe(work))
        return rows

    @cached_property
    def row_decoders(self) -> Mapping[str, RowDecoder]:
        """The decoders that write into an array."""
        return {name: one for name, one in self.decoders.items() if isinstance(one, RowDecoder)}

    def _one(
        self,
        readers: Mapping[str, Callable[[int], Any]],
        position: int,
        generators: LazyGenerators,
        into: Mapping[str, NDArray[Any]],
    ) -> Mapping[str, Any] | RowFailure:
        row = {name: read(position) for name, read in readers.items()}
        for name, decode in self.decoders.items():
            decoder, plain = self.row_decoders.get(name), cast("Callable[[Any], Any]", decode)
            try:
                if decoder is None and row.get(name) is not None:
                    row[name] = plain(row[name])
                elif decoder is not None and name in row:
                    out = into[name][position] if name in into else np.empty(decoder.shape, decoder.dtype)
                    if row[name] is None:
                        out[...] = 0
                    else:
                        decoder(row[name], place=generators.place(position), out=out)
                    row[name] = out
            except Exception as error:  # noqa: BLE001  the policy decides what becomes of it
                return _failure(name, error)
        if self.transform is None:
            return row
        try:
            result = self.transform(row, generators[position])
            check_fields(result, "transform")  # here: a generator or coroutine cannot leave a process
            return result
        except Exception as error:  # noqa: BLE001  raised with the sample's name by the caller
            return _failure("", error)


def _failure(decoding: str, error: Exception) -> RowFailure:
    details = "".join(traceback.format_exception(error))
    return RowFailure(decoding, f"{type(error).__name__}: {error}", details, error)


def row_reader(value: Any) -> Callable[[int], Any]:
    """Return a function that returns a row of a column by its number."""
    if isinstance(value, tuple):
        values, borders, *shapes = value
        if shapes:
            return lambda i: values[borders[i] : borders[i + 1]].reshape(shapes[0][i])
        return lambda i: values[borders[i] : borders[i + 1]]
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return lambda i: value[i].item()
    return lambda i: value[i]


def columns_of_rows(like: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn rows into columns of the same kinds as in `like`.

    A column is an array, a list, (values, borders) or (values, borders, shapes).
    """
    result: dict[str, Any] = {}
    for name, column in like.items():
        values = [row[name] for row in rows]
        if isinstance(column, tuple):
            borders = np.zeros(len(values) + 1, dtype=np.int64)
            np.cumsum([value.size for value in values], out=borders[1:])
            shapes = [
                np.array([v.shape for v in values], np.int64).reshape(-1, c.shape[1]) for c in column[2:]
            ]
            result[name] = (np.concatenate([column[0][:0], *map(np.ravel, values)]), borders, *shapes)
        elif isinstance(column, np.ndarray):
            result[name] = np.array(values, dtype=column.dtype).reshape(-1, *column.shape[1:])
        else:
            result[name] = values
    return result


def check_fields(result: object, function: str) -> None:
    """Raise ConfigurationError unless the result of a user's function is a mapping without the names of batches."""
    if not isinstance(result, Mapping):
        raise ConfigurationError(
            f"{function} returned {shown(result)}: a mapping of field to value is expected"
        )
    for name in ("step", "samples"):
        if name in result:
            raise ConfigurationError(
                f"{function} returned a field {name!r}, which is reserved for batches; call it {name}_"
            )


def stack_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn rows into columns: numbers and arrays of equal shape are stacked, other values become a list."""
    if not samples:
        return {}
    return {name: _stack(name, [sample[name] for sample in samples]) for name in samples[0]}


def _stack(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        return values
    if all(isinstance(value, (bool, int, float, np.generic)) for value in values):
        column = np.array(values)
        return values if column.dtype.kind in "OUS" else column  # integers above 64 bits, text
    try:
        values = [np.asarray(value) if hasattr(value, "__array__") else value for value in values]
    except (TypeError, RuntimeError) as error:
        raise RunError(
            f"the transform returned tensors of field {name!r} that numpy cannot hold: {error}; return arrays, or "
            "dense tensors of the CPU without gradients and of another type than bfloat16"
        ) from error
    first = values[0]
    if all(isinstance(v, np.ndarray) and v.shape == first.shape and v.dtype == first.dtype for v in values):
        return np.stack(values)
    return values


class SubstituteDraw:
    """Draws substitutes by SHA-256 of (seed, sample, step, slot, attempt), uniformly from the stratum's selected rows.

    Args:
        population: strata and their rows.
        seed: seed of the plan.
        fetch: reads one sample, verified.
    """

    def __init__(self, population: Population, seed: int, fetch: Callable[[int], dict[str, Any]]) -> None:
        self._population, self._seed, self._fetch = population, seed, fetch
        self._ends = np.cumsum(np.asarray(population.segment_rows, dtype=np.int64))

    def __call__(self, sample: int, step: int, slot: int, attempt: int) -> tuple[int, dict[str, Any]]:
        """Return the number and the fields of a substitute for `sample`."""
        population = self._population
        stratum = population.segment_stratum[int(np.searchsorted(self._ends, sample, side="right"))]
        segments = np.flatnonzero(population.segment_stratum == stratum)
        rows = population.segment_rows[segments].astype(np.int64)
        place = f"{self._seed} {sample} {step} {slot} {attempt}".encode()
        draw = int(sha256_digest(place).removeprefix("sha256:")[:16], 16) % int(rows.sum())
        ends = np.cumsum(rows)
        inside = int(np.searchsorted(ends, draw, side="right"))
        segment = segments[inside]
        other = (
            int(self._ends[segment] - population.segment_rows[segment])
            + draw
            - int(ends[inside] - rows[inside])
        )
        return other, self._fetch(other)
