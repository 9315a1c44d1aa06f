"""`shardkit` commands in a test's own process, or in one that is forked from it, as somebody types them."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkit_tools.main import run
from tests.servers.object_stores import ACCESS_KEY, SECRET_KEY

__all__ = ["ForkedCommand", "call", "document_of", "outcome", "output_of", "typed"]


def outcome(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, which may have a bug."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def typed(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command: no traceback, and no canary."""
    code, out, err = outcome(*arguments)
    for word in ("Traceback", ACCESS_KEY, SECRET_KEY):
        assert word not in out + err, out + err
    return code, out, err


def call(*arguments: object) -> tuple[int, str]:
    """Exit code of a command, and all that it said."""
    code, out, err = typed(*arguments)
    return code, out + err


def output_of(*arguments: object, code: int = 0) -> str:
    """All that a command says that ends with this code."""
    found, text = call(*arguments)
    assert found == code, text
    return text


def document_of(*arguments: object, code: int = 0) -> Any:
    """What a command prints with --json that ends with this code."""
    found, out, err = typed(*arguments, "--json")
    assert found == code, out + err
    return json.loads(out)


class ForkedCommand:
    """A command in a forked process, which imports nothing again; `before` is called there first."""

    def __init__(self, *arguments: object, before: Callable[[], object] = str) -> None:
        self._output = tempfile.TemporaryDirectory()
        given = (Path(self._output.name), before, [str(one) for one in arguments])
        self._process = multiprocessing.get_context("fork").Process(target=_command, args=given)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def ended(self) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        self._process.join(300)
        out, err = (Path(self._output.name, name).read_text(encoding="utf-8") for name in ("1", "2"))
        self._output.cleanup()
        return self._process.exitcode, out, err


def _command(output: Path, before: Callable[[], object], arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (1, 2):
        os.dup2(os.open(output / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    with (
        open(1, "w", encoding="utf-8", closefd=False) as out,
        open(2, "w", encoding="utf-8", closefd=False) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        before()
        run(arguments)
