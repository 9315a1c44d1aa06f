"""From one command to N ranks: torchrun as a child, or this process where one is enough; imports no torch."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardkit.errors import MissingDependency
from shardkit.exit_codes import ExitCode
from shardkit.telemetry.records import read_documents

from .configuration import Configuration, load_configuration
from .ending import on_stop_signals
from .run_directory import check_changes

__all__ = ["launch", "rank_environment"]


def rank_environment() -> dict[str, str]:
    """The environment of ranks: one thread each unless told otherwise, and restarts that do not hang.

    torchrun's shared store keeps the addresses of dead workers, on which restarted ones hang (pytorch issue 135712).
    """
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # torch's C++ prints a stack for every look at a store that went away with the launcher; ranks say it in a line
    return {**own, "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}


def launch(
    path: str | None,
    overrides: Sequence[str],
    *,
    nproc: int,
    restarts: int = 0,
    allow_changes: Sequence[str] = (),
) -> int:
    """Train with ``nproc`` ranks on this machine; returns the exit code.

    A SIGTERM or SIGINT to this process is handed on; ranks save and end, and the run counts as interrupted. Settings
    that differ from those of the start before, and change the data or the model, are refused unless ``allow_changes``
    names them.

    Raises:
        ConfigurationError: before anything is started.
        MissingDependency: torch is not installed.
    """
    config = load_configuration(path, overrides)
    check_changes(config, allow_changes)
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("training needs torch; run: pip install 'shardkit[train]'")
    if nproc == 1 and not restarts:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.parallel.threads))
        from .training import train

        return ExitCode.DONE if train(config, allow_changes=allow_changes).finished else ExitCode.INTERRUPTED
    allowed = [f"--allow-changes={','.join(allow_changes)}"] if allow_changes else []
    script = ["-m", "shardkit_trainer", *([path] if path else []), *overrides, *allowed]
    if config.parallel.recovery == "in-process":
        from .supervisor import supervise

        os.environ.update(rank_environment())
        return _outcome(supervise(script, config, nproc=nproc, restarts=restarts), config)
    torchrun = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}",
                f"--shutdown-timeout={config.parallel.shutdown_s}"]  # fmt: skip
    command = [sys.executable, "-m", "shardkit_trainer.agent", *torchrun, *script]
    return _run_child(command, config)


def _run_child(command: list[str], config: Configuration) -> int:
    """Run torchrun; hand signals on; tell a clean stop from a failure."""
    asked: list[int] = []
    child = subprocess.Popen(command, env=rank_environment(), start_new_session=True)

    def hand_on(number: int, _frame: object) -> None:
        asked.append(number)
        child.send_signal(signal.SIGTERM)

    with on_stop_signals(hand_on):
        try:
            code = child.wait()
        finally:
            child.kill()  # nothing where it has ended
            child.wait()
    # torchrun reports every signal as a failure; the run itself says whether it saved and stopped
    return _outcome(0 if asked else code, config)


def _outcome(code: int, config: Configuration) -> int:
    """How a run ended whose ranks ended with ``code``: one that a signal stopped is not done, however well it saved."""
    if code:
        return code if code in {*ExitCode} else ExitCode.FAILED
    events = [event["event"] for event in read_documents(Path(config.run.directory) / "events.jsonl")]
    last = [one for one in events if one in {"start", "stop", "end"}][-1:]
    return {"start": ExitCode.FAILED, "end": ExitCode.DONE}.get("".join(last), ExitCode.INTERRUPTED)
