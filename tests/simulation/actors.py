"""Who works in the world: the product's own commands, and the misfortunes.

Each piece of work may be killed between any two requests and is then begun again from the start, as a person or a
scheduler would. It may fail with the product's typed errors, since requests fail; anything else is a bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

import shardkit
from shardkit.copies.collecting import collect
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.repair import repair
from shardkit.copies.replicate import replicate
from shardkit.copies.scrub import scrub
from shardkit.dataset.removing import erase, remove, resume_erasures
from shardkit.dataset.selecting import put_selected
from shardkit.errors import CommitUnknown, IntegrityError, ShardkitError, UsageError
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.supply import BlockFetcher
from shardkit.repository.policy import LocationRecord
from shardkit.repository.repository import Repository
from tests.simulation.buckets import Bucket
from tests.simulation.world import SCHEMA, SETTINGS, Violated, World, add_rows, check_rows

__all__ = ["DAY", "MISFORTUNES", "WORK", "settle"]

DAY: Final = 86_400


def build(world: World) -> None:
    """A new version in place of what a ref names; or one that was there before, whose objects may be going away."""
    ref = world.scheduler.random.choice(["main", "side"])
    rows = world.take_known_rows() or world.take_rows(6)
    with shardkit.create(world.root, SCHEMA, **SETTINGS, ref=ref) as writer:
        add_rows(writer, rows)
    world.acknowledge_version(writer.manifest.id)
    _promise(world, writer.manifest.id, frozenset(rows))


def append(world: World) -> None:
    """More rows behind those of main."""
    rows = world.take_rows(4)
    base = shardkit.open(world.root).manifest.id
    with shardkit.create(world.root, SCHEMA, **SETTINGS, append=True) as writer:
        add_rows(writer, rows)
    world.acknowledge_version(writer.manifest.id)
    if writer.manifest.parent == base and base in world.promised:
        _promise(world, writer.manifest.id, world.promised[base] | frozenset(rows))


def select(world: World) -> None:
    """A version of some rows."""
    dataset = shardkit.open(world.root)
    keep = np.arange(0, len(dataset), 2, dtype=np.int64)
    view = dataset.select(rows=keep)
    repository = Repository.open(world.root)
    manifest = put_selected(repository, view.version, {"rows": "even"})
    _commit(world, repository, {"even": manifest.id}, {})


def tag(world: World) -> None:
    """A name for good."""
    repository = Repository.open(world.root)
    name = world.scheduler.random.choice(["v1", "t0", "t1"])
    _commit(world, repository, {}, {name: repository.resolve("main")})


def remove_rows(world: World) -> None:
    """Versions without some rows."""
    dataset = shardkit.open(world.root)
    removal = remove(world.root, rows=[0, len(dataset) - 1], reason="asked for")
    assert removal.samples == 2
    for version, _ in removal.refs.values():
        world.acknowledge_version(version)


def erase_rows(world: World) -> None:
    """Rows gone for good."""
    number = shardkit.open(world.root)[1]["n"]
    if number in world.built_again:
        return
    world.erasing.add(number)
    report = erase(world.root, keys=[f"row-{number}"], reason="asked for")
    if not any("cannot be read" in note for note in report.not_reached):
        world.acknowledge_erased([number])


def replicate_all(world: World) -> None:
    """Copies to where they belong."""
    replicate(Repository.open(world.root))


def scrub_some(world: World) -> None:
    """Copies are looked at and healed."""
    scrub(world.root, depth="read", heal=True)


def repair_all(world: World) -> None:
    """What is bad is made good."""
    repair(world.root, level="read")


def collect_garbage(world: World) -> None:
    """What nobody needs goes, in two rounds."""
    for _ in range(2):
        collect(
            Repository.open(world.root),
            delete=True,
            grace_s=DAY,
            history_s=DAY,
        )
        world.scheduler.sleep(1.5 * DAY)


def move(world: World) -> None:
    """A location gives away what it has, and gets it back."""
    world.was_moved = True
    name = world.scheduler.random.choice(["east", "west"])
    weight = world.scheduler.random.choice([50, 100, 200])
    change = PlacementChange(locations=(LocationRecord(name, world.urls[name], name, weight=weight),))
    place(Repository.open(world.root), change, grace_s=DAY, clock=world.scheduler.time)
    world.scheduler.sleep(2 * DAY)
    place(Repository.open(world.root), PlacementChange(), grace_s=DAY, clock=world.scheduler.time)


def read(world: World) -> None:
    """Everything that some version has: of a ref, a tag, or of the past."""
    names = [
        *world.head(),
        *(f"sha256:{version}".replace("sha256:sha256:", "sha256:") for version in world.promised),
    ]
    for _ in range(2):
        _read(world, shardkit.open(f"{world.root}@{world.scheduler.random.choice(names)}"))
        world.scheduler.sleep(60.0)


def read_cached(world: World) -> None:
    """What main has, by way of the machine's cache."""
    for _ in range(2):
        dataset = shardkit.open(world.root)
        try:
            supply = BlockFetcher(BlockCache(world.cache.path, limit=1 << 20))
        except UsageError as error:
            raise Violated(f"the cache is in the way of a reader: {error}") from error
        dataset.reader = dataset.reader.through(supply)
        _read(world, dataset)
        supply.close()


