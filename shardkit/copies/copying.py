"""One object to where it is missing: copied, verified on the way, and only then given its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardkit.copies.checking import PIECE_BYTES
from shardkit.copies.pacing import Pace
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.reading.locations import Location
from shardkit.repository.object_access import MAX_OBJECT_BYTES, ObjectAccess
from shardkit.stores.objects import parse_object_name
from shardkit.stores.store import Stage

__all__ = ["CopyAll", "CopyTask", "copy_object", "copy_task"]


def copy_object(
    name: str,
    sources: Sequence[Location],
    target: Location,
    *,
    pace: Pace | None = None,
    moved: Callable[[int], None] | None = None,
    bad_copy: Callable[[Location, str, str], None] | None = None,
) -> tuple[str, int]:
    """Make good bytes of an object durable in a location.

    Args:
        name: of the object.
        sources: asked in this order.
        target: open for writing; what lies there under the name is kept if it is good, replaced if not.
        pace: how fast.
        moved: told of bytes as they go.
        bad_copy: told of (source, name, "wrong" or "missing").

    Returns:
        (name of the source that was good, bytes of the object).

    Raises:
        IntegrityError: no source has good bytes.
        StoreError: no source answered, or the target failed.
    """
    digest, extension = parse_object_name(name)
    bad: dict[str, str] = {}
    silent: StoreError | None = None
    for source in sources:
        if source.name == target.name:
            continue
        with target.store.stage(extension) as stage:
            try:
                _fill(stage, source, name, pace, moved)
            except _TargetFailed as failed:
                raise failed.error from None
            except NotFoundError:
                bad[source.name] = "missing"
            except IntegrityError:
                bad[source.name] = "wrong"
            except ShardkitError as error:
                silent = error if isinstance(error, StoreError) else StoreError(str(error))
            else:
                if f"sha256:{stage.digest}" == digest:
                    return source.name, ObjectAccess(target.store).publish(stage, extension).size
                bad[source.name] = "wrong"
        if bad_copy is not None and source.name in bad:
            bad_copy(source, name, bad[source.name])
    if silent is not None:
        raise silent
    told = ", ".join(f"{where}: {what}" for where, what in bad.items()) or "none was asked"
    raise IntegrityError(f"{name}: no location has good bytes of it ({told}); run: shardkit repair")


class CopyTask(NamedTuple):
    """A copy to be made; see `copy_object`."""

    name: str
    sources: tuple[Location, ...]
    target: Location


CopyAll = Callable[
    [Iterable[tuple[int, CopyTask]]], Iterator[tuple[int, "int | IntegrityError | StoreError"]]
]
"""Makes numbered copies and yields what came of each as it comes: its bytes, or why there is none."""


def copy_task(
    task: CopyTask, pace: Pace, moved: Callable[[int], None] | None = None
) -> int | IntegrityError | StoreError:
    """Make a copy: its bytes, or why there is none."""
    try:
        return copy_object(task.name, task.sources, task.target, pace=pace, moved=moved)[1]
    except (IntegrityError, StoreError) as error:
        return error


class _TargetFailed(Exception):
    """A write failed, and not a read: no other source helps."""

    def __init__(self, error: ShardkitError) -> None:
        super().__init__(str(error))
        self.error = error


def _fill(
    stage: Stage, source: Location, name: str, pace: Pace | None, moved: Callable[[int], None] | None
) -> None:
    stat = source.store.head(name)
    if stat is None:
        raise NotFoundError(f"{name} is not in {source.store.url}")
    if stat.size > MAX_OBJECT_BYTES:
        raise IntegrityError(f"{name} in {source.store.url}: {stat.size} bytes, no object is that large")
    for offset in range(0, stat.size, PIECE_BYTES):
        length = min(PIECE_BYTES, stat.size - offset)
        if pace is not None:
            pace.take(length)
        data = source.store.get_range(name, offset, length)
        try:
            stage.write(data)
        except StoreError as error:
            raise _TargetFailed(error) from None
        if moved is not None:
            moved(length)
