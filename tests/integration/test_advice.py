"""Options in messages about sources: the command that prints them has them, or the command that is named."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

import shardkit
import shardkit_tools
import shardkit_trainer
from shardkit_tools.main import make_app
from shardkit_tools.options import advice_for
from tests.command_line import call, output_of
from tests.pictures import PNG

TOOLS = Path(shardkit_tools.__file__).parent
PACKAGES = [Path(str(one.__file__)).parent for one in (shardkit, shardkit_tools, shardkit_trainer)]
_OPTION = re.compile(r"(?:(shardkit \w+|tar)\b[^;:,()]*?)?(?<![\w-])(--[a-z][a-z-]+)")


def command_of(name: str) -> Any:
    group: Any = typer.main.get_command(make_app(name))
    return group.commands[name]


@functools.cache
def options_of(name: str) -> set[str]:
    return {one for each in command_of(name).params for one in (*each.opts, *each.secondary_opts)}


def texts() -> list[tuple[str, str]]:
    """Return (file, text) of the string literals that importers and adoptions are written with."""
    found = []
    for path in [*TOOLS.glob("importers/*.py"), *TOOLS.glob("adopting/*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            (path.name, node.value)
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        ]
    return found


def lacking(said: str, command: str) -> list[str]:
    """Return the options in a text that neither the command nor the program named before them has."""
    return [
        option
        for program, option in _OPTION.findall(said)
        if program != "tar" and option not in options_of(program.partition(" ")[2] or command)
    ]


@pytest.mark.parametrize("command", ["build", "adopt", "extend"])
def test_every_option_in_a_text_of_an_importer_is_one_of_its_command(command: str) -> None:
    given = command_of(command)
    shown = [
        (file, text if command == "build" else advice_for(given, text))
        for file, text in texts()
        if "--" in text
    ]
    assert len(shown) > 60
    assert [(file, text) for file, text in shown if lacking(text, command) or "…=" in text] == []


def _latin(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"name,x\ncaf\xe9,1\n")


def _quotes(folder: Path) -> None:
    (folder / "a.tsv").write_text('name\tx\n"a\t1\n')


def _pickle(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in ("a.txt", "a.pkl"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())


def _mixed(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"x": 1}\n{"x": "a"}\n')


def _name(folder: Path) -> None:
    pq.write_table(pa.table({"step": [1], "x": [2]}), folder / "a.parquet")


def _interval(folder: Path) -> None:
    column = pa.array([[{"b": b"a"}]], pa.list_(pa.struct([("b", pa.binary())])))
    pq.write_table(pa.table({"x": column, "name": ["a"]}), folder / "a.parquet")


def _kinds(folder: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    (folder / "a.wav").write_bytes(b"RIFF")


def _tokens(folder: Path) -> None:
    np.arange(8, dtype=np.uint16).tofile(folder / "train.bin")


def _link(folder: Path) -> None:
    (folder / "a.csv").write_text("x\n1\n")
    (folder / "b.csv").symlink_to("/etc/hostname")


@pytest.mark.parametrize("command", ["build", "adopt", "extend"])
@pytest.mark.parametrize(
    "write", [_latin, _quotes, _pickle, _mixed, _name, _interval, _kinds, _tokens, _link]
)
def test_commands_advise_their_own_options(
    write: Callable[[Path], None], command: str, tmp_path: Path
) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    write(source)
    with shardkit.create(root, {"name": "str"}) as writer:
        writer.add({"name": "a"}, key="a")
    arguments = (source, root) if command != "extend" else (root, "--from", source)
    code, said = call(command, *arguments)
    assert code in (1, 2), said
    assert not lacking(said, command), said


_COMMAND = re.compile(r"\bshardkit (?:audit )?[a-z]+ $")


def _unquoted(path: Path) -> list[str]:
    """Return the values that follow the name of a command in the messages of a file, but are not quoted for a shell."""
    found = []
    for text in ast.walk(ast.parse(path.read_text())):
        values = text.values if isinstance(text, ast.JoinedStr) else []
        for before, after in itertools.pairwise(values):
            if isinstance(before, ast.Constant) and _COMMAND.search(str(before.value)):
                assert isinstance(after, ast.FormattedValue)
                value = ast.unparse(after.value)
                if "shell_word(" not in value and value not in _NO_PATHS:
                    found.append(f"{path.name}:{after.lineno}: {value}")
    return found


_NO_PATHS = {"found[0]", "self.manifest.id[:19]", "name"}  # an option, a digest, the name of a part


def test_paths_in_commands_that_messages_name_are_quoted() -> None:
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert len(files) > 300
    assert [one for path in files for one in _unquoted(path)] == []


def test_a_command_that_an_error_names_works_in_a_folder_with_a_space(tmp_path: Path) -> None:
    root = tmp_path / "my data"
    with shardkit.create(root, {"x": "int64"}, format="arrow") as writer:
        writer.add({"x": 1})
    output_of("place", root, "--location", f"copy={tmp_path / 'a copy'},domain=b", "--copies", "2")
    output_of("replicate", root)
    (shard,) = root.rglob("*.arrow")
    shard.unlink()
    code, said = call("verify", root)
    assert code == 4
    program, *arguments = shlex.split(re.split("[,;\n]", said.partition("run: ")[2])[0])
    assert program == "shardkit"
    output_of(*arguments)
    output_of("verify", root)


@pytest.mark.parametrize("command", ["build", "adopt"])
@pytest.mark.parametrize(("root", "ref"), [("a b", "main"), ("home@work/", "main"), ("home@work/", "val")])
def test_the_command_that_is_named_next_works(command: str, root: str, ref: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    said = output_of(command, tmp_path / "a.csv", f"{tmp_path}/{root}", "--ref", ref)
    program, *arguments = shlex.split(said.partition("next: ")[2])
    assert program == "shardkit"
    output_of(*arguments)
