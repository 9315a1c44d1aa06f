"""Adapters for training frameworks: one module each, which imports its framework.

Accelerate needs none. ``accelerator.prepare`` leaves a `shardkit.torch.DataLoader` as it is and saves its state;
``accelerator.register_for_checkpointing(loader)`` saves the state of a ``ds.loader``.
"""
