"""Decodes mutated pictures until a count is done, in a process whose memory is watched; prints what became of them.

python picture_hostile.py COUNT MAX_PIXELS
"""

from __future__ import annotations

import collections
import json
import sys
import warnings

import numpy as np

from shardkit import images
from shardkit.errors import FormatError
from shardkit.images.decoding import PictureReader
from shardkit.plan import Place
from tests.pictures import encoded, photograph


def _mutated(payload: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(payload)
    kind = int(rng.integers(5))
    # headers decide what is allocated: half of all changes go there
    reach = len(data) if rng.integers(2) else min(len(data), 700)
    if kind == 0:
        del data[int(rng.integers(reach)) :]
    elif kind == 1:
        a, b = sorted(int(n) for n in rng.integers(reach, size=2))
        del data[a:b]
    elif kind == 2:
        at = int(rng.integers(reach))
        data[at:at] = rng.bytes(int(rng.integers(1, 40)))
    else:
        for at in rng.integers(reach, size=int(rng.integers(1, 12))):
            data[int(at)] = int(rng.choice([0, 255, 128, int(rng.integers(256))]))
    return bytes(data)


def main(count: int, max_pixels: int) -> None:
    warnings.simplefilter("ignore")  # Pillow's, of damaged metadata
    picture, large = photograph(0, 120, 90), photograph(1, 1000, max_pixels // 1000)
    seeds = [
        encoded(picture, quality=88), encoded(picture, progressive=True), encoded(picture.convert("CMYK")),
        encoded(picture, "PNG"), encoded(picture.quantize(32), "PNG"), encoded(picture, "WEBP"),
        encoded(picture, "WEBP", lossless=True), encoded(picture.convert("L"), quality=70),
    ]  # fmt: skip
    crop = images.random_resized_crop(32, max_pixels=max_pixels)
    out = np.empty(crop.shape, crop.dtype)
    for progressive in (True, False):
        crop(encoded(large, progressive=progressive), place=Place(0, 0, 0, 0), out=out)
    before = _peak_kib()
    rng, found = np.random.default_rng(20), collections.Counter[str]()
    for number in range(count):
        payload = _mutated(seeds[number % len(seeds)], rng)
        try:
            if number % 3:
                crop(payload, place=Place(0, number, 0, 0), out=out)
            else:
                reader = PictureReader(payload, max_pixels=max_pixels)
                pixels = reader.pixels()
                assert pixels.shape == (reader.height, reader.width, 3)
            found["picture"] += 1
        except FormatError:
            found["error"] += 1
    grown = 1024 * (_peak_kib() - before)
    print(json.dumps({**found, "grown_bytes": grown}))


def _peak_kib() -> int:
    """Peak resident memory of this program; ru_maxrss would count the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
