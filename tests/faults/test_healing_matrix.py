"""Every kind of object, damaged in every way, in the root or in a copy: each healing command makes all of it good.

One tiny dataset for each policy is built once and put back file by file before each case.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import StoreError
from shardkit.stores.file_operations import FileOperations, Handle, substituted
from shardkit.stores.local import LocalStore
from shardkit.stores.store import Store, read_object
from tests.command_line import call, output_of
from tests.drills import DRILLS
from tests.flips import flip

# ---- Every kind of object, damaged in every way, in the root or in a copy: each healing command makes all of it good


COMMANDS = (("repair",), ("scrub", "--repair"), ("replicate",))

KINDS = (
    *("arrow", "index", "page", "manifest", "selection", "sources", "about", "lookup", "cost", "parity"),
    *(
        "first entry",
        "middle entry",
        "newest entry",
        "identity",
        "locations",
        "mark",
        "parity set",
        "parity version",
    ),
    "attestation",
)
"""Extensions of objects, and documents."""


def _delete(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "delete": _delete,
    "flip": flip,
    "truncate": _truncate,
    "empty": _empty,
}


@dataclass(frozen=True)
class Pristine:
    """A root and a copy of it, and what every file of theirs holds."""

    base: Path
    files: dict[str, bytes]

    @property
    def root(self) -> Path:
        return self.base / "root"

    @property
    def has_parity(self) -> bool:
        return any(name.endswith(".parity") for name in self.files)

    def now(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.base)): path.read_bytes()
            for place in ("root", "mirror")
            for path in (self.base / place).rglob("*")
            if path.is_file()
        }

    def restore(self) -> None:
        found = self.now()
        for name in found.keys() - self.files.keys():
            (self.base / name).unlink()
        for name, data in self.files.items():
            if found.get(name) != data:
                path = self.base / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_symlink():
                    path.unlink()
                if path.exists():
                    path.chmod(0o644)
                path.write_bytes(data)

    def named(self, kind: str, place: str) -> str | None:
        """A file of a kind, below `base`; None where there is none there."""
        entries = sorted(name for name in self.files if name.startswith(f"{place}/log/"))
        by_name = {
            "first entry": entries[0],
            "middle entry": entries[1],
            "newest entry": entries[-1],
            "identity": f"{place}/shardkit.json",
            "locations": f"{place}/shardkit-locations.json",
            "mark": f"{place}/shardkit-copy.json",
        }
        folders = {
            "parity set": f"{place}/parity/sets/",
            "parity version": f"{place}/parity/versions/",
            "attestation": f"{place}/attest/",
        }
        if kind in by_name:
            return by_name[kind] if by_name[kind] in self.files else None
        start = folders.get(kind, f"{place}/objects/")
        end = ".json" if kind in folders else f".{kind}"
        return next(
            (name for name in sorted(self.files) if name.startswith(start) and name.endswith(end)), None
        )

    def bystander(self, name: str) -> str:
        """Another file, of the copy, that is lost at the same time."""
        kind = ".page" if name.endswith(".index") else ".index"
        return next(
            one for one in sorted(self.files) if one.startswith("mirror/objects/") and one.endswith(kind)
        )

    def unlike(self) -> list[str]:
        """Files that are not as they were; what the commands note of their looks is theirs."""
        found = self.now()
        return sorted(
            name for name, data in self.files.items() if "/attest/" not in name and found.get(name) != data
        )


def _build(base: Path, parity: str) -> Pristine:
    source, about = base / "source.jsonl", base / "about.toml"
    base.mkdir(parents=True)
    rows = [json.dumps({"x": i, "text": "word " * (i % 7 + 1), "label": i % 3}) for i in range(40)]
    source.write_text("\n".join(rows) + "\n")
    about.write_text('license = "CC0-1.0"\n')
    build = ["build", source, base / "root", "--stratify", "label", "--shard-size", "45KB", "--jobs", "1"]
    build += ["--split", "train=0.8,val=0.2", "--about", about, "--lookup", "key", "--cost", "bytes(text)"]
    assert call(*build)[0] == 0
    for tag in ("v1", "v2"):
        code, told = call("tag", f"{base / 'root'}@main", tag)
        assert code == 0, told
    code, told = call(
        "place", base / "root", "--location", f"mirror={base / 'mirror'}", "--copies", 2, "--parity", parity
    )
    assert code == 0, told
    assert call("scrub", base / "root")[0] == 0
    assert call("repair", base / "root")[0] == 0
    assert call("replicate", base / "root")[0] == 0
    made = Pristine(base, {})
    shutil.rmtree(base / "root" / "tmp", ignore_errors=True)
    made.files.update(made.now())
    return made


@pytest.fixture(scope="module", params=["4+2", "none"], ids=["parity", "no-parity"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return _build(tmp_path_factory.mktemp("matrix") / "data", request.param)


@pytest.mark.parametrize("place", ["root", "mirror"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_has_a_good_copy_is_whole_again(pristine: Pristine, kind: str, place: str) -> None:
    """Without parity each damage meets one of the commands, in turn; in `make drills` all of them."""
    name = pristine.named(kind, place)
    if name is None:
        assert (kind, place) in EXPECTED_ABSENT or kind.startswith("parity"), (kind, place)
        return
    unhealed = []
    turn = KINDS.index(kind)
    for number, (damage, spoil) in enumerate(DAMAGES.items()):
        few = (COMMANDS[(turn + number) % len(COMMANDS)],)
        for command, *options in COMMANDS if pristine.has_parity or DRILLS else few:
            pristine.restore()
            beside = pristine.bystander(name)
            (pristine.base / beside).unlink()
            path = pristine.base / name
            path.chmod(0o644)
            spoil(path)
            code, told = call(command, pristine.root, *options)
            unlike = pristine.unlike()
            if unlike:
                unhealed.append((damage, command, code, unlike, told[-600:]))
    pristine.restore()
    assert not unhealed, f"{len(unhealed)} unhealed: " + "\n".join(map(str, unhealed))


EXPECTED_ABSENT = {("locations", "mirror"), ("mark", "root"), ("attestation", "mirror")}


@pytest.mark.parametrize("kind", KINDS[:8] + KINDS[9:12])
def test_what_is_lost_is_named_and_the_rest_is_healed(pristine: Pristine, kind: str) -> None:
    """Gone from the root, damaged in the copy, and without parity."""
    lost = pristine.named(kind, "root")
    if lost is None or pristine.has_parity:
        return
    wrong = []
    for command, *options in COMMANDS:
        pristine.restore()
        copy = lost.replace("root/", "mirror/", 1)
        beside = pristine.bystander(copy)
        (pristine.base / beside).unlink()
        (pristine.base / lost).unlink()
        (pristine.base / copy).chmod(0o644)
        flip(pristine.base / copy)
        code, told = call(command, pristine.root, *options, "--json")
        if Path(lost).name not in told or code == 0 or pristine.unlike() != sorted([lost, copy]):
            wrong.append((command, code, pristine.unlike(), told[-900:]))
    pristine.restore()
    assert not wrong, "\n".join(map(str, wrong))


PARITY_KINDS = ("parity", "parity set", "parity version", "locations")


@pytest.mark.parametrize("kind", PARITY_KINDS)
def test_verify_finds_damage_to_documents_and_parity(pristine: Pristine, kind: str) -> None:
    name = pristine.named(kind, "root")
    if name is None:
        return
    for damage in DAMAGES.values():
        pristine.restore()
        path = pristine.base / name
        path.chmod(0o644)
        damage(path)
        code, told = call("verify", pristine.root)
        if kind == "parity version" and not path.exists():
            continue  # the version is one without parity then
        assert (code, path.name in told) == (4, True), (kind, told)
    pristine.restore()


def test_a_set_document_and_its_parity_lost_together_need_one_repair(pristine: Pristine) -> None:
    if not pristine.has_parity:
        return
    for command, *options in COMMANDS:
        pristine.restore()
        documents = sorted(pristine.base.glob("*/parity/sets/*.json"))
        document = documents[0].name
        parity = json.loads(documents[0].read_text())["parity"][1].removeprefix("sha256:")
        for path in [
            *pristine.base.glob(f"*/parity/sets/{document}"),
            *pristine.base.rglob(f"{parity}.parity"),
        ]:
            path.unlink()
        code, told = call(command, pristine.root, *options)
        assert (code, pristine.unlike()) == (0, []), (command, told)
    pristine.restore()


@pytest.mark.parametrize("folder", ["parity/sets", "parity/versions"])
@pytest.mark.parametrize("place", ["root", "mirror"])
def test_a_valid_document_of_another_set_is_no_good_document(
    pristine: Pristine, place: str, folder: str
) -> None:
    names = sorted((pristine.base / place / folder).glob("*.json"))
    if len(names) < 2:
        return
    for command, *options in COMMANDS:
        pristine.restore()
        names[0].chmod(0o644)
        names[0].write_bytes(names[1].read_bytes())
        code, told = call(command, pristine.root, *options)
        assert (code, pristine.unlike()) == (0, []), (command, told)
    pristine.restore()


@pytest.mark.parametrize("kind", ["locations", "parity set", "newest entry"])
@pytest.mark.parametrize("place", ["root", "mirror"])
def test_a_symbolic_link_in_place_of_a_document_is_replaced(
    pristine: Pristine, place: str, kind: str
) -> None:
    name = pristine.named(kind, place)
    if name is None:
        return
    for command, *options in COMMANDS:
        pristine.restore()
        path, elsewhere = pristine.base / name, pristine.base / "elsewhere.json"
        shutil.copyfile(path, elsewhere)
        path.unlink()
        path.symlink_to(elsewhere)
        code, told = call(command, pristine.root, *options)
        assert not path.is_symlink(), (command, code, told)
        assert (code, pristine.unlike()) == (0, []), (command, told)
    pristine.restore()


class _Counting(FileOperations):
    """Counts the bytes that are read."""

    num_bytes = 0

    def read(self, file: Handle, length: int, offset: int) -> bytes:
        data = super().read(file, length, offset)
        self.num_bytes += len(data)
        return data


@pytest.mark.parametrize("place", ["root", "mirror"])
def test_sparse_giants_are_replaced_without_being_read(pristine: Pristine, place: str) -> None:
    # the copies of a root are found by its newest entry or by its locations
    for size, found_by in ((2**26, "newest entry"), (2**40, "newest entry"), (2**40, "locations")):
        for command, *options in COMMANDS:
            pristine.restore()
            for kind in (found_by, "parity set", "parity version"):
                name = pristine.named(kind, place)
                if name is not None:
                    (pristine.base / name).chmod(0o644)
                    with (pristine.base / name).open("r+b") as file:
                        file.truncate(size)
            counting = _Counting()
            with substituted(counting):
                code, told = call(command, pristine.root, *options)
            assert (code, pristine.unlike()) == (0, []), (command, told)
            assert counting.num_bytes < 2**25, "documents of 64 MiB were read"
    pristine.restore()


# ---- A scrub that could not read what a version needs does not call it clean


def test_a_version_that_cannot_be_read_now_is_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shardkit.create(tmp_path / "data", {"value": "int64"}) as writer:
        writer.add({"value": 1})

    def silent(store: Store, digest: str, extension: str, *given: Any, **named: Any) -> bytes:
        if extension == "manifest":
            raise StoreError("the store does not answer")
        return read_object(store, digest, extension, *given, **named)

    assert call("scrub", tmp_path / "data")[0] == 0
    monkeypatch.setattr("shardkit.reading.inventory.read_object", silent)
    said = output_of("scrub", tmp_path / "data", code=3)
    assert "the store does not answer" in said


# ---- Stores that keep the checksum an object was put with: repair believes the bytes that it read, not the checksum


def test_repair_replaces_wrong_bytes_under_a_good_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1 said "Healed: 1 copy" and left the wrong bytes where they were."""
    root = tmp_path / "root"
    with shardkit.create(root, {"value": "int64"}, shard_size="8KiB", block_size="1KiB") as writer:
        for number in range(300):
            writer.add({"value": number})
    output_of("place", str(root), "--location", f"b={tmp_path / 'b'},domain=b", "--copies", "2")
    shard = next(path for path in sorted((root / "objects").rglob("*")) if path.suffix in (".tar", ".arrow"))
    good = shard.read_bytes()
    shard.chmod(0o644)
    shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    head = LocalStore.head

    def as_it_was_put(store: LocalStore, name: str) -> object:
        found = head(store, name)
        is_object = found is not None and name.startswith("objects/")
        return type(found)(found.size, Path(name).name.partition(".")[0]) if found and is_object else found

    monkeypatch.setattr(LocalStore, "head", as_it_was_put)
    output_of("repair", str(root), "--level", "read")
    assert shard.read_bytes() == good
