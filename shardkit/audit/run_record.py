"""Everything a run directory says of what was consumed, read without trusting any of it."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardkit.audit.result import Finding, Severity
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.formats.canonical_json import dumps, sha256_digest
from shardkit.ledger import SUBSTITUTED, Ledger, Merge, journal_paths
from shardkit.ledger.bindings import CONFIGURATION
from shardkit.ledger.journal import JournalFile
from shardkit.ledger.ledger import (
    StepRecords,
    Tree,
    damaged_records,
    leaf_hash,
    parse_lines,
    parse_records,
    read_file,
)
from shardkit.stores.local import open_store
from shardkit.stores.store import Store, object_name
from shardkit.telemetry.records import json_object, read_documents
from shardkit.torch.checkpoint_format import (
    checkpoint_names,
    decode_value,
    read_manifest_of,
    read_ref,
    tensor_objects,
)

_SHOWN: Final = 10

Place = tuple[int, int, int]
"""(step, lane, slot)."""


@dataclass
class RunRecord:
    """A run as its directory tells it.

    Attributes:
        path: of the run directory.
        settings: run.json; empty where the run has none.
        ledger: what is committed and what the journals add to it; None where the ledger is damaged.
        merge: what the journals hold beyond the tree.
        records: all step records, in file order, abandoned branches included.
        branch: those that are leaves of the tree of steps.
        events: in order.
        heads: as committed.
        checkpoints: by step.
        reached: the most steps that the trainer's own logs speak of.
        findings: what was wrong with any of it.
        roots: every head that the records ever had; None where the ledger is damaged.
        stage_plans: (first step, digest of the plan) of the stages of each configuration of the run; set by
            `find_plans`.
    """

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    merge: Merge | None = None
    records: StepRecords = field(default_factory=lambda: parse_records(b""))
    branch: StepRecords = field(default_factory=lambda: parse_records(b""))
    events: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    reached: int = 0
    findings: list[Finding] = field(default_factory=list)
    roots: Roots | None = None
    stage_plans: list[list[tuple[int, str]]] = field(default_factory=list)

    def add(self, severity: Severity, kind: str, subject: str, text: str) -> None:
        self.findings.append(Finding(severity, kind, subject, text))

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The plans that the run followed, by number: the events that introduced them."""
        return [event for event in self.events if event.get("kind") == "plan"]

    @property
    def configuration_events(self) -> list[dict[str, Any]]:
        """The settings that the ledger records, oldest first; empty for runs of 0.1 and of other trainers."""
        return [event for event in self.events if event.get("kind") == CONFIGURATION]

    def substitutions(self, first: int, last: int) -> dict[Place, tuple[int, int]]:
        """Place → (the planned sample, the one that was handed out), of steps [first, last)."""
        return {
            (event["step"], event["lane"], event["slot"]): (event["sample"], event["by"])
            for event in self.events
            if event.get("kind") == SUBSTITUTED and first <= event["step"] < last
        }

    def legs(self) -> list[tuple[int, int, int]]:
        """(number of the plan, first step, end) of what was consumed under each plan, in order."""
        steps, numbers = self.branch["step"].astype(np.int64), self.branch["plan"].astype(np.int64)
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(steps)]
        return [
            (int(numbers[begin]), int(steps[begin]), int(steps[end - 1]) + 1)
            for begin, end in itertools.pairwise(cuts)
            if begin < end
        ]

    def configurations(self) -> list[dict[str, Any]]:
        """Every configuration that the run had: run.json's, then those that it went on with."""
        texts: list[Any] = [event.get("settings") for event in self.configuration_events]
        found = [self.settings.get("configuration"), *map(json_object, texts)]
        if not texts:  # 0.1 said it in its log alone
            logged = read_documents(self.path / "events.jsonl")
            found += [one.get("configuration") for one in logged if one.get("event") == "configuration"]
        return [one for one in found if isinstance(one, dict)]


def load_run(path: Path) -> RunRecord:
    """Read a run directory; what is wrong with it becomes findings.

    Raises:
        NotFoundError: there is no run.
    """
    if not (path / "ledger").is_dir() and not (path / "journal").is_dir():
        raise NotFoundError(f"{path} is no run directory: it has neither a ledger/ nor a journal/")
    run = RunRecord(path)
    run.settings = _read_settings(run)
    _read_ledger(run)
    run.checkpoints, broken = read_checkpoints(path)
    for name, text in broken:
        run.add("violated", "checkpoint", name, text)
    run.reached = _logged_steps(path)
    return run


def _read_settings(run: RunRecord) -> dict[str, Any]:
    data = read_file(run.path / "run.json")
    settings = {} if data is None else json_object(data)
    if settings is None:
        run.add("violated", "settings", "run.json", "is no JSON object any more")
    return settings or {}


# ---- ledger


