"""`shardkit tag`: a name for a version that never moves."""

from __future__ import annotations

from typing import Annotated

from shardkit.copies.replicate import commit
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF, Repository
from shardkit_tools import console, options
from shardkit_tools.options import argument


def tag(
    root: Annotated[str, argument("ROOT[@REF]", "The version to name; without @REF: main.")],
    name: Annotated[str, argument("NAME", "The tag.")],
    ref: Annotated[str | None, argument("[REF]", "Another way to say which version.")] = None,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    as_json: options.JsonFlag = False,
) -> None:
    """Give a version a name that can never be moved to another.

    Example: shardkit tag data/cats v1 -m "as used in the paper"
    """
    path, given = parse_dataset_url(root)
    wanted = ref or given or DEFAULT_REF
    repository = Repository.open(path)
    manifest = repository.resolve(wanted)
    known = repository.tags.get(name) == manifest
    if not known:
        commit(repository, {}, {name: manifest}, message=message or f"tag {name} for {wanted}", author=author)
    if as_json:
        console.print_json({"root": path, "tag": name, "id": manifest, "created": not known})
    else:
        console.print_line(f"{path}@{name} {f'was {manifest} already' if known else f'is {manifest}'}")
