"""Ranks that go on when one dies, joins or leaves: ``parallel.recovery = "in-process"`` (SPEC.md §5).

torchrun stops all ranks when one dies. A `Supervisor` starts ranks on its machine, and new ones in the place of those
that are killed; the first one of a job has the `Lead`, which decides who the ranks are: numbered groups, agreed on in
the store that it serves. A rank has its `Membership`. A new process joins when it is ready: seconds of import do not
hold the others up.

Keys of the store:

    generation, members/<g>     number of the newest group; its processes in rank order
    formed/<g>, accused/<g>     its process group stands; ranks of it that do not answer
    ready/<name>                a process that can join
    leaving/<name>              one that was asked to leave
    processes                   names given so far
    news, news/<n>, answer/<n>  what supervisors and commands tell the first supervisor, and what it says to that
    host/<id>                   heartbeat of a supervisor
    job, lanes                  what rank 0 writes to job.json; the most ranks that a job can have
    stopping, finished          every rank shall save and end; the run has ended, and the processes of its last group
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardkit.errors import RunError
from shardkit.exit_codes import ExitCode

from .agent import LIFELINE, on_stop_signals
from .configuration import Configuration
from .run_directory import JOB

ADDRESS = "SHARDKIT_SUPERVISOR"
"""Environment variable: host:port of the job's store."""

NAME = "SHARDKIT_MEMBER"
"""Environment variable: this process among those of the job."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of gloo: the network interface that ranks reach each other by."""

CONNECT_S = 10.0  # what a command waits for a job to answer
BEAT_S, SILENCE_S = 0.5, 10.0  # between heartbeats of a supervisor; after which its machine counts as dead
LOOK_S = 0.02


class Left(Exception):
    """This process was asked to leave the job, and the others have gone on without it."""


def connect(address: str, timeout_s: float) -> Store:
    """The store at host:port."""
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    except (dist.DistError, ValueError) as error:
        raise RunError(
            f"nobody answers at {address}: the job there has ended, or this machine cannot reach it"
            f" ({str(error).splitlines()[0]})"
        ) from error
    return store


def own_place(toward: str = "") -> tuple[str, str]:
    """(network interface, its IPv4 address): what others reach this machine by.

    That of ``GLOO_SOCKET_IFNAME`` where it is set, else the one that leads to the address ``toward``, or outside; the
    name is empty where it cannot be told.
    """
    known = _interfaces()
    if name := os.environ.get(INTERFACE, "").split(",")[0]:
        return name, known.get(name, "127.0.0.1")
    address = next((one for one in known.values() if not one.startswith("127.")), "127.0.0.1")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((toward or "203.0.113.1", 9))  # nothing is sent: the kernel looks up the route
        address = asked.getsockname()[0]
    return next((name for name, one in known.items() if one == address), ""), address


def _interfaces() -> dict[str, str]:
    found: dict[str, str] = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    answer = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found


def members_of(store: Store, generation: int) -> list[str]:
    """Processes of a group, in rank order."""
    members: list[str] = json.loads(store.get(f"members/{generation}"))
    return members


def tell(store: Store, news: dict[str, Any]) -> int:
    """Tell the first supervisor something; returns its number, under which an answer may come."""
    number: int = store.add("news", 1)
    store.set(f"news/{number}", json.dumps(news))
    return number


def ask(store: Store, news: dict[str, Any], meanwhile: Callable[[], None]) -> None:
    """Tell the first supervisor something, and wait for its answer."""
    number = tell(store, news)
    while not store.check([f"answer/{number}"]):
        meanwhile()
        time.sleep(LOOK_S)
    if refusal := store.get(f"answer/{number}").decode():
        raise RunError(refusal)


# ---- in a rank