def _read_ledger(run: RunRecord) -> None:
    before = len(run.findings)
    _read_files(run)
    if len(run.findings) > before:
        _find_sequence(run, run.records)
        run.branch = run.records
        return
    try:
        run.ledger = Ledger(run.path)
        run.merge = Merge(run.ledger)
    except (IntegrityError, FormatError) as error:
        run.add("violated", "ledger", "ledger/" if run.ledger is None else "journal/", str(error))
        _find_sequence(run, run.records)
        run.branch = run.records if run.ledger is None else Ledger(run.path).branch_records()
        return
    _check_journals(run)
    run.records, run.branch = run.ledger.records(), run.ledger.branch_records()
    run.events = run.ledger.event_documents()
    _find_sequence(run, run.records)
    _check_trees(run)
    for name, count in run.merge.torn:
        run.add(
            "note", "torn", f"journal/{name}", f"its last {count} bytes were torn by a kill and do not count"
        )


def _check_journals(run: RunRecord) -> None:
    """What was merged is in the ledger; the journals must not have been touched all the same."""
    for path in journal_paths(run.path / "journal"):
        try:
            deque(JournalFile(path).entries(), maxlen=0)
        except FormatError as error:
            run.add("violated", "ledger", f"journal/{path.name}", str(error))


def _read_files(run: RunRecord) -> None:
    folder = run.path / "ledger"
    try:
        run.records = parse_records(read_file(folder / "steps") or b"")
    except FormatError as error:
        run.add("violated", "ledger", "ledger/steps", str(error))
    committed = _committed_records(run)
    bad = [index for index in damaged_records(run.records) if index < committed]
    for index in bad[:_SHOWN]:
        run.add(
            "violated", "ledger", f"ledger/steps record {index}",
            f"the record for step {int(run.records[index]['step'])} is damaged, or is not the one that was written "
            "there: its checksum does not go on from the record before",
        )  # fmt: skip
    if len(bad) > _SHOWN:
        run.add("violated", "ledger", "ledger/steps", f"{len(bad) - _SHOWN} more records are damaged")
    for name in ("events", "heads"):
        lines = run.events if name == "events" else run.heads
        try:
            lines.extend(
                document for document, _ in parse_lines(read_file(folder / name) or b"", f"ledger/{name}")
            )
        except FormatError as error:
            run.add("violated", "ledger", f"ledger/{name}", str(error))


def _committed_records(run: RunRecord) -> int:
    """How many records are committed; what an interrupted commit left behind them does not count."""
    try:
        return Ledger(run.path).state.records
    except ShardkitError:
        return len(run.records)


def _find_sequence(run: RunRecord, records: StepRecords) -> None:
    """Every record's step follows the one before, but where an event says that the run forked."""
    steps = records["step"].astype(np.int64)
    forks = {event.get("record"): event.get("step") for event in run.events if event.get("kind") == "fork"}
    for index in (np.flatnonzero(np.diff(steps) != 1) + 1).tolist():
        before, step = int(steps[index - 1]), int(steps[index])
        if forks.get(index) == step:
            continue
        if step == before:
            what = f"step {step} is recorded twice in a row"
        elif step > before + 1:
            missing = f"step {before + 1}" if step == before + 2 else f"steps {before + 1} to {step - 1}"
            what = f"{missing} missing between steps {before} and {step}"
        else:
            what = f"step {step} comes after step {before}, and no event says that the run forked there"
        run.add("violated", "ledger", f"ledger/steps record {index}", what)


def _check_trees(run: RunRecord) -> None:
    """Recompute both trees and compare every head that was ever committed or put into a checkpoint."""
    assert run.ledger is not None
    state = run.ledger.state
    roots = Roots(run.records, run.events)
    for number, head in enumerate(run.heads, 1):
        if head["records"] > len(run.records):
            continue  # of a commit that never happened
        if not roots.holds(head):
            run.add("violated", "ledger", f"ledger/heads line {number}", _unequal(head, "was committed"))
    if run.ledger.head()["steps"]["root"] != roots.step_root(run.ledger.steps.size):
        run.add(
            "violated",
            "ledger",
            "ledger/state.json",
            f"its tree of {state.size} steps has another root than the records",
        )
    run.roots = roots


class Roots:
    """Which heads the recorded steps and events ever had."""

    def __init__(self, records: StepRecords, events: list[dict[str, Any]]) -> None:
        self._events = Tree(leaf_hash(dumps(event)) for event in events)
        # (first step, tree) of every branch, the current one last
        self._branches: list[tuple[int, Tree]] = []
        digests = [leaf_hash(bytes(one)) for one in records["digest"].reshape(-1, 32)]
        steps = records["step"].astype(np.int64).tolist()
        borders = [0, *(at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]), len(steps)]
        first, leaves = 0, list[bytes]()
        for begin, end in itertools.pairwise(borders):
            if begin == end:
                continue
            if not leaves or steps[begin] <= first:
                first, leaves = steps[begin], []
            leaves = leaves[: steps[begin] - first] + digests[begin:end]
            self._branches.append((first, Tree(leaves)))

    def step_root(self, size: int) -> str:
        """Root of the current branch; empty where it is shorter."""
        tree = self._branches[-1][1] if self._branches else Tree()
        return tree.root(size).hex() if size <= len(tree) else ""

    def holds(self, head: dict[str, Any]) -> bool:
        """Whether some branch once had this head."""
        steps, events = head["steps"], head["events"]
        if events["size"] > len(self._events) or self._events.root(events["size"]).hex() != events["root"]:
            return False
        if not steps["size"]:
            return bool(steps["root"] == Tree().root().hex())
        return any(
            first == steps["first"]
            and steps["size"] <= len(tree)
            and tree.root(steps["size"]).hex() == steps["root"]
            for first, tree in self._branches
        )


