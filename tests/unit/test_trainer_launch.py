"""Machines of a run: what the command line may say, and what the exit codes of ranks mean."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from shardkit.errors import ConfigurationError
from shardkit.exit_codes import ExitCode
from shardkit_trainer import launch
from shardkit_trainer.agent import Agent, own_place
from shardkit_trainer.signals import LAUNCHER, RESTART, StopRequest

SETTINGS = ["run.directory=unused", "data.dataset=unused"]


@pytest.mark.parametrize(
    ("nnodes", "rendezvous", "words"),
    [
        ("3:2", "a:1", "--nnodes 3:2: expected N or MIN:MAX"), ("0:2", "a:1", "--nnodes 0:2"),
        ("x", "a:1", "--nnodes x"), ("1:", "a:1", "--nnodes 1:"), ("1:4", "", "expected --rendezvous HOST:PORT"),
        ("2", "host", "--rendezvous host: expected HOST:PORT"), ("2", ":1", "--rendezvous :1"),
        ("2", "host:99999", "--rendezvous host:99999"), ("2", "host:0", "--rendezvous host:0"),
    ],
)  # fmt: skip
def test_machines_that_cannot_be_meant_are_refused(nnodes: str, rendezvous: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        launch(None, SETTINGS, nnodes=nnodes, rendezvous=rendezvous)
    assert words in str(caught.value)


CODES = st.sampled_from([0, RESTART, int(ExitCode.INTERRUPTED), -signal.SIGTERM, -signal.SIGKILL, 1, 2])


@given(st.dictionaries(st.integers(0, 7), CODES), st.integers(0, 3))
def test_only_failures_use_up_a_restart(codes: dict[int, int], restarts: int) -> None:
    """A change of machines is free, a rank that somebody stopped ends the run, everything else counts."""
    failures = {rank: SimpleNamespace(exitcode=code, pid=1) for rank, code in codes.items() if code}
    agent: Any = object.__new__(Agent)
    agent._remaining_restarts = restarts
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: SimpleNamespace(failures=failures))
        agent._monitor_workers(None)
    found = {one.exitcode for one in failures.values()}
    real = found - {RESTART, int(ExitCode.INTERRUPTED), -signal.SIGTERM}
    left = agent._remaining_restarts - 1 if failures else agent._remaining_restarts
    if real or not found:
        assert agent._remaining_restarts == restarts
    elif ExitCode.INTERRUPTED in found or RESTART not in found:
        assert agent._remaining_restarts == 0
    else:
        assert left == restarts, "torchrun takes one away, which was added before"


def test_a_rank_stops_when_its_command_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not StopRequest().is_set()
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    request = StopRequest()
    assert not request.is_set()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getppid", lambda: 1)
        assert request.is_set()
        assert not StopRequest().is_set(), "another command's variable says nothing"
    request.ask()
    assert request.is_set()
    with pytest.raises(KeyboardInterrupt):
        request.ask(signal.SIGINT)


def test_the_interface_is_the_one_that_leads_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_place("127.0.0.1") == ("lo", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert own_place("203.0.113.1") == ("lo", "127.0.0.1")
