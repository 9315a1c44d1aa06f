"""Which split a row belongs to: by a keyed hash of its key or of a field that groups rows, or by its folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.layout import mix64
from shardkit.errors import ConfigurationError

# Not the seed of the shuffle: shuffling anew must not move a row from val to train.
_SPLIT_KEY = np.uint64(0x73706C69742D6F66)  # "split-of"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Split:
    """Named shares of a dataset."""

    names: tuple[str, ...]  # of the splits; each becomes a ref
    # exact, in the same order, together at most 1; what is left over belongs to no split
    shares: tuple[Fraction, ...]
    by: str | None = None  # the field whose equal values stay together, or None
    # every row comes with the name of its split, from the folder that it lies in; there are no shares
    folders: bool = False

    @property
    def is_noted(self) -> bool:
        """Whether rows carry the hash of what decides their split, as `split_value` makes it."""
        return self.by is not None or self.folders

    def to_json(self) -> dict[str, object]:
        """As the manifest keeps it: shares as texts, for JSON has no exact fractions."""
        if self.folders:
            return {"folders": True}
        shares = [[name, str(share)] for name, share in zip(self.names, self.shares, strict=True)]
        return {"by": self.by, "shares": shares}


def parse_split(
    shares: Mapping[str, float | str | Fraction], by: str | None = None, *, ref: str = "main"
) -> Split:
    """A split from ``{"train": 0.9, "val": 0.1}``; a float means the decimal that it prints as.

    Raises:
        ConfigurationError: no splits, a name that cannot be a ref, a share that is not in (0, 1], or
            more than 1 in all.
    """
    if not shares:
        raise ConfigurationError("split is empty; give names and shares such as train=0.9,val=0.1")
    exact: dict[str, Fraction] = {}
    _check_names(shares, ref)
    for name, share in shares.items():
        try:
            exact[name] = Fraction(str(share))
        except (ValueError, ZeroDivisionError):
            raise ConfigurationError(
                f"split {name} has the share {share!r}; give a number such as 0.1"
            ) from None
        if not 0 < exact[name] <= 1:
            raise ConfigurationError(f"split {name} has the share {share}; give a number above 0, at most 1")
    total = sum(exact.values())
    if total > 1:
        raise ConfigurationError(f"the shares of split add up to {float(total)}; give at most 1 in all")
    return Split(tuple(exact), tuple(exact.values()), by)


def folder_split(names: Iterable[str], *, ref: str = "main") -> Split:
    """A split whose rows come with the names of their splits.

    Raises:
        ConfigurationError: a name cannot be a ref.
    """
    listed = tuple(names)
    _check_names(listed, ref)
    return Split(listed, (), folders=True)


def split_value(text: str) -> int:
    """The 64-bit hash by which all rows with this value go to one split."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8"))


def _check_names(names: Iterable[str], ref: str) -> None:
    for name in names:
        if _NAME.fullmatch(name) is None or name == ref:
            raise ConfigurationError(
                f"split {name!r} cannot be a ref: give letters, digits, '.', '_' and '-', and not {ref!r}, "
                "which stands for all rows"
            )


def split_of(
    split: Split, identity: NDArray[np.uint64], group: NDArray[np.uint64] | None
) -> NDArray[np.int16]:
    """The split of each row.

    Args:
        split: names and shares.
        identity: uint64[n, 2], see `RowTable`.
        group: uint64[n], hash of the value of ``split.by`` or of the folder's split; None: every row by its own
            identity.

    Returns:
        int16[n], index into ``split.names``, -1 where the shares leave the row over.
    """
    if split.folders:
        assert group is not None, "rows of folders come with their splits"
        hashes = np.array([split_value(name) for name in split.names], dtype=np.uint64)
        order = np.argsort(hashes).astype(np.int16)
        place = np.minimum(np.searchsorted(hashes[order], group), len(order) - 1)
        return np.where(hashes[order][place] == group, order[place], np.int16(-1)).astype(np.int16)
    values = mix64(identity[:, 0] ^ mix64(identity[:, 1])) if group is None else group
    drawn = mix64(values ^ _SPLIT_KEY)
    ends = np.cumsum(np.array(split.shares, dtype=object))
    # A row belongs to the first split whose end its draw is below; an end of 1 is above every 64-bit number.
    limits = np.array([min(int(end * 2**64), 2**64 - 1) for end in ends], dtype=np.uint64)
    index = np.searchsorted(limits, drawn, side="right").astype(np.int16)
    if ends[-1] == 1:
        return np.minimum(index, np.int16(len(limits) - 1))
    return np.where(index == len(limits), np.int16(-1), index)
