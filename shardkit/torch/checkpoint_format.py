"""The stored form of checkpoints (the trainer's SPEC.md §4): refs, manifests, plain values; no pickle, no torch.

Also copies checkpoints between stores and deletes old ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from shardkit.documents import decode_plain, encode, parse_digest, sha256_digest
from shardkit.errors import ConfigurationError, FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.stores.local import open_store
from shardkit.stores.store import Store, object_name

MAX_MANIFEST_BYTES = 1 << 30
REF_BYTES = 4096
"""Maximum size of a ref, the document that names a checkpoint."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,79}")


def as_store(location: Store | str | os.PathLike[str]) -> Store:
    """Return the store of a run directory, given as a store, a path or a URL."""
    return open_store(os.fspath(location)) if isinstance(location, str | os.PathLike) else location


def ref_name(name: str) -> str:
    """Return the path of the ref of checkpoint ``name``; a name cannot leave ``checkpoints/``."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"checkpoint name {name!r}: expected {NAME.pattern}, such as step-000000000100"
        )
    return f"checkpoints/{name}.json"


def checkpoint_names(location: Store | str | os.PathLike[str]) -> list[str]:
    """Return the names of the complete checkpoints in a run directory, oldest first (names sort by step)."""
    refs = as_store(location).list_after("checkpoints/")
    return sorted(
        ref.removeprefix("checkpoints/").removesuffix(".json") for ref in refs if ref.endswith(".json")
    )


def get_verified(store: Store, digest_hex: str, extension: str, size: int) -> bytes:
    """Read one object and verify its size and SHA-256."""
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
    """Return the verified manifest of checkpoint ``name`` (default: the newest).

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
    ref = read_ref(store, name)
    if ref.get("name") != name:
        raise IntegrityError(
            f"checkpoint ref {ref_name(name)} in {store.url} is damaged: it calls itself {ref.get('name')!r}"
        )
    return read_manifest_of(store, ref)


def read_ref(store: Store, name: str) -> dict[str, Any]:
    """Return a checkpoint's ref after checking its digest: ``checkpoint`` (the manifest), ``size``, ``name``."""
    where = f"checkpoint ref {ref_name(name)} in {store.url}"
    try:
        body = _dictionary(decode_plain(store.get(ref_name(name), max_bytes=REF_BYTES), max_bytes=REF_BYTES))
        claimed = body.pop("digest", None)
        parse_digest(str(body["checkpoint"]))
        is_sound = claimed == sha256_digest(encode(body)) and 0 < int(body["size"]) <= MAX_MANIFEST_BYTES
    except (FormatError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    if not is_sound:
        raise IntegrityError(f"{where} is damaged: its digest does not fit")
    return body


def read_manifest_of(store: Store, ref: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verified manifest that a ref names."""
    digest, size = parse_digest(ref["checkpoint"]), int(ref["size"])
    manifest = _dictionary(decode_plain(get_verified(store, digest, "checkpoint", size), max_bytes=size))
    found = manifest.get("format"), manifest.get("version")
    if found != ("shardkit-checkpoint", 1):
        raise FormatError(
            f"checkpoint {ref.get('name')}: format {found[0]!r} version {found[1]!r}; expected shardkit-checkpoint"
            " version 1"
        )
    return manifest


def tensor_objects(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return SHA-256 in hex → size in bytes of the objects with a manifest's tensors, in the order of writing."""
    return {
        str(extent[0]): int(extent[1])
        for tensor in manifest.get("tensors", {}).values()
        for _, _, extents in tensor["chunks"]
        for extent in extents
    }


def _dictionary(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"checkpoint: expected a JSON object, got {type(value).__name__}")
    return value


def encode_value(value: object, where: str) -> object:
    """Convert plain Python data to values for canonical JSON, with floats as hexadecimal text."""
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
    """Convert values from `encode_value` back to Python data."""
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


def _objects(store: Store, name: str) -> dict[tuple[str, str], int]:
    """Return {(SHA-256, extension): size in bytes} of a checkpoint's objects, in the order of writing."""
    ref = read_ref(store, name)
    tensors = tensor_objects(read_manifest_of(store, ref))
    found = {(digest, "tensor"): size for digest, size in tensors.items()}
    return {**found, (parse_digest(ref["checkpoint"]), "checkpoint"): int(ref["size"])}


def copy_checkpoint(
    source: Store | str | os.PathLike[str], target: Store | str | os.PathLike[str], name: str
) -> int:
    """Copy a checkpoint: objects first, then the manifest, then the ref.

    Objects that the target already has are not read. Every copied object is verified, so damage does not spread.

    Returns:
        Number of bytes of objects written.

    Raises:
        ShardkitError: the source is damaged, or the target cannot be written.
    """
    source, target = as_store(source), as_store(target)
    written = 0
    for (digest, extension), size in _objects(source, name).items():
        place = object_name(f"sha256:{digest}", extension)
        known = target.head(place)
        if known is None or known.size != size:
            target.replace(place, get_verified(source, digest, extension, size))
            written += size
    target.replace(ref_name(name), source.get(ref_name(name), max_bytes=REF_BYTES))
    return written


def prune_checkpoints(
    location: Store | str | os.PathLike[str], keep: int, *, drop: Collection[str] = ()
) -> None:
    """Delete all but the newest ``keep`` checkpoints (at least 1), and the objects that no checkpoint uses.

    Checkpoints named in ``drop`` are deleted first.

    Refs are deleted first: a crash in between leaves garbage for the next call, never a ref without objects.
    Do not save into the run directory at the same time: objects without a manifest yet look like garbage.

    Raises:
        ConfigurationError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ConfigurationError(f"keep = {keep}: expected at least 1 checkpoint that stays")
    store = as_store(location)
    found_names = checkpoint_names(store)
    names = [name for name in found_names if name not in drop][-keep:]
    for name in found_names:
        if name not in names:
            store.delete(ref_name(name))
    reachable: set[str] = set()
    try:
        for name in names:
            reachable |= {object_name(f"sha256:{digest}", kind) for digest, kind in _objects(store, name)}
    except ShardkitError:
        return  # a damaged checkpoint can still be repaired from a copy: keep every object
    for found in list(store.list_after("objects/")):
        if found.endswith((".tensor", ".checkpoint")) and found not in reachable:
            store.delete(found)
