"""Hugging Face datasets, streaming, in the order of the files: shuffled once, before they were written."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

from bench.interruptions.adapters.hf_iterable import Loader as Shuffled


class Loader(Shuffled):
    label = "HF datasets, iterable, without `shuffle`"
    promise = (
        "Resuming returns exactly where the checkpoint was saved except in two cases: 1. examples from shuffle buffers "
        "are lost when resuming and the buffers are refilled with new data […]"
    )
    notes = "As the row before, without a shuffle buffer: the case that the sentence leaves out."
    documented = ""
    shuffles = False
