"""Where the parts of a merged dataset lie: beside the log of the root that names them, never in a manifest.

One small document per part, ``locations/<hex of the part's manifest>.json``. It is configuration, not data: it may be
written again when a part moves, and nothing is trusted because of it; what is read from a part is verified against the
merged manifest as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Final

from shardkit.errors import NotFoundError, ShardkitError, UsageError
from shardkit.formats.canonical_json import dumps
from shardkit.manifest.json_fields import read_document
from shardkit.reading.adopted import location_name, resolved
from shardkit.repository.repository import Repository
from shardkit.stores.store import find_checked, object_name, put_over, scheme_of

_FORMAT: Final = "shardkit-location/1"
_KEYS: Final = ("manifest", "part", "repository", "urls")
_MAX_BYTES: Final = 64 * 2**10
_CREDENTIAL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*@")


@dataclass(frozen=True, slots=True)
class PartLocation:
    """Where one part was when it was merged.

    Attributes:
        manifest: id of the part.
        part: its name in the merge.
        repository: UUID of the repository that held it, by which a moved one is known again.
        urls: tried in order; a relative one is relative to the root of the merged dataset, so that both may move
            together.
    """

    manifest: str
    part: str
    repository: str
    urls: tuple[str, ...]

    def to_bytes(self) -> bytes:
        return dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> PartLocation:
        fields = read_document(data, where, _FORMAT, _KEYS, _MAX_BYTES)
        return cls(
            manifest=fields.digest("manifest"),
            part=fields.text("part", maximum=100),
            repository=fields.text("repository", maximum=36),
            urls=fields.texts("urls", maximum=16),
        )


def put_location(
    repository: Repository, name: str, manifest_id: str, holder: Repository
) -> PartLocation | None:
    """Remember that a part lies in another repository; nothing is written where it lies in this one.

    Raises:
        UsageError: the place holds a credential.
        StoreError: the root cannot be written.
    """
    if holder.url == repository.url:
        return None
    if _CREDENTIAL.match(holder.url):
        raise UsageError(f"part {name!r} lies at a URL with a credential in it; leave it to the environment")
    urls: tuple[str, ...] = (holder.url,)
    if not scheme_of(repository.url) and not scheme_of(holder.url):
        # first where it lies from here: a copy of both beats the original that it was copied from
        urls = (os.path.relpath(holder.url, repository.url), holder.url)
    location = PartLocation(manifest_id, name, holder.id, urls)
    put_over(repository.store, location_name(manifest_id), location.to_bytes())
    return location


def find_part(repository: Repository, name: str, manifest_id: str) -> Repository:
    """The repository that holds a part of a merged dataset: this one, or the one that the root remembers.

    Raises:
        NotFoundError: it is not where it was; the message names all places that were tried.
    """
    if repository.store.head(object_name(manifest_id, "manifest")) is not None:
        return repository
    place_name = location_name(manifest_id)
    location = find_checked(repository.store, place_name, PartLocation.from_bytes, max_bytes=_MAX_BYTES)
    if location is None:
        raise NotFoundError(
            f"part {name!r} (manifest {manifest_id}) is not in {repository.url}, which does not say where it lies; "
            f"merge again with the place where it is: shardkit merge {name}=PLACE … {repository.url}"
        )
    tried = list(dict.fromkeys(resolved(repository.url, url) for url in location.urls))
    for place in tried:
        with contextlib.suppress(ShardkitError):
            found = Repository.open(place, read_only=True)
            if found.store.head(object_name(manifest_id, "manifest")) is not None:
                return found
    raise NotFoundError(
        f"part {name!r} (manifest {manifest_id}) of {repository.url} is gone from where it was: {', '.join(tried)}; "
        f"put it back, or merge again with the place where it is now: shardkit merge {name}=PLACE … {repository.url}"
    )
