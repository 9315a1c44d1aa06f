"""The table of tamperings: what somebody may do to a run directory, and the verdict that the audit must come to.

Three kinds of people: one who changes bytes; one who knows the formats and makes every checksum and digest of what was
changed fit again; one who rewrites ledger and checkpoints throughout. The last is found by a signature alone.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

import shardkit
from shardkit.audit import audit_run, make_statement
from shardkit.documents import decode_plain, encode, sha256_digest
from shardkit.errors import NotFoundError
from shardkit.ledger.events import BOUND, JOURNALED, MERGED, READS
from shardkit.ledger.ledger import RECORD_BYTES, STEPS_MAGIC, encode_record
from shardkit.stores.store import object_name
from shardkit.torch.checkpoint_format import decode_value, encode_value
from shardkit_trainer import load_configuration
from shardkit_trainer.training import train
from tests.forged_ledger import HeadOf, forge_events, read_events, write_events

FIRST, SECOND, THIRD, LAST = (f"step-{step:012d}" for step in (3, 6, 9, 10))
Document = dict[str, Any]


class Home:
    """A copy of a run, and what can be done to it."""

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.other, self.data = path, path / "run", path / "other", path / "data"

    # ---- checkpoints

    def ref(self, name: str) -> Path:
        return self.run / "checkpoints" / f"{name}.json"

    def manifest_path(self, name: str, run: Path | None = None) -> Path:
        ref = json.loads(((run or self.run) / "checkpoints" / f"{name}.json").read_bytes())
        return (run or self.run) / object_name(ref["checkpoint"], "checkpoint")

    def manifest(self, name: str) -> Document:
        found: Document = decode_plain(self.manifest_path(name).read_bytes(), max_bytes=1 << 24)
        return found

    def tensors(self, name: str) -> list[Path]:
        extents = [
            one
            for tensor in self.manifest(name)["tensors"].values()
            for *_, e in tensor["chunks"]
            for one in e
        ]
        return [self.run / object_name(f"sha256:{one[0]}", "tensor") for one in extents]

    def own_tensor(self, name: str) -> Path:
        """A tensor object that no other checkpoint shares."""
        shared = {
            path for other in (FIRST, SECOND, THIRD, LAST) if other != name for path in self.tensors(other)
        }
        return next(path for path in self.tensors(name) if path not in shared)

    def put_ref(self, name: str, digest: str, size: int) -> None:
        ref: Document = {"checkpoint": digest, "name": name, "size": size}
        self.ref(name).write_bytes(encode({**ref, "digest": sha256_digest(encode(ref))}))

    def reseal(self, name: str, change: Callable[[Document, Document], object], to: str | None = None) -> str:
        """Change (manifest, meta) of a checkpoint; all digests fit again. Its new digest."""
        document = self.manifest(name)
        meta = decode_value(document["meta"])
        document["name"] = to or name
        change(document, meta)
        document["meta"] = encode_value(meta, "meta")
        data = encode(document)
        digest = sha256_digest(data)
        path = self.run / object_name(digest, "checkpoint")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.put_ref(to or name, digest, len(data))
        return digest

    def new_tensor(self, data: bytes) -> str:
        digest = sha256_digest(data)
        path = self.run / object_name(digest, "tensor")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return digest.removeprefix("sha256:")

    # ---- run.json

    def settings(self, change: Callable[[Document], object]) -> None:
        path = self.run / "run.json"
        record = json.loads(path.read_bytes())
        change(record)
        path.write_bytes(json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")

    # ---- the ledger

    def forge(self, change: Callable[[Document], Document | None], checkpoint: Callable[..., object] | None = None,
              settings: Callable[[Document], object] | None = None,
              after: Callable[[Document], list[Document]] = lambda _: []) -> None:  # fmt: skip
        """Rewrite events, state and checkpoints throughout: nothing contradicts anything afterwards.

        Args:
            change: of every event; None drops it.
            checkpoint: of (manifest, meta) of the last checkpoint.
            settings: of run.json.
            after: events that are added after an event.
        """
        if settings is not None:
            self.settings(settings)
        run_digest = sha256_digest((self.run / "run.json").read_bytes())
        text = json.dumps(json.loads((self.run / "run.json").read_bytes())["configuration"], sort_keys=True)

        def fitting(event: Document, head_of: HeadOf) -> Document | None:
            changed = change(event)
            if changed is not None and changed["kind"] == "configuration":
                changed |= {"run": run_digest, "settings": text}
            if changed is not None and changed["kind"] == "checkpoint" and self.ref(changed["name"]).exists():
                own = checkpoint if changed["name"] == LAST else None
                changed["checkpoint"] = self._with_new_head(changed["name"], head_of, own)
            return changed

        forge_events(self.run, fitting, after)

    def _with_new_head(self, name: str, head_of: HeadOf, change: Callable[..., object] | None) -> str:
        def seal(document: Document, meta: Document) -> None:
            meta["ledger"]["events"] = head_of(meta["ledger"]["events"]["size"])
            if change is not None:
                change(document, meta)

        return self.reseal(name, seal)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, run/ (10 steps in two stages, 4 checkpoints) and other/, the same but for another rate."""
    home = tmp_path_factory.mktemp("model")
    with shardkit.create(str(home / "data"), schema={"text": "str"}, block_size="1KiB") as writer:
        for number in range(400):
            writer.add({"text": f"{number} bottles of beer on the wall"})
    for name, rate in (("run", 0.01), ("other", 0.02)):
        settings = {
            "run.directory": home / name, "run.steps": 10, "run.device": "cpu", "data.dataset": home / "data",
            "data.global_batch": 8, "data.lanes": 4, "data.stages": "[{from_step = 6, global_batch = 16}]",
            "model.context": 16, "model.layers": 1, "model.width": 16, "model.heads": 2, "optimizer.lr": rate,
            "checkpoint.every": 3, "checkpoint.keep": 0, "checkpoint.asynchronous": "false", "log.every": 100,
            "log.peak_flops": 1e9, "log.telemetry_s": 0.0, "log.sample_losses": "true",
        }  # fmt: skip
        assert train(load_configuration(None, [f"{key}={value}" for key, value in settings.items()])).finished
    return home


