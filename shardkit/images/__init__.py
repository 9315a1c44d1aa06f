"""Decoders that crop and resize pictures directly into the rows of a batch (SPEC.md).

::

    from shardkit import images

    loader = ds.loader(plan, decode={"image": images.random_resized_crop(224, normalise="imagenet")})

libjpeg-turbo and Pillow decode; torch or Pillow resize. Random numbers are integers computed from a sample's place in
the plan. torch is imported when the first picture is resized. Other augmentations belong in ``transform=`` (see the
guide training_on_images.py).
"""

from shardkit.images.decoders import random_resized_crop, resize, resize_center_crop
from shardkit.images.decoding import MAX_PIXELS

__all__ = ["MAX_PIXELS", "random_resized_crop", "resize", "resize_center_crop"]
