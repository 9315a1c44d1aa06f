"""`shardkit_tools.build`: a source in, a committed version out; parallel, in bounded memory, killable.

Two passes. The first reads the source task by task and leaves every row encoded in scratch, with a row table
beside it; the second lays all rows out and writes each shard from scratch. Both journal what is finished
(SPEC.md of shardkit.dataset §5).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit.dataset.about import About
from shardkit.dataset.ref_moves import block_size_for
from shardkit.dataset.version_settings import VersionSettings
from shardkit.errors import ConfigurationError, UsageError
from shardkit.formats import Schema
from shardkit.repository.repository import Repository
from shardkit_tools.building.build_run import BuildRun
from shardkit_tools.building.engine import Engine
from shardkit_tools.building.engines import open_engine
from shardkit_tools.building.outcome import BuildResult, BuildSettings, ProgressCallback
from shardkit_tools.building.packing import PackSettings
from shardkit_tools.building.row_marks import RowMarks
from shardkit_tools.importers import Importer, ImportOptions
from shardkit_tools.importers.detection import find_source
from shardkit_tools.importers.folder_layout import FolderLayout, split_notes
from shardkit_tools.transforms import AppliedFunction, TextTokenizer, TransformedImporter


def build(
    source: str | os.PathLike[str] | Importer,
    root: str | os.PathLike[str],
    *,
    from_: str | None = None,
    options: ImportOptions | None = None,
    stratify: str | Sequence[str] | None = None,
    format: str = "tar",
    compression: str = "none",
    shard_size: int | str = "256MiB",
    block_size: int | str | None = None,
    seed: int = 0,
    shuffle: bool = True,
    split: Mapping[str, float | str] | None = None,
    split_by: str | None = None,
    apply: str | Callable[..., Any] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    text_field: str | None = None,
    output_schema: Mapping[str, str] | None = None,
    unique: str | None = None,
    pack: Mapping[str, int] | None = None,
    append: bool = False,
    about: About | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] = (),
    cost: str | Sequence[str] = (),
    ref: str = "main",
    replace: bool = False,
    message: str = "",
    author: str = "",
    jobs: int | None = 1,
    engine: str | Engine = "local",
    address: str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    on_error: str = "raise",
    skipped_file: str | os.PathLike[str] | None = None,
    single_writer: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> BuildResult:
    """Build a version of the dataset at ``root`` from a source.

    The manifest depends on the source and the settings alone: not on jobs, scratch, kills or the machine. After a kill,
    Ctrl-C or an error the same call goes on where it stood.

    Args:
        source: a file, folder or glob, or an importer.
        root: where the dataset is or is to be.
        from_: name of the importer; by default it is detected.
        options: of the importer.
        stratify: field or fields by which batches are balanced; ``"__class__"`` for class names.
        format: ``"tar"`` or ``"arrow"``.
        compression: ``"none"``, ``"zstd"``, ``"zstd:9"`` or, for arrow, ``"lz4"``.
        shard_size: raw bytes per shard.
        block_size: raw bytes per block; by default those of the version that `ref` names, else 256 KiB.
        seed: of the shuffle.
        shuffle: False keeps the order of the source within each stratum.
        split: shares such as ``{"train": 0.9, "val": 0.1}``; each becomes a ref; ``ref`` holds all. Where the
            first folders of the source are splits (train, val, …), they become the refs; see `ImportOptions`.
        split_by: field whose equal values stay in one split.
        apply: a function of a module, or its name ``"package.module:function"``: sample → sample, list of samples or
            None; every process imports it. Its name and the SHA-256 of its file are part of the recipe.
        tokenizer: a ``tokenizer.json``; the text field becomes ``tokens``. Its SHA-256 is part of the recipe.
        text_field: the field to tokenise, where several are text.
        output_schema: field → type of what ``apply`` and ``tokenizer`` make, in place of the inferred types.
        unique: field; of rows whose values of it are equal to the last byte the first of the source stays.
        pack: ragged field → length, such as ``{"tokens": 2048}``: the samples are documents that are put together
            into rows of this length, with their borders in ``boundaries``; of other fields only those by which the
            dataset is stratified stay. Rows are filled up with zeros.
        append: put the rows behind those of the version that ``ref`` names; the rest must be as it was built.
            Appending the very files that the last version appended changes nothing.
        about: licence, source and contact, also per stratum: a file ``about.toml``, or what one would say.
        lookup: fields by whose values samples are to be found, such as ``"key,url,image:sha256"``.
        cost: what rows cost, for plans with ``cost=``, such as ``"len(tokens)**2"``; or several expressions.
        ref: the ref that is moved.
        replace: whatever the refs name, another schema and what others commit meanwhile included.
        single_writer: for a new root on a store that does not keep put-if-absent: nobody else writes it meanwhile.
        message: of the commit.
        author: of the commit.
        jobs: processes; with more than 1 a script that calls this needs ``if __name__ == "__main__":``. None for one
            per processor, of the cluster where there is one.
        engine: ``"local"``, ``"ray"``, or an `Engine` of your own that runs the tasks elsewhere.
        address: of a running Ray cluster; without it ``"ray"`` starts one here.
        scratch: directory for encoded rows, about as large as the source, that all workers see; by default inside
            ``root``.
        on_error: ``"raise"``, or ``"skip"`` to leave out rows that cannot be read or do not fit, empty folders, and
            files of another kind than most are.
        skipped_file: where rows left out are listed as JSON lines; by default beside the scratch.
        dry_run: read and lay out everything, write nothing.
        progress: called with a `Progress` a few times a second.

    Raises:
        NotFoundError, SourceError, SampleError: the source; names file and row.
        SchemaError, ConfigurationError, UsageError: a setting; or a ref names samples of another schema.
        CommitConflict: another commit moved a ref meanwhile; says how this version can be named all the same.
        StoreError: the root or the scratch disk.
        RunError: a process died, or another one is at work on the same build.
        KeyboardInterrupt: on Ctrl-C; its text says how to go on.
    """
    given = locals()
    if on_error not in ("raise", "skip"):
        raise ConfigurationError(f'on_error is {on_error!r}; expected "raise" or "skip"')
    doing = open_engine(engine, jobs, address)
    given["block_size"] = block_size_for(root, ref, block_size)
    settings = VersionSettings(**{one.name: given[one.name] for one in dataclasses.fields(VersionSettings)})
    if unique is not None and append:
        raise UsageError(
            f"unique={unique!r} with append: the rows that are there are not compared; build into a ref of its own, "
            "then merge, or build all of it anew"
        )
    left_out: tuple[str, ...] = ()
    options = options or ImportOptions(skip_bad_rows=on_error == "skip")
    if isinstance(source, Importer):
        importer = source
    else:
        options = dataclasses.replace(options, unchecked=apply is not None)
        importer, left_out = find_source(os.fspath(source), from_, options)
    layout = getattr(importer, "layout", None)
    folders = layout.splits if isinstance(layout, FolderLayout) else {}
    transforms: dict[str, object] = {}
    if text_field is not None and tokenizer is None:
        raise UsageError(f"text_field={text_field!r} without tokenizer; give the tokenizer too")
    if apply is not None or tokenizer is not None or output_schema:
        importer = TransformedImporter(
            importer,
            AppliedFunction.find(apply) if apply is not None else None,
            TextTokenizer.open(tokenizer) if tokenizer is not None else None,
            text_field=text_field,
            output_types=output_schema,
            skip=on_error == "skip",
        )
        transforms = importer.transforms()
    schema, classes = importer.schema, importer.classes
    encoder = settings.encoder(schema, classes, folders)
    packing = _packing(schema, pack, settings.axes, format)
    marks = RowMarks.of(schema, unique=unique, packed=packing.field if packing else None)
    if unique is not None:
        transforms["unique"] = unique
    if packing is not None:
        transforms["pack"] = packing.describe()
        schema = packing.rows
        classes = classes if "label" in schema else ()
    recipe = {"source": importer.describe(), **transforms}
    version = settings.version(schema, classes, ref=ref, folders=folders, recipe=recipe)
    run = BuildRun(
        importer,
        encoder,
        version,
        BuildSettings(
            root=os.fspath(root),
            source=os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else "",
            scratch=os.fspath(scratch) if scratch is not None else None,
            skipped_file=os.fspath(skipped_file) if skipped_file is not None else None,
            skip=on_error == "skip",
            append=append,
            ref=ref,
            replace=replace,
            classes=layout.counts if isinstance(layout, FolderLayout) else {},
            notes=left_out
            + (
                layout.notes
                if isinstance(layout, FolderLayout)
                else split_notes(f.name for f in importer.files())
            ),
            message=message,
            author=author,
            pack=packing,
            marks=marks,
            hash_threads=jobs or os.cpu_count() or 1,
        ),
        doing,
        progress,
    )
    if dry_run:
        return run.count()
    if single_writer:
        Repository.create(root, single_writer=True)
    return run.build()


def _packing(
    schema: Schema, pack: Mapping[str, int] | None, axes: tuple[str, ...], format: str
) -> PackSettings | None:
    if pack is None:
        return None
    if len(pack) != 1:
        raise ConfigurationError(
            f"pack names {len(pack)} fields ({', '.join(pack)}); give one field and its length"
        )
    ((field, length),) = pack.items()
    RowMarks.of(schema, unique=None, packed=field)
    return PackSettings.of(schema, field, length, axes, format)