# ---- what is done

Act = Callable[[Home], object]


def edit(path: Callable[[Home], Path], change: Callable[[bytes], bytes]) -> Act:
    def apply(home: Home) -> None:
        target = path(home)
        target.chmod(0o644)
        target.write_bytes(change(target.read_bytes()))

    return apply


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(_data: bytes) -> bytes:
    return b""


def longer(data: bytes) -> bytes:
    return data + b"\0"


def remove(path: Callable[[Home], Path]) -> Act:
    return lambda home: path(home).unlink()


def meta(change: Callable[[Document], Any], name: str = THIRD) -> Act:
    """Change a checkpoint's meta; its digests fit again."""
    return lambda home: home.reseal(name, lambda _, own: change(own))


def document(change: Callable[[Document], Any], name: str = THIRD) -> Act:
    return lambda home: home.reseal(name, lambda own, _: change(own))


def setting(section: str, key: str, value: Any) -> Act:
    return lambda home: home.settings(lambda record: record["configuration"][section].update({key: value}))


def top(key: str, value: Any) -> Act:
    return lambda home: home.settings(lambda record: record.update({key: value}))


def copy_ref(name: str, to: str) -> Act:
    return lambda home: shutil.copy(home.ref(name), home.ref(to))


def weights_of(home: Home, name: str, into: str, to: str | None = None) -> None:
    tensors = home.manifest(name)["tensors"]
    home.reseal(into, lambda own, _: own.update(tensors=tensors), to)


def other_weights(home: Home, own: Document) -> None:
    """Set one element of the first tensor; its object has its own digest again."""
    tensor = own["tensors"][min(own["tensors"])]
    extent = tensor["chunks"][0][2][0]
    data = bytearray((home.run / object_name(f"sha256:{extent[0]}", "tensor")).read_bytes())
    data[extent[2] + 3] ^= 0x40
    extent[0] = home.new_tensor(bytes(data))


def renamed(home: Home) -> None:
    home.reseal(FIRST, lambda *_: None, to=THIRD)


def as_step(home: Home, step: int, to: str, name: str = FIRST) -> None:
    def change(_: Document, own: Document) -> None:
        own["step"] = own["loader"]["step"] = step

    home.reseal(name, change, to)


def old_head(home: Home) -> None:
    head = decode_value(home.manifest(FIRST)["meta"])["ledger"]
    home.reseal(THIRD, lambda _, own: own.update(ledger=head))


def swapped_tensors(home: Home) -> None:
    one, two = home.own_tensor(FIRST), home.own_tensor(THIRD)
    first, second = one.read_bytes(), two.read_bytes()
    for path, data in ((one, second), (two, first)):
        path.chmod(0o644)
        path.write_bytes(data)


