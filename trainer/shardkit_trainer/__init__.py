"""The bundled trainer: data-parallel training by lanes, elastic, and bit-exact when asked.

::

    launch         ranks on this machine: torchrun (agent) as a child, the supervisor, or this process
    configuration  typed sections, TOML, overrides;  typed_settings: types, ranges, messages;  changes: of a later start
    training       a run: open, resume, step by step, evaluate, save;  steps: one optimizer step
      reading      datasets at the run's versions, plans by stage, cells one step ahead
      tasks        from cells to tensors to a loss;  models: a GPT, a residual network
      strategy     what a step asks of ddp, zero1, zero2, zero3;  strategies: which is made by which class
        replicated ddp and zero1;  fully_sharded: zero2 and zero3;  local_steps: meetings every H steps
        slices     parameters laid end to end and cut;  optimizers: AdamW, SGD, schedules
        reductions sums of gradients: exact;  compression: smaller ones
      checkpoints  save, resume, on shardkit's own store (`shardkit.torch`);  replicas: further stores
      recovery     what is left of the state when ranks have died;  holdings: who holds which part
        membership, supervisor: who the ranks are
      evaluation   one exact pass
      reporting    console, metrics;  metering: telemetry;  cost: what it comes to;  run_directory: run.json, events
      distributed  process group, small collectives, who is late

In which order to read it stands in SPEC.md.

Importing this package does not import torch; `shardkit_trainer.training` does.
"""

from .configuration import Configuration, load_configuration
from .launch import launch

__all__ = ["Configuration", "launch", "load_configuration"]
