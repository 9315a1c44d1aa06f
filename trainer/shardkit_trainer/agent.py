"""Run the ranks of this machine under torchrun's elastic agent (SPEC.md §5).

The agent decides which machines take part, and starts and restarts ranks. This module adds the meaning of exit codes:
ranks that saved because the machines change are restarted without using up one of ``max_restarts``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousTimeoutError,
)

from shardkit.errors import RunError
from shardkit.exit_codes import ExitCode

from .distributed import LAUNCHER, RESTART, on_stop_signals

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of gloo: the network interface through which ranks reach each other."""

RENDEZVOUS: Mapping[str, int] = {
    "join_timeout": 600,  # seconds to wait for the smallest number of machines
    "last_call_timeout": 3,  # seconds to wait for further machines after that
    "keep_alive_interval": 2,  # seconds between signs of life of a machine
    "keep_alive_max_attempt": 5,  # missing signs of life before a machine counts as lost
}


@dataclass(frozen=True)
class Machines:
    """Machines that train together."""

    # fewest, most: smallest and largest number of machines
    fewest: int
    most: int
    # host, port: the rendezvous; the first machine started at ``host`` serves it
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Agent(LocalElasticAgent):
    """torchrun's agent, extended by the exit codes of ranks."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        # a rank that is ending may still get the SIGTERM that the agent sends after the first rank has ended
        if RESTART in codes and codes <= {RESTART, -signal.SIGTERM}:
            self._remaining_restarts += 1
        elif codes and codes <= {RESTART, -signal.SIGTERM, ExitCode.INTERRUPTED}:
            self._remaining_restarts = 0  # a rank was stopped by a signal: end the run
        else:
            _print_failures(result.failures, self._remaining_restarts)
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close, shutdown_s = context.close, self._shutdown_timeout
        # After the failure of a rank, the context itself ends the other ranks, after torch's 30 seconds.
        context.close = lambda *_given, **_named: close(signal.SIGTERM, shutdown_s)
        return started

    def _shutdown(self, *_given: object, **_named: object) -> None:
        # not the signal that this process got: ranks save on SIGTERM
        super()._shutdown(signal.SIGTERM, self._shutdown_timeout)

    def exit_codes(self) -> set[int]:
        """Return the exit codes of the ranks that were started last."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {handler.proc.returncode for handler in handlers.values()}


def run_ranks(
    arguments: Sequence[str], *, nproc: int, machines: Machines | None, max_restarts: int, shutdown_s: int
) -> int:
    """Run ``python -m shardkit_trainer ARGUMENTS`` in ``nproc`` processes of this machine; return the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    here = machines or Machines(1, 1, "localhost", 0)
    address = None
    if machines is not None:
        interface, address = own_place(machines.host)
        if interface:
            os.environ.setdefault(INTERFACE, interface)
    os.environ[LAUNCHER] = str(os.getpid())
    agent: Agent | None = None
    with tempfile.TemporaryDirectory(prefix="shardkit-ranks-") as folder, on_stop_signals(_raise_stop):
        try:
            meeting = _meeting(here, address)
            spec = WorkerSpec(
                role="rank", local_world_size=nproc, rdzv_handler=meeting, max_restarts=max_restarts,
                entrypoint=sys.executable, args=("-m", "shardkit_trainer", *arguments), local_addr=address,
            )  # fmt: skip
            logs = DefaultLogsSpecs(log_dir=folder)
            agent = Agent(spec, logs, exit_barrier_timeout=shutdown_s, shutdown_timeout=shutdown_s)
            result = agent.run()
            meeting.shutdown()  # for all machines: the run has ended
        except SignalException:
            return _after_signal(agent)
        except RendezvousError as error:
            # the run ended on another machine, which closed the rendezvous, before this one restarted its ranks
            if isinstance(error, RendezvousClosedError) and agent is not None and agent.exit_codes() == {0}:
                return ExitCode.DONE
            raise _rendezvous_failure(error, here) from error
    return _exit_code(result)


def _exit_code(result: RunResult | None) -> int:
    """Return the ranks' own exit code if they agree on one, otherwise FAILED."""
    if result is None:  # a spare machine of a job that has ended
        return ExitCode.DONE
    codes = {failure.exitcode for failure in result.failures.values()}
    if not codes:
        return ExitCode.DONE
    # ranks that were stopped by a signal, or failed because another rank was gone, do not count
    own = {ExitCode(code) for code in codes & {*ExitCode}} - {ExitCode.FAILED}
    return own.pop() if len(own) == 1 else ExitCode.FAILED


