"""`shardkit` commands in a test's own process, as somebody types them."""

from __future__ import annotations

import contextlib
import io

from shardkit_tools.main import run

__all__ = ["call", "typed"]


def typed(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def call(*arguments: object) -> tuple[int, str]:
    """Exit code of a command, and all that it said: no traceback."""
    code, out, err = typed(*arguments)
    assert "Traceback" not in out + err, out + err
    return code, out + err
