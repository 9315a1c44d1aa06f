"""Adapter of loaders for the Hugging Face Trainer.

Example::

    trainer = Trainer(model=model, args=arguments)
    use_loader(trainer, ds.loader(plan))
    trainer.train(resume_from_checkpoint=…)
"""

from __future__ import annotations

import warnings
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
    batches = _Fields(loader)
    trainer.get_train_dataloader = lambda: batches
    trainer.args.ignore_data_skip = True  # the loader continues by itself
    trainer.remove_callback(LoaderState)  # of an earlier call, as when a cell of a notebook is run again
    trainer.add_callback(LoaderState(loader))


class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves and loads the state of a loader, under the name of this class."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state(self) -> dict[str, Any]:
        """Return the entry of this callback in ``trainer_state.json``."""
        return {"args": {}, "attributes": {"saved": self._loader.state_dict()}}

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Load the state if training resumes."""
        name = type(self).__name__
        if state.global_step and name in state.stateful_callbacks:
            self._loader.load_state_dict(state.stateful_callbacks[name]["attributes"]["saved"])
        elif state.global_step:
            step = self._loader.state_dict()["step"]
            warnings.warn(
                f"the checkpoint of step {state.global_step} has no state of this loader, as the run that saved it was "
                f"not trained with use_loader: training continues with batch {step} of the plan; call "
                "loader.load_state_dict(state) for another one",
                RuntimeWarning,
                stacklevel=2,
            )
        state.stateful_callbacks.setdefault(name, self.state())


class _Fields:
    """A loader whose batches have the fields of a model only."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {name: value for name, value in batch.items() if name not in _NOT_FOR_MODELS}
