"""Damage to files: flipped bits, at once or while somebody reads."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flip", "flipping"]


def flip(path: Path, at: int | None = None) -> None:
    """Flip a bit of a file: of the byte in its middle unless `at` names another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@contextlib.contextmanager
def flipping(path: Path, seed: int) -> Iterator[None]:
    """Flip one bit of a file after the other in a thread, and restore each at once."""
    whole, chance, stop = path.read_bytes(), random.Random(seed), threading.Event()

    def change() -> None:
        while not stop.wait(0.001):
            at = chance.randrange(len(whole))
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1 << chance.randrange(8)]))
                file.seek(at)
                file.write(whole[at : at + 1])

    writer = threading.Thread(target=change)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()
