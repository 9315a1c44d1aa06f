"""The bundled trainer: elastic data-parallel training by lanes, with an optional bit-exact mode.

The unit of work of every strategy is the cell: a step's gradient is the sum over its cells, divided once. SPEC.md gives
an order in which to read the package.

Importing this package does not import torch; `shardkit_trainer.training` does.
"""

from .configuration import Configuration, load_configuration
from .launch import launch

__all__ = ["Configuration", "launch", "load_configuration"]
