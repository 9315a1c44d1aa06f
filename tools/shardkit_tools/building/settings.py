"""The settings of a build: the command, `shardkit_tools.build` and `rebuild` share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from shardkit.dataset.version_settings import VersionSettings
from shardkit.errors import ConfigurationError, UsageError
from shardkit_tools.building.engine import Engine
from shardkit_tools.building.outcome import ProgressCallback
from shardkit_tools.importers import Importer, ImportOptions


@dataclass(frozen=True)
class BuildSettings(VersionSettings):
    """Everything that a build is told; of the version itself see `VersionSettings`.

    Attributes:
        source: a file, folder, glob or URL, or an importer.
        root: where the dataset is or is to be.
        from_: name of the importer; by default it is detected.
        options: of the importer.
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
        ref: the ref that is moved. By default blocks aim at the size of those of the version that it names.
        replace: whatever the refs name, another schema and what others commit meanwhile included.
        single_writer: for a new root on a store that does not keep put-if-absent: nobody else writes it meanwhile.
        message, author: of the commit.
        jobs: processes; with more than 1 a script that calls `build` needs ``if __name__ == "__main__":``. None for
            one per processor, of the cluster where there is one.
        engine: ``"local"``, ``"ray"``, or an `Engine` of your own that runs the tasks elsewhere.
        address: of a running Ray cluster; without it ``"ray"`` starts one here.
        scratch: directory for encoded rows, about as large as the source, that all workers see; by default inside
            ``root``.
        on_error: ``"raise"``, or ``"skip"`` to leave out rows that cannot be read or do not fit, empty folders, and
            files of another kind than most are.
        skipped_file: where rows left out are listed as JSON lines; by default beside the scratch.
        dry_run: read and lay out everything, write nothing.
        progress: called with a `Progress` a few times a second.
    """

    source: str | os.PathLike[str] | Importer
    root: str | os.PathLike[str]
    _: KW_ONLY
    from_: str | None = None
    options: ImportOptions | None = None
    apply: str | Callable[..., Any] | None = None
    tokenizer: str | os.PathLike[str] | None = None
    text_field: str | None = None
    output_schema: Mapping[str, str] | None = None
    unique: str | None = None
    pack: Mapping[str, int] | None = None
    append: bool = False
    ref: str = "main"
    replace: bool = False
    single_writer: bool = False
    message: str = ""
    author: str = ""
    jobs: int | None = 1
    engine: str | Engine = "local"
    address: str | None = None
    scratch: str | os.PathLike[str] | None = None
    on_error: str = "raise"
    skipped_file: str | os.PathLike[str] | None = None
    dry_run: bool = False
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        VersionSettings.__post_init__(self)
        if self.on_error not in ("raise", "skip"):
            raise ConfigurationError(f'on_error is {self.on_error!r}; expected "raise" or "skip"')
        if self.unique is not None and self.append:
            raise UsageError(
                f"unique={self.unique!r} with append: the rows that are there are not compared; build into a ref of "
                "its own, then merge, or build all of it anew"
            )
        if self.text_field is not None and self.tokenizer is None:
            raise UsageError(f"text_field={self.text_field!r} without tokenizer; give the tokenizer too")
        if self.pack is not None and len(self.pack) != 1:
            raise ConfigurationError(
                f"pack names {len(self.pack)} fields ({', '.join(self.pack)}); give one field and its length"
            )

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be read are left out."""
        return self.on_error == "skip"
