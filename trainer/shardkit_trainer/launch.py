"""Start the ranks of a run: through torchrun's agent, or in this process for a single rank. Does not import torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from shardkit.errors import ConfigurationError, MissingDependency
from shardkit.exit_codes import ExitCode
from shardkit.extras import install_command

from .configuration import load_configuration
from .run_directory import check_changes

RANK_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    # the agents' shared store keeps the addresses of dead ranks, on which new ranks hang (pytorch issue 135712)
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # torch's C++ prints a stack for every access to a store that ended with its rank; ranks report it in one line
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # the agent keeps this one; with torch's list, a run under nohup ends when its terminal is closed
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    # torch's loggers read their level here; the agent prints each failure in one line
    "LOGLEVEL": "CRITICAL",
}


def launch(
    path: str | None,
    overrides: Sequence[str],
    *,
    nproc: int = 1,
    nnodes: str = "1",
    rendezvous: str = "",
    max_restarts: int | None = None,
    allow_changes: Sequence[str] = (),
) -> int:
    """Train with ``nproc`` ranks on this machine, alone or together with other machines.

    SIGTERM, SIGINT and SIGHUP to this process are passed on: ranks finish the current step, save and end. The ranks of
    other machines save too, and continue without this machine if at least MIN machines are left.

    Args:
        path: TOML file or run.json with the settings; None: overrides only.
        overrides: settings as ``section.key=value``.
        nproc: number of ranks on this machine.
        nnodes: number of machines, ``N`` or ``MIN:MAX``.
        rendezvous: ``HOST:PORT`` at which the machines meet.
        max_restarts: number of failures after which all ranks restart from the newest checkpoint. None: 0 for a fixed
            number of machines, otherwise 3.
        allow_changes: settings that may differ from the previous start although they change the data or the model.

    Returns:
        The exit code: 0 for a finished run, 130 for a run that a signal stopped and that was saved.

    Raises:
        ConfigurationError: a setting is wrong, or differs without ``allow_changes``; nothing has been started.
        MissingDependency: torch is not installed.
        RunError: the machines do not find each other.
    """
    config = load_configuration(path, overrides)
    fewest, most = _parse_nnodes(nnodes)
    if most > 1 and not rendezvous:
        raise ConfigurationError(
            f"--nnodes {nnodes}: expected --rendezvous HOST:PORT too, the place where the machines meet"
        )
    host, port = _parse_endpoint(rendezvous) if rendezvous else ("", 0)
    check_changes(config, allow_changes)
    _expect_torch()
    if nproc == 1 and not rendezvous and not max_restarts:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.parallel.threads))
        from .training import train

        return ExitCode.DONE if train(config, allow_changes=allow_changes).finished else ExitCode.INTERRUPTED
    allowed = [f"--allow-changes={','.join(allow_changes)}"] if allow_changes else []
    restarts = max_restarts if max_restarts is not None else 0 if fewest == most else 3
    with _defaults(RANK_ENVIRONMENT):
        from .agent import Machines, run_ranks

        return run_ranks(
            [*([path] if path else []), *overrides, *allowed], nproc=nproc, max_restarts=restarts,
            machines=Machines(fewest, most, host, port) if rendezvous else None,
            shutdown_s=config.parallel.shutdown_s,
        )  # fmt: skip


def _parse_nnodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if low.isascii() and low.isdigit() and (not colon or (high.isascii() and high.isdigit())):
        fewest, most = int(low), int(high or low)
        if 1 <= fewest <= most <= 1_000_000:
            return fewest, most
    raise ConfigurationError(f"--nnodes {text}: expected N or MIN:MAX with 1 ≤ MIN ≤ MAX, such as 1:4")


def _parse_endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        return host, int(port)
    raise ConfigurationError(f"--rendezvous {text}: expected HOST:PORT, such as 10.0.0.1:29400")


@contextmanager
def _defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for child processes, except those already set."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _expect_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(f"training needs torch; run: {install_command('train')}")
