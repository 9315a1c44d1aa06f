"""Pictures for tests, made of the photographs that scikit-learn brings along."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import sklearn
from PIL import Image

__all__ = ["JPEG", "PNG", "encoded", "grey", "photograph"]

_FOLDER = Path(sklearn.__file__).parent / "datasets" / "images"


@lru_cache(maxsize=64)
def photograph(number: int, width: int, height: int) -> Image.Image:
    """Another cut of one of two photographs for each number, at this size."""
    with Image.open(_FOLDER / ("china.jpg", "flower.jpg")[number % 2]) as source:
        rng = np.random.default_rng(number)
        left, top = rng.uniform(0, 150, 2)
        return source.convert("RGB").resize(
            (width, height), Image.Resampling.LANCZOS, box=(left, top, left + 480, top + 270)
        )


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The file of a picture."""
    sink = io.BytesIO()
    image.save(sink, format, **options)
    return sink.getvalue()


def grey(shade: int) -> bytes:
    """A grey PNG that any decoder reads."""
    return encoded(Image.new("L", (4, 3), shade), "PNG")


JPEG: Final = encoded(Image.new("RGB", (1, 1)))
PNG: Final = encoded(Image.new("RGB", (1, 1)), "PNG")
"""The smallest pictures; bytes after them are part of the file and not of the picture."""