def _read(world: World, dataset: shardkit.Dataset) -> None:
    promised = world.promised.get(dataset.manifest.id)
    with contextlib.suppress(ShardkitError):  # versions may be erased or collected while they are read
        found = check_rows(dataset)
        if promised is not None and found != promised:
            raise Violated(f"{dataset.manifest.id} has rows {sorted(found)}, expected {sorted(promised)}")


def _commit(world: World, repository: Repository, refs: Mapping[str, str], tags: Mapping[str, str]) -> None:
    try:
        entry = repository.commit(refs, tags, message="simulated")
    except CommitUnknown:
        return
    world.acknowledge(entry.n, entry.txn)


def _promise(world: World, manifest: str, rows: frozenset[int]) -> None:
    if world.promised.setdefault(manifest, rows) != rows:
        raise Violated(f"{manifest} has two meanings")


WORK: Final[tuple[Callable[[World], None], ...]] = (
    build,
    append,
    append,
    select,
    tag,
    remove_rows,
    erase_rows,
    replicate_all,
    scrub_some,
    repair_all,
    collect_garbage,
    collect_garbage,
    move,
    read,
    read_cached,
)
"""What actors do, the frequent more often."""


# ---- misfortunes


def rot(world: World) -> None:
    """A copy of which another good one exists is no more what it was: flipped, cut, emptied or gone."""
    scheduler = world.scheduler
    scheduler.sleep(scheduler.random.random() * 20)
    found = [
        (bucket, name)
        for bucket in world.buckets.values()
        for name in sorted(bucket.objects)
        if name.startswith("objects/") and world.is_good(bucket, name) and len(world.copies(name)) > 1
    ]
    if found:
        bucket, name = found[scheduler.random.randrange(len(found))]
        data = bucket.objects[name].data
        kind = scheduler.random.randrange(1 if bucket.keeps_checksums else 4)
        scheduler.trace.append(
            f"misfortune: {('gone', 'flipped', 'cut', 'emptied')[kind]}: {bucket.name}/{name}"
        )
        at = scheduler.random.randrange(len(data))
        if bucket in world.disks:
            world.damaged.add(name)
        bucket.damage(name, (None, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at], b"")[kind])


def rot_everywhere(world: World) -> None:
    """Every copy of an object rots, and parity can make it again."""
    world.scheduler.sleep(world.scheduler.random.random() * 20)
    if name := world.rebuildable():
        world.scheduler.trace.append(f"misfortune: no good copy is left of {name}")
        world.rebuilt.add(name)
        for bucket in world.buckets.values():
            if (stored := bucket.objects.get(name)) is not None and stored.data:
                world.damaged.add(name)
                bucket.damage(
                    name, None if bucket.keeps_checksums else stored.data[:-1] + bytes([stored.data[-1] ^ 1])
                )


def rot_in_cache(world: World) -> None:
    """A block in the cache is no more what it was."""
    world.scheduler.sleep(world.scheduler.random.random() * 20)
    blocks = sorted(
        name for name, stored in world.cache.objects.items() if name.startswith("blocks/") and stored.data
    )
    if blocks:
        name = world.scheduler.random.choice(blocks)
        data = world.cache.objects[name].data
        world.cache.damage(name, data[:-1] + bytes([data[-1] ^ 1]))


