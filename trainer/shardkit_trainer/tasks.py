"""Tasks: the interface between cells, a model and its loss, and two built-in models.

The built-in models, a GPT over tokens and a small residual network over images, are initialised on the CPU from the
run's seed only, so initialisation does not depend on the number of ranks. By default they use LayerNorm and GroupNorm,
so the result of a sample does not depend on the other samples of the batch.

A task owns its model. `prepare` maps one cell to tensors and counts its valid targets. `loss` returns *sums* of the
losses over them; the loop divides by the number of valid targets of the whole step, so there is no mean of means.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import MissingDependency
from shardkit.extras import install_command
from shardkit.formats.schema import BOUNDARIES
from shardkit.function_names import load_named
from shardkit.loader.packed_rows import documents_of
from shardkit.plan.permutation import derive

from .configuration import Configuration, ModelConfig, expect
from .distributed import World

_CONTEXT = 128  # default positions for rows of various lengths
IGNORED = -100  # target value that the loss ignores; torch's own default


@dataclass
class Inputs:
    """The tensors of one or more cells."""

    tensors: dict[str, Tensor]  # tensors by name; the first dimension is samples
    valid: int  # number of valid targets
    samples: int  # number of samples
    seed: int = 0  # seed of the cell's dropout; if cells were concatenated, the seed of the first one
    # (samples,) int64 valid targets of each sample, on the CPU; None if all samples have equally many
    targets: Tensor | None = None

    def mean_losses(self, losses: Tensor) -> Tensor:
        """Return (samples,) float32 losses per valid target, given the sum of each sample.

        Raises:
            ConfigurationError: the task does not return one loss per sample.
        """
        found = f"the model's task returns losses of shape {tuple(losses.shape)}"
        wrong = f"log.sample_losses = true: {found}, expected ({self.samples},), one per sample"
        expect((losses.shape == (self.samples,), wrong))
        divisor = max(1, self.valid // max(1, self.samples))
        if self.targets is None:
            return losses.detach().float() / divisor
        return losses.detach().float() / self.targets.clamp(min=1).to(losses.device)


def concatenate(cells: Sequence[Inputs]) -> Inputs:
    """Join cells into the inputs of one forward pass."""
    if len(cells) == 1:
        return cells[0]
    tensors = {name: torch.cat([cell.tensors[name] for cell in cells]) for name in cells[0].tensors}
    counts = [cell.targets for cell in cells if cell.targets is not None]
    targets = torch.cat(counts) if len(counts) == len(cells) else None
    return Inputs(tensors, sum(c.valid for c in cells), sum(c.samples for c in cells), cells[0].seed, targets)


class Task(Protocol):
    """A model with its inputs and loss.

    The factory in ``model.kind = "package.module:factory"`` gets (ModelConfig, dataset) and returns a task.

    Attributes:
        model: the model, on the CPU.
        unit: name of a valid target, such as "token" or "sample".
    """

    model: nn.Module
    unit: str

    def prepare(self, cell: Mapping[str, Any], seed: int) -> Inputs:
        """Return the tensors of one cell, a `shardkit.loader` batch with .step, .lane and .slots; pure."""

    def empty(self) -> Inputs:
        """Return one sample without a valid target, for ranks that must run a pass but have no cells."""

    def loss(self, forward: Callable[..., Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (losses, number of right answers), both on the device.

        Losses are (samples,), each summed over the valid targets of a sample. A scalar, the sum over all samples, is
        enough unless ``log.sample_losses`` is set.
        """

    def blocks(self) -> Sequence[nn.Module]:
        """Return the modules that are sharded and checkpointed one by one; may be empty."""


def make_task(config: ModelConfig, dataset: Any, seed: int) -> Task:
    """Make the task of a configuration; its model is initialised from ``seed`` only.

    Raises:
        ConfigurationError: the factory cannot be imported, or the model does not fit the dataset.
    """
    torch.manual_seed(seed)
    if config.kind == "gpt":
        return LanguageTask(config, dataset.schema)
    if config.kind == "classifier":
        return ClassifierTask(config, dataset)
    task: Task = load_named("model.kind =", config.kind, "factory")(config, dataset)
    return task


def mix(*values: int) -> int:
    """Hash integers to 64 bits, the same on every machine."""
    state = 0
    for value in values:
        state = derive(state + value, 0)
    return state


