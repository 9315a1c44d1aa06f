"""Good bytes of an object, from whichever location has them, made durable in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.reading.locations import Location
from shardkit.stores.objects import PIECE_BYTES, publish
from shardkit.stores.store import MAX_OBJECT_BYTES, Stage, parse_object_name


def copy_object(
    name: str,
    sources: Sequence[Location],
    target: Location,
    *,
    replace: bool = False,
    pace: Callable[[int], None] | None = None,
    moved: Callable[[int], None] | None = None,
    bad_copy: Callable[[Location, str, str], None] | None = None,
) -> tuple[str, int]:
    """Make good bytes of an object durable in a location.

    Args:
        name: of the object.
        sources: asked in this order.
        target: open for writing; what lies there under the name is kept if it is good, replaced if not.
        replace: what lies there was read and is wrong: replaced whatever checksum the store keeps of it.
        pace: called with the number of bytes before they are read; may sleep.
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
                    if replace:
                        stage.publish(name, replace=True)
                    else:
                        publish(target.store, stage, extension)
                    return source.name, stage.size
                bad[source.name] = "wrong"
        if bad_copy is not None and source.name in bad:
            bad_copy(source, name, bad[source.name])
    if silent is not None:
        raise silent
    told = ", ".join(f"{where}: {what}" for where, what in bad.items()) or "none was asked"
    raise IntegrityError(f"{name}: no location has good bytes of it ({told}); run: shardkit repair")


class _TargetFailed(Exception):
    """A write failed, and not a read: no other source helps."""

    def __init__(self, error: ShardkitError) -> None:
        super().__init__(str(error))
        self.error = error


def _fill(
    stage: Stage,
    source: Location,
    name: str,
    pace: Callable[[int], None] | None,
    moved: Callable[[int], None] | None,
) -> None:
    stat = source.store.head(name)
    if stat is None:
        raise NotFoundError(f"{name} is not in {source.store.url}")
    if stat.size > MAX_OBJECT_BYTES:
        raise IntegrityError(f"{name} in {source.store.url}: {stat.size} bytes, no object is that large")
    for offset in range(0, stat.size, PIECE_BYTES):
        length = min(PIECE_BYTES, stat.size - offset)
        if pace is not None:
            pace(length)
        data = source.store.get_range(name, offset, length)
        try:
            stage.write(data)
        except StoreError as error:
            raise _TargetFailed(error) from None
        if moved is not None:
            moved(length)
