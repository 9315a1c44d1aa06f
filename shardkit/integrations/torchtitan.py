"""A dataloader for torchtitan's trainer: packed rows of tokens with document boundaries.

Example, in the function that returns a ``Trainer.Config``::

    config.training.global_batch_size = 512
    config.dataloader = PlanDataLoader.Config(dataset_path="s3://data/web@v3", global_batch=512)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

import shardkit
from shardkit.errors import ConfigurationError, StateError
from shardkit.formats.schema import BOUNDARIES
from shardkit.loader import Batch

__all__ = ["PlanDataLoader"]


class PlanDataLoader(BaseDataLoader):  # type: ignore[misc]
    """The steps of a plan in microbatches; torchtitan makes it from `Config`.

    A microbatch is ``({"input", "positions"}, labels)``, each (local_batch_size, seq_len) int64. Positions begin at 0
    in each document. The loss ignores the labels of the last token of a document and of padding.

    Checkpoints hold a step of the plan, which fits any data-parallel degree and any ``training.local_batch_size``.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Settings; ``dataset_path`` is a dataset, as for `shardkit.open`.

        Attributes:
            global_batch: rows of a step on all ranks; equal to ``training.global_batch_size``.
            tokens: field of tokens; rows have ``training.seq_len`` of them, or one more as the last label.
            sources: name → path of several datasets that are read as one, instead of ``dataset_path``.
            infinite: continue with the next epoch after the last step of one.
            run: run directory of the ledger.
            plan: further settings of ``ds.plan``, such as ``seed`` and ``weights``.
            loader: further settings of ``ds.loader``, such as ``cache``.
        """

        global_batch: int = 0
        tokens: str = "tokens"
        sources: dict[str, str] = dataclasses.field(default_factory=dict)
        infinite: bool = True
        run: str | None = None
        plan: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
        loader: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        if config.global_batch <= 0 or config.global_batch % (dp_world_size * local_batch_size):
            raise ConfigurationError(
                f"dataloader.global_batch = {config.global_batch}: a multiple of {dp_world_size} data-parallel ranks × "
                f"{local_batch_size} rows is expected; set it to training.global_batch_size"
            )
        ds = shardkit.open(config.sources or config.dataset_path)
        kind = str(ds.schema.get(config.tokens))
        if kind.partition("[")[2] not in (f"{seq_len}]", f"{seq_len + 1}]"):
            raise ConfigurationError(
                f"dataloader.tokens = {config.tokens!r} is {kind}: rows of {seq_len + 1} tokens are expected for "
                f"training.seq_len = {seq_len}; build with: --pack {config.tokens}={seq_len + 1}"
            )
        plan = ds.plan(global_batch=config.global_batch, **config.plan)
        where: dict[str, Any] = {"rank": dp_rank, "world": dp_world_size}
        if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == tuple(where.values()):
            where = {}  # data-parallel ranks only: they compare their inputs through the process group
        self._loader = ds.loader(
            plan, fields=[config.tokens, *({BOUNDARIES} & {*ds.schema})], run=config.run, tensors=True,
            restart=not config.infinite, **where, **config.loader,
        )  # fmt: skip
        self._config, self._seq_len, self._rows = config, seq_len, local_batch_size
        self._left = 0  # microbatches of the current step that the trainer has not received

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Iterate over microbatches from the next step on."""
        while True:
            for batch in self._loader:
                parts = [torch.split(part[:, : self._seq_len], self._rows) for part in self._tensors(batch)]
                for number, (tokens, positions, labels) in enumerate(zip(*parts, strict=True), 1):
                    self._left = len(parts[0]) - number
                    yield {"input": tokens, "positions": positions}, labels
            if not self._config.infinite:
                return

    def _tensors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, positions and labels of the rows of this rank."""
        tokens: torch.Tensor = batch[self._config.tokens].long()
        found = batch.documents(self._config.tokens)
        same = found.document_ids[:, 1:] == found.document_ids[:, :-1]  # document as the next token
        if BOUNDARIES in batch:
            values, offsets = batch[BOUNDARIES]
            same &= torch.arange(1, tokens.shape[1]) < values[offsets[1:] - 1][:, None]  # the rest is padding
        labels = torch.where(same, tokens[:, 1:], IGNORE_INDEX)
        return tokens, found.position_ids, torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step; it is the same on all ranks."""
        if self._left:
            raise StateError(
                f"{self._left} microbatches of a step are left on this rank: set training.global_batch_size = "
                f"{self._config.global_batch}, as dataloader.global_batch"
            )
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state was taken, on any data-parallel degree."""
        self._loader.load_state_dict(state_dict)