def foreign(name: str, to: str) -> Act:
    """The checkpoint of another run over the same data and plan."""

    def apply(home: Home) -> None:
        shutil.copytree(home.other / "objects", home.run / "objects", dirs_exist_ok=True)
        path = home.manifest_path(name, home.other)
        if to == name:
            shutil.copy(home.other / "checkpoints" / f"{name}.json", home.ref(to))
        else:
            home.put_ref(to, f"sha256:{path.stem}", path.stat().st_size)

    return apply


def events(change: Callable[[list[Document]], Any]) -> Act:
    """Change the events of the ledger; the checksums of their lines fit again."""

    def apply(home: Home) -> None:
        found = read_events(home.run)
        change(found)
        write_events(home.run, found)

    return apply


def of_kind(all_: list[Document], kind: str) -> Document:
    return next(one for one in all_ if one["kind"] == kind)


def rebound(home: Home) -> None:
    """Other weights, and the digest of the checkpoint that holds them in the event that binds it."""
    digest = home.reseal(THIRD, lambda own, _: other_weights(home, own))
    events(lambda all_: next(e for e in all_ if e.get("name") == THIRD).update(checkpoint=digest))(home)


def forged(**details: Any) -> Act:
    return lambda home: home.forge(**({"change": lambda event: event} | details))


def changed_event(kind: str, **details: Any) -> Callable[[Document], Document]:
    return lambda event: event | details if event["kind"] == kind else event


def metrics(change: Callable[[bytes], bytes], name: str = "metrics/train.jsonl") -> Act:
    return edit(lambda home: home.run / name, change)


def ledger(name: str) -> Callable[[Home], Path]:
    return lambda home: home.run / "ledger" / name


def journals(home: Home) -> list[Path]:
    return sorted((home.run / "journal").iterdir())


def stages(*pairs: tuple[int, int]) -> Act:
    """Other data.stages: (from_step, global_batch)."""
    return setting("data", "stages", [{"from_step": a, "global_batch": b, "weights": {}} for a, b in pairs])


def steps(change: Callable[[list[tuple[int, int, int, bytes]]], object], *, checksums: bool) -> Act:
    """Change the step records of the ledger; with `checksums`, as somebody would who knows the format."""

    def apply(home: Home) -> None:
        path = ledger("steps")(home)
        data = path.read_bytes()
        raw = [data[at : at + RECORD_BYTES] for at in range(len(STEPS_MAGIC), len(data), RECORD_BYTES)]
        records = [
            (int.from_bytes(one[:8], "little"), int.from_bytes(one[8:12], "little"), 0, one) for one in raw
        ]
        change(records)
        out, check = bytearray(STEPS_MAGIC), 0
        for step, rows, plan, one in records:
            record, check = encode_record(step, rows, plan, one[16:48], check)
            out += record if checksums else one
        path.write_bytes(out)

    return apply


def another_digest(records: list[tuple[int, int, int, bytes]]) -> None:
    step, rows, plan, one = records[5]
    records[5] = (step, rows, plan, one[:16] + bytes(32) + one[48:])


def ledger_of_other(home: Home) -> None:
    shutil.rmtree(home.run / "ledger")
    shutil.copytree(home.other / "ledger", home.run / "ledger")


def forget_first(home: Home) -> None:
    home.ref(FIRST).unlink()
    home.forge(lambda event: None if event.get("name") == FIRST else event)


def plan_of_first(home: Home) -> None:
    plan = decode_value(home.manifest(FIRST)["meta"])["plan"]
    home.reseal(THIRD, lambda _, own: own.update(plan=plan))


BAD = "violated"


@dataclass(frozen=True)
class Row:
    """One tampering.

    Attributes:
        what, apply: which.
        verdict: of the audit; "clean" where nothing in the directory claims the contrary, or only a signature can tell.
        words: all in one finding of that severity (of a note where the verdict is "clean"); empty: nothing is said.
        signed: verdict where the audit of the run as it was had been signed; words of the finding are then "signed".
    """

    what: str
    apply: Act
    verdict: str
    words: tuple[str, ...]
    signed: str = ""


# ---- events of every kind, appended, repeated, moved and contradicting


