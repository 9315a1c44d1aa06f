"""Shared parts of the guides: a working directory, and `shardkit` commands that are run and shown."""

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
    """Work in the folder of ``--dir``, which is kept, or in a temporary folder, which is removed."""
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
    """Run a command in this process, show it with its output, and return its standard output.

    An exit code other than ``expect`` ends the guide.
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
