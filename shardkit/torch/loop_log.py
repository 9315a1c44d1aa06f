"""Where loops over a dataset begin and whether they are over, when worker processes run them (SPEC.md).

A log of fixed-size records in memory without a name, to which the training process and its workers append. Appending
is atomic, all read the same order, and state follows from the order alone: no lock that a killed worker could hold. It
ends with the last process that has it open.

The first loop of a worker begins where the training process says when it starts the first of these workers: every
process that is started gets a ticket, one more than the one before, and the starts of tickets past.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import weakref
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any, NamedTuple
from uuid import uuid4

from torch.utils.data import get_worker_info

_RECORD = struct.Struct("<IIIIQqqqqq")  # kind, worker, parts, whether it sends, the loop, stop
_MOVED, _SETTLED, _BEGUN, _DONE, _ARRIVED = range(5)


class Loop(NamedTuple):
    """A loop of the worker processes that one DataLoader iterator has started."""

    thread: int = 0  # of the training process that has started them; 0: it runs the loop itself
    ticket: int = 0  # of worker 0
    number: int = 0  # of the loop: persistent workers have several
    start: int = 0  # its first step
    moves: int = 0  # how often somebody had said where to go on, before it began


_NO_LOOP = Loop()


@dataclass
class _Record:
    """What is known of a loop."""

    loop: Loop
    stop: int = 0
    parts: int = 0  # workers that have to be done
    done: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)  # those of them that had steps
    arrived: set[int] = field(default_factory=set)  # those whose last batch is here
    is_seen: bool = False  # some batch came as it was sent, so that all that come are seen

    def is_finished(self) -> bool:
        return 0 < self.parts <= len(self.done) and (not self.is_seen or self.sending <= self.arrived)


class LoopLog:
    """One process's view of the log.

    Args:
        step: at which the first loop begins.
    """

    def __init__(self, step: int = 0) -> None:
        self._lock = threading.Lock()  # held during a fork: a child gets a whole view, and a free lock
        self.token = ""
        self._settle_down(step)

    def _settle_down(self, step: int) -> None:
        """This is the training process, and has begun no loop."""
        _logs.pop(self.token, None)
        self.token = uuid4().hex
        self._home = os.getpid()
        self._next, self._moves = step, 0  # the next loop's, as far as the log was read
        self._loops: dict[tuple[int, int], _Record] = {}  # the latest of each group of workers
        self._begun = 0  # loops of this very process
        self._starts: dict[int, list[tuple[int, int]]] = {}  # by thread: start and moves of each ticket
        self._ticket = 0, 0  # (thread, ticket) with which this process was started
        self._read = 0
        self._open(_nameless())

    def _open(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False
        _logs[self.token] = self

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is being started by another way than a fork."""
        with self._lock:
            self._give_ticket()
            kept = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            return kept | {"_ticket": self._last_ticket(), "_begun": 0, "_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = threading.Lock()
        self._open(state["_file"].detach())

    # ---- the training process

    def where(self) -> int:
        """The step at which a loop that begins now begins."""
        with self._lock:
            self._settle()
            return self._next

    def move(self, step: int) -> None:
        """Somebody says that the next loop begins at `step`."""
        with self._lock:
            self._settle()
            self._append(_MOVED, stop=step)
            self._catch_up()

    def arrive(self, loop: Loop, worker: int, *, last: bool) -> None:
        """A batch has come from a worker; `last`: there are no more from it."""
        with self._lock:
            self._catch_up()
            record = self._loops.get(loop[:2])
            if last or record is None or not record.is_seen:
                self._append(_ARRIVED, loop, worker, int(last))

    # ---- whoever reads

    def begin(self, worker: int | None) -> Loop:
        """The next loop of this process; the same for every worker, whenever it asks. None: it is no worker."""
        with self._lock:
            if worker is None:
                self._settle()
                self._begun += 1
                return Loop(0, self._begun, 0, self._next, self._moves)
            thread, ticket = self._ticket[0], self._ticket[1] - worker
            number, self._begun = self._begun, self._begun + 1
            if number == 0:
                return Loop(thread, ticket, 0, *self._starts[thread][ticket])
            self._append(_BEGUN, Loop(thread, ticket, number))  # the first worker to say so decides
            self._catch_up()
            return self._loops[thread, ticket].loop

    def done(self, loop: Loop, worker: int, parts: int, stop: int, *, sends: bool) -> None:
        """A worker hands out the last of its steps, or has none (`sends`); `parts` workers do so in all."""
        self._append(_DONE, loop, worker, parts, stop, sends=sends)

    # ---- the log

    def _append(
        self,
        kind: int,
        loop: Loop = _NO_LOOP,
        worker: int = 0,
        parts: int = 0,
        stop: int = 0,
        *,
        sends: bool = False,
    ) -> None:
        os.write(self._file, _RECORD.pack(kind, worker, parts, sends, *loop, stop))

    def _catch_up(self) -> None:
        while records := os.pread(self._file, _RECORD.size << 10, self._read):
            self._read += len(records)  # whole ones: each was one write
            for kind, worker, parts, sends, *loop, stop in _RECORD.iter_unpack(records):
                self._follow(kind, worker, parts, bool(sends), Loop(*loop), stop)

    def _follow(self, kind: int, worker: int, parts: int, sends: bool, loop: Loop, stop: int) -> None:
        if kind == _MOVED:
            self._next, self._moves = stop, self._moves + 1
            return
        if kind in (_SETTLED, _BEGUN):
            self._go_on()
        if kind == _SETTLED:
            return
        record = self._loops.get(loop[:2])
        if record is None or record.loop.number < loop.number:
            begun = loop._replace(start=self._next, moves=self._moves) if kind == _BEGUN else loop
            record = self._loops[loop[:2]] = _Record(begun)
        if record.loop.number > loop.number:
            return  # these workers have left that loop
        if kind == _DONE:
            record.parts, record.stop = parts, stop
            record.done.add(worker)
            record.sending |= {worker} if sends else set()
        elif kind == _ARRIVED:
            record.is_seen = True
            record.arrived |= {worker} if parts else set()

    def _settle(self) -> None:
        if self._home != os.getpid():  # a process that is no worker, such as a rank, goes its own way
            self._settle_down(self._next)
        self._catch_up()
        if any(map(self._counts, self._loops.values())):
            self._append(_SETTLED)
            self._catch_up()

    def _go_on(self) -> None:
        for record in self._loops.values():
            if self._counts(record):
                self._next = record.stop
        for group, record in list(self._loops.items()):
            if record.loop.number == 0 and record.loop[3:] != (self._next, self._moves):
                del self._loops[
                    group
                ]  # its workers know where it began; where it ends moves nothing any more

    def _counts(self, record: _Record) -> bool:
        """Whether the next loop begins where this one ends: it is over, and began where the next one would."""
        begun = record.loop
        return begun[3:] == (self._next, self._moves) and record.is_finished() and record.stop != begun.start

    # ---- processes that begin

    def _give_ticket(self) -> None:
        self._settle()
        self._starts.setdefault(threading.get_ident(), []).append((self._next, self._moves))

    def _last_ticket(self) -> tuple[int, int]:
        thread = threading.get_ident()  # the one that forked goes on in the child, and keeps its number
        return thread, len(self._starts[thread]) - 1

    def _take_ticket(self) -> None:
        self._ticket, self._begun = self._last_ticket(), 0


_logs: weakref.WeakValueDictionary[str, LoopLog] = weakref.WeakValueDictionary()
_forking = threading.Lock()
_held: list[LoopLog] = []


def find_log(token: str) -> LoopLog | None:
    """The log of that token, in the training process that uses it."""
    log = _logs.get(token)
    return None if get_worker_info() is not None else log


def _before_fork() -> None:
    _forking.acquire()
    for log in [] if get_worker_info() is not None else list(_logs.values()):
        log._lock.acquire()  # noqa: SLF001  released below
        _held.append(log)
        log._give_ticket()  # noqa: SLF001


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()  # noqa: SLF001
    _forking.release()


def _in_child() -> None:
    try:
        for log in _held:
            log._take_ticket()  # noqa: SLF001
    finally:
        _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("shardkit-loops")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
