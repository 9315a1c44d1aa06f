"""Nothing public is lost by accident: the face is the frozen one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from public_face import collect
from public_face.__main__ import FROZEN, freeze, load, report
from public_face.comparing import differences, unexplained

if TYPE_CHECKING:
    from public_face.comparing import Face

AGAIN = (
    "If it is meant: python -m public_face (writes tests/golden/public_face.json; commit it with the change)."
)


@pytest.fixture(scope="module")
def today() -> tuple[Face, Face]:
    return collect()


def test_the_face_is_the_frozen_one(today: tuple[Face, Face]) -> None:
    for frozen, found, what in zip(
        load(FROZEN), today, ("public face", "words of the public face"), strict=True
    ):
        changed = differences(frozen, found)
        assert not changed, f"the {what} is another:\n{report(changed)}\n{AGAIN}"


# ---- the comparison itself, on faces made up

FACE: Face = {
    "commands": {"build": "command", "build --jobs": "int, default 1", "build -j": "int, default 1"},
    "python": {
        "shardkit.create": "function", "shardkit.create(seed=)": "keyword, default 0",
        "shardkit.loader.Loader": "class", "shardkit.loader.Loader.seek": "method",
        "shardkit.loader.Loader.seek(step=)": "position 1, required",
    },
    "metrics": {"shardkit_step": "gauge"},
    "stats": {"lanes": "number"},
    "telemetry": {"loader.lanes": "number"},
    "control": {"loader.memory": "key"},
    "events": {"stall": "kind"},
    "errors": {"StoreFullError": "kind 'store-full'"},
    "exit codes": {"4": "DAMAGED"},
    "trainer": {"run.steps": "int, default 0"},
}  # fmt: skip
EVERY = [(section, name) for section, names in FACE.items() for name in names]


def without(*gone: tuple[str, str]) -> Face:
    return {
        s: {n: meaning for n, meaning in names.items() if (s, n) not in gone} for s, names in FACE.items()
    }


def changelog(text: str, before: str = "") -> str:
    return f"# Changes\n\n## Unreleased\n\n- {text}\n\n## 0.1\n\n- First version. {before}\n"


@pytest.mark.parametrize(("section", "name"), EVERY)
def test_a_removal_must_be_named(section: str, name: str) -> None:
    found = differences(FACE, without((section, name)))
    assert report(found) == f"- {section}: {name}: {FACE[section][name]}"
    assert unexplained(found, changelog("Everything is better.")) == found
    assert unexplained(found, changelog(f"{name} is gone.")) == found, "no backquotes"
    assert unexplained(found, changelog(f"`{name}` is faster.")) == found, "said, but not that it is gone"
    assert unexplained(found, changelog("Faster.", f"`{name}` is gone.")) == found, "another release's"
    told = changelog(f"`{name}` is gone: nobody used it.")
    assert unexplained(found, told) == []


@pytest.mark.parametrize(("section", "name"), EVERY)
def test_another_meaning_must_be_named(section: str, name: str) -> None:
    found = differences(FACE, FACE | {section: FACE[section] | {name: "other"}})
    assert report(found) == f"~ {section}: {name}: {FACE[section][name]} → other"
    assert unexplained(found, changelog("Everything is better.")) == found
    assert unexplained(found, changelog(f"`{name}` means something else.")) == []


@pytest.mark.parametrize(
    ("section", "name", "text"),
    [
        ("commands", "build --jobs", "`merge --jobs` is gone"),
        ("commands", "build --jobs", "`build` is gone"),
        ("python", "shardkit.create(seed=)", "`create` is gone"),
        ("python", "shardkit.loader.Loader.seek", "`Writer.seek` is gone"),
        ("stats", "lanes", "`amend(lanes=)` is gone"),
        ("errors", "StoreFullError", "`StoreError` is gone"),
    ],
)
def test_the_name_of_another_thing_is_not_enough(section: str, name: str, text: str) -> None:
    found = differences(FACE, without((section, name)))
    assert unexplained(found, changelog(text)) == found


@pytest.mark.parametrize(
    ("section", "name", "text"),
    [
        ("commands", "build --jobs", "`shardkit build --jobs` is removed"),
        ("python", "shardkit.create(seed=)", "`create(…, seed=7)` was renamed"),
        ("python", "shardkit.loader.Loader.seek", "`loader.seek` is gone"),
        ("python", "shardkit.loader.Loader.seek(step=)", "`seek(step=)` is gone"),
        ("telemetry", "loader.lanes", "the counter `lanes` was dropped"),
    ],
)
def test_names_may_be_written_as_people_write_them(section: str, name: str, text: str) -> None:
    assert not unexplained(differences(FACE, without((section, name))), changelog(text))


def test_what_goes_with_its_owner_is_named_by_it() -> None:
    names = [("commands", name) for name in ("build", "build --jobs", "build -j")]
    names += [("python", name) for name in FACE["python"] if "Loader" in name]
    found = differences(FACE, without(*names))
    assert len(found) == 6
    assert unexplained(found, changelog("`build` and `Loader` are gone.")) == []


def test_a_silent_removal_is_not_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "face.json"
    assert freeze(FACE, {}, path, changelog("New.")) == 0
    before = path.read_bytes()
    assert freeze(without(("metrics", "shardkit_step")), {}, path, changelog("New.")) == 1
    assert path.read_bytes() == before
    assert "- metrics: shardkit_step: gauge" in capsys.readouterr().out

    grown = FACE | {"stats": FACE["stats"] | {"moves": "number"}}
    assert freeze(grown, {}, path, changelog("New."), check=True) == 1
    assert path.read_bytes() == before
    assert freeze(grown, {}, path, changelog("New.")) == 0
    assert load(path)[0] == grown
    assert "+ stats: moves: number" in capsys.readouterr().out
