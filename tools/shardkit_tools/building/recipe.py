"""`shardkit_tools.build`: a source in, a committed version out; parallel, in bounded memory, killable.

Two passes. The first reads the source task by task and leaves every row encoded in scratch, with a row table
beside it; the second lays all rows out and writes each shard from scratch. Both journal what is finished
(SPEC.md of shardkit.dataset §5).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import ParamSpec

from shardkit.dataset.committing import block_size_for
from shardkit.repository.repository import Repository
from shardkit_tools.building.build_run import BuildInput, BuildRun
from shardkit_tools.building.engines import open_engine
from shardkit_tools.building.outcome import BuildResult, BuildSettings
from shardkit_tools.building.packing import PackSettings
from shardkit_tools.building.reading import RowMarks
from shardkit_tools.importers import Importer, ImportOptions
from shardkit_tools.importers.detection import find_source
from shardkit_tools.importers.folder import FolderLayout, split_notes
from shardkit_tools.transforms import AppliedFunction, TextTokenizer, TransformedImporter

_P = ParamSpec("_P")


def _of_settings(
    settings: Callable[_P, BuildSettings],
) -> Callable[[Callable[[BuildSettings], BuildResult]], Callable[_P, BuildResult]]:
    """A function of settings as one of their fields, by which people call it."""

    def spread(function: Callable[[BuildSettings], BuildResult]) -> Callable[_P, BuildResult]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> BuildResult:
            return function(settings(*args, **kwargs))

        shown = inspect.signature(settings).replace(return_annotation=BuildResult)
        called.__signature__ = shown  # type: ignore[attr-defined]  # what `help` and tools show
        return called

    return spread


@_of_settings(BuildSettings)
def build(settings: BuildSettings) -> BuildResult:
    """Build a version of the dataset at ``root`` from a source.

    The manifest depends on the source and the settings alone: not on jobs, scratch, kills or the machine. After a kill,
    Ctrl-C or an error the same call goes on where it stood.

    Args:
        settings: the fields of `BuildSettings`: ``build("photos", "data/cats", stratify="label")``.

    Raises:
        NotFoundError, SourceError, SampleError: the source; names file and row.
        SchemaError, ConfigurationError, UsageError: a setting; or a ref names samples of another schema.
        CommitConflict: another commit moved a ref meanwhile; says how this version can be named all the same.
        StoreError: the root or the scratch disk.
        RunError: a process died, or another one is at work on the same build.
        KeyboardInterrupt: on Ctrl-C; its text says how to go on.
    """
    engine = open_engine(settings.engine, settings.jobs, settings.address)
    blocks = block_size_for(settings.root, settings.ref, settings.block_size)
    settings = dataclasses.replace(settings, block_size=blocks)
    run = BuildRun(settings, _input(settings), engine)
    if settings.dry_run:
        return run.count()
    if settings.single_writer:
        Repository.create(settings.root, single_writer=True)
    return run.build()


def _input(settings: BuildSettings) -> BuildInput:
    """What is read, how it is changed on the way, and what it becomes."""
    left_out: tuple[str, ...] = ()
    if isinstance(settings.source, Importer):
        importer = settings.source
    else:
        options = settings.options or ImportOptions(skip_bad_rows=settings.skips)
        options = dataclasses.replace(options, unchecked=settings.apply is not None)
        importer, left_out = find_source(os.fspath(settings.source), settings.from_, options)
    layout: FolderLayout | None = getattr(importer, "layout", None)
    if settings.apply is not None or settings.tokenizer is not None or settings.output_schema:
        importer = TransformedImporter(
            importer,
            AppliedFunction.find(settings.apply) if settings.apply is not None else None,
            TextTokenizer.open(settings.tokenizer) if settings.tokenizer is not None else None,
            text_field=settings.text_field,
            output_types=settings.output_schema,
            skip=settings.skips,
        )
    schema, classes = importer.schema, importer.classes
    folders = layout.splits if layout else {}
    encoder = settings.encoder(schema, classes, folders)
    recipe: dict[str, object] = {"source": importer.describe()}
    if isinstance(importer, TransformedImporter):
        recipe |= importer.transforms()
    if settings.unique is not None:
        recipe["unique"] = settings.unique
    ((packed, length),) = settings.pack.items() if settings.pack else ((None, 0),)
    marks = RowMarks.of(schema, unique=settings.unique, packed=packed)
    packing = None
    if packed is not None:
        packing = PackSettings.of(schema, packed, length, settings.axes, settings.format)
        recipe["pack"] = packing.describe()
        schema = packing.rows
        classes = classes if "label" in schema else ()
    return BuildInput(
        importer=importer,
        encoder=encoder,
        version=settings.version(schema, classes, ref=settings.ref, folders=folders, recipe=recipe),
        packing=packing,
        marks=marks,
        counts=layout.counts if layout else {},
        notes=left_out + (layout.notes if layout else split_notes(file.name for file in importer.files())),
    )