def append_entry(home: Home, step: int, kind: int, body: Document) -> None:
    """Append an entry to the newest journal; its checksums are right."""
    path = journals(home)[-1]
    data = path.read_bytes()
    head = struct.pack("<QII", step, kind, len(encode(body)))
    head_check = xxhash.xxh3_64_intdigest(head, seed=struct.unpack("<Q", data[-8:])[0])
    check = xxhash.xxh3_64_intdigest(encode(body), seed=head_check)
    path.write_bytes(data + head + struct.pack("<Q", head_check) + encode(body) + struct.pack("<Q", check))


def of_plan(home: Home, step: int) -> int:
    """The sample that the plan has in the first place of a step."""
    plan = shardkit.open(str(home.data)).plan(global_batch=8, lanes=4)
    return int(plan.step(step)[0, 0])


ZEROS, ONES = "00" * 32, "11" * 32
LATE = {"step": 2, "rank": 0, "start": 0}  # a step that a checkpoint follows
REPLACED = {**LATE, "lane": 0, "slot": 0, "sample": 0, "by": 1, "field": "text", "reason": "does not decode"}
READ = {**LATE, "location": "mirror", "count": 3, "what": "a shard"}
SIGNED = {"author": "eve", "message": "", "time": 5}
SAMPLES: dict[str, Document] = {
    "plan": {"step": 0, "number": 7, "manifest": f"sha256:{ONES}", "plan": ONES, "lanes": 4},
    "start": {"step": 9, "start": 0, "ranks": 2, "workers": 1, "reached": 10, "repeats": 1, "time": 5},
    "assignment": {"step": 2, "start": 0, "lanes": [[0, 0, 2], [0, 2, 2]]},
    "fork": {"step": 4, "record": 4, "start": 0, "plan": 0, "abandoned": {"first": 0, "size": 9, "root": ZEROS}},
    "conflict": {"step": 2, "start": 0, "lane": 1, "before": "00" * 16, "now": "11" * 16},
    "checkpoint": {"step": 9, "name": THIRD, "checkpoint": f"sha256:{ONES}", "merged": 9},
    "configuration": {"step": 2, "run": f"sha256:{ONES}", "settings": "{}", "changed": [], "allowed": []},
    "dealt": {"step": 2, "nodes": ["a"], "lanes": 4, "owners": [0, 0, 0, 0]},
    "amendment": {"step": 2, "number": 0, "from_step": 8, "resume_from": 8, "parent": ZEROS, "plan": ONES,
                  "manifest": f"sha256:{ONES}", "skip": 9, "weights": None, "excluded": None, **SIGNED},
    "undo": {"step": 2, "number": 0, **SIGNED}, "switch": {"step": 2, "number": 0},
    "losses": {"step": 2, "first": 0, "end": 2, "digest": f"sha256:{ONES}"},
    "substituted": REPLACED,
    "masked": REPLACED,
    "rewind": {**LATE, "worker": 0, "number": 0, "reached": 5},
    "stage": {**LATE, "number": 1},
    "decoders": {**LATE, "made_by": {"image": "pillow 11"}},
    "rebalance": {**LATE, "number": 0, "from_step": 4, "owner": [0, 0, 0, 0], "moved": 1, "before_us": 9,
                  "expected_us": 8, "undoes": 0},
    "decision": {**LATE, "plan": ONES, "stage": 2, "weights": [3, 1], "drawn": [6, 2], "sums": [9, 9],
                 "counts": [6, 2]},
    **dict.fromkeys(READS, READ),
}  # fmt: skip
CONTRADICTING: dict[str, Document] = {
    "plan": {"number": 0}, "start": {"repeats": 7}, "assignment": {"lanes": [[5, 0, 4]]}, "fork": {"record": 900},
    "conflict": {"now": "00" * 16}, "checkpoint": {"replaces": f"sha256:{ZEROS}"}, "configuration": {"allowed": ["x"]},
    "amendment": {"resume_from": 9}, "undo": {"number": 5}, "switch": {"number": 5},
    "losses": {"first": 7, "end": 9},
    "dealt": {"owners": [3, 0, 0, 0]}, "substituted": {"by": 399}, "masked": {"sample": 399}, "rewind": {"reached": 1},
    "stage": {"number": 3}, "decoders": {"rank": 9}, "rebalance": {"owner": [8, 0, 0, 0]}, "decision": {"plan": ZEROS},
    **{kind: {"start": 4} for kind in READS},
}  # fmt: skip


def event_of(home: Home, kind: str, **more: Any) -> Document:
    event = {"kind": kind, **SAMPLES[kind], **more}
    return event | {"sample": of_plan(home, 2)} if kind == "masked" and "sample" not in more else event


