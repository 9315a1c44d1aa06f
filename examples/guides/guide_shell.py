"""What the guides under examples share: a place to work in, and `shardkit` commands run and shown as typed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardkit_tools.main import run

__all__ = ["shardkit", "workplace"]


@contextlib.contextmanager
def workplace(about: str | None) -> Iterator[Path]:
    """The folder of ``--dir`` (kept), or a temporary one (removed), as the working directory."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="work here and leave everything for you to look at")
    given: Path | None = parser.parse_args().dir
    with contextlib.ExitStack() as stack:
        folder = given or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardkit-guide-")))
        folder.mkdir(parents=True, exist_ok=True)
        before = Path.cwd()
        stack.callback(os.chdir, before)
        os.chdir(folder)
        yield folder


def shardkit(*arguments: object, expect: int | tuple[int, ...] = 0) -> str:
    """Run a command in this process, show it and what it prints; returns its standard output.

    Exit codes are part of the story: another one than ``expect`` ends the guide.
    """
    words = [str(argument) for argument in arguments]
    print(f"$ shardkit {shlex.join(words)}")
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(words)
        except SystemExit as end:
            code = int(end.code or 0)
    for line in (out.getvalue() + err.getvalue()).splitlines():
        print(f"  {line}")
    if code not in (expect if isinstance(expect, tuple) else (expect,)):
        raise SystemExit(f"exit code {code}, expected {expect}")
    if code:
        print(f"  (exit code {code})")
    return out.getvalue()
