"""Checkpoints as bytes in a store: refs, manifests, and plain values without a pickle (the trainer's SPEC.md §4)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from shardkit.errors import ConfigurationError, FormatError, IntegrityError, NotFoundError
from shardkit.formats.canonical_json import dumps, loads, parse_digest, sha256_digest
from shardkit.stores.store import Store, object_name
from shardkit.stores.urls import open_store

__all__ = [
    "NAME",
    "REF_BYTES",
    "as_store",
    "checkpoint_names",
    "decode_value",
    "encode_value",
    "get_verified",
    "read_checkpoint_manifest",
    "ref_name",
]

MAX_MANIFEST_BYTES = 1 << 30
REF_BYTES = 4096
"""Of the document that names a checkpoint, at most."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,79}")


def as_store(location: Store | str | os.PathLike[str]) -> Store:
    """The store of a run directory, given as a store, a path or a URL."""
    return open_store(os.fspath(location)) if isinstance(location, str | os.PathLike) else location


def ref_name(name: str) -> str:
    """Where the ref of checkpoint ``name`` lies; a name cannot leave ``checkpoints/``.

    Raises:
        ConfigurationError: the name has characters that a ref may not have.
    """
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"checkpoint name {name!r}: expected {NAME.pattern}, such as step-000000000100"
        )
    return f"checkpoints/{name}.json"


def checkpoint_names(location: Store | str | os.PathLike[str]) -> list[str]:
    """Names of the complete checkpoints in a run directory, oldest first (names sort by step)."""
    refs = as_store(location).list_after("checkpoints/")
    return sorted(
        ref.removeprefix("checkpoints/").removesuffix(".json") for ref in refs if ref.endswith(".json")
    )


def get_verified(store: Store, digest_hex: str, extension: str, size: int) -> bytes:
    """One object, its size and SHA-256 checked before anybody parses it.

    Raises:
        IntegrityError: the object is missing, or its bytes are not the bytes that were written.
    """
    name = object_name(f"sha256:{digest_hex}", extension)
    advice = "load an older checkpoint, or copy the object from a replica of the run directory"
    try:
        data = store.get(name, max_bytes=size)
    except NotFoundError as error:
        raise IntegrityError(f"checkpoint object {name} is missing in {store.url}; {advice}") from error
    found = sha256_digest(data)
    if len(data) != size or found != f"sha256:{digest_hex}":
        raise IntegrityError(
            f"checkpoint object {name} in {store.url}: expected {size} bytes with its own digest,"
            f" got {len(data)} bytes with {found}; {advice}"
        )
    return data


def read_checkpoint_manifest(
    location: Store | str | os.PathLike[str], name: str | None = None
) -> dict[str, Any]:
    """The verified manifest of checkpoint ``name`` (default: the newest).

    Returns:
        ``{"name", "meta", "tensors": {fqn: {dtype, shape, path, chunks}}, "values": {fqn: {path, value}}}``

    Raises:
        NotFoundError: there is no such checkpoint.
        IntegrityError: the ref or the manifest is damaged.
    """
    store = as_store(location)
    if name is None:
        names = checkpoint_names(store)
        if not names:
            raise NotFoundError(f"no checkpoint in {store.url}; expected refs under checkpoints/")
        name = names[-1]
    ref = store.get(ref_name(name), max_bytes=REF_BYTES)
    try:
        body = _dictionary(loads(ref, max_bytes=REF_BYTES))
        claimed = body.pop("digest", None)
        digest, size = parse_digest(str(body["checkpoint"])), int(body["size"])
    except (FormatError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"checkpoint ref {ref_name(name)} in {store.url} is damaged: {error}") from error
    if (
        claimed != sha256_digest(dumps(body))
        or body.get("name") != name
        or not 0 < size <= MAX_MANIFEST_BYTES
    ):
        raise IntegrityError(
            f"checkpoint ref {ref_name(name)} in {store.url} is damaged: its digest does not fit"
        )
    manifest = _dictionary(loads(get_verified(store, digest, "checkpoint", size), max_bytes=size))
    if manifest.get("format") != "shardkit-checkpoint" or manifest.get("version") != 1:
        raise FormatError(f"checkpoint {name}: format {manifest.get('format')!r} version {manifest.get('version')!r};"
                          " expected shardkit-checkpoint version 1")  # fmt: skip
    return manifest


def _dictionary(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"checkpoint: expected a JSON object, got {type(value).__name__}")
    return value


def encode_value(value: object, where: str) -> object:
    """Plain Python data as canonical JSON (floats by their hexadecimal text); never a pickle.

    Raises:
        ConfigurationError: the value is not made of None, bool, int, float, str, list, tuple and dict.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [encode_value(v, where) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode_value(k, where), encode_value(v, where)] for k, v in value.items()]}
    raise ConfigurationError(
        f"checkpoint entry {where}: {type(value).__name__} cannot be saved; expected tensors or plain"
        " None, bool, int, float, str, list, tuple, dict; drop it from the state, or make it a tensor"
    )


def decode_value(value: object) -> Any:
    """The inverse of `encode_value`."""
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "float":
        return float.fromhex(body)
    if kind == "dict":
        return {decode_value(k): decode_value(v) for k, v in body}
    if kind in {"list", "tuple"}:
        items = [decode_value(v) for v in body]
        return tuple(items) if kind == "tuple" else items
    raise FormatError(f"checkpoint value of kind {kind!r}; expected float, list, tuple or dict")