def appended(kind: str) -> Act:
    """In a journal, by somebody who knows its format."""
    bare = ("step", "rank", "start") if kind in JOURNALED else ("step",)
    body = {name: value for name, value in SAMPLES[kind].items() if name not in bare}
    return lambda home: append_entry(home, SAMPLES[kind]["step"], 1, {"kind": kind, **body})


def inserted(kind: str, place: str, times: int = 1, **more: Any) -> Act:
    """In the ledger, after the event of a kind or a checkpoint, everything else rewritten to fit."""

    def apply(home: Home) -> None:
        event = event_of(home, kind, **more)
        home.forge(
            lambda one: one, after=lambda one: [event] * times * (place in (one["kind"], one.get("name")))
        )

    return apply


def repeated(kind: str) -> Act:
    """An event that is there comes again; one that is not comes twice, where it could have been."""

    def apply(home: Home) -> None:
        if any(one["kind"] == kind for one in read_events(home.run)):
            home.forge(lambda one: one, after=lambda one: [one] * (one["kind"] == kind))
        else:
            inserted(kind, "start", 2)(home)

    return apply


def moved(kind: str) -> Act:
    """The first event of a kind to the end; another one after the checkpoint that follows its step."""

    def apply(home: Home) -> None:
        found = next((one for one in read_events(home.run) if one["kind"] == kind), None)
        if found is None:
            inserted(kind, LAST)(home)
            return
        home.forge(
            lambda one: None if one == found else one, after=lambda one: [found] * (one.get("name") == LAST)
        )

    return apply


def events_rows() -> list[Row]:
    """Every kind of event in the four ways."""
    rows = []
    for kind in SAMPLES:
        rows += [
            Row(f"{kind} event appended to a journal", appended(kind), BAD, ()),
            Row(f"{kind} event repeated throughout", repeated(kind), BAD, ()),
            Row(f"{kind} event moved throughout", moved(kind), BAD, ()),
            Row(
                f"{kind} event that contradicts, throughout",
                inserted(kind, "start", **CONTRADICTING[kind]),
                BAD,
                (),
            ),
        ]
    return rows


