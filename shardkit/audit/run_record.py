"""Read the contents of a run directory, without trusting them."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardkit.audit.events import check_order, contradictions
from shardkit.audit.result import Finding, Severity
from shardkit.documents import convert, encode, sha256_digest
from shardkit.errors import FormatError, NotFoundError, ShardkitError
from shardkit.ledger import Ledger, Merge, journal_paths, merge_journals
from shardkit.ledger.bindings import CONFIGURATION, Amendment, amendment_states
from shardkit.ledger.events import Head
from shardkit.ledger.files import read_file
from shardkit.ledger.journal import JournalFile, xxh3
from shardkit.ledger.ledger import (
    RECORD_BYTES,
    StepRecords,
    Tree,
    consecutive,
    leaf_hash,
    parse_events,
    parse_records,
)
from shardkit.ledger.losses import Losses
from shardkit.plan import Plan
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
_MAX_SETTINGS: Final = 1 << 26
_MAX_FILE: Final = 1 << 33
_LOG_TAIL: Final = 1 << 26

GridPlace = tuple[int, int, int]
"""(step, lane, slot)."""


Replacements = dict[GridPlace, tuple[int, int]]
"""Place → (planned sample, substitute)."""


@dataclass
class RunRecord:
    """The contents of a run directory.

    Attributes:
        path: the run directory.
        settings: contents of run.json; empty if it is missing or damaged.
        ledger: the committed ledger with the journals merged into it; None if it is damaged.
        merge: the merge of the journals; None if a journal is damaged.
        records: all step records in file order, including abandoned branches.
        branch: the records that are leaves of the tree of steps.
        events: all events, in order.
        checkpoints: readable checkpoints, ordered by step.
        reached: largest number of steps in the trainer's logs.
        findings: errors and notes found so far.
        roots: all heads that the records ever had; None if the ledger is damaged.
        replaced: confirmed substitutions by step and recorded digest (the digest of a cell if the step is
            incomplete). Set by `find_plans`.
        stage_plans: the plans of each configuration under the amendments in force at a time. Set by `find_plans`.
    """

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    merge: Merge | None = None
    records: StepRecords = field(default_factory=lambda: parse_records(b""))
    branch: StepRecords = field(default_factory=lambda: parse_records(b""))
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    reached: int = 0
    findings: list[Finding] = field(default_factory=list)
    roots: Roots | None = None
    replaced: dict[tuple[int, bytes], Replacements] = field(default_factory=dict)
    stage_plans: list[list[Plan]] = field(default_factory=list)

    def add(self, severity: Severity, kind: str, subject: str, text: str) -> None:
        self.findings.append(Finding(severity, kind, subject, text))

    @property
    def violations(self) -> list[Finding]:
        """The findings that say that the record was changed."""
        return [one for one in self.findings if one.severity == "violated"]

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The events of the run's plans, ordered by number."""
        return [event for event in self.events if event["kind"] == "plan"]

    @property
    def configuration_events(self) -> list[dict[str, Any]]:
        """The events of the run's settings, oldest first. Empty if the trainer records none."""
        return [event for event in self.events if event["kind"] == CONFIGURATION]

    def amendments(self) -> list[list[Amendment]]:
        """Return the amendments in force after each amendment and undo, oldest state first."""
        return amendment_states(self.events)

    def legs(self) -> list[tuple[int, int, int]]:
        """Return (plan number, first step, end) of each range of the branch under one plan, in order."""
        return [
            (int(one[0]["plan"]), int(one[0]["step"]), int(one[-1]["step"]) + 1)
            for one in consecutive(self.branch)
        ]

    def losses(self) -> Losses:
        """Return the losses that the trainer noted.

        Raises:
            NotFoundError: the run has none, or its ledger is damaged.
        """
        if self.ledger is None:
            raise NotFoundError(f"{self.path}: the losses are in a damaged ledger")
        return Losses(self.ledger)

    def configurations(self) -> list[dict[str, Any]]:
        """Return the configuration of run.json, then the recorded configurations in order."""
        texts = (json_object(event["settings"]) for event in self.configuration_events)
        return [one for one in (self.settings.get("configuration"), *texts) if isinstance(one, dict)]


def check_run_directory(path: Path) -> None:
    """Raise NotFoundError if a path is not a run directory."""
    if not (path / "ledger").is_dir() and not (path / "journal").is_dir():
        raise NotFoundError(f"{path} is no run directory: it has neither a ledger/ nor a journal/")


