"""One rank of several runs, one after the other: ``ranks.py RESULTS SETTINGS``, both JSON files, under torchrun.

SETTINGS maps a run's name to its ``section.key=value`` overrides. `make.py` alone gives an "end" with it: ["stop", n]
asks the run to stop in step n, as a signal does; ["die", n] ends the process there, as a kill does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardkit_trainer import load_configuration
from shardkit_trainer.steps import Stepper
from shardkit_trainer.training import train


def end_in(how: str, number: int) -> None:
    """Let the run end in step ``number``."""
    take: Any = Stepper.take

    def ending(self: Any, step: int, *arguments: Any) -> Any:
        if step == number and how == "die":
            os._exit(9)
        if step == number:
            self._stop.set()
        return take(self, step, *arguments)

    setattr(Stepper, "take", ending)  # noqa: B010 (a method replaced)


def main(results: str, settings: str) -> None:
    """Take every run to its end; rank 0 writes how they ended."""
    ends = {}
    dist.init_process_group("gloo")  # one group for all of them
    for name, run in json.loads(Path(settings).read_text()).items():
        if run.get("end"):
            end_in(*run["end"])
        summary = train(load_configuration(None, run["overrides"]))
        ends[name] = {
            "step": summary.step,
            "loss": summary.loss,
            "parameters_sha256": summary.parameters_sha256,
        }
    if os.environ.get("RANK", "0") == "0":
        Path(results).write_text(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
