"""Sums of gradients over ranks: exact sums (SPEC.md §2), and compressed sums as hooks for DDP's buckets (§8)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future

from shardkit.torch import FlatSlice

from .configuration import ParallelConfig
from .distributed import World
from .optimizer import FlatLayout

FRACTION_BITS = 40  # fixed point: range ±2²² (4.2·10⁶) with a spare bit, resolution 9·10⁻¹³


class ExactSum:
    """Sum of the gradients of cells as 64-bit fixed-point integers.

    Integer addition is associative, so any order on any ranks gives the same bits. The fp64 variant adds floats of 53
    bits instead: half the work, and equal in practice but not by construction.
    """

    def __init__(self, parameters: Sequence[Tensor], layout: FlatLayout, kind: str, world: World, cells: int):
        self._parameters, self._layout, self._world = parameters, layout, world
        self._integers = kind == "int64"
        device, dtype = parameters[0].device, torch.int64 if self._integers else torch.float64
        self._sum = torch.zeros(layout.total, dtype=dtype, device=device)
        self._scratch = torch.empty(max(layout.lengths), dtype=torch.float64, device=device)
        # the sum of `cells` values up to this limit fits in 63 bits
        self._limit = 2.0 ** (62 - FRACTION_BITS) / max(1, cells)
        self.overflowed = False

    def add_cell(self) -> None:
        """Move the gradients of one cell from ``.grad`` into the sum; set `overflowed` if a value does not fit."""
        for parameter, part in zip(self._parameters, self._layout.views(self._sum), strict=True):
            if parameter.grad is None:
                continue
            wide = self._scratch[: len(part)].copy_(parameter.grad.reshape(-1))
            parameter.grad = None
            peak = float(wide.abs().max()) if len(part) else 0.0
            if not peak <= self._limit:  # also true for NaN
                self.overflowed = True
                continue
            part += wide.mul_(2.0**FRACTION_BITS).round_().to(torch.int64) if self._integers else wide

    def reduce(self) -> float:
        """Sum over ranks; return the global norm, computed parameter by parameter in a fixed order."""
        self._world.all_reduce(self._sum)
        squares = 0.0
        for index in range(len(self._parameters)):
            wide = self._wide(index, 0, self._layout.lengths[index])
            squares += float(wide.mul_(wide).sum())
        return math.sqrt(squares)

    def _wide(self, index: int, low: int, high: int) -> Tensor:
        offset = self._layout.offsets[index]
        wide = self._scratch[: high - low].copy_(self._sum[offset + low : offset + high])
        return wide.mul_(2.0**-FRACTION_BITS) if self._integers else wide

    def gradient(self, index: int, low: int, high: int) -> Tensor:
        """Return the summed gradient of elements low … high−1 of a parameter: (high − low,) float32."""
        return self._wide(index, low, high).to(torch.float32)

    def clear(self) -> None:
        self._sum.zero_()
        self.overflowed = False


BLOCK = 256  # int8: number of elements that share a scale


class Compression:
    """One rank's compressed reduction of DDP's buckets; every variant returns the mean over ranks, as DDP does.

    The part of a gradient that a rank did not send is its *error*, one number per element, and is added to the next
    gradient. Errors are stored in a flat tensor (a *line*) by parameter, not by bucket, since DDP changes its buckets
    after the first step. New errors and factors take effect in `commit`, so a skipped step does not change them.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], config: ParallelConfig, world: World
    ):
        self._config, self._world = config, world
        self._layout = FlatLayout.of(parameters, 1)
        places = zip(names, parameters, self._layout.offsets, strict=True)
        self._place = {id(parameter): (name, offset) for name, parameter, offset in places}
        self._lines: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._left: dict[str, list[tuple[int, Tensor]]] = {}  # line → [(offset, values)], not yet committed
        self._left_factors: dict[str, Tensor] = {}
        self._loaded: dict[str, tuple[Tensor, float]] = {}
        if config.reduction != "bf16":
            self._lines["error"] = torch.zeros(self._layout.total, device=world.device)
        if config.reduction == "topk" and config.correction:
            self._lines["momentum"] = torch.zeros(self._layout.total, device=world.device)
        if config.reduction == "powersgd":
            generator = torch.Generator().manual_seed(0)
            for name, parameter in zip(names, parameters, strict=True):
                rows, columns = matrix_shape(parameter)
                if config.rank * (rows + columns) < rows * columns:
                    start = torch.randn(columns, config.rank, generator=generator)
                    self._factors[name] = start.to(world.device)
        self._kinds = {"int8": self._int8, "topk": self._topk, "powersgd": self._powersgd}

    def hook(self, bucket: Any) -> Future[Tensor]:
        """Reduce one bucket (`torch.distributed.GradBucket`)."""
        if self._config.reduction == "bf16":
            self._world.bytes_moved += 2 * bucket.buffer().numel()
            # None is the default group
            mean: Future[Tensor] = bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
            return mean
        return self._kinds[self._config.reduction](bucket.buffer(), bucket.parameters())

    # --- the variants ------------------------------------------------------------------------------------------------

    def _int8(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Send blocks of up to 256 values of one parameter as 8-bit integers, with a scale for each block.

        Blocks do not cross parameters: blocks of a whole bucket would give other bits after a resume, since the first
        step of a process has other buckets.
        """
        wanted = gradient + self._read("error", parameters)
        lengths = [p.numel() for p in parameters]
        blocks = [F.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK) for part in _split(wanted, parameters)]
        scale = torch.cat([part.abs().amax(1) for part in blocks])
        scale.div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        # length of each block
        counts = [min(BLOCK, n - at) for n in lengths for at in range(0, n, BLOCK)]
        sizes = torch.tensor(counts, device=wanted.device)
        spread = scale.repeat_interleave(sizes)
        sent = (wanted / spread).round_().to(torch.int8)
        self._write("error", parameters, wanted - sent * spread)
        total = torch.zeros_like(wanted)
        for values, scales in zip(self._gather(sent), self._gather(scale), strict=True):
            total += values * scales.repeat_interleave(sizes)
        return _finished_future(gradient.copy_(total / self._world.size))

    def _topk(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Send the largest values with their indices; momentum correction after Lin et al. 2018 (DGC)."""
        correction = self._config.correction
        if correction:
            gradient = self._read("momentum", parameters).mul_(correction).add_(gradient)
        wanted = gradient + self._read("error", parameters)
        count = max(1, math.ceil(self._config.density * wanted.numel()))
        places = wanted.abs().topk(count, sorted=False).indices
        values = wanted[places]
        wanted[places] = 0.0
        self._write("error", parameters, wanted)
        if correction:
            gradient[places] = 0.0
            self._write("momentum", parameters, gradient)
        total = torch.zeros_like(wanted)
        places = places.to(torch.int32)
        for others_places, others in zip(self._gather(places), self._gather(values), strict=True):
            total.index_add_(0, others_places.to(torch.int64), others)
        return _finished_future(total.div_(self._world.size))

    def _powersgd(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Send a low-rank approximation of each matrix (Vogels et al. 2019), and vectors whole.

        One power iteration per matrix, started from the factor of the step before.
        """
        wanted = gradient + self._read("error", parameters)
        names = [self._place[id(p)][0] for p in parameters]
        parts = dict(zip(names, _split(wanted, parameters), strict=True))
        shapes = {name: matrix_shape(p) for name, p in zip(names, parameters, strict=True)}
        matrices = {name: part.view(shapes[name]) for name, part in parts.items() if name in self._factors}
        left = {name: matrix @ self._factors[name] for name, matrix in matrices.items()}
        whole = {name: part for name, part in parts.items() if name not in matrices}
        means = self._mean({**left, **whole})
        left = {name: torch.linalg.qr(means[name]).Q for name in matrices}
        right = self._mean({name: matrix.T @ left[name] for name, matrix in matrices.items()})
        self._left_factors.update(right)
        result = [(left[n] @ right[n].T).view(-1) if n in matrices else means[n] for n in names]
        total = torch.cat(result)
        sent = [r if n in matrices else parts[n] for n, r in zip(names, result, strict=True)]
        self._write("error", parameters, wanted - torch.cat(sent))
        return _finished_future(gradient.copy_(total))

    # --- shared parts ------------------------------------------------------------------------------------------------

    def _mean(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of tensors over ranks, in one collective."""
        if not tensors:
            return {}
        joined = self._world.all_reduce(torch.cat([t.reshape(-1) for t in tensors.values()]))
        parts = _split(joined.div_(self._world.size), tensors.values())
        return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor, by rank; collective."""
        self._world.bytes_moved += mine.nbytes
        everyone = [torch.empty_like(mine) for _ in range(self._world.size)]
        dist.all_gather(everyone, mine)
        return everyone

    def _read(self, line: str, parameters: Sequence[Tensor]) -> Tensor:
        """Return a copy of the elements of a line that belong to a bucket."""
        places = [(self._place[id(p)][1], p.numel()) for p in parameters]
        return torch.cat([self._lines[line][offset : offset + length] for offset, length in places])

    def _write(self, line: str, parameters: Sequence[Tensor], values: Tensor) -> None:
        for parameter, part in zip(parameters, _split(values, parameters), strict=True):
            self._left.setdefault(line, []).append((self._place[id(parameter)][1], part))

    def commit(self) -> None:
        """Store the errors and factors of the step that has been taken, for the next step."""
        for line, parts in self._left.items():
            for offset, values in parts:
                self._lines[line][offset : offset + len(values)] = values
        self._factors.update(self._left_factors)
        self.forget()

    def forget(self) -> None:
        """Drop errors and factors that were not committed, at the end of a step."""
        self._left, self._left_factors = {}, {}

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return tensors to save: lines as this rank's row of (ranks, elements), and factors, equal on all ranks."""
        rank, size, total = self._world.rank, self._world.size, self._layout.total
        lines = {name: FlatSlice(line, (size, total), rank * total) for name, line in self._lines.items()}
        return {**lines, **{f"factor.{name}": factor for name, factor in self._factors.items()}}

    def loading_state(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return tensors to load into, from a checkpoint of any number of ranks or of another reduction."""
        target: dict[str, Tensor] = {}
        for name in self._lines:
            if f"reduction.{name}" in saved:
                old = saved[f"reduction.{name}"]["shape"][0]
                first = self._world.rank * old // self._world.size
                last = (self._world.rank + 1) * old // self._world.size
                rows = torch.zeros((last - first) * self._layout.total, device=self._world.device)
                self._loaded[name] = (rows.view(-1, self._layout.total), self._world.size / old)
                target[name] = FlatSlice(rows, (old, self._layout.total), first * self._layout.total)
        for name, factor in self._factors.items():
            if f"reduction.factor.{name}" in saved:
                target[f"factor.{name}"] = factor
        return target

    def after_load(self) -> None:
        """Distribute the loaded rows over the present ranks; the mean over ranks of each error is preserved."""
        for name, (rows, ratio) in self._loaded.items():
            self._lines[name].copy_(rows.sum(0) * ratio)
        self._loaded = {}


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a parameter as a matrix; a vector has one column."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, parameter.numel() // max(1, rows)


def _split(line: Tensor, like: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Split a line into views, one for each tensor, of the tensor's length."""
    return torch.split(line, [t.numel() for t in like])


def _finished_future(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future
