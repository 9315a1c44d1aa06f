"""Adapter of loaders for the Hugging Face Trainer.

Example::

    trainer = Trainer(model=model, args=arguments)
    use_loader(trainer, ds.loader(plan))
    trainer.train(resume_from_checkpoint=…)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

__all__ = ["use_loader"]

_NOT_FOR_MODELS = ("step", "samples")


def use_loader(trainer: Trainer, loader: Any) -> None:
    """Train `trainer` from `loader`; call it before ``trainer.train()``.

    The loader's state is part of each checkpoint (``trainer_state.json``), so a resumed run continues with the next
    batch, on any number of ranks, and reads no batch twice. Models get the fields of a batch without "step" and
    "samples". ``max_steps`` counts optimizer steps, as always.

    Args:
        trainer: not trained yet; give it no ``train_dataset``.
        loader: ``ds.loader(plan)`` or `shardkit.torch.DataLoader`.
    """

    class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]
        """Saves and loads the state of `loader`."""

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": loader.state_dict()}}

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            name = type(self).__name__
            if state.global_step and name in state.stateful_callbacks:
                loader.load_state_dict(state.stateful_callbacks[name]["attributes"]["saved"])
            state.stateful_callbacks.setdefault(name, self.state())

    batches = _Fields(loader)
    trainer.get_train_dataloader = lambda: batches
    trainer.args.ignore_data_skip = True  # the loader continues by itself
    trainer.add_callback(LoaderState())


class _Fields:
    """A loader whose batches have the fields of a model only."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {name: value for name, value in batch.items() if name not in _NOT_FOR_MODELS}
