"""Building with --apply and --tokenizer: one id for any jobs, the recipe names the code, errors name file and row."""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
import shardkit_tools
from shardkit.errors import (
    ConfigurationError,
    MissingDependency,
    SampleError,
    SchemaError,
    ShardkitError,
    UsageError,
)
from shardkit_tools.building import engines
from shardkit_tools.importers import ImportOptions, line_ranges
from shardkit_tools.transforms import applied
from tests.command_line import document_of, output_of

CODE = """
import numpy as np

def double(sample):
    return {"text": sample["text"] * 2, "n": sample["n"]}

def pieces(sample):
    if sample["n"] % 3 == 0:
        return None
    return [{"word": word, "at": at} for at, word in enumerate(sample["text"].split())]

def arrays(sample):
    return {"grid": np.full((2, 3), sample["n"], np.float32), "some": np.arange(sample["n"] % 5, dtype=np.uint8)}

def gaps(sample):
    return {"text": sample["text"], "n": sample["n"], "half": None if sample["n"] is None else sample["n"] // 2}

def fails(sample):
    if sample["n"] == 41:
        raise ValueError("forty-one is not allowed")
    return sample

def odd(sample):
    return 7

def mend(sample):
    number = sample["n"]
    name = sample.get("Full name/first") or sample.get("name")
    return {"n": int(number) if str(number).isdigit() else -1, "name": name if isinstance(name, str) else "?"}

def some(sample):
    return {"n": sample["n"], **({"odd": 1} if sample["n"] % 2 else {}), **({"late": 1} if sample["n"] > 80 else {})}

def fewer(sample):
    return {"n": sample["n"], **({"early": 1} if sample["n"] < 80 else {})}

def prints(sample):
    print("a word of the function")
    return sample

constant = 3
"""

