"""From one command to N ranks: torchrun as a child, or this process where one is enough; imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shardkit.errors import ConfigurationError, MissingDependency, RunError
from shardkit.exit_codes import ExitCode

from .agent import on_stop_signals
from .configuration import Configuration, load_configuration
from .run_directory import JOB, check_changes, last_event, running_job, setting_changes, software

OF_A_MACHINE = {
    "run.directory",
    "run.device",
    "data.dataset",
    "data.locations",
    "data.cache",
    "data.cache_size",
    "log.listen",
}
"""Settings in which the machines of a job may differ."""


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

    A SIGTERM or SIGINT to this process is handed on; ranks save and end, and the run counts as interrupted.

    Raises:
        ConfigurationError: before anything is started; also where settings that ``allow_changes`` does not name differ
            from the start before and change the data or the model.
    """
    config = load_configuration(path, overrides)
    check_changes(config, allow_changes)
    _expect_torch()
    in_process = config.parallel.recovery == "in-process"
    if nproc == 1 and not restarts and not in_process:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.parallel.threads))
        from .training import train

        return ExitCode.DONE if train(config, allow_changes=allow_changes).finished else ExitCode.INTERRUPTED
    allowed = [f"--allow-changes={','.join(allow_changes)}"] if allow_changes else []
    script = ["-m", "shardkit_trainer", *([path] if path else []), *overrides, *allowed]
    if in_process:
        return _supervise(script, config, nproc, restarts)
    torchrun = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}",
                f"--shutdown-timeout={config.parallel.shutdown_s}"]  # fmt: skip
    command = [sys.executable, "-m", "shardkit_trainer.agent", *torchrun, *script]
    return _run_child(command, config)


def _supervise(script: Sequence[str], config: Configuration, nproc: int, restarts: int) -> int:
    """Be the first supervisor of a job."""
    from .supervisor import supervise

    os.environ.update(rank_environment())
    job = {"format": "shardkit-job", "version": 1, "configuration": config.to_json(), "software": software()}
    return _outcome(supervise(script, config, nproc=nproc, restarts=restarts, job=job), config)


def join(path: str | None, run: str, overrides: Sequence[str], *, nproc: int, restarts: int = 0) -> int:
    """Add ``nproc`` ranks on this machine to those that train in the run directory; returns the exit code.

    Args:
        path: a configuration that must be the job's; None: take the job's.
        run: directory, as this machine sees it.
        overrides: settings of this machine.
        nproc: further ranks.
        restarts: how often one of them that was killed is replaced.

    Raises:
        RunError: nobody trains there, the ranks cannot be joined, run other software, or are as many as the lanes.
        ConfigurationError: other settings than the job's.
    """
    _expect_torch()
    job = running_job(Path(run))
    settings = [*overrides, f"run.directory={json.dumps(str(Path(run).absolute()))}"]
    file = path or str(Path(run) / JOB)
    config = load_configuration(file, settings)
    _compare_software(job["software"], exact=config.parallel.exact != "off")
    if others := [
        one for one in setting_changes(job["configuration"], config) if one.key not in OF_A_MACHINE
    ]:
        raise ConfigurationError(
            f"{run} is trained with other settings: {', '.join(map(str, others))}; leave out the file to take the"
            f" job's, and set at most {', '.join(sorted(OF_A_MACHINE))}"
        )
    from .supervisor import join as join_job

    os.environ.update(rank_environment())
    script = ["-m", "shardkit_trainer", file, *settings]
    code = join_job(script, config, job["address"], nproc=nproc, restarts=restarts)
    return code or (
        ExitCode.INTERRUPTED if last_event(Path(config.run.directory)) == "stop" else ExitCode.DONE
    )


def leave(run: str, rank: int) -> str:
    """Let a rank of the job that trains in ``run`` end after the step that is being taken; says which ranks go on.

    Raises:
        RunError: nobody trains there, or the job has no such rank, or no other.
    """
    _expect_torch()
    from .supervisor import CONNECT_S, ask, connect, members_of

    job = running_job(Path(run))
    patience_s = load_configuration(Path(run) / JOB).parallel.timeout_s
    store = connect(job["address"], min(patience_s, CONNECT_S))
    deadline = time.monotonic() + patience_s

    def meanwhile() -> None:
        if time.monotonic() > deadline:
            raise RunError(
                f"no answer within {patience_s} s; the ranks are not at a step yet, or hang: try again"
            )

    try:
        ask(store, {"kind": "leave", "rank": rank}, meanwhile)
    except RunError as error:
        raise RunError(f"{run}: {error}") from None
    ranks = len(members_of(store, int(store.get("generation"))))
    return f"rank {rank} leaves after the step that is being taken; {ranks} go on"


def _expect_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("training needs torch; run: pip install 'shardkit[train]'")


def _compare_software(theirs: dict[str, str], *, exact: bool) -> None:
    own = software()
    differing = [
        f"{name} {theirs.get(name)} there, {own[name]} here"
        for name in ("shardkit", "torch", *(["cpu"] if exact else []))
        if theirs.get(name) != own[name]
    ]
    if differing:
        raise RunError(
            f"the ranks of this job run other software: {'; '.join(differing)}; install the same, then join"
        )


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
    return {"start": ExitCode.FAILED, "end": ExitCode.DONE}.get(
        last_event(Path(config.run.directory)), ExitCode.INTERRUPTED
    )
