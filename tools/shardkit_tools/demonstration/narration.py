"""How the demo speaks: numbered headings, commands as a person would type them, and what they print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from shardkit.errors import RunError

__all__ = ["Narration"]


class Narration:
    """Prints chapters and runs real `shardkit` commands in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.console = Console(highlight=False)
        self._chapter = 0
        self._started = time.monotonic()

    def chapter(self, title: str, why: str) -> None:
        """Begin a chapter: a rule with a number, and one sentence."""
        self._chapter += 1
        elapsed = time.monotonic() - self._started
        self.console.print()
        self.console.print(Rule(Text(f"{self._chapter}  {title}", style="bold"), align="left"))
        self.console.print(Text(f"{why}  [{elapsed:.0f} s]", style="dim"))

    def say(self, text: str, style: str = "") -> None:
        """One line of our own."""
        self.console.print(Text(text, style=style))

    def command(self, *arguments: str, expect: Sequence[int] = (0,), show: int | None = None) -> str:
        """Run `shardkit ARGUMENTS…` as a process of its own and print what it prints.

        Args:
            arguments: as typed.
            expect: exit codes that belong to the story.
            show: print only so many lines; all of them by default.

        Returns:
            Its standard output.
        """
        self.console.print(Text(f"$ shardkit {shlex.join(arguments)}", style="bold cyan"))
        done = subprocess.run(
            [sys.executable, "-m", "shardkit_tools", *arguments],
            cwd=self.directory, env=self.environment(), text=True, capture_output=True, check=False,
        )  # fmt: skip
        self.quote(done.stdout + done.stderr, show)
        if done.returncode not in expect:
            raise RunError(
                f"shardkit {shlex.join(arguments)} ended with exit code {done.returncode}; see above"
            )
        if done.returncode:
            self.say(f"  (exit code {done.returncode})", "dim")
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `shardkit ARGUMENTS…` and go on; its output comes through the pipe."""
        self.console.print(Text(f"$ shardkit {shlex.join(arguments)}", style="bold cyan"))
        return subprocess.Popen(
            [sys.executable, "-m", "shardkit_tools", *arguments],
            cwd=self.directory, env=self.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def quote(self, output: str, show: int | None = None) -> None:
        """Print what a command said, indented."""
        lines = output.rstrip("\n").splitlines()
        for line in lines if show is None else lines[:show]:
            self.console.print(Text(f"  {line}"), soft_wrap=True)
        if show is not None and len(lines) > show:
            self.say(f"  … {len(lines) - show} more lines", "dim")

    def environment(self) -> dict[str, str]:
        """The environment of commands: the terminal's width less our indent."""
        return {**os.environ, "COLUMNS": str(max(60, self.console.width - 2)), "PYTHONUNBUFFERED": "1"}
