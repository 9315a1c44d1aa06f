"""An importer whose samples went through a function and a tokenizer, on their way to being encoded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardkit.errors import SampleError, SchemaError, SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.protocol import Importer, SourceFailure, SourceFile, SourceSample, SourceTask
from shardkit_tools.transforms.applied import AppliedFunction
from shardkit_tools.transforms.output_types import types_of
from shardkit_tools.transforms.tokenizing import TOKENS, TextTokenizer, find_text_field

_SAMPLES_LOOKED_AT = 64
_ROWS_LOOKED_AT = 10_000


class TransformedImporter:
    """`Importer` of what the transforms make of another one's samples.

    Args:
        importer: of the source.
        function: applied first, or None.
        tokenizer: then applied to the text, or None.
        text_field: which field is text, where that is not clear.
        output_types: field → type of the samples that come out, where the inferred one will not do.
        skip: infer types from the samples that can be made, and leave out the others.

    Raises:
        ConfigurationError, SchemaError: the samples cannot be transformed so.
        SourceError, SampleError: the first samples cannot be made.
    """

    def __init__(
        self,
        importer: Importer,
        function: AppliedFunction | None = None,
        tokenizer: TextTokenizer | None = None,
        *,
        text_field: str | None = None,
        output_types: Mapping[str, str] | None = None,
        skip: bool = False,
    ) -> None:
        self._importer = importer
        self._function = function
        self._tokenizer = tokenizer
        given = dict(output_types or {})
        tokens = given.pop(TOKENS, None) if tokenizer else None
        schema = importer.schema
        if function is not None:
            first = itertools.islice(self._first_samples(skip), _SAMPLES_LOOKED_AT)
            schema = types_of(first, importer.schema, given, skip=skip)
        elif given:
            raise SchemaError(
                f"--output-schema names {', '.join(given)}, which nothing makes; types of the source are given "
                "with --schema"
            )
        self._text = find_text_field(schema, text_field) if tokenizer else ""
        if tokenizer is not None:
            kind = tokens or f"{tokenizer.dtype}[*]" + "?" * schema[self._text].optional
            schema = Schema.parse(
                {
                    TOKENS if n == self._text else n: kind if n == self._text else str(t)
                    for n, t in schema.items()
                }
            )
        self._schema = schema

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def classes(self) -> tuple[str, ...]:
        """See `Importer`; none where the label is gone."""
        label = self._schema.get("label")
        return self._importer.classes if label is not None and str(label) == "int64" else ()

    def files(self) -> Sequence[SourceFile]:
        return self._importer.files()

    def tasks(self) -> Sequence[SourceTask]:
        return self._importer.tasks()

    def describe(self) -> dict[str, object]:
        return self._importer.describe()

    def transforms(self) -> dict[str, object]:
        """What the recipe says of the transforms, beside the source."""
        said: dict[str, object] = {}
        if self._function is not None:
            said["apply"] = self._function.describe()
        if self._tokenizer is not None:
            said["tokenizer"] = self._tokenizer.describe(self._text)
        return said

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """See `Importer`; a sample that cannot be transformed is a failure of its row."""
        for found, where in self._rows(task):
            if isinstance(found, SourceFailure):
                yield found
                continue
            try:
                samples = [self._tokenise(sample, where) for sample in self._apply(found.sample, where)]
            except SampleError as error:
                yield SourceFailure(found.source_name, found.source_row, error)
                continue
            for piece, sample in enumerate(samples):
                key = found.key if len(samples) == 1 or found.key is None else f"{found.key}-{piece}"
                yield SourceSample(sample, key, found.source_name, found.source_row, piece)

    def _rows(self, task: SourceTask) -> Iterator[tuple[SourceSample | SourceFailure, _Where]]:
        paths = {file.name: file.path for file in task.files}
        is_seen = self._function is not None
        gaps = dict.fromkeys(name for name, kind in self._importer.schema.items() if kind.optional or is_seen)
        for found in self._importer.read(task):
            if gaps and isinstance(found, SourceSample):  # a function sees None, and no field come and go
                found = replace(found, sample={**gaps, **found.sample})
            yield found, _Where(found, paths)

    def _apply(self, sample: Mapping[str, object], where: _Where) -> Iterator[Mapping[str, object]]:
        if self._function is None:
            return iter((sample,))
        return self._function(sample, where)

    def _tokenise(self, sample: Mapping[str, object], where: _Where) -> Mapping[str, object]:
        if self._tokenizer is None:
            return sample
        if self._text not in sample:
            return sample  # the schema says what is missing
        made = dict(sample)
        text = made.pop(self._text)
        has_none = text is None and self._schema[TOKENS].optional
        made[TOKENS] = None if has_none else self._tokenizer.encode(text, where)
        return made

    def _first_samples(self, skip: bool) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Samples to learn the types from, out of rows enough to find some where most are filtered out."""
        looked_at = 0
        made = 0
        for task in self._importer.tasks():
            try:
                for found, where in self._rows(task):
                    for sample in self._first_of(found, where, skip):
                        yield str(where), sample
                        made += 1
                    looked_at += 1
                    if made and looked_at >= _ROWS_LOOKED_AT:
                        return
            except SourceError:
                if not skip:
                    raise

    def _first_of(
        self, found: SourceSample | SourceFailure, where: _Where, skip: bool
    ) -> list[Mapping[str, object]]:
        try:
            if isinstance(found, SourceFailure):
                raise found.error
            return list(self._apply(found.sample, where))
        except (SampleError, SourceError):
            if not skip:
                raise
            return []


class _Where:
    """A row by file and number; the text is made only when a message needs it."""

    def __init__(self, found: SourceSample | SourceFailure, paths: Mapping[str, str]) -> None:
        self._found = found
        self._paths = paths

    def __str__(self) -> str:
        found = self._found
        text = f"{self._paths.get(found.source_name, found.source_name)} row {found.source_row}"
        key = found.key if isinstance(found, SourceSample) else None
        return text if key is None else f"{text} (key {key!r})"
