"""WebDataset tars: members with the same name up to the first dot form a sample.

They are decoded as by webdataset, except that decoders that can run code (pickle, torch) are refused by name.

    jpg png … → image: bytes    wav mp3 … → audio: bytes     mp4 … → video: bytes
    cls → label: int64          index, count, id, inx, cls2 → int64
    txt text transcript → text: str                          json → meta: json
    npy → its dtype and shape   bin → blob: bytes            others → bytes, named by their extension

A longer extension names its field: ``17.left.png`` is the field ``left``, ``17.tokens.npy`` the field
``tokens``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardkit.errors import SourceError
from shardkit.extras import shell_word
from shardkit.formats.cells import cell_value
from shardkit.formats.schema import FieldType
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.numpy_arrays import (
    array_type,
    check_precision,
    common_array,
    float_fields,
    read_array,
)
from shardkit_tools.importers.protocol import (
    MIXED,
    FileImporter,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import LeftOut, check_suffixes, open_plain, text_of
from shardkit_tools.importers.tar_members import (
    TEXTS,
    Member,
    field_of,
    members_and_damage,
    split_name,
)

# number of samples, in source order, that the schema is inferred from; the rest are checked against it
_SCAN_SAMPLES = 1000
_SHORT_NAME = 99  # longer names may be cut off in their header
_PICKLED = frozenset(["pyd", "pickle", "pkl", "pth", "pt"])
_UNREAD = {
    "ten": "tensor",
    "tb": "tensor",
    "mp": "MessagePack",
    "msgpack": "MessagePack",
    "cbor": "CBOR",
    "npz": "zipped NumPy",
}
_TARS_COMPARED = 64  # tars whose first keys decide whether keys repeat


@dataclass(frozen=True, kw_only=True)
class WebDatasetImporter(FileImporter):
    """Tars as a source, each one task: a tar can only be read from its start."""

    name: str = "webdataset"
    has_own_fields: ClassVar[bool] = True
    keys: str  # "source", "prefixed" or "none"

    def _rows(self, task: SourceTask) -> SampleStream:
        """Yield the samples; one with a member that cannot be decoded is a failure of that sample only."""
        (file,) = task.files
        types = {name: str(kind.required) for name, kind in self.fields.items()}
        optional = {name for name, kind in self.fields.items() if kind.optional}
        floats = {} if self.options.unchecked else float_fields(self.fields, self.options)
        read = _value_or_bytes if self.options.unchecked else value_of
        found = None
        for found in _samples(file, self.options):
            where = f"{file.path} sample {found.key!r}"
            members = self.options.kept(found.members)
            if found.is_torn and members.keys() != types.keys():
                continue  # the error next to it says so
            try:
                if found.error is not None:
                    raise found.error
                if not self.options.unchecked:
                    check_fields(members, types, where, optional)
                sample = {
                    name: read(
                        member.extension, types.get(name, MIXED), member.data, f"{where} .{member.extension}"
                    )
                    for name, member in members.items()
                }
                for name, dtype in floats.items():
                    check_precision(sample.get(name), dtype, name, where)
            except SourceError as error:
                yield SourceFailure(file.name, found.row, error)
                continue
            yield SourceSample(sample, self._key(file, found.key), file.name, found.row)
        if found is None:  # such as a download for which room was made only
            raise SourceError(f"{file.path}: the tar holds no samples; fetch it again, or leave it out")

    def _key(self, file: SourceFile, key: str) -> str | None:
        if self.keys == "none":
            return None
        return key if self.keys == "source" else f"{file.name.partition('.tar')[0]}/{key}"

    def _settings(self) -> dict[str, object]:
        return {} if self.keys == "source" else {"keys": self.keys}


def open_webdataset(source: Source, options: ImportOptions) -> WebDatasetImporter:
    """Infer the schema of tars from their first samples."""
    check_suffixes(source, ("tar", "tgz"), "a tar")
    types: dict[str, str] = {}
    left_out: dict[str, None] = {}
    counts: Counter[str] = Counter()
    scanned, bad = 0, LeftOut(options.skip_bad_rows)
    for where, members in itertools.islice(_first_samples(source, options, bad), _SCAN_SAMPLES):
        scanned += 1
        counts.update(members.keys())
        for name, member in members.items():
            if not options.keeps(name):
                left_out[name] = None
            elif name in options.field_types:
                types[name] = options.field_types[name]
            else:
                try:
                    found = field_type_of(member.extension, member.data, f"{where} .{member.extension}")
                    types[name] = _common_type(types.get(name, found), found, f"{where} .{member.extension}")
                except SourceError as error:
                    if options.unchecked:
                        types[name] = MIXED
                    else:
                        bad.add(error)
    if not (types or left_out):
        raise bad.no_samples(source.given, "the tar holds no samples; give tars with samples in them")
    for name, count in counts.items():
        if count < scanned and types.get(name, MIXED) != MIXED and name not in options.field_types:
            types[name] += "?"
    # a field that later samples have first
    types |= {n: kind for n, kind in options.field_types.items() if n not in types and kind.endswith("?")}
    source.notes.extend(_dotted_notes(counts, scanned))
    schema = options.schema(types, source.given, names=left_out)
    keys = options.keys or _keys(source, options)
    return WebDatasetImporter(source=source, fields=schema, options=options, keys=keys)


def _keys(source: Source, options: ImportOptions) -> str:
    """Return "prefixed" if tars begin with equal keys, as if their writers count from 0 in every tar."""
    first = set[str]()
    for file in source.files[:_TARS_COMPARED]:
        with contextlib.suppress(SourceError):  # it is an error, or skipped, when the tar is read
            samples = (found for found in _samples(file, options) if found.error is None)
            for found in itertools.islice(samples, 1):
                if found.key in first:
                    source.notes.append(
                        f"keys are prefixed with the name of their tar, because several have the key {found.key!r}"
                    )
                    return "prefixed"
                first.add(found.key)
    return "source"


def _first_samples(
    source: Source, options: ImportOptions, bad: LeftOut
) -> Iterator[tuple[str, Mapping[str, Member]]]:
    """Yield the samples for inference."""
    for file in source.files:
        for found in bad.before_damage(_samples(file, options)):
            if found.error is not None:
                bad.add(found.error)
            elif not found.is_torn:
                yield f"{file.path} sample {found.key!r}", found.members


def _dotted_notes(counts: Mapping[str, int], scanned: int) -> list[str]:
    """Return a note if dots in names have made fields that few samples have."""
    odd = [name for name, count in counts.items() if " " in name or ("." in name and 2 * count < scanned)]
    if not odd:
        return []
    shown = ", ".join(map(repr, odd[:3])) + " …" * (len(odd) > 3)
    note = f"a member's field is what follows the first dot of its name ({shown}); rename members with other dots"
    return [note]


def _value_or_bytes(extension: str, kind: str, data: bytes, where: str) -> object:
    """Return the value of a member, or its bytes if they do not fit its extension."""
    try:
        known = field_type_of(extension, data, where) if kind == MIXED else kind
        return value_of(extension, known, data, where)
    except SourceError:
        return data


def _samples(file: SourceFile, options: ImportOptions) -> Iterator[TarSample]:
    with open_plain(file) as stream:
        members = members_and_damage(stream, file.path, skip=options.skip_bad_rows)
        yield from tar_samples(members, file.path, options.keeps)


def check_fields(
    members: Mapping[str, object], types: Mapping[str, object], where: str, optional: Collection[str] = ()
) -> None:
    """Refuse a sample with an unknown field, or without a required one."""
    if members.keys() == types.keys():
        return
    missing = [name for name in types if name not in members and name not in optional]
    if missing:
        name = missing[0]
        raise SourceError(
            f"{where}: the field {name!r} is missing; add it, or build with --schema "
            f"{shell_word(name)}={str(types[name]).removesuffix('?')}?"
        )
    added = next((name for name in members if name not in types), None)
    if added is not None:
        word = shell_word(added)
        raise SourceError(
            f"{where}: has the field {added!r}, which the samples before it do not have; say its type, such as "
            f"--schema {word}={_LIKELY.get(added, 'bytes')}?, or add it to all"
        )


def _common_type(known: str, found: str, where: str) -> str:
    """Return a common type of two arrays: equal types stay, dimensions of different sizes become free."""
    if known == found:
        return known
    common = common_array(known, found)
    if common is not None:
        return common
    raise SourceError(
        f"{where}: an array of type {found}, but {known} in the samples before it; make the arrays alike"
    )


# ---- Values of members


_LIKELY = {"label": "int64", "text": "str", "meta": "json"}  # field → its type, for advice
_INTEGERS = frozenset(["cls", "cls2", "index", "count", "id", "inx"])
_JSON = ("json", "jsn")


def field_type_of(extension: str, data: bytes, where: str) -> str:
    """Return the field type of a member."""
    suffix = extension.rpartition(".")[2]
    if suffix in _INTEGERS:
        return "int64"
    if suffix in TEXTS:
        return "str"
    if suffix in _JSON:
        return "json"
    if suffix == "npy":
        array = read_array(data, where)
        return array_type(array.dtype, array.shape)
    return "bytes"


_parse = functools.cache(FieldType.parse)


@functools.cache
def _word(extension: str) -> str:
    """Return the field of an extension as a word of a command."""
    return shell_word(field_of(extension))


def value_of(extension: str, kind: str, data: bytes, where: str) -> object:
    """Return the value of a member: as bytes, text or JSON what it holds, otherwise as its extension says.

    Text that is to be another type is converted like a cell of a table.
    """
    suffix, kind = extension.rpartition(".")[2], kind.removesuffix("?")
    if kind == "bytes":
        return data
    if kind == "json" or (kind != "str" and suffix in _JSON):
        return parse_json(data, where)
    if kind != "str" and suffix in _INTEGERS:
        text = data.strip()
        if not re.fullmatch(rb"[+-]?[0-9]{1,20}", text):
            raise SourceError(
                f"{where}: {text[:40]!r} is not an integer; mend it, or read it as text with --schema "
                f"{_word(extension)}=str"
            )
        return int(text)
    if kind != "str" and suffix == "npy":
        return read_array(data, where)
    found = text_of(data, where, f"convert it, or keep the bytes with --schema {_word(extension)}=bytes")
    return found if kind == "str" else cell_value(found.strip(), _parse(kind), field_of(extension), where)


# ---- Samples of members


@dataclass(slots=True)
class TarSample:
    """Members that share a name up to its first dot."""

    key: str
    row: int  # number in the tar
    members: dict[str, Member]  # by field
    error: SourceError | None = None  # why the sample, or all in a damaged part (row -1), cannot be read
    is_torn: bool = False  # it is next to a damaged part, so members may be missing


def _field_facts(extension: str, keeps: Callable[[str], bool]) -> tuple[str, str]:
    """Return the field of an extension, and why its members are not read; "" if they are."""
    if not extension:
        return "", "has no extension, so its field is unknown; rename it (key.extension)"
    suffix, name = extension.rpartition(".")[2], field_of(extension)
    advice = f"convert the member to .npy or .json, or leave it out: --drop {shell_word(name)}"
    why = ""
    if keeps(name) and suffix in _PICKLED:
        why = f"a pickle can run any code when it is loaded, so it is never read; {advice}"
    elif keeps(name) and suffix in _UNREAD:
        why = f"{_UNREAD[suffix]} members are not read; {advice}"
    return name, why


def tar_samples(
    members: Iterable[Member | SourceError], path: str, keeps: Callable[[str], bool] = bool
) -> Iterator[TarSample]:
    """Yield the samples of a tar, without hidden files and the resource forks of macOS.

    A sample has an error if it or one of its fields appears twice, or a member has no extension or a format that is
    not read. Members of fields that `keeps` is false for may have any format.

    Args:
        members: members, and errors of damaged parts between them, as `members_and_damage` yields them.
        path: name of the tar, for messages.
        keeps: tells which fields are imported.

    Raises:
        SourceError: The rest of the tar cannot be read; the samples before were yielded.
    """
    facts_of = functools.cache(functools.partial(_field_facts, keeps=keeps))
    keys: set[str] = set()
    sample: TarSample | None = None  # its members are being read
    is_torn = False  # a damaged part precedes the next sample
    last, row = "", 0  # key of the last sample; number of the next
    try:
        for member in members:
            if isinstance(member, SourceError):
                if sample is not None:
                    sample.is_torn = True
                    yield sample
                sample, is_torn = None, True
                yield TarSample("", -1, {}, member)
                continue
            key, extension = split_name(member.name)
            if not key or (is_torn and not _is_own_name(member.name)):
                continue
            if sample is None or key != sample.key:
                if sample is not None:
                    yield sample
                is_rest = is_torn and key == last  # its first members are before a damaged part
                error = None if is_rest or key not in keys else _repeated_key(path, member.name, key)
                sample = TarSample(key, row, {}, error, is_torn)
                keys.add(key)
                last, row, is_torn = key, row + 1, False
            name, why = facts_of(extension)
            if name in sample.members:
                why = f"a second member for the field {name!r} of one sample; rename or remove one"
            if member.why or (why and sample.error is None):
                what = f": {member.why}" if member.why else f" member {member.name!r}: {why}"
                sample.error = SourceError(f"{path}{what}")
            sample.members[name] = member
    except SourceError:
        if sample is not None:
            sample.is_torn = True
            yield sample
        raise
    if sample is not None:
        yield sample


def _repeated_key(path: str, name: str, key: str) -> SourceError:
    return SourceError(
        f"{path} member {name!r}: the sample {key!r} appears a second time in the tar: its members are not next to "
        "each other, or two samples have one name; write the tar again sorted by name (tar --sort=name), or rename one"
    )


def _is_own_name(name: str) -> bool:
    """Return True if a name is certainly complete without an extension header, which may be lost in a damaged part."""
    return len(name) < _SHORT_NAME and name.isascii() and "?" not in name