def load_run(path: Path, *, is_checked: bool = True) -> RunRecord:
    """Read a run directory. Damage becomes a finding.

    Args:
        path: the run directory.
        is_checked: False: read the ledger only, without checking it against itself, in a fraction of a second for a
            million steps. Damage that prevents reading raises.

    Raises:
        NotFoundError: the path is not a run directory.
    """
    check_run_directory(path)
    run = RunRecord(path)
    run.settings, _, wrong = read_settings(path)
    if wrong:
        run.add("violated", "settings", "run.json", wrong)
    if not is_checked:
        run.ledger, run.merge = merge_journals(path)
        run.branch = run.records = run.ledger.branch_records()
        if len(run.branch) != run.ledger.state.records:
            run.records = run.ledger.records()
        run.events = run.ledger.event_documents()
        return run
    _read_ledger(run)
    run.checkpoints, broken = read_checkpoints(path)
    for name, text in broken:
        run.add("violated", "checkpoint", name, text)
    run.reached = _logged_steps(path)
    return run


def read_settings(path: Path) -> tuple[dict[str, Any], str | None, str]:
    """Return (contents of run.json, "sha256:…" of the file, error).

    The digest is None if the file is missing. The error is empty if the file is missing or valid.
    """
    try:
        data = read_file(path / "run.json", _MAX_SETTINGS)
    except FormatError as error:
        return {}, "", str(error)
    if data is None:
        return {}, None, ""
    settings, digest = json_object(data), sha256_digest(data)
    if settings is None:
        return {}, digest, "is no JSON object any more"
    sections = [settings.get(name) or {} for name in ("configuration", "parts", "software")]
    inner = sections[0].values() if isinstance(sections[0], dict) else ()
    if not all(isinstance(one, dict) for one in (*sections, *inner)):
        return {}, digest, "is not what a trainer writes: its sections are no objects"
    return settings, digest, ""


# ---- ledger


def _read_ledger(run: RunRecord) -> None:
    try:
        ledger = Ledger(run.path)
    except ShardkitError as error:
        run.add("violated", "ledger", "ledger/", str(error))
        folder = run.path / "ledger"
        with contextlib.suppress(ShardkitError):  # the whole files tell what is missing
            run.records = run.branch = parse_records(read_file(folder / "steps", _MAX_FILE) or b"")
            run.events = [one for one, _ in parse_events(read_file(folder / "events", _MAX_FILE) or b"")]
        _find_sequence(run, run.records)
        _find_damage(run)
        return
    settled = {name: (place.end, int(place.check, 16)) for name, place in ledger.state.journals.items()}
    merge = None
    try:
        merge = Merge(ledger)
    except ShardkitError as error:
        run.add("violated", "ledger", "journal/", str(error))
        ledger = Ledger(run.path)
    _check_journals(run, settled)
    try:
        run.records, run.branch = ledger.records(), ledger.branch_records()
        run.events = ledger.event_documents()
    except ShardkitError as error:
        run.add("violated", "ledger", "ledger/", str(error))
        return
    _find_sequence(run, run.records)
    if _find_damage(run):
        return
    run.ledger, run.merge = ledger, merge
    for event, text in contradictions(run.events, run.records["step"].tolist()):
        run.add("violated", "event", f"step {event['step']}", f"the event {event['kind']!r} {text}")
    _check_trees(run, ledger)
    for name, count in [] if merge is None else merge.torn:
        run.add(
            "note", "torn", f"journal/{name}", f"its last {count} bytes were torn by a kill and do not count"
        )


def _check_journals(run: RunRecord, settled: Mapping[str, tuple[int, int]]) -> None:
    """Check that the journals still hold their merged entries, in the order in which ranks write; see `check_order`."""
    attempts: dict[tuple[int, ...], list[JournalFile]] = {}
    for path in journal_paths(run.path / "journal"):
        try:
            file = JournalFile(path)
        except ShardkitError as error:
            run.add("violated", "ledger", f"journal/{path.name}", str(error))
            continue
        if (header := file.header) is not None:
            attempts.setdefault((header.started, header.rank, header.worker), []).append(file)
    for files in attempts.values():
        try:
            check_order(files, settled)
        except ShardkitError as error:
            run.add("violated", "ledger", f"journal/{files[0].path.name}", str(error))


def _find_damage(run: RunRecord) -> bool:
    """Add findings for damaged records; return True if there are any."""
    bad = damaged_records(run.records)
    for index in bad[:_SHOWN]:
        run.add(
            "violated", "ledger", f"ledger/steps record {index}",
            f"the record for step {int(run.records[index]['step'])} is damaged, or is not the one that was written "
            "there: its checksum does not continue from the record before",
        )  # fmt: skip
    if len(bad) > _SHOWN:
        run.add("violated", "ledger", "ledger/steps", f"{len(bad) - _SHOWN} more records are damaged")
    return bool(bad)


