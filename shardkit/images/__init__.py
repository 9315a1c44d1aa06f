"""Pictures into batches: decoded, cropped and resized straight into the row of the batch (SPEC.md).

::

    from shardkit import images

    loader = ds.loader(plan, decode={"image": images.random_resized_crop(224, normalise="imagenet")})

Decoding is libjpeg-turbo's and Pillow's, resizing torch's or Pillow's; what is random is integers of a sample's place
in the plan. Only what is here turns bytes of pictures into pixels. It knows plans and errors, no loader, and imports
torch when the first picture is resized.
"""

from shardkit.images.augmenting import color_jitter, random_erasing, trivial_augment
from shardkit.images.decoders import random_resized_crop, resize, resize_center_crop
from shardkit.images.decoding import MAX_PIXELS
from shardkit.images.mixing import cutmix, mixup

__all__ = [
    "MAX_PIXELS", "color_jitter", "cutmix", "mixup", "random_erasing", "random_resized_crop", "resize",
    "resize_center_crop", "trivial_augment",
]  # fmt: skip
