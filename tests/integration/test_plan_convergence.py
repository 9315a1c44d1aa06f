"""A class-sorted dataset trains as well in the plan's order as in a full shuffle, and far better than in its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shardkit.plan import Population, make_plan
from shardkit.plan.report import full_shuffle

CLASSES, DIMENSIONS, ROWS, BATCH, EPOCHS, SEEDS = 8, 16, 8192, 64, 2, 5

Order = Callable[[int, int], np.ndarray]  # (seed, epoch) -> (steps, B) sample numbers


def data(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Overlapping clusters, sorted by class; and as many others to test on."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 0.55, (CLASSES, DIMENSIONS))
    label = np.repeat(np.arange(CLASSES), ROWS // CLASSES)
    return (centres[label] + rng.normal(0, 1, (ROWS, DIMENSIONS)), label,
            centres[label] + rng.normal(0, 1, (ROWS, DIMENSIONS)), label)  # fmt: skip


def accuracy(order: Order, seed: int) -> float:
    """Test accuracy of softmax regression after plain SGD, large steps, in a given order."""
    train, label, test, truth = data(seed)
    weights, velocity = np.zeros((DIMENSIONS + 1, CLASSES)), np.zeros((DIMENSIONS + 1, CLASSES))
    train, test = (np.hstack([x, np.ones((len(x), 1))]) for x in (train, test))
    for epoch in range(EPOCHS):
        for rows in order(seed, epoch):
            x = train[rows]
            scores = np.exp(x @ weights - (x @ weights).max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
            scores[np.arange(len(rows)), label[rows]] -= 1
            velocity = 0.9 * velocity + x.T @ scores / len(rows)
            weights -= 0.05 * velocity
    return float(((test @ weights).argmax(axis=1) == truth).mean())


def planned(strata: bool) -> Order:
    """32 shards of one class each; with the class as stratum, or (adopted data) with no stratum at all."""
    segments = [(s, s * CLASSES // 32 if strata else 0, ROWS // 32) for s in range(32)]
    names = [f"class {c}" for c in range(CLASSES)] if strata else ["all"]
    population = Population.of("sorted", names, segments, 16)

    def order(seed: int, epoch: int) -> np.ndarray:
        plan = make_plan(population, global_batch=BATCH, lanes=16, seed=seed)
        assert plan.steps_per_epoch is not None
        return plan.steps(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch).reshape(-1, BATCH)

    return order


@pytest.fixture(scope="module")
def figures() -> dict[str, np.ndarray]:
    def runs(order: Order) -> Iterator[float]:
        return (accuracy(order, seed) for seed in range(SEEDS))

    shuffled: Order = lambda seed, epoch: full_shuffle(ROWS, ROWS // BATCH, BATCH, 100 * seed + epoch)  # noqa: E731
    as_it_lies: Order = lambda seed, epoch: np.arange(ROWS).reshape(-1, BATCH)  # noqa: E731
    orders = {
        "strata": planned(True),
        "adopted": planned(False),
        "full shuffle": shuffled,
        "sequential": as_it_lies,
    }
    return {name: np.array(list(runs(order))) for name, order in orders.items()}


@pytest.mark.parametrize("kind", ["strata", "adopted"])
def test_sorted_data_trains_as_if_shuffled(figures: dict[str, np.ndarray], kind: str) -> None:
    mine, full = figures[kind], figures["full shuffle"]
    # the same data under both orders: paired differences, within three standard errors or half a per cent
    error = (mine - full).std(ddof=1) / SEEDS**0.5
    assert (mine - full).mean() > -max(3 * error, 0.005)
    assert full.mean() > 0.6


def test_the_order_matters(figures: dict[str, np.ndarray]) -> None:
    assert (figures["strata"] - figures["sequential"]).min() > 0.15
    assert (figures["adopted"] - figures["sequential"]).min() > 0.15
