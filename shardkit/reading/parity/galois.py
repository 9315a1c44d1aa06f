"""Parity P and Q over GF(2⁸), in NumPy (SPEC.md §1)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Bytes
from shardkit.errors import UsageError

_POLYNOMIAL: Final = 0x11D
_REDUCTION: Final = np.uint8(_POLYNOMIAL & 0xFF)
_ROW: Final = 1 << 16
"""Bytes processed at a time: four rows of this size fit in the second-level cache."""


def _powers() -> tuple[int, ...]:
    """Return g^0 … g^254."""
    found = [1]
    while len(found) < 255:
        twice = found[-1] << 1
        found.append(twice ^ _POLYNOMIAL if twice & 0x100 else twice)
    return tuple(found)


_POWER: Final = _powers()
_LOGARITHM: Final = {value: exponent for exponent, value in enumerate(_POWER)}
_TABLES: dict[int, NDArray[np.uint16]] = {}


def sums(pieces: Sequence[Bytes | None], p: Bytes | None, q: Bytes | None) -> None:
    """Compute P and Q over the given members, in place.

    Args:
        pieces: bytes of each member, None for missing ones; may be shorter than P and Q.
        p: array to fill with P; None to skip it.
        q: array to fill with Q, as long as `p`; None to skip it.
    """
    length = len(p) if p is not None else len(q) if q is not None else 0
    mask = np.empty(min(_ROW, length), dtype=np.bool_)
    for start in range(0, length, _ROW):
        end = min(start + _ROW, length)
        parts = [None if piece is None else piece[start:end] for piece in pieces]
        if p is not None:
            _add_up(parts, p[start:end])
        if q is not None:
            _horner(parts, q[start:end], mask[: end - start])


def _add_up(parts: Sequence[Bytes | None], p: Bytes) -> None:
    p[:] = 0
    for part in parts:
        if part is not None and len(part):
            head = p[: len(part)]
            np.bitwise_xor(head, part, out=head)


def _horner(parts: Sequence[Bytes | None], q: Bytes, mask: NDArray[np.bool_]) -> None:
    q[:] = 0
    signed, bits = q.view(np.int8), mask.view(np.uint8)
    begun = False
    for part in reversed(parts):
        if begun:  # multiply q by g: double it, and reduce if the highest bit was set
            np.less(signed, 0, out=mask)
            np.add(q, q, out=q)
            np.multiply(bits, _REDUCTION, out=bits)
            np.bitwise_xor(q, bits, out=q)
        if part is not None and len(part):
            head = q[: len(part)]
            np.bitwise_xor(head, part, out=head)
            begun = True


def recover(
    pieces: Sequence[Bytes | None],
    p: Bytes | None,
    q: Bytes | None,
    length: int,
    wanted: Container[int] | None = None,
) -> Mapping[int, Bytes]:
    """Recover the missing pieces of a set; all pieces cover the same byte range of their objects.

    Args:
        pieces: bytes of each member, None for lost ones.
        p: bytes of P; None if lost.
        q: bytes of Q; None if lost.
        length: bytes of P and Q.
        wanted: positions to recover; None for all. Only P (position k) and Q (k + 1) can be left out.

    Returns:
        Position → (length,) uint8, for each lost member, and for P and Q if lost and wanted.

    Raises:
        UsageError: more than two pieces are lost.
    """
    count = len(pieces)
    lost = [i for i, piece in enumerate(pieces) if piece is None]
    missing = len(lost) + (p is None) + (q is None)
    if missing > 2:
        raise UsageError(f"{missing} pieces of a set are lost, expected at most 2")
    found = _members(pieces, p, q, lost, length) if lost else {}
    make_p = p is None and (wanted is None or count in wanted)
    make_q = q is None and (wanted is None or count + 1 in wanted)
    if make_p or make_q:
        whole = [found.get(i, piece) for i, piece in enumerate(pieces)]
        new_p = np.empty(length, dtype=np.uint8) if make_p else None
        new_q = np.empty(length, dtype=np.uint8) if make_q else None
        sums(whole, new_p, new_q)
        found |= {count + i: new for i, new in enumerate((new_p, new_q)) if new is not None}
    return found


def _members(
    pieces: Sequence[Bytes | None], p: Bytes | None, q: Bytes | None, lost: Sequence[int], length: int
) -> dict[int, Bytes]:
    """Recover one or two lost members from P, Q or both (Anvin, §4, cases 2 to 4)."""
    a, b = (None if row is None else np.empty(length, dtype=np.uint8) for row in (p, q))
    if len(lost) == 1 and a is not None:
        b = None
    sums(pieces, a, b)
    for beyond, row in ((a, p), (b, q)):  # Dx + Dy, and g^x·Dx + g^y·Dy
        if beyond is not None and row is not None:
            np.bitwise_xor(beyond, row, out=beyond)
    if b is None:
        assert a is not None
        return {lost[0]: a}
    if a is None:
        _scale(b, _POWER[-lost[0] % 255])
        return {lost[0]: b}
    x, y = lost
    inverse = -_LOGARITHM[_POWER[y - x] ^ 1]
    scaled = a.copy()
    _scale(scaled, _POWER[(y - x + inverse) % 255])
    _scale(b, _POWER[(inverse - x) % 255])
    np.bitwise_xor(b, scaled, out=b)
    np.bitwise_xor(a, b, out=a)
    return {x: b, y: a}


def _scale(data: Bytes, constant: int) -> None:
    """Multiply in place by a constant, two bytes at a time."""
    if constant == 1:
        return
    table = _table(constant)
    even = len(data) // 2 * 2
    pairs = data[:even].view(np.uint16)
    room = np.empty(_ROW // 4, dtype=np.uint16)
    for start in range(0, len(pairs), len(room)):
        part = pairs[start : start + len(room)]
        np.take(table, part, out=room[: len(part)], mode="clip")  # with clip, numpy writes straight to `out`
        part[:] = room[: len(part)]
    if even < len(data):
        data[even] = table[int(data[even])] & 0xFF


def _table(constant: int) -> NDArray[np.uint16]:
    """Return the (65,536,) products of a constant and each pair of bytes; at most 255 tables of 128 KiB are kept."""
    found = _TABLES.get(constant)
    if found is None:
        step = _LOGARITHM[constant]
        single = [0] + [_POWER[(_LOGARITHM[value] + step) % 255] for value in range(1, 256)]
        products = np.array(single, dtype=np.uint16)
        found = _TABLES[constant] = (products[None, :] | products[:, None] << np.uint16(8)).reshape(-1)
    return found
