"""Two threads that decode documents of types that were never decoded before."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# The description of Outer is incomplete while the annotation of Inner is evaluated; the second thread comes then.
PROGRAM = textwrap.dedent("""
    import sys, threading
    from dataclasses import dataclass
    from shardkit import documents

    inside, begun = threading.Event(), threading.Event()

    def slowly():
        inside.set()
        assert not finished.wait(0.3), "the second thread decoded while the first one described the type"
        return int

    @dataclass
    class Inner:
        number: "slowly()"

    @dataclass
    class Outer:
        inner: Inner

    class One(documents.Record):
        outer: Outer

    class Other(documents.Record):
        outer: Outer

    finished, found = threading.Event(), {}

    def second():
        inside.wait()
        found["second"] = READ(Other)
        finished.set()

    def decode(kind):
        return documents.decode(kind, b'{"outer":{"inner":{"number":7}}}', "it", max_bytes=99).outer.inner.number

    def convert(kind):
        return documents.convert(kind, {"outer": {"inner": {"number": 7}}}, "it").outer.inner.number

    READ = globals()[sys.argv[1]]
    thread = threading.Thread(target=second)
    thread.start()
    found["first"] = READ(One)
    thread.join()
    print(found["first"], found["second"])
""")


@pytest.mark.parametrize("way", ["decode", "convert"])
def test_a_type_is_described_by_one_thread_at_a_time(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "7 7\n"), done.stderr
