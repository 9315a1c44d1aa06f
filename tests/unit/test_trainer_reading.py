"""Cells are taken one step ahead, each once, in order, over the ends of epochs, and never past the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from shardkit_trainer.training import CellsAhead

EPOCH = 3


class Loader:
    """Gives step numbers, three an epoch; remembers which thread took each, and fails at `broken`."""

    def __init__(self, step: int = 0, broken: int = -1) -> None:
        self.step, self.broken = step, broken
        self.taken: dict[int, str] = {}
        self.opened: list[int] = []
        self.plan = SimpleNamespace(
            epoch_bounds=lambda step: (step // EPOCH * EPOCH, (step // EPOCH + 1) * EPOCH)
        )

    def __iter__(self) -> Iterator[list[int]]:
        first = self.step
        self.opened.append(first)

        def steps() -> Iterator[list[int]]:
            for step in range(first, (first // EPOCH + 1) * EPOCH):
                if step == self.broken:
                    raise OSError("the disk is gone")
                self.taken[step], self.step = threading.current_thread().name, step + 1
                yield [step]

        return steps()


def test_every_step_once_and_ahead() -> None:
    loader = Loader(1)
    cells = CellsAhead(loader, 1, 8, in_turn=False)
    found = []
    for _ in range(1, 8):
        found += cells.take()
        cells.ask()
        cells.ask()  # once is enough
    cells.close()
    assert found == list(range(1, 8))
    assert sorted(loader.taken) == found, "nothing past the end"
    assert all(name.startswith("cells-ahead") for step, name in loader.taken.items() if step > 1)
    assert loader.opened == [1, 3, 6]


def test_an_epoch_is_opened_when_the_last_step_of_the_one_before_is_handed_out() -> None:
    loader = Loader()
    cells = CellsAhead(loader, 0, 6, in_turn=True)
    opened = []
    for _ in range(6):
        cells.take()
        cells.ask()
        opened.append(len(loader.opened))
    cells.close()
    assert opened == [1, 1, 2, 2, 2, 2]
    assert set(loader.taken.values()) == {threading.current_thread().name}, "in turn: not ahead"


def test_what_the_loader_raises_comes_where_its_step_is_taken() -> None:
    cells = CellsAhead(Loader(broken=1), 0, 6, in_turn=False)
    assert cells.take() == [0]
    cells.ask()
    with pytest.raises(OSError, match="the disk is gone"):
        cells.take()
    cells.close()
