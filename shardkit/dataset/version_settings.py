"""What every way to make a version takes alike, and the version that is to be made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardkit.dataset.about import About, given_about
from shardkit.dataset.costs import parse_costs
from shardkit.dataset.encoding import RowEncoder
from shardkit.dataset.layout import BLOCK_BYTES, LayoutSettings
from shardkit.dataset.lookups import parse_lookup
from shardkit.dataset.splits import Split, folder_split, parse_split
from shardkit.errors import UsageError
from shardkit.formats import Schema, extension, normalise_compression
from shardkit.ranges import parse_size

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """What a new version is to be, apart from its rows."""

    schema: Schema
    format: str
    compression: str  # normalised
    axes: tuple[str, ...]  # fields by which it is stratified
    classes: tuple[str, ...]  # names of the values of `label`
    settings: LayoutSettings
    split: Split | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)  # more settings that decide the bytes: plain JSON
    sources: str | None = None  # digest of the object that lists the source files
    about: About | None = None  # licence, source and contact; None: what the base says
    # fields of which sidecars are made; of a base its own are carried on, as costs
    lookups: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()  # expressions of which rows' costs are written

    def refs(self, ref: str) -> tuple[str, ...]:
        """All refs that it moves, where ``ref`` is to name all rows."""
        return (ref, *(self.split.names if self.split else ()))

    def build_settings(self) -> dict[str, Any]:
        """What the manifest says of how it was built."""
        return {
            **self.recipe,
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
            "shard_size": self.settings.shard_size,
            "block_size": self.settings.block_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSettings:
    """Settings of a version, as `create`, `build`, `rebuild` and the parts of a version give them; checked when made.

    Raises:
        ConfigurationError, UsageError: a setting that cannot be carried out.
    """

    stratify: str | Sequence[str] | None = None
    format: str = "tar"
    compression: str = "none"
    shard_size: int | str = "256MiB"
    block_size: int | str | None = None
    seed: int = 0
    shuffle: bool = True
    split: Mapping[str, float | str] | None = None
    split_by: str | None = None
    about: About | Mapping[str, Any] | str | os.PathLike[str] | None = None
    lookup: str | Sequence[str] = ()
    cost: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.split_by is not None and self.split is None:
            raise UsageError(f"split_by={self.split_by!r} without split; give the shares too")
        extension(self.format, normalise_compression(self.compression))
        self.layout()

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.stratify,) if isinstance(self.stratify, str) else tuple(self.stratify or ())

    def layout(self) -> LayoutSettings:
        """Where rows go."""
        return LayoutSettings(
            seed=self.seed,
            shuffle=self.shuffle,
            shard_size=parse_size(self.shard_size),
            block_size=BLOCK_BYTES if self.block_size is None else parse_size(self.block_size),
        )

    def encoder(
        self, schema: Schema, classes: Sequence[str], folders: Mapping[str, str] = _NONE
    ) -> RowEncoder:
        """Of the rows, as they are before they are packed."""
        return RowEncoder(
            schema,
            self.format,
            stratify=self.axes,
            classes=classes,
            split_by=self.split_by,
            split_folders=folders,
        )

    def version(
        self,
        schema: Schema,
        classes: Sequence[str],
        *,
        ref: str,
        folders: Mapping[str, str] = _NONE,
        recipe: Mapping[str, Any] = _NONE,
    ) -> NewVersion:
        """What is to be made.

        Args:
            schema: of its rows.
            classes: names of the values of ``label``.
            ref: that names all rows; no split may have its name.
            folders: folder of the source → split, where the source has splits.
            recipe: more settings that decide the bytes.
        """
        return NewVersion(
            schema=schema,
            format=self.format,
            compression=normalise_compression(self.compression),
            axes=self.axes,
            classes=tuple(classes),
            settings=self.layout(),
            split=self._split(folders, ref),
            recipe=dict(recipe),
            about=None if self.about is None else given_about(self.about),
            lookups=parse_lookup(self.lookup, schema) if self.lookup else (),
            costs=parse_costs(self.cost, schema) if self.cost else (),
        )

    def _split(self, folders: Mapping[str, str], ref: str) -> Split | None:
        """By the folders of the source where they are splits, else by shares."""
        if not folders:
            return parse_split(self.split, self.split_by, ref=ref) if self.split is not None else None
        if self.split is not None:
            raise UsageError(
                f"the folders {', '.join(folders)} of the source are splits already, and become refs; leave out "
                "--split (split=), or pass --no-split-folders (split_folders=False) to take them as classes"
            )
        return folder_split(folders.values(), ref=ref)