def _meeting(machines: Machines, address: str | None) -> RendezvousHandler:
    def meet(*, serve: bool) -> RendezvousHandler:
        parameters = RendezvousParameters(
            backend="c10d", endpoint=str(machines), run_id="shardkit", min_nodes=machines.fewest,
            max_nodes=machines.most, local_addr=address, is_host=serve, **RENDEZVOUS,
        )  # fmt: skip
        return registry.get_rendezvous_handler(parameters)

    if machines.port == 0:
        return meet(serve=True)
    if _can_listen(machines.host, machines.port):
        with suppress(RendezvousConnectionError):  # another process of this machine was faster
            return meet(serve=True)
    return meet(serve=False)


def _rendezvous_failure(error: RendezvousError, machines: Machines) -> RunError:
    if isinstance(error, RendezvousClosedError):
        return RunError(f"the job at {machines} has ended; start the run again")
    if isinstance(error, RendezvousTimeoutError):
        return RunError(
            f"fewer than {machines.fewest} machines came to {machines} within {RENDEZVOUS['join_timeout']} s; start the"
            " same command on the others, or lower MIN in --nnodes MIN:MAX"
        )
    return RunError(
        f"the rendezvous at {machines} does not answer: the machine that serves it has ended or cannot be reached;"
        " start the run again, first on that machine"
    )


def _after_signal(agent: Agent | None) -> int:
    """Return the exit code after a signal: INTERRUPTED if every rank saved and ended by itself."""
    codes = agent.exit_codes() if agent is not None else set()
    if codes == {ExitCode.DONE}:
        return ExitCode.DONE
    saved = {ExitCode.DONE, ExitCode.INTERRUPTED, RESTART, -signal.SIGTERM, -signal.SIGINT}
    return ExitCode.INTERRUPTED if codes <= saved else ExitCode.FAILED


def _raise_stop(number: int, _frame: object) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def _print_failures(failures: Mapping[int, Any], restarts: int) -> None:
    for rank, failure in sorted(failures.items()):
        code = failure.exitcode
        if code in {RESTART, -signal.SIGTERM, ExitCode.INTERRUPTED}:
            continue  # stopped because another rank failed
        ended = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        after = f"; starting all ranks again, restarts left: {restarts - 1}" if restarts else ""
        print(f"torchrun: rank {rank} (process {failure.pid}) {ended}{after}", file=sys.stderr, flush=True)


def _can_listen(host: str, port: int) -> bool:
    """Return True if ``host`` is this machine and nothing listens at ``port`` yet."""
    # also if its name does not resolve yet
    named = host.partition(".")[0] == socket.gethostname().partition(".")[0]
    with suppress(OSError), socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("" if named else host, port))
        return True
    return False


def own_place(toward: str) -> tuple[str, str]:
    """Return the network interface and IPv4 address at which other machines reach this one.

    ``GLOO_SOCKET_IFNAME`` names the interface. Without it, the route to the host ``toward`` decides. The name is empty
    if the interface is unknown.
    """
    known = _interfaces()
    if name := os.environ.get(INTERFACE, "").split(",")[0]:
        return name, known.get(name, "127.0.0.1")
    address = "127.0.0.1"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((toward, 9))  # nothing is sent: the kernel looks up the route
        address = asked.getsockname()[0]
    return next((name for name, one in known.items() if one == address), ""), address


def _interfaces() -> dict[str, str]:
    """Return {name: IPv4 address} of this machine's network interfaces."""
    found: dict[str, str] = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    answer = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found
