"""Where the simulation takes the place of the world: clients of stores, the clock, chance, and pools of threads.

Substituted for one simulation at a time, in a process that does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

from shardkit.stores import file_operations, local
from shardkit.stores.remote import clients
from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.clients import Client
from shardkit.stores.waiting import WAITS
from tests.simulation.disk_operations import DiskOperations
from tests.simulation.scheduler import Scheduler

__all__ = ["simulated"]


@contextlib.contextmanager
def simulated(
    scheduler: Scheduler, open_client: Callable[[Address], Client], files: DiskOperations
) -> Iterator[None]:
    """Run product code under `scheduler`."""
    chance = random.Random(scheduler.random.getrandbits(64))

    def read_clock() -> float:
        return scheduler.now

    def new_id() -> uuid.UUID:
        return uuid.UUID(int=chance.getrandbits(128), version=4)

    def token(size: int = 32) -> str:
        return chance.randbytes(size).hex()

    def share(_: random.SystemRandom) -> float:
        return chance.random()

    def process() -> int:
        return scheduler.process

    def boot() -> str:
        return f"boot{scheduler.boots}"

    def is_alive(number: int, _start: int) -> bool:
        return scheduler.is_alive(number)

    with contextlib.ExitStack() as stack:
        stack.enter_context(clients.substituted(open_client))
        stack.enter_context(file_operations.substituted(files))
        stack.enter_context(mock.patch.object(time, "time", scheduler.time))
        for name in ("monotonic", "perf_counter"):
            stack.enter_context(mock.patch.object(time, name, read_clock))
        stack.enter_context(mock.patch.object(time, "sleep", scheduler.sleep))
        stack.enter_context(mock.patch.object(uuid, "uuid4", new_id))
        stack.enter_context(mock.patch.object(secrets, "token_hex", token))
        stack.enter_context(mock.patch.object(random.SystemRandom, "random", share))
        stack.enter_context(mock.patch.object(os, "cpu_count", return_value=2))
        stack.enter_context(mock.patch.object(os, "getpid", process))
        for name, value in (
            ("_boot", boot),
            ("_pid_namespace", boot),
            ("_start_time", _nothing),
            ("_is_alive", is_alive),
        ):
            stack.enter_context(mock.patch.object(local, name, value))
        stack.enter_context(
            mock.patch.object(WAITS, "_is_watched", False)
        )  # by a thread: it would move the clock
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "__init__", _no_threads))
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _at_once))
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "shutdown", _nothing))
        yield


def _no_threads(self: Any, *_: Any, **__: Any) -> None:
    """Not even the machinery of a pool: nothing is handed to another thread."""


def _at_once(_self: Any, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
    """Carried out by whoever submits it: the actor, whose requests interleave with those of other actors."""
    done: Future[Any] = Future()
    try:
        done.set_result(work(*args, **named))
    except Exception as error:
        done.set_exception(error)
    return done


def _nothing(*_: Any, **__: Any) -> None:
    """There is no thread to wait for."""