CODES = {"clean": 0, BAD: 4}
TABLE = [
    # checkpoints, by somebody who changes bytes
    Row("ref copied over a newer one", copy_ref(FIRST, THIRD), BAD, (THIRD, f"calls itself {FIRST}", "renamed")),
    Row("ref copied to a step that never was", copy_ref(FIRST, "step-000000000012"), BAD, ("step-000000000012", FIRST)),
    Row("ref copied to another kind of name", copy_ref(LAST, "best"), BAD, ("best", "calls itself", LAST)),
    Row("ref flipped", edit(lambda h: h.ref(THIRD), flipped), BAD, (THIRD, "cannot be read")),
    Row("ref cut", edit(lambda h: h.ref(THIRD), cut), BAD, (THIRD, "cannot be read")),
    Row("ref emptied", edit(lambda h: h.ref(THIRD), emptied), BAD, (THIRD, "cannot be read")),
    Row("ref removed", remove(lambda h: h.ref(THIRD)), "clean", (THIRD, "pruned, or removed")),
    Row("manifest flipped", edit(lambda h: h.manifest_path(THIRD), flipped), BAD, (THIRD, "with its own digest")),
    Row("manifest cut", edit(lambda h: h.manifest_path(THIRD), cut), BAD, (THIRD, "with its own digest")),
    Row("manifest removed", remove(lambda h: h.manifest_path(THIRD)), BAD, (THIRD, "cannot be read")),
    Row("manifest of another checkpoint", lambda h: shutil.copy(h.manifest_path(FIRST), h.manifest_path(THIRD)),
        BAD, (THIRD, "cannot be read")),
    Row("tensor flipped", edit(lambda h: h.own_tensor(THIRD), flipped), BAD, (THIRD, "tensor object", "other bytes")),
    Row("tensor cut", edit(lambda h: h.own_tensor(THIRD), cut), BAD, (THIRD, "tensor object", "expected")),
    Row("tensor emptied", edit(lambda h: h.own_tensor(THIRD), emptied), BAD, (THIRD, "tensor object", "0 bytes")),
    Row("tensor longer", edit(lambda h: h.own_tensor(THIRD), longer), BAD, (THIRD, "tensor object", "expected")),
    Row("tensor removed", remove(lambda h: h.own_tensor(THIRD)), BAD, (THIRD, "tensor object", "missing")),
    Row("tensors swapped", swapped_tensors, BAD, (FIRST, "tensor object")),
    Row("all objects removed", lambda h: shutil.rmtree(h.run / "objects"), BAD, (LAST, "cannot be read")),
    # checkpoints, by somebody who makes the digests fit
    Row("step 3 resealed as step 9, whole", lambda h: as_step(h, 9, THIRD), BAD, (THIRD, "was replaced")),
    Row("step 3 under the name of step 9", renamed, BAD, (THIRD, "its name says step 9, it holds step 3")),
    Row("step 3 resealed as step 12", lambda h: as_step(h, 12, "step-000000000012"), BAD, ("does not record it",)),
    Row("weights of step 3 in step 9", lambda h: weights_of(h, FIRST, THIRD), BAD, (THIRD, "was replaced")),
    Row("weights of step 3 as a step 12", lambda h: weights_of(h, FIRST, LAST, "step-000000000012"), BAD,
        ("step-000000000012", "does not record it")),
    Row("older head in a newer checkpoint", old_head, BAD, (THIRD, "head of step 3", "calls itself step 9")),
    Row("another step", meta(lambda m: m.update(step=8)), BAD, (THIRD, "its name says step 9, it holds step 8")),
    Row("another loader.step", meta(lambda m: m["loader"].update(step=7)), BAD, (THIRD, "loader's step is 7")),
    Row("another loader.plan", meta(lambda m: m["loader"].update(plan="00" * 32)), BAD, (THIRD, "loader's plan")),
    Row("another loader.manifest", meta(lambda m: m["loader"].update(manifest="sha256:" + "00" * 32)), BAD,
        (THIRD, "loader's manifest")),
    Row("no loader state", meta(lambda m: m.pop("loader")), BAD, (THIRD, "was replaced")),
    Row("another number of updates", meta(lambda m: m.update(updates=90)), BAD, (THIRD, "was replaced")),
    Row("another loss scale", meta(lambda m: m.update(loss_scale=2.0)), BAD, (THIRD, "was replaced")),
    Row("another number of ranks", meta(lambda m: m.update(ranks=8)), BAD, (THIRD, "was replaced")),
    Row("another rate in a checkpoint", meta(lambda m: m["configuration"]["optimizer"].update(lr=9.0)), BAD,
        (THIRD, "was replaced")),
    Row("another plan", meta(lambda m: m.update(plan="00" * 32)), BAD, (THIRD, "another run")),
    Row("plan of another stage", plan_of_first, BAD, (THIRD, "was replaced")),
    Row("another manifest", meta(lambda m: m.update(manifest="sha256:" + "00" * 32)), BAD, (THIRD, "another run")),
    Row("no head", meta(lambda m: m.pop("ledger")), BAD, (THIRD, "was replaced")),
    Row("another root in its head", meta(lambda m: m["ledger"]["steps"].update(root="00" * 32)), BAD, (THIRD, "head")),
    Row("more events in its head", meta(lambda m: m["ledger"]["events"].update(size=999)), BAD, (THIRD, "head")),
    Row("a head of negative size", meta(lambda m: m["ledger"]["steps"].update(size=-1)), BAD, (THIRD, "size")),
    Row("a head that is no head", meta(lambda m: m.update(ledger={"steps": 3})), BAD, (THIRD, "cannot be read")),
    Row("a tensor less", document(lambda d: d["tensors"].pop(min(d["tensors"]))), BAD, (THIRD, "was replaced")),
    Row("a tensor more", document(lambda d: d["tensors"].update(more=d["tensors"][min(d["tensors"])])), BAD,
        (THIRD, "was replaced")),
    Row("another shape", document(lambda d: d["tensors"][min(d["tensors"])].update(shape=[1])), BAD,
        (THIRD, "was replaced")),
    Row("other weights", lambda h: h.reseal(THIRD, lambda d, _: other_weights(h, d)), BAD, (THIRD, "was replaced")),
    Row("other weights in the last", lambda h: h.reseal(LAST, lambda d, _: other_weights(h, d)), BAD,
        (LAST, "was replaced")),
    Row("a manifest with nothing in it", document(lambda d: d.clear()), BAD, (THIRD, "format None")),
    Row("another size in the ref", lambda h: h.put_ref(THIRD, f"sha256:{h.manifest_path(THIRD).stem}", 17), BAD,
        (THIRD, "cannot be read")),
    Row("checkpoint of another run", foreign(THIRD, THIRD), BAD, (THIRD, "another run")),
    Row("checkpoint of another run as a new one", foreign(LAST, "step-000000000012"), BAD, ("step-000000000012",)),
    # run.json
    Row("another rate", setting("optimizer", "lr", 0.5), BAD, ("run.json", "optimizer.lr is 0.5", "records 0.01")),
    Row("another seed", setting("run", "seed", 9), BAD, ("run.json", "run.seed is 9", "records 0")),
    Row("another precision", setting("parallel", "precision", "bf16"), BAD, ("run.json", "parallel.precision")),
    Row("another width", setting("model", "width", 32), BAD, ("run.json", "model.width is 32")),
    Row("another plan seed", setting("data", "seed", 9), BAD, ("run.json", "data.seed is 9, the ledger records 0")),
    Row("more steps", setting("run", "steps", 20), BAD, ("run.json", "run.steps is 20")),
    Row("another dataset", setting("data", "dataset", "elsewhere"), BAD, ("run.json", "data.dataset")),
    Row("a setting that changes nothing", setting("log", "every", 5), BAD, ("run.json", "log.every is 5")),
    Row("stages removed", stages(), BAD, ("run.json", "data.stages is []")),
    Row("stage later", stages((7, 16)), BAD, ("run.json", "data.stages")),
    Row("stage smaller", stages((6, 12)), BAD, ("run.json", "data.stages")),
    Row("a stage more", stages((6, 16), (8, 8)), BAD, ("run.json", "data.stages")),
    Row("stages that are none", setting("data", "stages", [7]), BAD, ("plan", "no settings")),
    Row("another manifest in run.json", top("manifest", "sha256:" + "00" * 32), BAD, ("run.json", "names manifest")),
    Row("another plan in run.json", top("plan", "00" * 32), BAD, ("run.json", "names plan")),
    Row("other software", top("software", {"torch": "1.0"}), BAD, ("run.json", "its bytes are not those")),
    Row("another start", top("started", 1.0), BAD, ("run.json", "its bytes are not those")),
    Row("run.json laid out anew", edit(lambda h: h.run / "run.json", lambda d: json.dumps(json.loads(d)).encode()), BAD,
        ("run.json", "its bytes are not those")),
    Row("run.json emptied", edit(lambda h: h.run / "run.json", emptied), BAD, ("run.json", "no JSON")),
    Row("run.json cut", edit(lambda h: h.run / "run.json", cut), BAD, ("run.json", "no JSON")),
    Row("run.json removed", remove(lambda h: h.run / "run.json"), BAD, ("run.json", "is gone")),
    # the ledger
    Row("an event flipped", edit(ledger("events"), flipped), BAD, ("ledger/events", "line")),
    Row("an event dropped", events(lambda e: e.remove(of_kind(e, "checkpoint"))), BAD, ("ledger",)),
    Row("an event changed", events(lambda e: of_kind(e, "configuration").update(settings="{}")), BAD,
        ("ledger",)),
    Row("a checkpoint and its event", rebound, BAD, ("ledger",)),
    Row("a step flipped", edit(ledger("steps"), lambda d: flipped(d[: len(STEPS_MAGIC) + 5 * RECORD_BYTES]) + d[
        len(STEPS_MAGIC) + 5 * RECORD_BYTES :]), BAD, ("ledger/steps",)),
    *(
        Row(f"{what}, checksums {'right' if checksums else 'wrong'}", steps(change, checksums=checksums), BAD,
            ("ledger/steps", words))
        for what, change, words in (
            ("a step dropped", lambda records: records.pop(7), "step 7 missing between steps 6 and 8"),
            ("a step repeated", lambda records: records.insert(7, records[7]), "step 7 is recorded twice in a row"),
            ("two steps swapped", lambda records: records.insert(7, records.pop(8)), "step 7 comes after step 8"),
        )
        for checksums in (False, True)
    ),
    Row("another digest of a step", steps(another_digest, checksums=True), BAD, ("step 5", "the plan's is")),
    Row("another digest of a step, and the root", steps(another_digest, checksums=True), BAD,
        ("ledger/state.json", "another root")),
    Row("steps cut", edit(ledger("steps"), lambda d: d[:-RECORD_BYTES]), BAD, ("steps was cut",)),
    Row("a loss flipped", edit(ledger("loss_values"), flipped), BAD, ("losses", "were changed")),
    Row("a record of losses flipped", edit(ledger("losses"), flipped), BAD, ("losses", "were changed")),
    Row("losses removed", remove(ledger("losses")), BAD, ("losses was cut",)),
    Row("state.json removed", remove(ledger("state.json")), BAD, ("ledger", "state.json")),
    Row("state.json flipped", edit(ledger("state.json"), flipped), BAD, ("state.json",)),
    Row("ledger removed, journals left", lambda h: shutil.rmtree(h.run / "ledger"), BAD, (LAST, "ledger")),
    Row("ledger of another run", ledger_of_other, BAD, ("run.json", "optimizer.lr is 0.01")),
    Row("a journal flipped", edit(lambda h: journals(h)[0], flipped), BAD, ("journal/",)),
    Row("a journal removed, as pruning does", lambda h: journals(h)[0].unlink(), "clean", ()),
    # hints, which claim nothing
    Row("a log that speaks of more steps", metrics(lambda d: d + b'{"step":98}\n'), BAD, ("10 to 98", "cut")),
    Row("another loss in the metrics", metrics(lambda d: d.replace(b'"loss":', b'"loss":1')), "clean", ()),
    Row("events.jsonl emptied", metrics(emptied, "events.jsonl"), "clean", ()),
    # everything, throughout: nothing is left that contradicts it but a signature
    Row("forged without a change", forged(), "clean", (), "clean"),
    Row("forged: other weights in the last checkpoint", lambda h: h.forge(
        lambda event: event, checkpoint=lambda own, _: other_weights(h, own)), "clean", (), BAD),
    Row("forged: another rate", forged(settings=lambda r: r["configuration"]["optimizer"].update(lr=0.5)), "clean", (),
        BAD),
    Row("forged: run.json's software", forged(settings=lambda r: r.update(software={})), "clean", (), BAD),
    Row("forged: another start", forged(change=changed_event("start", time=7)), "clean", (), BAD),
    Row("forged: other ranks", forged(change=changed_event("assignment", lanes=[[5, 0, 4]])), BAD, ("rank 5",), BAD),
    Row("forged: a checkpoint never was", forget_first, "clean", (), BAD),
    *events_rows(),
    Row("forged: other stages", forged(settings=lambda r: r["configuration"]["data"].update(stages=[])), BAD,
        ("plan", "run.json"), BAD),
]  # fmt: skip


