"""`shardkit select`: a version that holds only some samples of another; no sample is copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.committing import move_refs, standing_refs
from shardkit.dataset.lookups import NUMBER, check_absent, list_samples
from shardkit.dataset.selecting import put_selected
from shardkit.errors import UsageError
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.console import count_text
from shardkit_tools.options import argument, option
from shardkit_tools.row_lists import AbsentOption, read_values
from shardkit_tools.version_report import moved_document, moved_facts, parse_url, print_next


def select(
    root: Annotated[str, argument("ROOT[@REF]", "The version to take samples from.")],
    ref: Annotated[str, option("--ref NAME", "The ref that the new version gets.")],
    where: Annotated[
        str | None, option("--where CONDITION", "A condition, such as 'label < 5' or '`First Name` < 5'.")
    ] = None,
    rows: Annotated[
        Path | None, option("--rows FILE", "A file with the sample numbers to keep, one a line.")
    ] = None,
    exclude: Annotated[
        Path | None, option("--exclude FILE", "A list of samples to leave out, one value a line.")
    ] = None,
    field: Annotated[
        str | None,
        option("--field FIELD", "What --exclude names: key, number, url, …; default: keys, or else numbers."),
    ] = None,
    allow_absent: AbsentOption = False,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    as_json: options.JsonFlag = False,
) -> None:
    """Make a version that holds only some samples of another, over the same shards.

    Conditions compare number and text fields: and, or, not, in, ==, !=, <, <=, >, >=.

    Example: shardkit select data/web --where "lang in ('de', 'fr') and score >= 0.5" --ref good
    """
    if sum(option is not None for option in (where, rows, exclude)) != 1:
        raise UsageError("select takes one of --where, --rows and --exclude")
    if field is not None and exclude is None:
        raise UsageError("--field says what --exclude names; give both, or leave it out")
    repository = Repository.open(parse_url(root)[0])
    expected = standing_refs(repository, [ref])
    dataset = shardkit.open(root)
    if where is not None:
        view, note, said = dataset.select(where=where), {"where": where}, f"select {where}"
    else:
        view = dataset.select(rows=_numbers(dataset, rows, exclude, field, allow_absent))
        note, said = {"rows": "listed" if rows is not None else "all but listed"}, "select by list"
    manifest = put_selected(repository, view.version, note)
    moved = move_refs(repository, {ref: manifest.id}, expected, message=message or said, author=author)
    document = {
        "root": parse_url(root)[0],
        "ref": ref,
        "id": manifest.id,
        "samples": manifest.selected,
        "of_samples": dataset.manifest.selected,
        "moved": moved_document(moved.refs),
    }
    console.present(as_json, lambda: document, lambda: _print(document, moved.refs))


def _print(document: Mapping[str, Any], moved: Mapping[str, tuple[str | None, str]]) -> None:
    console.print_line(f"{document['root']}@{document['ref']}", "bold")
    samples = f"{count_text(document['samples'])} of {count_text(document['of_samples'])}"
    console.print_facts([("id", document["id"]), ("samples", samples), *moved_facts(moved)])
    print_next(document["root"], document["ref"])


def _numbers(
    dataset: Dataset, rows: Path | None, exclude: Path | None, field: str | None, allow_absent: bool
) -> NDArray[np.int64]:
    path = rows or exclude
    assert path is not None
    values = read_values(path, may_be_empty=True)
    listed = list_samples(dataset, values, NUMBER if rows is not None else field)
    if not allow_absent:
        check_absent(listed.absent, str(path))
    if rows is not None:
        return listed.samples
    return np.setdiff1d(np.arange(len(dataset), dtype=np.int64), listed.samples, assume_unique=True)
