"""Boundaries of the documents in packed rows, in the forms that variable-length attention takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError, UsageError


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of token rows; padding after a row's last document counts as one more.

    If the batch holds tensors, the arrays are CPU tensors.

    Attributes:
        cu_seqlens: (documents + 1,) int32 offsets of the documents in all rows end to end, and the total length; the
            format of FlashAttention's variable-length functions.
        max_seqlen: tokens of the longest document.
        position_ids: (rows, length) int64 position of each token in its document.
        document_ids: (rows, length) int32 number of each token's document in its row, from 0.
    """

    cu_seqlens: Any
    max_seqlen: int
    position_ids: Any
    document_ids: Any

    def mask(self) -> Any:
        """Return (rows, length, length) bool: True if a query (row of the matrix) may attend to a key (column).

        A query attends to the tokens of its own document up to itself. ``mask()[:, None]`` adds the dimension of heads
        that ``scaled_dot_product_attention(attn_mask=…)`` expects.
        """
        same = self.document_ids[:, :, None] == self.document_ids[:, None, :]
        length = same.shape[1]
        earlier = np.tril(np.ones((length, length), dtype=np.bool_))
        if isinstance(same, np.ndarray):
            return same & earlier
        return same & _tensor(earlier).to(same.device)


def find_documents(values: NDArray[np.int64], offsets: NDArray[np.int64], length: int) -> Documents:
    """Return the documents of rows of `length` tokens.

    Args:
        values: boundaries of all rows end to end; those in a row ascend from 0.
        offsets: (rows + 1,) offsets of the rows in `values`.
        length: tokens per row.
    """
    rows = len(offsets) - 1
    row = np.repeat(np.arange(rows), np.diff(offsets))
    inside = (values > 0) & (values < length)  # 0 and `length` are row starts, added below
    flat = np.concatenate([np.arange(rows) * length, (row * length + values)[inside]])
    starts = np.unique(flat)
    ends = np.append(starts[1:], rows * length)
    begins = np.zeros(rows * length, dtype=np.int64)
    begins[starts] = 1
    number = np.cumsum(begins) - 1  # number of each token's document in the batch
    position = np.arange(rows * length) - starts[number] if rows else np.zeros(0, np.int64)
    of_row = number.reshape(rows, length)
    return Documents(
        cu_seqlens=np.append(starts, rows * length).astype(np.int32),
        max_seqlen=int((ends - starts).max(initial=0)),
        position_ids=position.reshape(rows, length),
        document_ids=(of_row - of_row[:, :1]).astype(np.int32),
    )


def documents_of(batch: Any, field: str, boundaries: str) -> Documents:
    """Return the documents of a batch; see `Batch.documents`."""
    tokens = batch.get(field)
    if not hasattr(tokens, "ndim") or tokens.ndim != 2:
        raise UsageError(
            f"batch.documents({field!r}): rows of tokens, (rows, length), are expected; for documents of their own "
            "length build with --pack"
        )
    rows, length = tokens.shape
    as_tensors = not isinstance(tokens, np.ndarray)
    if boundaries in batch:
        values, offsets = (np.asarray(_host(part), dtype=np.int64) for part in batch[boundaries])
        outside = np.flatnonzero((values < 0) | (values > length))
        if len(outside):
            row = int(np.searchsorted(offsets, outside[0], side="right")) - 1
            sample = int(batch.samples.ravel()[row])
            raise SampleError(
                f"sample {sample}: {boundaries} holds {int(values[outside[0]])}, and its row has {length} tokens; see: "
                f"shardkit cat ROOT {sample}"
            )
    else:
        values, offsets = np.zeros(rows, dtype=np.int64), np.arange(rows + 1)
    found = find_documents(values, offsets, length)
    if not as_tensors:
        return found
    return Documents(
        _tensor(found.cu_seqlens), found.max_seqlen, _tensor(found.position_ids), _tensor(found.document_ids)
    )


def _host(part: Any) -> Any:
    return part if isinstance(part, np.ndarray) else part.numpy(force=True)


def _tensor(array: NDArray[Any]) -> Any:
    import torch  # already imported if the batch holds tensors

    return torch.from_numpy(array)