@pytest.fixture
def home(model: Path, tmp_path: Path) -> Home:
    shutil.copytree(model / "run", tmp_path / "run")
    os.symlink(model / "other", tmp_path / "other")
    os.symlink(model / "data", tmp_path / "data")
    return Home(tmp_path)


def check(run: Path, verdict: str, words: tuple[str, ...], **more: Any) -> None:
    audit = audit_run(run, **more)
    assert audit.verdict.startswith(verdict), audit.findings
    assert audit.exit_code == CODES[verdict]
    severity = "note" if verdict == "clean" else verdict
    found = [one for one in audit.findings if one.severity == severity and one.kind != "restart"]
    texts = [f"{one.kind} {one.subject} {one.text}" for one in found]
    assert any(all(word in text for word in words) for text in texts) or not words, texts
    assert words or verdict != "clean" or not texts, texts


def test_the_run_is_clean_as_it_is(home: Home) -> None:
    audit = audit_run(home.run)
    assert (audit.verdict[:5], {one.kind for one in audit.findings}) == ("clean", {"restart"})
    assert (audit.bound_checkpoints, len(audit.checkpoints)) == (4, 4)
    assert audit.tensors > 4


def test_the_table_is_long_enough() -> None:
    assert len({row.what for row in TABLE}) == len(TABLE) >= 130
    assert set(SAMPLES) == {*JOURNALED, *MERGED, *BOUND}


@pytest.mark.parametrize("row", TABLE, ids=[row.what.replace(" ", "-") for row in TABLE])
def test_a_tampering_gets_its_verdict(home: Home, row: Row) -> None:
    statement = json.loads(json.dumps(make_statement(audit_run(home.run)))) if row.signed else None
    row.apply(home)
    check(home.run, row.verdict, row.words)
    if statement is not None:
        words = ("signed statement", "is good" if row.signed == "clean" else "changed since")
        check(home.run, row.signed, words, statement=statement)


def test_a_run_directory_without_any_record_is_none(home: Home) -> None:
    shutil.rmtree(home.run / "ledger")
    shutil.rmtree(home.run / "journal")
    with pytest.raises(NotFoundError, match="no run directory"):
        audit_run(home.run)
