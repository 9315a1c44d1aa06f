"""Hostile lists of samples and event documents: no traceback, and the answers of a slow model."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit.events import contradictions
from shardkit.dataset.lookups import list_samples
from shardkit.documents import encode, sha256_digest
from shardkit.errors import FormatError, IntegrityError, ShardkitError, SourceError, UsageError
from shardkit.ledger import Ledger, Merge
from shardkit.ledger.events import JOURNALED, check_event, journaled_event
from shardkit.ledger.state import JournalPlace, LedgerState, PendingStep
from shardkit_tools.row_lists import read_values
from tests.command_line import call
from tests.drills import drill_count
from tests.faults.test_tampering import SAMPLES

KEYS = [f"{(7 * number) % 40:010d}" for number in range(40)] + [
    "cat",
    "17",
    "it's",
    "a b",
    "ключ",
    "0x1",
    "1e2",
    "-1",
]
WRAPS = [
    "{}",
    "{}",
    "{}",
    " {}",
    "{}\t",
    '"{}"',
    "'{}'",
    "\ufeff{}",
    "{}\u200b",
    "{}\0",
    "{}\r",
    "“{}”",
    "{}\u2028",
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("lists") / "data")
    with shardkit.create(root, {"value": "int64"}, lookup="key") as writer:
        for number, key in enumerate(KEYS):
            writer.add({"value": number}, key=key)
    return shardkit.open(root)


def some_values(rng: random.Random) -> list[str]:
    """Keys, keys without their zeros, numbers, and values that are neither."""
    pools: list[list[str]] = [
        KEYS, [str(int(key)) for key in KEYS[:40]], [str(number) for number in range(60)],
        ["nope", "007", "+3", "٣", "3.0", "9" * 30, "00", "CAT"],
    ]  # fmt: skip
    pool = rng.choice([pools[0], pools[1], pools[2], [value for one in pools for value in one]])
    return [rng.choice(pool) for _ in range(rng.randint(1, 4))]


def modelled(keys: dict[str, int], values: list[str], field: str | None) -> tuple[set[int], set[str]] | None:
    """(samples, absent values), or None where the list must be refused; value by value."""
    numbers = {
        value: int(value)
        for value in values
        if value.isascii() and value.isdigit() and value == str(int(value))
    }
    as_keys = {keys[value] for value in values if value in keys}
    as_numbers = {number for number in numbers.values() if number < len(keys)}
    if field == "number":
        outside = {value for value, number in numbers.items() if number >= len(keys)}
        fits = len(numbers) == len(set(values)) and all(len(value) <= 18 for value in values)
        return (as_numbers, outside) if fits else None
    taken_for_keys = (as_keys, {value for value in values if value not in keys})
    if field == "key" or len(numbers) < len(set(values)) or any(len(value) > 18 for value in values):
        return taken_for_keys
    with_zeros = {keys[value.zfill(10)] for value in values if value.zfill(10) in keys}
    if as_numbers and any(found and found != as_numbers for found in (as_keys, with_zeros)):
        return None
    return (
        taken_for_keys
        if as_keys
        else (as_numbers, {value for value in values if numbers[value] >= len(keys)})
    )


def test_a_list_names_what_a_slow_model_finds(dataset: shardkit.Dataset) -> None:
    rng = random.Random(3)
    keys = {dataset.key(sample): sample for sample in range(len(dataset))}
    assert sorted(keys) == sorted(KEYS)
    for _ in range(drill_count(20_000)):
        values, field = some_values(rng), rng.choice([None, None, "key", "number"])
        expected = modelled(keys, values, field)
        if expected is None:
            with pytest.raises(UsageError):
                list_samples(dataset, values, field)
            continue
        found = list_samples(dataset, values, field)
        assert (set(found.samples.tolist()), set(found.absent)) == expected, (values, field)


def test_a_file_is_read_as_it_is_or_refused(tmp_path: Path) -> None:
    """Nothing is lost, changed or added on the way from a file to values."""
    rng, path = random.Random(5), tmp_path / "list"
    for _ in range(drill_count(40_000)):
        values = some_values(rng)
        lines = [rng.choice(WRAPS).format(value) if rng.random() < 0.2 else value for value in values]
        end, mark = rng.choice(["\n", "\r\n"]), rng.choice(["", "\ufeff"])
        data = (mark + end.join(lines) + rng.choice(["", end, end * 2])).encode(
            rng.choice(["utf-8"] * 9 + ["utf-16"])
        )
        path.write_bytes(data)
        clean = all(line == value or line == value + "\r" for line, value in zip(lines, values, strict=True))
        if lines[0] == f"\ufeff{values[0]}" and not mark and lines[1:] == values[1:]:
            clean = True  # it is the mark of the file
        try:
            found = read_values(path)
        except SourceError:
            assert not clean or data[:2] in (b"\xff\xfe", b"\xfe\xff") or any("\r" in line for line in lines)
        else:
            assert found == values


@pytest.mark.parametrize(
    ("text", "field", "code", "excluded"),
    [
        ("cat\n", None, 0, "cat"),
        ("0000000007\n", None, 0, "0000000007"),
        ("17\n", None, 2, None),
        ("17\n", "key", 0, "17"),
        ("3\n", None, 2, None),
        ("cat\nnope\n", None, 5, None),
        ("٣\n", None, 5, None),
    ],
)
def test_select_excludes_what_other_commands_would_trace(
    dataset: shardkit.Dataset, tmp_path: Path, text: str, field: str | None, code: int, excluded: str | None
) -> None:
    (tmp_path / "list").write_text(text)
    root, more = dataset.repository.url, [] if field is None else ["--field", field]
    found, told = call("select", root, "--exclude", tmp_path / "list", *more, "--ref", "rest")
    assert found == code, told
    if excluded is not None:
        rest = shardkit.open(f"{root}@rest")
        assert {rest.key(i) for i in range(len(rest))} == set(KEYS) - {excluded}


VALUES: list[Any] = [0, 1, -1, 9, 10**12, 1 << 62, (1 << 63) - 1, "", "x", "00" * 32, "sha256:" + "11" * 32, None, True,
                     [], [[0, 0, 4]], [["a"]], {}, {"first": 0}]  # fmt: skip


def some_event(rng: random.Random) -> dict[str, Any]:
    """An event with up to three of its fields changed, dropped or added."""
    kind = rng.choice(list(SAMPLES))
    event = {"kind": kind, **copy.deepcopy(SAMPLES[kind])}
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        name = rng.choice([*event, "more"])
        if rng.random() < 0.2:
            event.pop(name, None)
        else:
            event[name] = copy.deepcopy(rng.choice(VALUES))
    return event


def test_events_are_refused_in_words_or_understood() -> None:
    rng = random.Random(7)
    known: list[dict[str, Any]] = []
    for _ in range(drill_count(40_000)):
        event = some_event(rng)
        try:
            check_event(event, "test")
        except FormatError:
            continue
        known = [*known[-20:], event]
        for _, text in contradictions(known, [rng.randrange(9) for _ in range(9)]):
            assert text
        body = {name: value for name, value in event.items() if name not in ("step", "rank", "start")}
        assert (event["kind"] in JOURNALED) or not _is_journaled(body)
        assert not _is_journaled(event), "a journal does not say whose event it is"


def _is_journaled(body: dict[str, Any]) -> bool:
    with suppress(FormatError):
        journaled_event(3, 0, 0, body, "test")
        return True
    return False


def test_states_are_refused_in_words_or_understood(tmp_path: Path) -> None:
    rng = random.Random(11)
    pending = PendingStep.empty(plan=0, step=1, start=0, lanes=2)
    pending.put((5, 0, 0), [0], [3], bytes(range(16)))
    body = LedgerState(records=1, branch=[(0, 0)], peaks=[bytes(32)], pending=[pending],
                       journals={"x": JournalPlace(1, "0" * 16, 3, 4)}).to_bytes()  # fmt: skip
    state = json.loads(body)
    del state["digest"]
    (tmp_path / "ledger").mkdir()
    for _ in range(drill_count(10_000)):
        changed = copy.deepcopy(state)
        for within in rng.choices([changed, changed["pending"][0]], k=rng.randint(1, 3)):
            within[rng.choice([*within, "more"])] = copy.deepcopy(rng.choice(VALUES))
        data = encode(changed | {"digest": sha256_digest(encode(changed))})
        (tmp_path / "ledger" / "state.json").write_bytes(data)
        with suppress(IntegrityError):
            ledger = Ledger(tmp_path)
            with suppress(ShardkitError):
                ledger.records()
                ledger.branch_records()
                ledger.head()
                Merge(ledger)
