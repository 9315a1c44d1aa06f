"""What a user calls a version by: ``data/cats``, ``data/cats@val``, ``file:///data/cats@sha256:…``."""

from __future__ import annotations

import os

from shardkit.errors import UsageError
from shardkit.manifest.json_fields import DIGEST
from shardkit.repository.log import check_ref_name

__all__ = ["parse_dataset_url"]


def parse_dataset_url(url: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split ``ROOT[@REF]``.

    Only an ``@`` in the last component separates; a root whose own name holds one is written with a slash at
    its end (``data/cats@home/``).

    Returns:
        The root, and the ref, tag or ``sha256:<hex>`` behind the ``@``, None where there is none.

    Raises:
        UsageError: What follows the ``@`` is neither a name nor a digest, or there is no root.
    """
    text = os.fspath(url)
    folder, slash, last = text.rpartition("/")
    name, at, ref = last.rpartition("@")
    if not at:
        root, found = text, None
    else:
        root, found = folder + slash + name, ref
        if DIGEST.fullmatch(ref) is None:
            check_ref_name(ref)
    if not root:
        raise UsageError(f"dataset {text!r} has no root: expected ROOT or ROOT@REF, such as data/cats@val")
    return root, found
