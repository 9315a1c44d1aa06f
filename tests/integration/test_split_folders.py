"""Folders of pictures as the field lays them out: splits first, then classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from tests.command_line import document_of, typed
from tests.pictures import PNG


def pictures(root: Path, *names: str, head: bytes = PNG) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(head + name.encode())
    return root


def labels(url: str) -> dict[str, str]:
    """Key → class name."""
    dataset = shardkit.open(url)
    return {dataset.key(n): dataset.classes[dataset[n]["label"]] for n in range(len(dataset))}


def built(*arguments: object) -> Any:
    """What a build says with --json."""
    return document_of("build", *arguments, "--jobs", 1)


IMAGENET = (
    "train/cat/1.png",
    "train/cat/2.png",
    "train/dog/3.png",
    "train/emu/4.png",
    "val/cat/5.png",
    "val/dog/6.png",
)


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_imagenet_layout(tmp_path: Path, jobs: int) -> None:
    code, out, err = typed("build", pictures(tmp_path / "imgs", *IMAGENET), tmp_path / "d", "--jobs", jobs)
    assert (code, err) == (0, "")
    root = str(tmp_path / "d")
    assert shardkit.open(root).classes == ("cat", "dog", "emu")
    by_folder = {name.rpartition(".")[0]: name.split("/")[1] for name in IMAGENET}
    assert labels(root) == by_folder
    for split in ("train", "val"):
        assert labels(f"{root}@{split}") == {k: v for k, v in by_folder.items() if k.startswith(f"{split}/")}
        assert shardkit.open(f"{root}@{split}").classes == ("cat", "dog", "emu"), (
            "shared, so a number means the same"
        )
    assert "3: cat 3, dog 2, emu 1" in out
    assert "split val has nothing of class 'emu'" in out
    again = built(tmp_path / "imgs", tmp_path / "d")
    assert again["commit"] is None
    assert again["classes"] == {"cat": 3, "dog": 2, "emu": 1}


def test_any_case_and_every_name(tmp_path: Path) -> None:
    names = [f"{folder}/{kind}/{folder}.png" for folder in ("Train", "VAL", "valid", "validation", "test", "dev")
             for kind in ("a", "b")]  # fmt: skip
    done = built(pictures(tmp_path / "imgs", *names), tmp_path / "d")
    assert sorted(done["splits"]) == sorted(["train", "val", "valid", "validation", "test", "dev"])
    assert {split["samples"] for split in done["splits"].values()} == {2}
    assert set(labels(f"{tmp_path}/d@val")) == {"VAL/a/VAL", "VAL/b/VAL"}


def test_only_train_and_no_classes_at_all(tmp_path: Path) -> None:
    one = built(pictures(tmp_path / "one", "train/a/1.png", "train/b/2.png"), tmp_path / "d1")
    assert (list(one["splits"]), list(one["classes"])) == (["train"], ["a", "b"])
    bare = built(pictures(tmp_path / "bare", "train/1.png", "test/2.png"), tmp_path / "d2")
    assert sorted(bare["splits"]) == ["test", "train"]
    assert list(shardkit.open(tmp_path / "d2").schema) == ["image"], "no folder is a class"
    flat = built(tmp_path / "one", tmp_path / "d3", "--no-classes")
    assert (list(flat["splits"]), flat["classes"]) == (["train"], {})


def test_classes_that_have_such_a_name(tmp_path: Path) -> None:
    """A train among cars and buses is a vehicle; that it might be a split is said."""
    vehicles = pictures(tmp_path / "v", "train/1.png", "car/2.png", "bus/3.png")
    code, out, _ = typed("build", vehicles, tmp_path / "d")
    assert code == 0
    assert labels(str(tmp_path / "d")) == {"train/1": "train", "car/2": "car", "bus/3": "bus"}
    assert "--split-folders" in out
    only = pictures(tmp_path / "o", "train/a/1.png", "test/b/2.png")
    done = built(only, tmp_path / "d2", "--no-split-folders")
    assert (list(done["classes"]), done["splits"]) == (["test", "train"], {})
    folds = pictures(tmp_path / "f", "fold1/a/1.png", "fold2/b/2.png")
    assert sorted(built(folds, tmp_path / "d3", "--split-folders")["splits"]) == ["fold1", "fold2"]


@pytest.mark.parametrize(
    ("names", "more", "says"),
    [
        (("train/cat/1.png", "extra/cat/2.png"), (), "extra/ beside it"),
        (("train/cat/1.png", "readme.png"), (), "readme.png beside it"),
        (("train/cat/1.png", "Train/cat/2.png"), (), "several folders are the split 'train'"),
        (("train/cat/1.png", "train/2.png"), (), "so it has no class"),
        (IMAGENET, ("--split", "a=0.5,b=0.5"), "--no-split-folders"),
        (IMAGENET, ("--ref", "train"), "'train' cannot be a ref"),
    ],
)
def test_what_is_ambiguous_is_asked(
    tmp_path: Path, names: tuple[str, ...], more: tuple[str, ...], says: str
) -> None:
    code, _, err = typed("build", pictures(tmp_path / "imgs", *names), tmp_path / "d", *more)
    assert code in (1, 2)
    assert says in err
    assert not (tmp_path / "d" / "log").exists()


def test_the_unusual_is_said(tmp_path: Path) -> None:
    def notes(*names: str, folder: str) -> str:
        return " ".join(built(pictures(tmp_path / folder, *names), tmp_path / f"d-{folder}")["notes"])

    assert "one class only, 'a'" in notes("a/1.png", "a/2.png", folder="one")
    alike = notes("Cat/1.png", "cat/2.png", "dog/3.png", "e\u0301/4.png", "é/5.png", folder="alike")
    assert "2 classes: 'Cat', 'cat' differ in case" in alike
    assert "2 classes: 'e\u0301', 'é' differ in case, spaces or Unicode form only" in alike
    many = [f"id{n:03d}/photo.png" for n in range(30)]
    assert "30 of 30 classes have one sample each" in notes(*many, folder="many")
    assert "one sample only is in class 'b'" in notes(
        *(f"a/{n}.png" for n in range(9)), "b/x.png", folder="rare"
    )
    assert "samples lie 1 to 2 folders deep" in notes(
        "a/1.png", "a/x/2.png", "b/3.png", "b/4.png", folder="deep"
    )
    assert notes("a/1.png", "a/2.png", "b/3.png", "b/4.png", folder="usual") == ""


def test_tables_that_are_named_as_splits_are_told(tmp_path: Path) -> None:
    """They become one version, as in 0.1; who wanted refs is told how."""
    for folder, names in (
        ("a", ("train-00000-of-00001", "test-00000-of-00001")),
        ("b", ("train/0", "val/0")),
    ):
        for number, name in enumerate(names):
            path = tmp_path / folder / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'{{"n": {number}}}\n')
        done = built(tmp_path / folder, tmp_path / f"d-{folder}")
        assert (done["samples"], done["splits"]) == (2, {})
        assert "named as the splits train" in done["notes"][0]
        assert "--ref train" in done["notes"][0]
    one = built(tmp_path / "a" / "train-*", tmp_path / "d-one", "--ref", "train")
    assert (one["samples"], one["notes"]) == (1, [])


def test_text_with_splits_by_line_and_appended(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    for name, text in (
        ("train/pos/a.txt", "good\nfine\n"),
        ("test/neg/b.txt", "bad\n"),
        ("test/pos/c.txt", "ok\n"),
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    done = built(source, tmp_path / "d", "--from", "text", "--per", "line")
    assert {name: split["samples"] for name, split in done["splits"].items()} == {"train": 2, "test": 2}
    more = tmp_path / "more"
    for name in ("train/neg/d.txt", "test/pos/e.txt"):
        (more / name).parent.mkdir(parents=True, exist_ok=True)
        (more / name).write_text(f"{name}\n")
    grown = built(more, tmp_path / "d", "--from", "text", "--per", "line", "--append")
    assert {name: split["samples"] for name, split in grown["splits"].items()} == {"train": 3, "test": 3}
    texts = [shardkit.open(f"{tmp_path}/d@test")[n]["text"] for n in range(3)]
    assert sorted(texts) == ["bad", "ok", "test/pos/e.txt"]


def test_other_folders_keep_their_ids(tmp_path: Path) -> None:
    """A folder without splits: its id is pinned."""
    head = b"\x89PNG\r\n\x1a\n"  # and no picture: encoders differ between versions
    source = pictures(tmp_path / "imgs", "cat/1.png", "dog/2.png", "dog/3.png", head=head)
    options = ("--stratify", "label", "--block-size", "1MiB", "--check", "none")
    done = built(source, tmp_path / "d", *options)
    assert done["id"] == "sha256:3467af4f2f08c6efb4bfa9edb519834eaa9eb200a6d086b6ba3910685b0dd720"
