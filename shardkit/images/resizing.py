"""A view of pixels, resized with antialiasing: by torch's uint8 kernel or by Pillow's, which agree to one level."""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import NDArray

from shardkit.images.framing import View


def find_resizer() -> str:
    """What resizes here: "torch", which takes a third of the time, or "pillow" where it is not installed."""
    return "pillow" if importlib.util.find_spec("torch") is None else "torch"


def resize_view(
    pixels: NDArray[np.uint8], view: View, size: tuple[int, int], resizer: str, shrunk: int
) -> NDArray[np.uint8]:
    """What is seen of a picture: (*size, 3) uint8, of any strides, the caller's own.

    Args:
        pixels: (height, width, 3) of the whole picture.
        view: in pixels of the picture as stored.
        size: (height, width) of what is cut out.
        resizer: as `find_resizer` names it.
        shrunk: by how much `pixels` are smaller than the picture.
    """
    left, top, wide, high = (edge // shrunk for edge in view[:4])
    resize = _by_torch if resizer == "torch" else _by_pillow
    return resize(pixels[top : top + high, left : left + wide], view, size)


def _by_torch(box: NDArray[np.uint8], view: View, size: tuple[int, int]) -> NDArray[np.uint8]:
    import torch

    # a batch of one that is whole in memory, and whose strides say so: of any other torch makes planes, which is slower
    planes = torch.from_numpy(np.ascontiguousarray(box)).view(1, *box.shape).permute(0, 3, 1, 2)
    if box.shape[:2] == view.resized:
        seen = planes.clone()
    else:
        seen = torch.nn.functional.interpolate(planes, view.resized, mode="bilinear", antialias=True)
    top, left = view.cut
    seen = seen[0, :, top : top + size[0], left : left + size[1]]
    if view.flip:
        seen = seen.flip(2)
    found: NDArray[np.uint8] = seen.permute(1, 2, 0).numpy()
    return found


def _by_pillow(box: NDArray[np.uint8], view: View, size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL import Image

    (top, left), (high, wide) = view.cut, view.resized
    down, right = box.shape[0] / high, box.shape[1] / wide
    edges = (left * right, top * down, (left + size[1]) * right, (top + size[0]) * down)
    image = Image.fromarray(box).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=edges)
    return np.array(image)[:, ::-1] if view.flip else np.array(image)
