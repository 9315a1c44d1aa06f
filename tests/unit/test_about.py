"""What is said of a dataset: read strictly, kept under its digest, shown, and handed on as Croissant."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.dataset.about import About, Terms, about_of, given_about, parse_about
from shardkit.dataset.croissant import croissant_document
from shardkit.dataset.merging import merge_datasets
from shardkit.errors import ConfigurationError, FormatError, NotFoundError, SourceError, UsageError

TEXT = """
name = "web"
licence = "CC-BY-4.0"
source = "https://example.org/crawl"
contact = "data@example.org"

[stratum.fr]
license = "MIT"

[stratum."d*"]
contact = "de@example.org"
note = "by post"
"""


def make(root: Path, *, about: Any = None, **settings: Any) -> shardkit.Dataset:
    with shardkit.create(
        root,
        {"lang": "str", "n": "int32[2]"},
        stratify="lang",
        about=about,
        **settings,
    ) as writer:
        for number in range(30):
            writer.add({"lang": ["fr", "de", "en"][number % 3], "n": [number, 2]}, key=f"{root.name}{number}")
    return shardkit.open(root)


def about_file(tmp_path: Path, text: str = TEXT) -> Path:
    path = tmp_path / "about.toml"
    path.write_text(text)
    return path


def test_strata_take_what_they_leave_open_from_the_whole(tmp_path: Path) -> None:
    about = given_about(about_file(tmp_path))
    assert about is not None
    whole = Terms("CC-BY-4.0", "https://example.org/crawl", "data@example.org")
    assert about.of_stratum("en") == whole
    assert about.of_stratum("fr") == Terms("MIT", "https://example.org/crawl", "data@example.org")
    assert about.of_stratum("de") == Terms(
        "CC-BY-4.0", "https://example.org/crawl", "de@example.org", "", "by post"
    )
    assert About.from_bytes(about.to_bytes()) == about


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({"licnce": "MIT"}, "licence"),
        ({"licence": "MIT", "license": "MIT"}, "twice"),
        ({"licence": 3}, "Expected `str`, got `int` at `licence`"),
        ({"source": "https://me:secret@example.org/"}, "password"),
        ({"stratum": "fr"}, "stratum"),
        ({"stratum": {"fr": {"name": "x"}}}, "name"),
        ({"stratum": {"fr": "MIT"}}, "stratum"),
        ({"note": "x" * 10_001}, "10000"),
    ],
)
def test_what_is_misspelt_is_refused(document: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        parse_about(document)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"about\.toml"):
        given_about(about_file(tmp_path, "licence = "))
    with pytest.raises(FormatError):
        About.from_bytes(b"{}")


HOSTILE = {
    "deep arrays": "note = " + "[" * 20_000 + "]" * 20_000,
    "deep tables": "[" + ".".join("a" * 5000) + "]\nb = 1",
    "deep strata": "[stratum." + ".".join("a" * 5000) + "]\nb = 1",
    "deep keys": "stratum.x." + ".".join("a" * 5000) + " = 1",
    "giant decimal": "note = " + "9" * 20_000,
    "giant hexadecimal": "note = 0x" + "f" * 20_000,
    "giant number in a stratum": "[stratum.x]\nnote = 0x" + "f" * 20_000,
    "number for a stratum": "stratum = 0x" + "f" * 20_000,
    "long text": f"note = '{'x' * 20_000}'",
    "too large": "# " + "x" * (4 << 20),
    "token": "note = 'ghp_" + "a1" * 18 + "'",
    "token in a key": '"https://ghp_' + "a1" * 18 + '@host" = "x"',
    "token in a stratum's name": '[stratum."https://ghp_' + "a1" * 18 + '@host"]',
    "signature": "homepage = 'https://host/x?sig=ghp_a1a1a1a1'",
}


@pytest.mark.parametrize("name", [*HOSTILE, "pipe", "folder", "gone", "sparse"])
def test_a_hostile_file_is_a_message(tmp_path: Path, name: str) -> None:
    path = tmp_path / "about.toml"
    if name == "pipe":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    elif name == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif name != "gone":
        path.write_text(HOSTILE[name], encoding="utf-8")
    with pytest.raises((ConfigurationError, SourceError, NotFoundError, UsageError)) as caught:
        given_about(path)
    assert len(str(caught.value)) < 1000
    assert "ghp_" not in str(caught.value)


def test_a_stratum_that_is_not_there_is_refused_before_anything_is_committed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'fx'; there are de, en, fr"):
        make(tmp_path / "d", about={"stratum": {"fx": {"licence": "MIT"}}})
    assert not list((tmp_path / "d").glob("log/*"))


def test_versions_carry_it_on(tmp_path: Path) -> None:
    plain, told = make(tmp_path / "a"), make(tmp_path / "b", about=about_file(tmp_path))
    assert plain.manifest.about is None
    assert b"about" not in plain.manifest.to_bytes()
    assert told.select(where="lang == 'fr'").manifest.about == told.manifest.about
    with shardkit.create(tmp_path / "b", told.schema, stratify="lang", append=True) as writer:
        writer.add({"lang": "it", "n": [1, 2]}, key="it")
    assert writer.manifest.about == told.manifest.about


def test_a_merged_dataset_says_what_its_parts_say(tmp_path: Path) -> None:
    make(tmp_path / "a", about={"licence": "CC0-1.0"})
    make(tmp_path / "b", about=about_file(tmp_path))
    merge_datasets({"one": tmp_path / "a", "two": tmp_path / "b"}, tmp_path / "m")
    about = about_of(shardkit.open(tmp_path / "m").version)
    assert about.of_stratum("one/fr").licence == "CC0-1.0"
    assert about.of_stratum("two/fr").licence == "MIT"
    assert about.of_stratum("two/de").contact == "de@example.org"
    assert about.of_stratum("two/en").contact == "data@example.org"


@pytest.mark.parametrize(("kind", "compression"), [("tar", "none"), ("arrow", "none")])
def test_croissant_names_every_shard_by_its_sha256(tmp_path: Path, kind: str, compression: str) -> None:
    root = tmp_path / "d"
    ds = make(root, about=about_file(tmp_path), format=kind, compression=compression, shard_size="2KiB")
    document = croissant_document(ds.version, about_of(ds.version), name="d")
    assert document["@type"] == "sc:Dataset"
    assert document["conformsTo"].startswith("http://mlcommons.org/croissant/")
    assert document["name"] == "web"
    assert document["license"] == ["CC-BY-4.0", "MIT"]
    assert {part["name"]: part["license"] for part in document["hasPart"]} == {"fr": "MIT", "de": "CC-BY-4.0"}
    files = [item for item in document["distribution"] if item["@type"] == "cr:FileObject"]
    assert len(files) == ds.manifest.shards
    for file in files:
        data = (root / file["contentUrl"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
        assert file["contentSize"] == f"{len(data)} B"
    known = {item["@id"] for item in document["distribution"]}
    fields = [field for records in document["recordSet"] for field in records["field"]]
    assert {field["source"]["fileSet"]["@id"] for field in fields} <= known
    described = " ".join(field.get("description", "") for field in fields)
    assert "lang: str" in described
    assert "n: int32[2]" in described