def outage(world: World) -> None:
    """A location does not answer for a while."""
    with _trouble(world, world.scheduler.random.choice(["root", "east", "west"])) as bucket:
        bucket.is_down = True
        world.scheduler.sleep(world.scheduler.random.choice([1.0, 30.0, 2_000.0]))


def full(world: World) -> None:
    """A location takes no put for a while."""
    with _trouble(world, world.scheduler.random.choice(["root", "east", "west"])) as bucket:
        bucket.is_full = True
        world.scheduler.sleep(30.0)


def jump(world: World) -> None:
    """The clocks of everybody are ahead, all at once."""
    world.scheduler.sleep(world.scheduler.random.random() * 10)
    world.scheduler.trace.append("misfortune: the clock jumps")
    world.scheduler.now += world.scheduler.random.choice([3_600.0, 2.0 * DAY, 40.0 * DAY])


def power_cut(world: World) -> None:
    """All processes die, and what the disk was not asked to keep may be lost."""
    world.scheduler.sleep(world.scheduler.random.random() * 15)
    world.scheduler.trace.append("misfortune: the power is cut")
    world.cut_power()


@contextlib.contextmanager
def _trouble(world: World, name: str) -> Iterator[Bucket]:
    bucket: Bucket = world.buckets[name]
    world.scheduler.sleep(world.scheduler.random.random() * 10)
    world.scheduler.trace.append(f"misfortune: trouble of {name} begins")
    try:
        yield bucket
    finally:
        bucket.is_down = bucket.is_full = False
        world.scheduler.trace.append(f"misfortune: trouble of {name} ends")


MISFORTUNES: Final[tuple[Callable[[World], None], ...]] = (
    rot,
    rot,
    rot_everywhere,
    rot_in_cache,
    outage,
    full,
    jump,
    power_cut,
    power_cut,
)
"""What befalls the world."""


# ---- the end


def _collect(world: World) -> None:
    """Garbage goes, as soon as it may."""
    clock = world.scheduler
    for _ in range(4):
        if not world.residue():
            break
        with contextlib.suppress(UsageError):  # a collection that was killed is taken over in the next round
            collect(
                Repository.open(world.root),
                delete=True,
                grace_s=DAY,
                history_s=0,
            )
        clock.now += 2 * DAY


def settle(world: World) -> None:
    """Faults have stopped: what the product promises for that is carried out and checked.

    Raises:
        Violated: it does not hold.
    """
    clock = world.scheduler
    is_stopped = False
    try:
        resume_erasures(world.root)
    except (
        IntegrityError
    ):  # damage stops an erasure; it must not go on over it, and says: run shardkit repair
        is_stopped = True
    # where nothing rotted, replicate alone must do as well
    if is_stopped or world.damaged or clock.random.random() < 0.5:
        mended = repair(world.root, level="read")
        if mended.lost or mended.unchecked:
            raise Violated(f"repair did not heal: {[*mended.lost, *mended.unchecked][:3]}")
    resume_erasures(world.root)
    if begun := [
        name for name in world.buckets["root"].objects if name.startswith("erasures/") and "/plan" in name
    ]:
        raise Violated(f"{begun[0]}: an erasure was begun, and nobody finished it")
    copied = replicate(Repository.open(world.root))
    if copied.exit_code:
        raise Violated(f"replicate did not reach the policy: {copied}")
    _collect(world)
    if world.was_moved:
        place(Repository.open(world.root), PlacementChange(), grace_s=0, clock=lambda: clock.now)
    check_policy(world)
    if left := world.rows_left(world.erased):
        raise Violated(f"{left[0]} still has rows that were erased")
    for version in sorted(set(world.head().values())):
        found = check_rows(shardkit.open(f"{world.root}@{version}"))
        promised = world.promised.get(version, found)
        if found != promised:
            raise Violated(f"{version} has rows {sorted(found)}, expected {sorted(promised)}")


def check_policy(world: World) -> None:
    """Every object has its copies, nothing else is left.

    Raises:
        Violated: one has not, or something is.
    """
    needed = world.needed()
    for name in sorted(needed):
        copies = world.copies(name)
        if "root" not in copies or len(copies) < 2:
            raise Violated(f"{name} is good in {copies} only, the policy asks for the root and another")
    if left := world.residue():
        raise Violated(f"{left[0]} is needed by nobody and was not collected")
