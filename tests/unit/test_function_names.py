"""A user's function is recorded by a name that another process can import, or it is refused."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigurationError
from shardkit.function_names import importable_name, load_named
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
    assert load_named("apply", importable_name("apply", function), "function") is function


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3 (broken.py line 1); expected"),
        ("import sys; sys.exit()", "cannot be imported: SystemExit (broken.py line 1)"),
        ("class Stop(BaseException): ...\nraise Stop('now')", "Stop: now (broken.py line 2)"),
        ("def f(:", "SyntaxError"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("g = 3", "broken has no 'f'"),
        (None, "cannot be imported: ModuleNotFoundError: No module named 'broken'"),
    ],
)
def test_a_module_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    if code is not None:
        (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ConfigurationError, match=rf"^--mixer broken:f: .*{re.escape(said)}"):
        load_named("--mixer", "broken:f", "function")


def test_an_interrupt_of_a_module_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_module.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_named("--mixer", "slow_module:f", "function")


@pytest.mark.parametrize("name", ["just_a_name", ":f", "module:", "a.b.c", ""])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected package\.module:factory"):
        load_named("model.kind", name, "factory")


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