def _unequal(head: dict[str, Any], what: str) -> str:
    steps, events = head["steps"], head["events"]
    return (
        f"a head of {steps['size']} steps (root {steps['root'][:12]}…) and {events['size']} events {what}, and the "
        "recorded steps and events do not give it: they were changed since"
    )


def _logged_steps(path: Path) -> int:
    """The most steps that events.jsonl and metrics/train.jsonl speak of: these files are no evidence, but hints."""
    reached = 0
    for name in ("events.jsonl", "metrics/train.jsonl"):
        for record in read_documents(path / name):
            if not isinstance(record.get("step"), int):
                continue
            if "event" not in record:
                reached = max(reached, record["step"] + 1)
            elif record["event"] in ("checkpoint", "stop", "end"):
                reached = max(reached, record["step"])
    return reached


# ---- checkpoints

STEP_NAME: Final = re.compile(r"step-(\d{12})")
"""Name of a checkpoint that says its step."""


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint's claim: which steps it had consumed, and the ledger's head at that time.

    Attributes:
        name: of its ref; `inner_names` are those that the ref and the manifest say of themselves.
        digest: "sha256:…" of its manifest.
        step, manifest, plan, head: of its meta; a writer of one's own need not say them: the step is then that of its
            name or -1, the others are empty.
        says_step: whether its meta does.
        loader: state of the loader that it holds.
        objects: SHA-256 in hex → bytes, of its tensors.
    """

    name: str
    step: int
    manifest: str
    plan: str
    head: dict[str, Any] | None
    says_step: bool = True
    digest: str = ""
    inner_names: tuple[str, ...] = ()
    loader: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, int] = field(default_factory=dict)


def read_checkpoints(run: Path) -> tuple[list[CheckpointRecord], list[tuple[str, str]]]:
    """(checkpoints by step, (name, what is wrong) of those that cannot be read)."""
    store = open_store(run)
    found: list[CheckpointRecord] = []
    broken: list[tuple[str, str]] = []
    for name in checkpoint_names(store):
        try:
            found.append(_claim(store, name))
        except (ShardkitError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            broken.append((f"checkpoints/{name}.json", f"cannot be read: {error}"))
    return sorted(found, key=lambda one: one.step), broken


def damaged_objects(run: Path, objects: Mapping[str, int], *, read: bool) -> dict[str, str]:
    """What is wrong with tensor objects, by SHA-256: gone, of another size, or (where they are read) other bytes."""
    store = open_store(run)
    found: dict[str, str] = {}
    for digest, size in objects.items():
        name = object_name(f"sha256:{digest}", "tensor")
        try:
            stat = store.head(name)
            if stat is None:
                found[digest] = "is missing"
            elif stat.size != size:
                found[digest] = f"has {stat.size} bytes, expected {size}"
            elif read and sha256_digest(store.get(name, max_bytes=size)) != f"sha256:{digest}":
                found[digest] = "holds other bytes than were written"
        except ShardkitError as error:
            found[digest] = f"cannot be read: {error}"
    return found


def _claim(store: Store, name: str) -> CheckpointRecord:
    ref = read_ref(store, name)
    document = read_manifest_of(store, ref)
    meta = decode_value(document["meta"])
    head, loader = meta.get("ledger"), meta.get("loader")
    match = STEP_NAME.fullmatch(name)
    return CheckpointRecord(
        name=name,
        step=int(meta["step"]) if "step" in meta else int(match[1]) if match else -1,
        says_step="step" in meta,
        manifest=str(meta.get("manifest", "")),
        plan=str(meta.get("plan", "")),
        head=_checked_head(head) if isinstance(head, dict) else None,
        digest=str(ref["checkpoint"]),
        inner_names=(str(ref.get("name")), str(document.get("name"))),
        loader=loader if isinstance(loader, dict) else {},
        objects=tensor_objects(document),
    )


def _checked_head(head: dict[str, Any]) -> dict[str, Any]:
    """The head with its parts in their types, whatever somebody has written there."""
    steps, events = head["steps"], head["events"]
    if min(steps["first"], steps["size"], events["size"]) < 0:
        raise ValueError("its head of the ledger has negative sizes")
    return {
        "steps": {"first": int(steps["first"]), "size": int(steps["size"]), "root": str(steps["root"])},
        "events": {"size": int(events["size"]), "root": str(events["root"])},
    }
