"""A user's function is recorded by a name that another process can import, or it is refused."""

from __future__ import annotations

import functools
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigurationError
from shardkit.function_names import importable_name
from shardkit.plan import FunctionMixer

PROGRAM = """
import multiprocessing
import sys
from shardkit.errors import ConfigurationError
from shardkit.plan import FunctionMixer
from shardkit_tools.transforms import AppliedFunction

def favour(losses, weights, step):
    return losses[-1]

def show():
    for named in (lambda: FunctionMixer(function=favour, every=8).text, lambda: AppliedFunction.find(favour).name):
        try:
            print(named(), flush=True)
        except ConfigurationError as error:
            print("refused:", error, flush=True)

if __name__ == "__main__":
    show()
    if "spawn" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=show)
        child.start()
        child.join()
"""


def top_level(losses: Any, weights: Any, step: int) -> Any:
    return losses[-1]


class Favour:
    def __call__(self, losses: Any, weights: Any, step: int) -> Any:
        return losses[-1]

    def method(self, losses: Any, weights: Any, step: int) -> Any:
        return losses[-1]

    @staticmethod
    def static(losses: Any, weights: Any, step: int) -> Any:
        return losses[-1]


@pytest.mark.parametrize("function", [top_level, Favour.static, pytest.approx])
def test_a_name_imports_its_function(function: Callable[..., Any]) -> None:
    assert pkgutil.resolve_name(importable_name("apply", function)) is function


def test_functions_without_a_name_are_refused() -> None:
    def inner(losses: Any, weights: Any, step: int) -> Any:
        return losses[-1]

    renamed: Any = lambda losses, weights, step: losses[-1]  # noqa: E731 (a lambda with the name of a function)
    renamed.__qualname__ = "top_level"
    unnamed: list[Any] = [
        inner, lambda losses, weights, step: losses[-1], renamed, Favour(), Favour().method,
        functools.partial(top_level, step=3), 5, None,
    ]  # fmt: skip
    for function in unnamed:
        with pytest.raises(ConfigurationError, match="define it at the top level of a module"):
            FunctionMixer(function=function, every=8)
        with pytest.raises(ConfigurationError, match="define it at the top level of a module"):
            importable_name("apply", function)


@pytest.mark.parametrize("more", [[], ["spawn"]])
def test_functions_of_the_program(tmp_path: Path, more: list[str]) -> None:
    """``__main__:favour`` names nothing in an audit; ``python -m`` gives the module's name."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.py").write_text(PROGRAM)

    def said(*command: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *command, *more],
            cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return done.stdout.splitlines()

    times = 1 + len(more)
    assert said("-m", "training.run") == ["training.run:favour"] * 2 * times
    refused = said("training/run.py")
    assert len(refused) == 2 * times
    assert all(line.startswith("refused:") for line in refused)
