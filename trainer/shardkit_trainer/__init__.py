"""The bundled trainer: data-parallel training by lanes, elastic, and bit-exact when asked.

Cells are the unit of work under every strategy: a step's gradient is the sum over its cells, divided once. In which
order to read the package stands in SPEC.md.

Importing this package does not import torch; `shardkit_trainer.training` does.
"""

from .configuration import Configuration, load_configuration
from .launch import join, launch, leave

__all__ = ["Configuration", "join", "launch", "leave", "load_configuration"]
