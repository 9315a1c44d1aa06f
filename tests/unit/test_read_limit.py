"""The limit of concurrent requests of a location: when it grows, and when it is halved."""

from __future__ import annotations

import pytest

from shardkit.reading.request_limit import RequestLimit

SIZE = 1 << 20


@pytest.fixture
def limit() -> RequestLimit:
    return RequestLimit(16, 64)


def free_slots(limit: RequestLimit) -> int:
    """Return how many requests may start now, and give the slots back."""
    taken = 0
    while limit.acquire(0.0):
        taken += 1
    for _ in range(taken):
        limit.release()
    return taken


def answer(limit: RequestLimit, rounds: int, seconds: float) -> None:
    """Answer all requests that may be in flight, several times over."""
    for _ in range(rounds):
        taken = 0
        while limit.acquire(0.0):
            taken += 1
        for _ in range(taken):
            limit.answered(SIZE, seconds)
        for _ in range(taken):
            limit.release()


def test_the_limit_grows_to_its_bound_while_answers_take_the_same_time(limit: RequestLimit) -> None:
    assert free_slots(limit) == 16
    answer(limit, 1, 0.02)
    assert free_slots(limit) == 16, "one round is a slot at most, less what rounding takes"
    answer(limit, 10, 0.02)
    assert 20 <= free_slots(limit) <= 27
    answer(limit, 100, 0.02)
    assert free_slots(limit) == 64


def test_the_limit_does_not_grow_while_answers_wait_for_each_other(limit: RequestLimit) -> None:
    answer(limit, 4, 0.02)
    before = free_slots(limit)
    answer(limit, 3, 0.05)
    assert free_slots(limit) == before


def test_overload_halves_the_limit_once_in_half_a_second(limit: RequestLimit) -> None:
    answer(limit, 100, 0.02)
    for _ in range(64):  # all requests in flight are refused
        limit.overloaded()
    assert free_slots(limit) in (32, 16), "a slow machine may take longer than half a second"
    before = free_slots(limit)
    answer(limit, 3, 0.02)
    assert before < free_slots(limit) <= before + 3


def test_a_limit_that_is_not_reached_does_not_grow(limit: RequestLimit) -> None:
    for _ in range(500):
        assert limit.acquire(0.0)
        limit.answered(SIZE, 0.02)
        limit.release()
    assert free_slots(limit) == 16
