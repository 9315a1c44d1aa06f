from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit_tools import console
from shardkit_tools.console import (
    bytes_text,
    clean,
    count_text,
    duration_text,
    print_document,
    print_facts,
    print_line,
    print_table,
    share_text,
    short_id,
    short_ids,
)
from shardkit_tools.main import run

DIGEST = "sha256:" + "ab" * 32
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.50 KiB"),
        (10 * 2**20, "10 MiB"), (268435456, "256 MiB"), (123456789, "118 MiB"), (5 * 2**50, "5 PiB"),
        (2**70, "1048576 PiB"),
    ],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_counts_shares_and_durations() -> None:
    assert [count_text(n, "shard") for n in (0, 1, 2500)] == ["0 shards", "1 shard", "2,500 shards"]
    assert [share_text(n, 10_000) for n in (0, 1, 12, 500, 10_000)] == [
        "0.0 %",
        "0.010 %",
        "0.12 %",
        "5.0 %",
        "100.0 %",
    ]
    assert share_text(0, 0) == "0.0 %"
    assert [duration_text(s) for s in (0, 0.0121, 0.84, 1.84, 42, 187, 19230)] == [
        "0 s",
        "12.1 ms",
        "840 ms",
        "1.8 s",
        "42 s",
        "3:07 min",
        "5:20 h",
    ]


def test_what_is_not_printable_is_escaped() -> None:
    assert clean("Zürich 猫 a\x1b[2Jb\nc\u202ed\x07") == "Zürich 猫 a\\x1b[2Jb\\nc\\u202ed\\x07"


def test_plain_output_is_whole_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ["name", ">rows", "*note"], [("a", "1,000", DIGEST), ("longer", 2, ["two", "lines"]), ("猫", "3", "")]
    )
    assert capsys.readouterr().out.splitlines() == [
        "name     rows  note",
        f"a       1,000  {DIGEST}",
        "longer      2  two, lines",
        "猫          3",
    ]
    assert short_id(DIGEST) == DIGEST


def test_what_a_stranger_wrote_is_escaped_wherever_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\x1b[2Jb\nc")
    print_facts([("name", "two\nlines"), ("absent", None)])
    print_table(["cell"], [("\u202ed",)])
    assert capsys.readouterr().out == "a\\x1b[2Jb\\nc\nname  two\\nlines\ncell\n\\u202ed\n"


def test_a_terminal_gets_short_ids_and_narrow_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = [f"class number {number}" for number in range(40)]
    with shardkit.create(
        tmp_path / "d",
        {"text": "str", "label": "int64"},
        stratify="label",
        classes=classes,
        format="arrow",
        shard_size=8192,
    ) as writer:
        for number in range(2000):
            label = number % 30 if number < 1990 else 30 + number % 10
            writer.add({"text": "word " * (number % 17), "label": label})
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert short_ids(f"from {DIGEST}.") == "from sha256:abababababab…."
    pages = {}
    for command in (
        ["ls", "d"],
        ["show", "d"],
        ["show", "d", "--all"],
        ["log", "d"],
        ["diff", "d", "d"],
        ["cat", "d", "7"],
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as end:
            run(command)
        assert not end.value.code
        pages[" ".join(command)] = COLOURS.sub("", capsys.readouterr().out)
        lines = pages[" ".join(command)].splitlines()
        assert max(len(line) for line in lines if not line.startswith("id ")) <= 80, command
    assert re.search(r"^id  +sha256:[0-9a-f]{64}$", pages["show d"], re.MULTILINE), "a whole id, to copy"
    print_document({"copies": [{"shard": DIGEST, "location": "root", "domain": "a" * 80, "problem": None}]})
    table = COLOURS.sub("", capsys.readouterr().out).splitlines()
    assert table[2].split() == ["shard", "location", "domain"], "whole headings, and no empty column"
    assert "sha256:abababababab… " in table[3]
    assert max(map(len, table)) <= 80
    assert "pooled: too rare for every shard" in pages["show d --all"]
    assert "class number 39" in pages["show d --all"]
    assert "… and 15 more (--all)" in pages["show d"]


def test_a_page_has_the_names_of_the_document_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    print_document(
        {
            "stored_bytes": 2**20,
            "wait_s": 0.012,
            "lost_share": 0.5,
            "empty": [],
            "n": 1234,
            "names": ["a", "b"],
            "commit": {"n": 1, "by\x1b": None},
            "strata": [
                {"name": "x", "samples": 5000},
                {"name": "y", "samples": 7},
                {"name": "z", "samples": 1},
            ],
            "sites": {"root": {"bytes": 0}, "mirror": {"bytes": 12}},
            "parts": [{"name": "one", "build": {"seed": 0}}],
        },
        most=2,
    )
    assert capsys.readouterr().out.splitlines() == [
        "stored_bytes  1 MiB",
        "wait_s        12 ms",
        "lost_share    50 %",
        "n             1,234",
        "names         a, b",
        "",
        "commit",
        "n  1",
        "",
        "strata",
        "name  samples",
        "x       5,000",
        "y           7",
        "… and 1 more (--json lists all)",
        "",
        "sites",
        "           bytes",
        "root     0 bytes",
        "mirror  12 bytes",
        "",
        "parts",
        "name  one",
        "",
        "build",
        "seed  0",
    ]


_WORK = """
import logging
from shardkit_tools.console import LogHandler, long_work

logging.getLogger("shardkit").addHandler(LogHandler())
with long_work() as status:
    status.show("copied 1 of 2")
    logging.getLogger("shardkit").warning("a location is slow")
    status.show("copied 2 of 2 " + 200 * "x" + "\\x1b[2J")
print("result")
"""


def test_a_terminal_shows_progress_in_one_line_that_goes_away() -> None:
    terminal, for_process = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", _WORK], stdout=subprocess.PIPE, stderr=for_process
    ) as process:
        os.close(for_process)
        shown = b""
        try:
            while part := os.read(terminal, 1 << 16):
                shown += part
        except OSError:  # the process has closed its end
            pass
        os.close(terminal)
        assert process.stdout is not None
        assert process.stdout.read() == b"result\n"
    assert process.returncode == 0
    text = shown.decode()
    assert "a location is slow\r\n" in text
    assert text.index("copied 1 of 2") < text.index("copied 2 of 2")
    assert "\x1b[2J" not in text
    assert text.count("x") < 200, "the line must fit the window"
    assert text.rindex("\x1b[2K") > text.index("copied 2 of 2")


def test_without_a_terminal_progress_is_plain_lines_at_long_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"a": 1}\n' * 100)
    for interval, root in ((float("inf"), "quiet"), (0.0, "told")):
        monkeypatch.setattr(console, "LINE_INTERVAL_S", interval)
        with pytest.raises(SystemExit) as end:
            run(["build", str(source), str(tmp_path / root)])
        assert not end.value.code
        told = capsys.readouterr().err
        assert "\x1b" not in told
        assert ("reading 100 samples" in told, "committing" in told) == (interval == 0,) * 2
