"""The bundled trainer: data-parallel training by lanes, elastic, and bit-exact when asked.

Cells are the unit of work under every strategy: a step's gradient is the sum over its cells, divided once. SPEC.md
says in which order to read the package.

Importing this package does not import torch; `shardkit_trainer.training` does.
"""

from .configuration import Configuration, load_configuration
from .launch import launch

__all__ = ["Configuration", "launch", "load_configuration"]