Module = Callable[[str], str]


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 500)
    monkeypatch.setattr(line_ranges, "READ_BYTES", 100)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """A module of functions on the path; its name is that of the test's folder, so no two tests share one."""
    name = "m" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    return lambda function: f"{name}:{function}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words of the source; it asks for truncation, which a dataset must not follow."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0} | {word: number + 1 for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


WORDS = ["red", "green", "blue", "black", "white"]


def text_of(n: int) -> str:
    return " ".join(WORDS[(n + k) % 5] for k in range(n % 7 + 1))


def source(path: Path, rows: int = 90) -> str:
    path.write_text("".join(json.dumps({"text": text_of(n), "n": n}) + "\n" for n in range(rows)))
    return str(path)


def samples(root: Path) -> list[dict[str, Any]]:
    ds = shardkit.open(str(root))
    return ds[:]


@pytest.mark.usefixtures("many_tasks")
def test_pieces_and_filters_are_the_same_for_any_jobs(tmp_path: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl")
    one = shardkit_tools.build(lines, tmp_path / "one", apply=module("pieces"), jobs=1)
    two = shardkit_tools.build(lines, tmp_path / "two", apply=module("pieces"), jobs=2)
    assert one.manifest is not None
    assert two.manifest is not None
    assert one.manifest.id == two.manifest.id
    found = sorted((sample["word"], sample["at"]) for sample in samples(tmp_path / "two"))
    assert found == sorted(
        (word, at) for n in range(90) if n % 3 for at, word in enumerate(text_of(n).split())
    )
    said = one.manifest.build["apply"]
    code = tmp_path / "modules" / f"{module('pieces').partition(':')[0]}.py"
    assert said == {"function": module("pieces"), "sha256": hashlib.sha256(code.read_bytes()).hexdigest()}


def test_types_are_those_of_the_source_or_of_the_values(tmp_path: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl")
    shardkit_tools.build(lines, tmp_path / "a", apply=module("double"))
    assert {n: str(t) for n, t in shardkit.open(str(tmp_path / "a")).schema.items()} == {
        "text": "str",
        "n": "int64",
    }
    shardkit_tools.build(lines, tmp_path / "b", apply=module("arrays"), output_schema={"some": "int32[*]"})
    schema = shardkit.open(str(tmp_path / "b")).schema
    assert {n: str(t) for n, t in schema.items()} == {"grid": "float32[2,3]", "some": "int32[*]"}
    with pytest.raises(SchemaError, match="some_other"):
        shardkit_tools.build(
            lines, tmp_path / "c", apply=module("arrays"), output_schema={"some_other": "str"}
        )


def test_samples_of_a_function_may_lack_fields(tmp_path: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl")
    with pytest.raises(SampleError, match=r"a\.jsonl line 82: .*'late'.*--output-schema 'late=TYPE\?'"):
        shardkit_tools.build(lines, tmp_path / "a", apply=module("some"))
    shardkit_tools.build(
        lines, tmp_path / "a", apply=module("some"), output_schema={"late": "int8?"}, shuffle=False
    )
    found = samples(tmp_path / "a")
    assert [found[n]["odd"] for n in range(4)] == [None, 1, None, 1]
    assert [one["late"] for one in found] == [None] * 81 + [1] * 9
    with pytest.raises(SampleError, match=r"a\.jsonl line 81: .*'early'.*--output-schema 'early=int64\?'"):
        shardkit_tools.build(lines, tmp_path / "b", apply=module("fewer"))
    assert shardkit_tools.build(lines, tmp_path / "b", apply=module("fewer"), on_error="skip").rows == 80


def test_missing_values_go_through_functions_and_tokenizers(
    tmp_path: Path, module: Module, tokenizer: Path
) -> None:
    rows = [{"text": "red"}, {"n": 4, "text": None}, {"n": 5, "text": "blue green"}, {"n": 6}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shardkit_tools.build(str(tmp_path / "a.jsonl"), tmp_path / "a", apply=module("gaps"), shuffle=False)
    assert {n: str(t) for n, t in shardkit.open(str(tmp_path / "a")).schema.items()} == {
        "text": "str?", "n": "int64?", "half": "int64?"
    }  # fmt: skip
    found = [(sample["text"], sample["n"], sample["half"]) for sample in samples(tmp_path / "a")]
    assert found == [("red", None, None), (None, 4, 2), ("blue green", 5, 2), (None, 6, 3)]
    shardkit_tools.build(str(tmp_path / "a.jsonl"), tmp_path / "t", tokenizer=str(tokenizer), shuffle=False)
    tokens = [sample["tokens"] for sample in samples(tmp_path / "t")]
    assert [None if one is None else one.tolist() for one in tokens] == [[1], None, [3, 2], None]


def test_an_error_of_the_function_names_file_row_and_function(tmp_path: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl", 300)
    for jobs in (1, 2):
        with pytest.raises(SampleError, match="forty-one") as caught:
            shardkit_tools.build(lines, tmp_path / "root", apply=module("fails"), jobs=jobs)
        text = str(caught.value)
        assert "a.jsonl line 42" in text
        assert module("fails") in text
    result = shardkit_tools.build(lines, tmp_path / "root", apply=module("fails"), on_error="skip")
    assert result.rows == 299
    assert [row.source_row for row in result.skipped] == [41]


def test_functions_that_cannot_be_applied_are_refused(tmp_path: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl")
    name = module("x").partition(":")[0]
    for given, said in (
        ("no_such_module_here:f", "cannot be imported: .*'no_such_module_here'; expected"),
        (f"{name}:none", "has no 'none'"),
        (f"{name}:constant", "a int"),
        ("just_a_name", "package.module:function"),
        ("math:sqrt", "no Python source"),
        (lambda sample: sample, "cannot import it by name"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            shardkit_tools.build(lines, tmp_path / "root", apply=given)
    with pytest.raises(SampleError, match=r"line 1: .* returned a int"):
        shardkit_tools.build(lines, tmp_path / "root", apply=module("odd"))


@pytest.mark.parametrize("skip", ["raise", "skip"])
def test_a_text_that_a_tokenizer_without_a_token_for_unknown_words_refuses(
    tmp_path: Path, tokenizer: Path, skip: str
) -> None:
    described = json.loads(tokenizer.read_text())
    described["model"]["unk_token"] = "absent"
    tokenizer.write_text(json.dumps(described))
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{WORDS[0]}"}}\n{{"text": "?!"}}\n')
    made = partial(
        shardkit_tools.build, tmp_path / "a.jsonl", tmp_path / "root", tokenizer=tokenizer, on_error=skip
    )
    if skip == "raise":
        with pytest.raises(SampleError, match=r"a\.jsonl line 2: the tokenizer refuses this text"):
            made()
    else:
        assert len(made().skipped) == 1


def test_a_function_that_fails_on_every_row_is_named_with_skip_too(tmp_path: Path, module: Module) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 41}\n{"n": 41}\n')
    with pytest.raises(ShardkitError, match=r"a\.jsonl line 1: .*fails failed: ValueError: forty-one"):
        shardkit_tools.build(tmp_path / "a.jsonl", tmp_path / "root", apply=module("fails"), on_error="skip")


@pytest.mark.usefixtures("many_tasks")
def test_tokens_are_those_of_the_library_untruncated(tmp_path: Path, tokenizer: Path) -> None:
    lines = source(tmp_path / "a.jsonl")
    ids = set()
    for jobs in (1, 2):
        result = shardkit_tools.build(
            lines, tmp_path / f"{jobs}", tokenizer=tokenizer, jobs=jobs, format="arrow"
        )
        assert result.manifest is not None
        ids.add(result.manifest.id)
    assert len(ids) == 1
    assert result.manifest is not None
    assert result.manifest.build["tokenizer"] == {
        "field": "text",
        "sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    assert str(result.manifest.schema["tokens"]) == "uint16[*]"
    for sample in samples(tmp_path / "2"):
        expected = [WORDS.index(word) + 1 for word in text_of(sample["n"]).split()]
        assert sample["tokens"].tolist() == expected
        assert sample["tokens"].dtype == np.uint16


@pytest.mark.parametrize(
    ("special", "config", "given", "expected"),
    [
        (["</s>"], None, None, "</s>"),
        (["</s>", "<|endoftext|>"], {"eos_token": "<|endoftext|>"}, None, "<|endoftext|>"),
        (["</s>"], {"eos_token": {"content": "black"}}, None, "black"),
        (["</s>"], {"eos_token": None}, None, "</s>"),
        (["</s>"], None, "red", "red"),
        (["</s>"], None, "none", None),
        ([], None, None, None),
        (["</s>", "<|endoftext|>"], None, None, "name one with --eos"),
        (["</s>"], None, "<eos>", "not a token of"),
        (["</s>"], "{", None, "tokenizer_config.json: cannot be read"),
    ],
)
@pytest.mark.parametrize("adds_it_itself", [False, True])
def test_every_document_ends_with_one_end_of_document_token(
    tmp_path: Path,
    tokenizer: Path,
    special: list[str],
    config: Any,
    given: str | None,
    expected: str | None,
    adds_it_itself: bool,
) -> None:
    from tokenizers import Tokenizer, processors

    made = Tokenizer.from_file(str(tokenizer))
    made.add_special_tokens(special)
    end = made.token_to_id(expected) if expected else None
    if adds_it_itself and expected and end is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {expected}", special_tokens=[(expected, end)]
        )
    made.save(str(tokenizer))
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        tokenizer.with_name("tokenizer_config.json").write_text(text)
    lines = source(tmp_path / "a.jsonl")
    named: dict[str, Any] = {"tokenizer": tokenizer, "eos": given, "format": "arrow"}
    if expected and end is None:
        with pytest.raises(ConfigurationError, match=expected):
            shardkit_tools.build(lines, tmp_path / "root", **named)
        return
    result = shardkit_tools.build(lines, tmp_path / "root", **named)
    assert result.manifest is not None
    assert result.manifest.build["tokenizer"].get("eos") == expected
    (note,) = result.notes
    assert (repr(expected) if expected else "no token marks") in note
    for sample in samples(tmp_path / "root"):
        words = [WORDS.index(word) + 1 for word in text_of(sample["n"]).split()]
        doubled = end is not None and words[-1] == end  # a text that ends with the token itself
        assert sample["tokens"].tolist() == [*words, *([] if end is None or doubled else [end])] or (
            adds_it_itself and doubled
        )


def test_a_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = source(tmp_path / "a.jsonl")
    with pytest.raises(ShardkitError, match="no_such"):
        shardkit_tools.build(lines, tmp_path / "root", tokenizer=tmp_path / "no_such.json")
    with pytest.raises(UsageError, match="without tokenizer"):
        shardkit_tools.build(lines, tmp_path / "root", text_field="text")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ConfigurationError, match="not a file of the tokenizers library"):
        shardkit_tools.build(lines, tmp_path / "root", tokenizer=broken)
    with pytest.raises(ConfigurationError, match="--text-field n"):
        shardkit_tools.build(lines, tmp_path / "root", tokenizer=tokenizer, text_field="n")
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **named)

    applied._tokenizer.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match="pip install 'tokenizers>="):
        shardkit_tools.build(lines, tmp_path / "root", tokenizer=tokenizer)


def test_command_line(tmp_path: Path, tokenizer: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl")
    said = output_of("build", lines, tmp_path / "root", "--apply", module("fails"), "--jobs", "1", code=1)
    assert "a.jsonl line 42" in said
    options = ["--tokenizer", str(tokenizer), "--text-field", "text", "--output-schema", "tokens=int32[*]"]
    built = document_of("build", lines, tmp_path / "root", "--apply", module("double"), "-j1", *options)
    assert built["samples"] == 90
    assert str(shardkit.open(str(tmp_path / "root")).schema["tokens"]) == "int32[*]"
    said = document_of("build", lines, tmp_path / "said", "--apply", module("prints"), "-j1")
    assert said["samples"] == 90


KILLED = """
import os, signal, sys
import shardkit_tools
from shardkit.dataset.scratch import ScratchFolder
from shardkit_tools.importers import ImportOptions, line_ranges
line_ranges._RANGE_BYTES, line_ranges.READ_BYTES = 500, 100
real, left = ScratchFolder.put_record, [int(sys.argv[4])]
def record(folder, name, data):
    if name.startswith("task-"):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
    real(folder, name, data)
ScratchFolder.put_record = record
shardkit_tools.build(sys.argv[1], sys.argv[2], apply=sys.argv[3])
"""


@pytest.mark.usefixtures("many_tasks")
def test_a_killed_build_goes_on_unless_the_code_has_changed(tmp_path: Path, module: Module) -> None:
    lines = source(tmp_path / "a.jsonl")
    whole = shardkit_tools.build(lines, tmp_path / "whole", apply=module("pieces"))
    root = tmp_path / "root"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "modules")}
    command = [sys.executable, "-c", KILLED, lines, str(root), module("pieces"), "3"]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    result = shardkit_tools.build(lines, root, apply=module("pieces"))
    assert result.reused_tasks == 3
    assert result.manifest is not None
    assert whole.manifest is not None
    assert result.manifest.id == whole.manifest.id
    assert subprocess.run(
        [*command[:4], str(tmp_path / "other"), *command[5:]], env=environment, check=False
    ).returncode
    code = tmp_path / "modules" / f"{module('pieces').partition(':')[0]}.py"
    code.write_text(code.read_text() + "# changed\n")
    changed = shardkit_tools.build(lines, tmp_path / "other", apply=module("pieces"))
    assert changed.reused_tasks == 0
    assert changed.manifest is not None
    assert changed.manifest.id != whole.manifest.id


UNFIT: list[dict[str, Any]] = [{"n": n if n % 7 else str(n), "Full name/first": f"n{n}"} for n in range(200)]
del UNFIT[3]["n"]
UNFIT[150] |= {"n": "many", "Full name/first": None, "extra": {"a": 1}}
MENDED = [(-1 if n in (3, 150) else n, "?" if n == 150 else f"n{n}") for n in range(200)]


def unfit_lines(path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in UNFIT))
    return str(path)


def unfit_csv(path: Path) -> str:
    lines = [f"{row.get('n', '')},{row['Full name/first'] or ''}\n" for row in UNFIT]
    path.write_text("n,Full name/first\n" + "".join(lines).replace("150,\n", "many,?\n"))
    return str(path)


def unfit_parquet(path: Path) -> str:
    texts = [str(row["n"]) if "n" in row else None for row in UNFIT]
    left = pa.array([None] * 200, pa.list_(pa.list_(pa.binary())))  # no field type holds it
    names = [row["Full name/first"] for row in UNFIT]
    pq.write_table(pa.table({"n": texts, "Full name/first": names, "left": left}), path)
    return str(path)


def unfit_tar(path: Path) -> str:
    with tarfile.open(path, "w") as tar:
        for n, row in enumerate(UNFIT):
            data = {"cls": row.get("n"), "name.txt": row["Full name/first"], "extra.json": row.get("extra")}
            for extension, value in data.items():
                content = str(value).encode() if n != 150 or extension != "name.txt" else b"\xff"
                if value is not None or content == b"\xff":
                    info = tarfile.TarInfo(f"{n:03}.{'n.cls' if extension == 'cls' else extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(path)


@pytest.mark.parametrize(
    ("write", "name"),
    [(unfit_lines, "a.jsonl"), (unfit_csv, "a.csv"), (unfit_parquet, "a.parquet"), (unfit_tar, "a.tar")],
)
def test_a_function_mends_rows_that_would_be_refused(
    tmp_path: Path, module: Module, write: Callable[[Path], str], name: str
) -> None:
    given, root = write(tmp_path / name), str(tmp_path / "root")
    with pytest.raises(ShardkitError, match=re.escape(name)):
        shardkit_tools.build(given, root, options=ImportOptions(field_types={"n": "int64"}))
    for options in (ImportOptions(), ImportOptions(field_types={"n": "int64"}, rename={"n": "n"})):
        shardkit_tools.build(
            given, root, apply=module("mend"), options=options, shuffle=False, replace=True, jobs=1
        )
        kinds = {field: str(kind.required) for field, kind in shardkit.open(root).schema.items()}
        assert kinds == {"n": "int64", "name": "str"}
        assert [(row["n"], row["name"]) for row in samples(tmp_path / "root")] == MENDED


def test_what_a_function_leaves_unmended_is_refused_or_left_out(tmp_path: Path, module: Module) -> None:
    rows = [{"text": text_of(n), "n": "bad" if n in (5, 80) else n} for n in range(90)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given, root = str(tmp_path / "a.jsonl"), tmp_path / "root"
    with pytest.raises(
        SchemaError, match=r"field 'n' is int64 in .* line 1 and str in .* line 6;.*--output-schema"
    ):
        shardkit_tools.build(given, root, apply=module("double"))
    with pytest.raises(SampleError, match=r"row 5\b.*field 'n' \(int64\) cannot take .*'bad'"):
        shardkit_tools.build(given, root, apply=module("double"), output_schema={"n": "int64"})
    made = shardkit_tools.build(given, root, apply=module("double"), on_error="skip")
    assert (made.rows, [row.source_row for row in made.skipped]) == (88, [5, 80])
    assert str(shardkit.open(str(root)).schema["n"]) == "int64"
