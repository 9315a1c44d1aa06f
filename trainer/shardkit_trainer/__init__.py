"""The bundled trainer: data-parallel training by lanes, elastic, and bit-exact when asked.

::

    launch         ranks on this machine: torchrun (agent) as a child, the supervisor, or this process
    configuration  typed sections, TOML, overrides
    training       a run: open, resume, step by step, evaluate, save;  steps: one optimizer step
      reading      cells, one step ahead
      tasks        from cells to tensors to a loss;  models: a GPT, a residual network
      strategies   ddp, zero1, zero2, zero3 behind one interface
        slices     parameters laid end to end and cut;  optimizers: AdamW, SGD, schedules
        reductions sums of gradients: exact;  compression: smaller ones;  local_steps: rarer ones
      checkpoints  save, resume, on shardkit's own store;  replicas: copies, pruning;  export: safetensors
      recovery     who has the state when ranks have died;  membership, supervisor: who the ranks are
      evaluation   one exact pass
      reporting    console, metrics;  cost: what it comes to;  run_directory: run.json, events
      distributed  process group, small collectives, who is late

Importing this package does not import torch; `shardkit_trainer.training` does.
"""

from .configuration import Configuration, load_configuration
from .launch import launch

__all__ = ["Configuration", "launch", "load_configuration"]