def damaged_records(records: StepRecords) -> list[int]:
    """Return the indices of records whose checksum does not continue the previous record's."""
    data, bad, check = records.tobytes(), [], 0
    for index, found in enumerate(records["check"].tolist()):
        at = index * RECORD_BYTES
        if xxh3(data[at : at + RECORD_BYTES - 8], seed=check) != found:
            bad.append(index)
        check = found
    return bad


def _find_sequence(run: RunRecord, records: StepRecords) -> None:
    """Check that the step of each record follows the previous record's, except at recorded forks."""
    steps = records["step"].astype(np.int64)
    forks = {event["record"]: event["step"] for event in run.events if event["kind"] == "fork"}
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


def _check_trees(run: RunRecord, ledger: Ledger) -> None:
    """Recompute both trees and compare their roots with state.json."""
    roots = Roots(run.records, run.events)
    if ledger.head()["steps"]["root"] != roots.step_root(ledger.steps.size):
        run.add(
            "violated", "ledger", "ledger/state.json",
            f"its tree of {ledger.steps.size} steps has another root than the records",
        )  # fmt: skip
    if ledger.head()["events"]["root"] != roots.event_root():
        run.add(
            "violated", "ledger", "ledger/state.json", "its tree of events has another root than the events"
        )
    run.roots = roots


class Roots:
    """All heads that the recorded steps and events ever had."""

    def __init__(self, records: StepRecords, events: list[dict[str, Any]]) -> None:
        self._events = Tree(leaf_hash(encode(event)) for event in events)
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
        """Return the root of the first `size` steps of the current branch, or an empty string if it is shorter."""
        tree = self._branches[-1][1] if self._branches else Tree()
        return tree.root(size).hex() if size <= len(tree) else ""

    def event_root(self) -> str:
        """Return the root of all events."""
        return self._events.root().hex()

    def holds(self, head: dict[str, Any]) -> bool:
        """Return True if a branch once had this head."""
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


def _logged_steps(path: Path) -> int:
    """Return the number of steps in events.jsonl and metrics/train.jsonl, which are hints, not evidence.

    A start may go back to an earlier step, so only the events of the newest start and the newest metrics count.
    """
    reached = last = 0
    for record in read_documents(path / "events.jsonl", _LOG_TAIL):
        if record.get("event") == "start":
            reached = 0
        elif isinstance(record.get("step"), int) and record.get("event") in ("checkpoint", "stop", "end"):
            reached = max(reached, record["step"])
    for record in read_documents(path / "metrics" / "train.jsonl", _LOG_TAIL):
        if isinstance(record.get("step"), int):
            last = record["step"] + 1
    return max(reached, last)


def recent_step_seconds(path: Path) -> list[float]:
    """Return the durations of some recent steps in metrics/train.jsonl, in seconds; hints, not evidence."""
    found = (record.get("step_s") for record in read_documents(path / "metrics" / "train.jsonl", 1 << 16))
    return [float(one) for one in found if isinstance(one, int | float) and one > 0][-64:]


# ---- checkpoints

STEP_NAME: Final = re.compile(r"step-(\d{12})")
"""Name of a checkpoint that contains its step."""


@dataclass(frozen=True)
class CheckpointRecord:
    """The claims of a checkpoint."""

    name: str  # name of its ref
    step: int  # number of consumed steps, from its meta, otherwise from its name; -1 if neither holds it
    manifest: str  # manifest id from its meta; empty if missing
    plan: str  # plan digest from its meta; empty if missing
    head: dict[str, Any] | None  # head of the ledger from its meta; None if missing
    says_step: bool = True  # True if its meta holds the step
    digest: str = ""  # "sha256:…" of its manifest
    inner_names: tuple[str, ...] = ()  # names stored inside the ref and the manifest
    loader: Mapping[str, Any] = field(default_factory=dict)  # state of the loader
    # SHA-256 in hex → size in bytes of each tensor object
    objects: Mapping[str, int] = field(default_factory=dict)


def read_checkpoints(run: Path) -> tuple[list[CheckpointRecord], list[tuple[str, str]]]:
    """Return (readable checkpoints ordered by step, (file name, error) of each unreadable checkpoint)."""
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
    """Return the errors of tensor objects by SHA-256: missing, wrong size or, if `read` is set, wrong bytes."""
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
    if isinstance(head, dict):
        convert(Head, head, "its head of the ledger")
    match = STEP_NAME.fullmatch(name)
    return CheckpointRecord(
        name=name,
        step=int(meta["step"]) if "step" in meta else int(match[1]) if match else -1,
        says_step="step" in meta,
        manifest=str(meta.get("manifest", "")),
        plan=str(meta.get("plan", "")),
        head=head if isinstance(head, dict) else None,
        digest=str(ref["checkpoint"]),
        inner_names=(str(ref.get("name")), str(document.get("name"))),
        loader=loader if isinstance(loader, dict) else {},
        objects=tensor_objects(document),
    )
