"""Adapters for training frameworks: one module each, which imports its framework.

Accelerate needs none: ``accelerator.prepare`` leaves a `shardkit.torch.DataLoader` as it is and saves its state, and
``accelerator.register_for_checkpointing(ds.loader(plan))`` saves that of a loader.
"""