def synchronise_norms(task: Task, config: Configuration, world: World, cells: int) -> None:
    """Replace BatchNorm by torch's SyncBatchNorm, or refuse it.

    With statistics of one rank, results would depend on the assignment of lanes.
    """
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.model.modules()):  # noqa: SLF001
        return
    parallel = config.parallel
    reason = ""
    if parallel.exact != "off" or parallel.rebalance or parallel.sync_every > 1:
        reason = "exact mode, rebalancing and local steps need samples that do not depend on their neighbours"
    elif world.size > 1 and world.device.type == "cpu":
        reason = f"torch's SyncBatchNorm does not work on the CPU, and there are {world.size} ranks"
    elif cells % world.size:
        reason = f"its statistics need equal passes on all ranks, and {world.size} ranks share {cells} lanes"
    expect((not reason, f'the model has BatchNorm: {reason}; use GroupNorm (model.norm = "group")'))
    if world.size > 1:
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)  # type: ignore[no-untyped-call]


def wrap_blocks(task: Task, config: Configuration) -> None:
    """Set up activation checkpointing and compilation, block by block, without changing names in the state."""
    for block in task.blocks():
        if config.parallel.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.parallel.compile:
            block.compile()


class LanguageTask:
    """Next-token prediction on text, bytes or integer tokens. Longer samples are cropped, shorter samples padded."""

    unit = "token"

    def __init__(self, config: ModelConfig, schema: Mapping[str, Any]):
        self.field = _input(
            schema, config.field, _is_sequence, ("tokens", "text", "blob"), "a token sequence"
        )
        kind = schema[self.field]
        length = kind.shape[0] if kind.kind == "array" else 0
        self.context, self.vocabulary = config.context or length or _CONTEXT, config.vocabulary
        packed = schema.get(BOUNDARIES) if length else None
        self.has_documents = packed is not None and packed.kind == "ragged"
        self.remarks: list[str] = []
        if length > self.context:
            self.remarks.append(
                f"model.context = {self.context}: each row of {length} tokens gives one random crop of {self.context}; "
                "leave model.context out to train on whole rows"
            )
        if not length and not config.context:
            self.remarks.append(
                f"model.context = {_CONTEXT}: a longer sample gives one random crop; set it to the longest one"
            )
        self.model: nn.Module = GPT(config, self.context)

    def prepare(self, cell: Any, seed: int) -> Inputs:
        """Return (samples, context) int64 tokens and targets; crops depend on (seed, step, lane, slot) only."""
        values, borders = _sequences(cell[self.field])
        crop, lengths = self.context + 1, np.diff(borders)
        starts = borders[:-1].copy()
        for row, (spare, slot) in enumerate(zip(lengths - crop, cell.slots, strict=True)):
            starts[row] += mix(seed, cell.step, int(slot)) % (int(spare) + 1) if spare > 0 else 0
        there = torch.from_numpy(np.arange(crop) < lengths[:, None])
        counts = there[:, 1:].sum(1)
        # gathered on the device of the tokens; indices past the end belong to fillers and are masked below
        places = torch.from_numpy(starts[:, None] + np.arange(crop)).clamp_(max=max(0, len(values) - 1))
        there, places = there.to(values.device), places.to(values.device)
        line = values if len(values) else values.new_zeros(1)
        tokens = torch.where(there, line[places].to(torch.int64), 0)
        _check_range("model.vocabulary", self.vocabulary, "token", tokens, cell)
        targets = torch.where(there[:, 1:], tokens[:, 1:], IGNORED)
        tensors = {"tokens": tokens[:, :-1], "targets": targets}
        if self.has_documents:
            documents, positions = self._documents(cell, starts - borders[:-1])
            across = documents[:, 1:] != documents[:, :-1]  # the next token begins another document
            targets[across.to(targets.device)] = IGNORED
            tensors |= {"documents": documents[:, :-1].clone(), "positions": positions}
            counts = (targets != IGNORED).sum(1).cpu()
        return Inputs(tensors, int(counts.sum()), len(lengths), targets=counts)

    def _documents(self, cell: Any, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (samples, context + 1) document numbers, and (samples, context) positions inside each document.

        Positions count from the crop's start for a document that begins before the crop. Fillers have document −1.
        """
        found = documents_of(cell, self.field, BOUNDARIES)
        length = found.document_ids.shape[1]
        places = torch.from_numpy(starts[:, None] + np.arange(self.context + 1))
        documents = torch.as_tensor(found.document_ids).gather(1, places.clamp(max=length - 1)).long()
        documents[places >= length] = -1  # a filler
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        steps = torch.arange(self.context + 1).expand_as(documents)
        positions = steps - torch.where(begins, steps, 0).cummax(1).values
        return documents, positions[:, :-1].clone()

    def empty(self) -> Inputs:
        tokens = torch.zeros((1, self.context), dtype=torch.int64)
        tensors = {"tokens": tokens, "targets": torch.full_like(tokens, IGNORED)}
        if self.has_documents:
            tensors |= {"documents": torch.zeros_like(tokens), "positions": torch.zeros_like(tokens)}
        return Inputs(tensors, 0, 0)

    def loss(self, forward: Callable[..., Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        inputs = [tensors[name] for name in ("tokens", "documents", "positions") if name in tensors]
        logits = forward(*inputs).float().flatten(0, 1)
        targets = tensors["targets"]
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
        return losses.view(targets.shape).sum(1), torch.zeros((), dtype=torch.int64, device=losses.device)

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model.blocks)  # type: ignore[arg-type]


class ClassifierTask:
    """Image classification: arrays (h, w) or (h, w, channels), or encoded images, which pillow decodes."""

    unit = "sample"

    def __init__(self, config: ModelConfig, dataset: Any):
        schema = dataset.schema
        self.field = _input(schema, config.field, _is_image, ("image",), "an image")
        self.label, self.size = _field(schema, config.label), config.image_size
        kind = schema[self.field]
        self.encoded = kind.kind == "bytes"
        sized = bool(self.size) or not self.encoded
        expect((sized, f"model.image_size = 0: encoded images in {self.field!r} are made equal by it"))
        self.shape = (self.size, self.size, 3) if self.encoded else (*kind.shape, 1)[:3]
        self.classes = config.classes or _count_classes(dataset)
        self.model: nn.Module = ResidualNetwork(config, self.shape[2], self.classes)

    def prepare(self, cell: Any, seed: int) -> Inputs:
        """Return (samples, channels, h, w) float32 images, each standardised, and (samples,) int64 labels."""
        raw = cell[self.field]
        images = torch.stack([_decode(one, self.size) for one in raw]) if self.encoded else raw
        wide = torch.as_tensor(images).reshape(-1, *self.shape).float()
        # by each image's own mean and deviation: this needs no statistics of the dataset and fits any range of pixels
        spread, mean = torch.std_mean(wide, dim=(1, 2, 3), keepdim=True, correction=0)
        scaled = (wide - mean) / (spread + 1e-6)
        labels = torch.as_tensor(cell[self.label]).to(torch.int64)
        _check_range("model.classes", self.classes, "label", labels, cell)
        tensors = {"images": row_major(scaled.permute(0, 3, 1, 2)), "labels": labels}
        return Inputs(tensors, len(labels), len(labels))

    def empty(self) -> Inputs:
        height, width, channels = self.shape
        labels = torch.full((1,), IGNORED, dtype=torch.int64)
        return Inputs({"images": torch.zeros(1, channels, height, width), "labels": labels}, 0, 0)

    def loss(self, forward: Callable[..., Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = forward(tensors["images"]).float()
        losses = F.cross_entropy(logits, tensors["labels"], reduction="none", ignore_index=IGNORED)
        return losses, (logits.detach().argmax(1) == tensors["labels"]).sum()

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model.blocks)  # type: ignore[arg-type]


def _is_sequence(kind: Any) -> bool:
    integers = kind.dtype.startswith(("int", "uint"))
    return kind.kind in {"str", "bytes"} or (integers and (kind.kind == "ragged" or len(kind.shape) == 1))


def _is_image(kind: Any) -> bool:
    return kind.kind == "bytes" or (kind.kind == "array" and len(kind.shape) in {2, 3})


def _field(schema: Mapping[str, Any], name: str) -> str:
    expect((name in schema, f"model: the dataset has no field {name!r}; it has {', '.join(schema)}"))
    return name


def _input(
    schema: Mapping[str, Any], named: str, fits: Callable[[Any], bool], preferred: Sequence[str], what: str
) -> str:
    """Return the input field of a model: the named field, otherwise the only suitable one."""
    if named:
        kind = schema[_field(schema, named)]
        expect((fits(kind), f"model.field = {named!r} is {kind}: expected {what}"))
        return named
    found = [name for name, kind in schema.items() if fits(kind)]
    found = [name for name in preferred if name in found][:1] or found
    known = ", ".join(f"{name}: {kind}" for name, kind in schema.items())
    expect((len(found) == 1, f"model.field is empty, {len(found)} fields could be {what} ({known}); set it"))
    return found[0]


def _check_range(key: str, end: int, what: str, values: Tensor, cell: Any) -> None:
    least, most = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
    found = f"{what} {least if least < 0 else most} at step {cell.step}, lane {cell.lane}"
    expect((0 <= least <= most < end, f"{key} = {end}: {found}; expected 0 … {end - 1}: raise {key}"))


def _count_classes(dataset: Any) -> int:
    if dataset.classes:
        return len(dataset.classes)
    numbered = bool(dataset.strata) and all(name.isdigit() for name in dataset.strata)
    expect((numbered, "model.classes = 0, and the dataset does not name its classes; set model.classes"))
    return 1 + max(int(name) for name in dataset.strata)


def _sequences(column: Any) -> tuple[Tensor, np.ndarray]:
    """Return the integers of a text, bytes, array or ragged column, end to end, and (samples + 1,) host borders."""
    if isinstance(column, tuple):
        return torch.as_tensor(column[0]), torch.as_tensor(column[1]).cpu().numpy().astype(np.int64)
    if isinstance(column, list):
        raw = [item.encode() if isinstance(item, str) else bytes(item) for item in column]
        line = torch.from_numpy(np.frombuffer(bytearray().join(raw), dtype=np.uint8))
        return line, np.cumsum([0, *map(len, raw)])
    rows = torch.as_tensor(column)
    return rows.flatten(), np.arange(len(rows) + 1) * rows.shape[1]


def _decode(data: bytes, size: int) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency(f"decoding images needs pillow; run: {install_command('images')}") from error
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB").resize((size, size))).copy())


# ---- the built-in models


def row_major(tensor: Tensor) -> Tensor:
    """Return the tensor with row-major strides in all dimensions.

    `contiguous` ignores dimensions of size 1. With one channel, strides left over from ``permute`` look like another
    layout to torch's convolution, which then writes past its buffers (torch 2.13 on some processors).
    """
    strides = [math.prod(tensor.shape[at + 1 :]) for at in range(tensor.dim())]
    return (
        tensor if list(tensor.stride()) == strides else tensor.contiguous().as_strided(tensor.shape, strides)
    )


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward: (batch, positions, width) → the same."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the block; `mask` is (batch, 1, positions, positions) bool, None for causal attention."""
        batch, positions, width = x.shape
        query, key, value = (
            part.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout
        )
        x = x + self._drop(self.attention_out(mixed.transpose(1, 2).reshape(batch, positions, width)))
        return x + self._drop(self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al. 2019): (batch, positions) int64 → (batch, positions, vocabulary)."""

    def __init__(self, config: ModelConfig, context: int):
        super().__init__()
        width, layers = config.width, config.layers
        self.token_embedding = nn.Embedding(config.vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, config.heads, config.dropout) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # residual branches start small, so that the variance does not grow with depth
                small = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if small else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return logits; with `documents` and `positions` of packed rows, attention stays inside a document.

        All arguments are (batch, positions) int64.
        """
        order = torch.arange(tokens.shape[1], device=tokens.device)
        mask = None
        if documents is not None:
            same = documents[:, :, None] == documents[:, None, :]
            mask = (same & (order[:, None] >= order))[:, None]
        x = self.token_embedding(tokens) + self.position_embedding(order if positions is None else positions)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


class Convolution(nn.Linear):
    """A square convolution without bias; its weight is a matrix (channels, channels_in · size²).

    The gradient of a four-dimensional weight has other strides than the weight if a dimension is 1, and DDP then copies
    it with a warning. A matrix has one layout.
    """

    def __init__(self, channels_in: int, channels: int, size: int, stride: int = 1):
        super().__init__(channels_in * size * size, channels, bias=False)
        self.kernel, self.stride = (channels, channels_in, size, size), stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, h, w) to (batch, channels, ⌈h/stride⌉, ⌈w/stride⌉)."""
        weight = row_major(self.weight.view(self.kernel))
        return F.conv2d(row_major(x), weight, stride=self.stride, padding=self.kernel[-1] // 2)


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(next(g for g in (8, 4, 2, 1) if channels % g == 0), channels)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, each with a norm, and a shortcut (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: str):
        super().__init__()
        self.first = Convolution(channels_in, channels, 3, stride)
        self.first_norm = _norm(norm, channels)
        self.second = Convolution(channels, channels, 3)
        self.second_norm = _norm(norm, channels)
        plain = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if plain else Convolution(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A small image classifier: (batch, channels, h, w) → (batch, classes) logits."""

    def __init__(self, config: ModelConfig, channels: int, classes: int):
        super().__init__()
        before = config.width
        self.stem = Convolution(channels, before, 3)
        self.blocks = nn.ModuleList()
        for stage in range(config.stages):
            for block in range(config.blocks):
                after = config.width << stage
                self.blocks.append(ResidualBlock(before, after, 2 if stage and not block else 1, config.norm))
                before = after
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