@dataclass
class Membership:
    """One rank's view of the job's store."""

    store: Store
    name: str
    patience_s: float

    @classmethod
    def from_environment(cls, patience_s: float) -> Membership:
        """In the job whose supervisor started this process."""
        store = connect(os.environ[ADDRESS], patience_s)
        store.set(f"ready/{os.environ[NAME]}", "1")
        return cls(store, os.environ[NAME], patience_s)

    def newest(self) -> int:
        """The newest generation."""
        try:
            return int(self.store.get("generation"))
        except dist.DistError as error:
            raise RunError(
                f"{self.name}: the supervisor does not answer any more; start the run again: it goes on from its"
                f" newest checkpoint ({str(error).splitlines()[0]})"
            ) from error

    def change_after(self, generation: int) -> int:
        """0: the group is the newest; 1: it is not; 2: nor that, and ranks of it were asked to leave."""
        if self.newest() == generation:
            return 0
        asked = [f"leaving/{name}" for name in members_of(self.store, generation)]
        return 2 if any(self.store.check([key]) for key in asked) else 1

    def accuse(self, generation: int, ranks: list[int]) -> None:
        """Say which ranks of a group do not answer: their supervisor kills them."""
        members = members_of(self.store, generation)
        self.store.set(f"accused/{generation}", " ".join(members[rank] for rank in ranks))

    def wait_after(self, after: int) -> tuple[int, int, int]:
        """(generation, rank, size) of the first newer generation that this process is a member of."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            generation = self.newest()
            if generation > after:
                members = members_of(self.store, generation)
                if self.name in members:
                    return generation, members.index(self.name), len(members)
                if self.store.check([f"leaving/{self.name}"]):
                    raise Left
            time.sleep(0.005)
        raise RunError(
            f"process {self.name} waited {self.patience_s} s for a group of ranks after number {after}; the supervisor"
            " has not formed one: look at its output, or restart the run: it goes on from its newest checkpoint"
        )


# ---- in the parents of the ranks


@dataclass
class Supervisor:
    """The ranks that one command has started."""

    _script: Sequence[str]  # arguments of python for a rank
    _config: Configuration
    _store: Store  # of the job
    _restarts: int  # how many more ranks are started in the place of those that are killed
    _address: str  # of the store, as the ranks reach it
    _interface: str  # that ranks reach each other by; empty: as gloo finds it
    _lead: Lead | None = None  # in the first supervisor of the job
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)  # LOCAL_RANK of each child
    _stopping_since: float | None = None
    _finished: bool = False
    _beaten: float = 0.0
    _code: int = 0

    def __post_init__(self) -> None:
        self._host = f"{os.getpid()}-{time.time_ns():x}"
        # its end tells the children that nobody looks after them any more: only this process holds the other one
        self._lifeline, self._held = os.pipe()

    def run(self, nproc: int) -> int:
        """Until the ranks of this machine have ended, in the first supervisor those of all; returns the exit code."""
        names = [self._new_name() for _ in range(nproc)]
        lead = self._lead
        with on_stop_signals(lambda _number, _frame: self._stop()):
            try:
                if lead is None:
                    self._ask_to_join(names)
                for name in names:
                    self._start(name)
                if lead is not None:
                    lead.begin(self._host, names)
                while self._children or (lead is not None and lead.others_live()):
                    self._look_after_children()
                    if lead is not None:
                        lead.look()
                    else:
                        self._beat()
                    self._obey()
                    time.sleep(LOOK_S)
            except dist.DistError as error:
                if self._children and not self._finished:
                    _say(f"the job's first supervisor does not answer ({str(error).splitlines()[0]})")
                    return ExitCode.FAILED
            finally:
                for child in self._children.values():
                    child.kill()
                    child.wait()
                os.close(self._lifeline)
                os.close(self._held)
        return lead.failed if lead is not None else self._code

    def _ask_to_join(self, names: list[str]) -> None:
        def meanwhile() -> None:
            if self._stopping_since:
                raise KeyboardInterrupt
            self._beat()

        ask(self._store, {"kind": "join", "host": self._host, "names": names}, meanwhile)
        _say(f"{', '.join(names)} will join when ready")

    def _new_name(self) -> str:
        return f"process-{self._store.add('processes', 1) - 1}"

    def _start(self, name: str) -> None:
        self._places[name] = min({*range(len(self._places) + 1)} - {*self._places.values()})
        told = {ADDRESS: self._address, **({INTERFACE: self._interface} if self._interface else {})}
        told |= {NAME: name, LIFELINE: str(self._lifeline), "LOCAL_RANK": str(self._places[name])}
        command = [sys.executable, *self._script]
        environment = {**os.environ, **told}
        self._children[name] = subprocess.Popen(command, env=environment, pass_fds=[self._lifeline])

    def _beat(self) -> None:
        if time.monotonic() - self._beaten >= BEAT_S:
            self._beaten = time.monotonic()
            self._store.set(f"host/{self._host}", str(self._beaten))

    def _look_after_children(self) -> None:
        """Tell the lead which have ended; start new ones in the place of those that were killed."""
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                continue
            del self._children[name], self._places[name]
            news: dict[str, Any] = {"kind": "ended", "host": self._host, "name": name, "code": code}
            self._code = max(self._code, code)
            if code < 0 and not self._finished:
                _say(f"{name} was killed by signal {-code}")
                if self._stopping_since is None and self._restarts:
                    self._restarts -= 1
                    news["replacement"] = self._new_name()
                    self._start(news["replacement"])
            tell(self._store, news)

    def _obey(self) -> None:
        """What the lead and the ranks ask of every supervisor."""
        if not self._finished and self._store.check(["finished"]):
            # the run has ended: processes that the ranks have not met any more need not begin
            self._finished = True
            last = json.loads(self._store.get("finished"))
            self._kill([name for name in self._children if name not in last])
        if self._stopping_since is None and self._store.check(["stopping"]):
            self._stop()
        since, patience_s = self._stopping_since, self._config.parallel.shutdown_s
        if since is not None and time.monotonic() - since > patience_s:
            self._kill(list(self._children))
        key = f"accused/{self._store.get('generation').decode()}"
        if self._store.check([key]):
            # ranks that the others of the newest group have found frozen cannot be waited for
            accused = {*self._store.get(key).decode().split()} & {*self._children}
            accused = {name for name in accused if self._children[name].poll() is None}
            for name in accused:
                _say(f"{name} does not answer and is killed")
            self._kill(accused)

    def _kill(self, names: Iterable[str]) -> None:
        for name in names:
            self._children[name].kill()

    def _stop(self) -> None:
        """Ask every child to save and end; called by signals too, which may interrupt the use of the store."""
        self._stopping_since = self._stopping_since or time.monotonic()
        for child in list(self._children.values()):
            child.send_signal(signal.SIGTERM)


@dataclass
class _Host:
    """Another supervisor, as the lead knows it: its processes, its latest heartbeat, and when that came."""

    names: set[str] = field(default_factory=set)
    beat: bytes = b""
    since: float = field(default_factory=time.monotonic)


class Lead:
    """Decides who the ranks are: publishes groups, from what supervisors and commands tell it.

    Attributes:
        failed: exit code of the run; 0 as long as nothing says otherwise.
    """

    def __init__(self, store: Store, timeout_s: float):
        self._store = store
        self._silence_s = min(SILENCE_S, timeout_s / 2)  # the others wait as long as that for a new group
        self._generation, self._read = -1, 0
        self._members: list[str] = []  # of the newest group
        self._formed: list[str] = []  # of the newest one whose process group stands
        self._stands = False  # whether that is the newest one
        self._joining: list[str] = []
        self._leaving: set[str] = set()
        self._requests: list[tuple[int, dict[str, Any]]] = []
        self._hosts: dict[str, _Host] = {}
        self._own = ""
        self._finished = False
        self.failed = 0

    def begin(self, host: str, names: list[str]) -> None:
        """The first group."""
        self._own, self._members = host, list(names)
        self._hosts[host] = _Host({*names})
        self._announce()

    def others_live(self) -> bool:
        """Whether ranks of other supervisors go on: the store is theirs too."""
        return any(one.names for host, one in self._hosts.items() if host != self._own)

    def look(self) -> None:
        """Take in what has happened, and form a new group where that is needed."""
        if self._store.check([f"formed/{self._generation}"]):
            self._formed, self._stands = list(self._members), True
        while self._store.check([f"news/{self._read + 1}"]):
            self._read += 1
            news = json.loads(self._store.get(f"news/{self._read}"))
            if news["kind"] == "ended":
                self._ended(**news)
            else:
                self._requests.append((self._read, news))
        self._give_up_silent_hosts()
        over = "the run has just ended" if self._finished or self.failed else ""
        # a group that forms would wait for ranks that have seen a newer one
        if over or (self._stands and self._store.check(["lanes"])):
            ready = all(self._store.check([f"ready/{name}"]) for name in self._joining)
            if self._requests:
                number, news = self._requests.pop(0)
                act = self._join if news.pop("kind") == "join" else self._leave
                self._store.set(f"answer/{number}", over or act(**news))
            elif self._joining and ready and not over:
                self._members, self._joining = self._members + self._joining, []
                self._announce()

    def _announce(self) -> None:
        self._generation, self._stands = self._generation + 1, False
        self._store.set(f"members/{self._generation}", json.dumps(self._members))
        self._store.set("generation", str(self._generation))  # last: it is what ranks look for

    def _ended(self, host: str, name: str, code: int, replacement: str = "", **_: Any) -> None:
        processes = self._hosts.setdefault(host, _Host()).names
        processes.discard(name)
        if replacement:
            processes.add(replacement)
            self._joining.append(replacement)
        if code == 0 and name not in self._leaving and not self._finished:
            self._finished = True
            self._store.set("finished", json.dumps(self._formed))
        elif code > 0:
            self.failed = self.failed or code
            self._store.set("stopping", "1")  # a rank gave up and said why: so would the others
        self._forget({name})

    def _forget(self, names: set[str]) -> None:
        """Processes are gone: the others go on."""
        changed = not names.isdisjoint(self._members)
        self._members = [name for name in self._members if name not in names]
        self._joining = [name for name in self._joining if name not in names]
        if self._finished or self.failed:
            return
        if not self._members:
            # nobody is left to go on: those that join make the next group, from the newest checkpoint
            self._members, self._joining = self._joining, []
        if self._members and changed:
            self._announce()
        elif not self._members:
            self.failed = ExitCode.FAILED

    def _give_up_silent_hosts(self) -> None:
        for host, one in self._hosts.items():
            if host == self._own or not one.names:
                continue
            key = f"host/{host}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != one.beat:
                one.beat, one.since = beat, time.monotonic()
            elif time.monotonic() - one.since > self._silence_s:
                gone, one.names = one.names, set()
                _say(f"the machine of {', '.join(sorted(gone))} does not answer: the others go on without it")
                self._forget(gone)

    # --- requests: they return why not, nothing where it is done -----------------------------------------------------

    def _join(self, host: str, names: list[str]) -> str:
        there, lanes = len(self._members) + len(self._joining), int(self._store.get("lanes"))
        if there + len(names) > lanes:
            return (
                f"{len(names)} more ranks than the {there} that are there or about to join: the plan has {lanes} lanes,"
                f" and a rank needs one; join with at most --nproc {lanes - there}"
            )
        self._hosts[host] = _Host({*names})
        self._joining += names
        return ""

    def _leave(self, rank: int) -> str:
        if not 0 <= rank < len(self._members):
            return f"rank {rank} is not there: expected 0 … {len(self._members) - 1}"
        if len(self._members) == 1:
            return "rank 0 is the only one; to stop the run, send SIGTERM to the command that started it"
        name = self._members.pop(rank)
        _say(f"{name} (rank {rank}) leaves: its lanes go to the other {len(self._members)}")
        self._leaving.add(name)
        self._store.set(f"leaving/{name}", "1")
        self._announce()
        return ""


def _say(text: str) -> None:
    print(f"supervisor: {text}", file=sys.stderr, flush=True)


def supervise(
    script: Sequence[str], config: Configuration, *, nproc: int, restarts: int, job: Any = None
) -> int:
    """Run ``python *script`` as the first ``nproc`` ranks of a job; returns the exit code.

    ``job`` is what those that join shall know: rank 0 writes it to the run directory, with the address of the store.
    """
    served: Any = dist.TCPStore  # type: ignore[attr-defined]
    timeout = timedelta(seconds=config.parallel.timeout_s)
    # others connect to it, on this machine and others; it lives as long as this process
    store = served("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    interface, address = own_place()
    store.set("job", json.dumps({**(job or {}), "address": f"{address}:{store.port}"}))
    lead = Lead(store, config.parallel.timeout_s)
    own = f"127.0.0.1:{store.port}"
    try:
        return Supervisor(script, config, store, restarts, own, interface, lead).run(nproc)
    finally:
        path = Path(config.run.directory) / JOB
        if path.exists() and path.read_bytes() == store.get("job"):  # another job may train there
            path.unlink()


def join(script: Sequence[str], config: Configuration, address: str, *, nproc: int, restarts: int) -> int:
    """Run ``nproc`` further ranks of the job whose store is at ``address``; returns the exit code.

    Raises:
        RunError: the job does not answer, or does not take them.
    """
    store = connect(address, min(config.parallel.timeout_s, CONNECT_S))
    store.set_timeout(timedelta(seconds=config.parallel.timeout_s))
    interface, _ = own_place(address.rpartition(":")[0])
    return Supervisor(script, config, store, restarts, address, interface).run(nproc)
