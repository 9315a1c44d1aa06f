"""Many short texts in one buffer, for keys and names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError

__all__ = ["Texts"]


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Many short texts in one buffer; text i is ``data[offsets[i]:offsets[i + 1]]``, UTF-8."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def pack(cls, texts: Sequence[str]) -> Texts:
        """Texts as one buffer; lone surrogates (of undecodable file names) survive."""
        joined = "".join(texts)
        offsets = np.zeros(len(texts) + 1, np.int64)
        if joined.isascii():  # keys are: a byte for every character
            np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
            return cls(np.frombuffer(joined.encode("ascii"), np.uint8), offsets)
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> str:
        raw = self.data[self.offsets[position] : self.offsets[position + 1]].tobytes()
        return raw.decode("utf-8", "surrogatepass")

    def to_list(self) -> list[str]:
        """All texts."""
        raw, ends = self.data.tobytes(), self.offsets.tolist()
        return [raw[start:end].decode("utf-8", "surrogatepass") for start, end in itertools.pairwise(ends)]

    def check(self, what: str, count: int) -> None:
        """Refuse offsets that do not cover the buffer with `count` texts in order."""
        if self.offsets.dtype != np.int64 or self.offsets.shape != (count + 1,):
            raise FormatError(f"index: {count} {what} need {count + 1} int64 offsets")
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise FormatError(f"index: {what} are no run of bytes")
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != len(self.data)
            or bool((np.diff(self.offsets) < 0).any())
        ):
            raise FormatError(f"index: offsets of {what} do not fit their {len(self.data)} bytes")
