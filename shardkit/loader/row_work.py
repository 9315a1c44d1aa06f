"""Decoding and transforms of batches in order, and replacement of rows that do not decode."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from pickle import PicklingError
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, RunError, ShardkitError
from shardkit.formats import presence_of
from shardkit.loader.gather import Allocate, rows_of
from shardkit.loader.global_generators import BATCH_ADVICE, TRANSFORM_ADVICE, GeneratorWatch, TrainerWaits
from shardkit.loader.settings import LoaderSetup, Workers
from shardkit.loader.transforms import (
    LazyGenerators,
    RowFailure,
    RowFunction,
    SubstituteDraw,
    check_fields,
    columns_of_rows,
    row_reader,
    stack_samples,
)

__all__ = ["BatchRows", "RowWork", "open_workers"]

Rows: TypeAlias = list[Mapping[str, Any] | RowFailure]
"""Result or failure of each row."""

_ATTEMPTS = 16
_function: RowFunction | None = None  # of this worker process


_NONE: Final[Mapping[str, Any]] = {}


class BatchRows(NamedTuple):
    """The gathered rows of one batch, which workers may be decoding."""

    lane: int  # −1 stands for all lanes
    fields: dict[str, Any]  # as gathered
    valid: Mapping[str, NDArray[np.bool_]]  # optional field → (n,) presence of a value
    samples: NDArray[np.int64]
    slots: NDArray[np.int64]
    columns: Mapping[str, Any] = _NONE  # the gathered columns that rows are made of
    pieces: Sequence[Future[Rows]] = ()  # results in order; empty if no rows are decoded
    into: Mapping[str, NDArray[Any]] = _NONE  # arrays of the batch that decoders write their rows to

    def give_up(self) -> None:
        """Cancel the pieces that have not begun and wait for the rest."""
        wait([piece for piece in self.pieces if not piece.cancel()])


class RowWork:
    """Decoding and transforms of one loop.

    Work on a batch has two parts, `begin` and `finish`, so that workers decode the next batch while one is assembled.

    Args:
        setup: setup of the loader; its batch transform runs in the assembling thread.
        workers: executor that runs the setup's function; None if it has none.
        parts: number of pieces into which a step is split for the workers.
        allocate: makes the arrays that decoders write to.
    """

    def __init__(
        self,
        setup: LoaderSetup,
        *,
        workers: Executor | None,
        parts: int,
        allocate: Allocate,
    ) -> None:
        plan, config, function = setup.plan, setup.config, setup.function
        self._function, self._batch_transform, self._on_error = (
            function,
            config.batch_transform,
            config.on_error,
        )
        self._workers, self._parts, self._allocate = workers, parts, allocate
        self._row_decoders = {} if function is None or function.transform else function.row_decoders
        self._seed, self._cell_size = plan.settings.seed, plan.cell_size
        self._substitutes = SubstituteDraw(
            plan.population,
            plan.settings.seed,
            lambda sample: setup.missing.of_sample(setup.sources.fetch(sample)),
        )
        self._describe = setup.sources.describe
        self._replaced: list[dict[str, Any]] = []
        self.trainer_waits = TrainerWaits()
        self._watch_rows: GeneratorWatch | None = None
        if config.runs_user_code and not config.rows_are_seeded:
            self._watch_rows = GeneratorWatch(self.trainer_waits, TRANSFORM_ADVICE)
        self._watch_batch = GeneratorWatch(self.trainer_waits, BATCH_ADVICE)
        self.at: tuple[int, int] | None = None  # (step, first sample) in `finish`, for the watchdog

    def steps_ahead(self, rows: int) -> int:
        """Return how many steps of `rows` rows to begin ahead so that no worker is idle; 0 without workers."""
        return 0 if self._workers is None else -(-self._parts // max(1, rows))

    def begin(self, rows: BatchRows, step: int, step_rows: int) -> BatchRows:
        """Submit the rows of a batch to the workers; a whole step of `step_rows` rows makes `parts` pieces."""
        function, fields, slots = self._function, rows.fields, rows.slots
        if function is None:
            return rows
        # without a transform, columns that are not decoded need no work per row
        columns = (
            fields if function.transform else {n: v for n, v in fields.items() if n in function.decoders}
        )
        into = {
            name: self._allocate((len(slots), *decoder.shape), decoder.dtype)
            for name, decoder in self._row_decoders.items()
            if name in columns
        }
        size = max(1, -(-step_rows // self._parts))
        pieces = []
        for place in (slice(first, first + size) for first in range(0, len(slots), size)):
            rows_of_piece = {name: rows_of(value, place) for name, value in columns.items()}
            targets = {name: array[place] for name, array in into.items()}
            pieces.append(self._submit(function, rows_of_piece, step, slots[place], targets))
        return rows._replace(columns=columns, pieces=pieces, into=into)

    def finish(self, begun: BatchRows, step: int) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Return the fields of the batch after decoding and transforms, and its (n,) sample numbers."""
        fields, samples = begun.fields, begun.samples
        self.at = (step, int(samples[0]) if len(samples) else -1)
        valid = np.ones(len(samples), dtype=np.bool_)
        if self._function is not None:
            fields, samples = self._rows(self._function, begun, step, valid)
        if self._on_error == "mask":
            fields["valid"] = valid
        if self._batch_transform is not None:
            generators = LazyGenerators(self._seed, step, begun.slots, self._cell_size)
            try:
                changed = self._watch_batch.observe(partial(self._batch_transform, fields, generators))
            except ShardkitError:
                raise
            except Exception as error:
                raise RunError(
                    f"the batch_transform failed on step {step}: {type(error).__name__}: {error}"
                ) from error
            check_fields(changed, "batch_transform")
            fields = dict(changed)
        self.at = None
        return fields, samples

    def take_replacements(self) -> list[dict[str, Any]]:
        """Return the rows replaced or masked since the last call; they are journaled when the step is handed out."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def _rows(
        self, function: RowFunction, begun: BatchRows, step: int, valid: NDArray[np.bool_]
    ) -> tuple[dict[str, Any], NDArray[np.int64]]:
        fields, columns, samples, slots = begun.fields, begun.columns, begun.samples, begun.slots
        rows = self._results(begun.pieces, step, begun.into)
        replaced: dict[int, dict[str, Any]] = {}
        for position, row in enumerate(rows):
            if isinstance(row, RowFailure):
                place = (step, int(samples[position]), int(slots[position]))
                sample, raw, row = self._replace(function, row, *place, list(fields))
                for name, mask in begun.valid.items():
                    mask[position] = raw[presence_of(name)]
                rows[position] = row if function.transform else {name: row[name] for name in columns}
                for name, array in begun.into.items():
                    array[position] = row[name]
                replaced[position] = raw
                if self._on_error == "mask":
                    valid[position] = False
                else:
                    samples = samples.copy()
                    samples[position] = sample
        if function.transform:
            self._check_names(rows, samples)  # type: ignore[arg-type]
        if begun.into:  # fields that decoders have written to the batch are not stacked
            rows = [{n: v for n, v in row.items() if n not in begun.into} for row in rows]  # type: ignore[union-attr]
        done = {**stack_samples(rows), **begun.into}  # type: ignore[arg-type]
        if function.transform:
            return done, samples
        rest = {name: value for name, value in fields.items() if name not in columns}
        if replaced:
            readers = {name: row_reader(value) for name, value in rest.items()}
            all_rows = [
                replaced.get(i) or {n: read(i) for n, read in readers.items()} for i in range(len(rows))
            ]
            rest = columns_of_rows(rest, all_rows)
        done = rest | done
        return {name: done[name] for name in fields if name in done}, samples

    def _check_names(self, rows: Sequence[Mapping[str, Any]], samples: NDArray[np.int64]) -> None:
        """Raise RunError unless the transform has returned the same fields for all samples of a batch."""
        for sample, row in zip(samples.tolist(), rows, strict=True):
            if row.keys() != rows[0].keys():
                raise RunError(
                    f"the transform returned {', '.join(row)} for sample {self._describe(sample)} and "
                    f"{', '.join(rows[0])} for sample {self._describe(int(samples[0]))} of the same batch: the same "
                    "fields are expected for each; return None for a field without a value"
                )

    def _submit(
        self,
        function: RowFunction,
        columns: Mapping[str, Any],
        step: int,
        slots: NDArray[np.int64],
        into: Mapping[str, NDArray[Any]] = _NONE,
    ) -> Future[Rows]:
        """Let a worker work some rows; threads write to `into`, processes return all values."""
        workers = self._workers
        assert workers is not None, "opened for the function"
        try:
            if isinstance(workers, ThreadPoolExecutor):
                return workers.submit(function, columns, step, slots, self._cell_size, into, self._watch_rows)
            return workers.submit(_work_here, columns, step, slots, self._cell_size)
        except BrokenExecutor as error:
            raise _death_error(step) from error

    def _results(
        self, pieces: Sequence[Future[Rows]], step: int, into: Mapping[str, NDArray[Any]] = _NONE
    ) -> Rows:
        try:
            rows = [row for piece in pieces for row in piece.result()]
        except BrokenExecutor as error:
            raise _death_error(step) from error
        except (AttributeError, PicklingError, RuntimeError, TypeError) as error:
            # not of the transform, whose failures are results
            raise RunError(
                f"results of the transform for step {step} cannot be sent from its process: {error}; return plain "
                "values and arrays"
            ) from error
        if not isinstance(self._workers, ThreadPoolExecutor):
            for name, array in into.items():
                for position, row in enumerate(rows):
                    if not isinstance(row, RowFailure):
                        array[position] = row[name]
        return rows

    def _replace(
        self, function: RowFunction, failure: RowFailure, step: int, sample: int, slot: int, fields: list[str]
    ) -> tuple[int, dict[str, Any], Mapping[str, Any]]:
        if not failure.decoding:
            raise RunError(
                f"the transform failed on sample {self._describe(sample)}: {failure.reason}"
                + ("" if failure.error else f"\n{failure.details}")
            ) from failure.error
        if self._on_error == "raise":
            raise RunError(
                f"sample {self._describe(sample)} does not decode: field {failure.decoding!r}: {failure.reason}; its "
                'bytes are what was written. Leave the sample out with a selection, or pass on_error="substitute"'
            ) from failure.error
        one = np.array([slot], dtype=np.int64)
        for attempt in range(_ATTEMPTS):
            other, raw = self._substitutes(sample, step, slot, attempt)
            columns = {name: [raw[name]] for name in fields}
            (row,) = self._results([self._submit(function, columns, step, one)], step)
            if not isinstance(row, RowFailure):
                lane, place = divmod(slot, self._cell_size)
                kind = "substitution" if self._on_error == "substitute" else "mask"
                self._replaced.append(
                    {"step": step, "kind": kind, "lane": lane, "slot": place, "sample": sample, "by": other,
                     "field": failure.decoding, "reason": failure.reason[:200]}
                )  # fmt: skip
                return other, raw, row
            if not row.decoding:
                return self._replace(function, row, step, other, slot, fields)
        raise RunError(
            f"sample {self._describe(sample)} does not decode ({failure.reason}), and neither do {_ATTEMPTS} others of "
            "its stratum; is this the right decoder?"
        )


# ---- workers


def _death_error(step: int) -> RunError:
    return RunError(
        f"a transform process died while it worked on step {step}, or on one that was begun beside it: killed, out of "
        "memory, or the transform ended it; look at the system's log, then resume"
    )


def open_workers(kind: Workers, number: int, function: RowFunction) -> Executor:
    """Return an executor of threads or spawned processes for `function`.

    A process watches its parent on a thread and exits when the parent ends, for whatever reason.
    """
    if kind == "threads":
        return ThreadPoolExecutor(number, "shardkit-transform")
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor  # slow to import
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(function)
    except Exception as error:
        raise ConfigurationError(
            f'workers="processes": the transform or a decoder cannot be sent to another process: {error}. Define it at '
            'the top level of a module, or use workers="threads"'
        ) from error
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, initializer=_begin_worker, initargs=(function,))


def _begin_worker(function: RowFunction) -> None:
    import multiprocessing

    global _function
    _function = function
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    from multiprocessing.connection import wait as wait_for

    wait_for([sentinel])
    os._exit(1)


def _work_here(columns: Mapping[str, Any], step: int, slots: NDArray[np.int64], cell_size: int) -> Rows:
    assert _function is not None
    rows = _function(columns, step, slots, cell_size)
    return [row._replace(error=None) if isinstance(row, RowFailure) else row for row in rows]
