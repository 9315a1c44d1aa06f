"""Copies and parity: a policy, a lost directory, a flipped bit, and training that continues meanwhile.

    python examples/guides/copies_and_parity.py

The policy for copies is stored in numbered versions in the root's folder ``locations/``, next to the log. It is not
part of the manifest, so a version has the same id in every location. Each location has a failure domain, and copies go
to different domains. Parity (k + 2) costs 2/k of the space and survives the loss of any two of k + 2 objects. Digests
detect damage; parity repairs it.

    shardkit place ROOT --location mirror=s3://bucket/cats,domain=aws --copies 2 --parity 8+2
    shardkit replicate ROOT          # until every copy exists; lag counts the missing ones
    shardkit scrub ROOT --time-box 1h --older-than 30d --repair       # nightly
    shardkit repair ROOT             # bad and missing objects: from another location, otherwise from parity

Readers do not wait for repairs: if a block does not verify, it is read from the next location, and the event is
recorded.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import shardkit as sk
from guide_shell import shardkit, workplace


def make_dataset() -> None:
    """Write 400 rows in about 20 shards."""
    with sk.create("data/cats", schema={"x": "int64[256]"}, shard_size="64KiB", block_size="8KiB") as writer:
        for number in range(400):
            writer.add({"x": [number] * 256})


def read_all() -> dict[str, int]:
    """Read one epoch and check every row; return the bytes read from each location."""
    dataset = sk.open("data/cats")
    plan = dataset.plan(global_batch=8, lanes=4, seed=0)
    numbers = set()
    with dataset.loader(plan, tensors=False) as loader:
        for batch in loader:
            assert (batch["x"] == batch["x"][:, :1]).all()
            numbers |= set(batch["x"][:, 0].tolist())
        stats = loader.stats()
    assert len(numbers) == 400
    return {name: int(value) for name, value in stats.items() if name.startswith("bytes_from_") and value}


def shards_of(folder: str) -> list[Path]:
    return sorted(Path(folder, "objects").rglob("*.tar"))


def main() -> None:
    with workplace(__doc__):
        make_dataset()
        Path("rack-2").mkdir()
        shardkit(
            "place", "data/cats", "--location", "mirror=rack-2/cats,domain=rack-2", "--copies", 2, "--parity", "8+2"
        )  # fmt: skip
        shardkit("replicate", "data/cats")
        shardkit("scrub", "data/cats", "--level", "read")

        # A bit flips in the root's own copy: training continues, and scrub finds and repairs it.
        victim = shards_of("data/cats")[3]
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 0x10
        victim.chmod(0o644)
        victim.write_bytes(data)
        print(
            f"a bit of {victim.name[:12]}… is flipped; an epoch over all of it, every row right: {read_all()}"
        )
        shardkit("scrub", "data/cats", "--level", "read", "--repair")

        # The whole mirror is lost, and two shards of the root: parity restores the shards.
        shutil.rmtree("rack-2/cats")
        for shard in shards_of("data/cats")[:2]:
            shard.unlink()
        # Repaired, but the mirror could not be read; an empty location is filled only after --refill.
        shardkit("repair", "data/cats", "--level", "list", expect=3)
        read_all()
        shardkit("place", "data/cats", "--refill", "mirror")
        shardkit("replicate", "data/cats")
        shardkit("verify", "data/cats")


if __name__ == "__main__":
    main()
