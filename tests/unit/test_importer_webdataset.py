from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit_tools.importers import ImportOptions, open_source
from shardkit_tools.importers.tar_members import Member, members_and_damage
from tests.importer_conformance import check_importer, read_all


def npy(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], tar_format: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1700000000.5  # webdataset writes fractions: a pax header each
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def header(
    name: bytes = b"a.txt", size: bytes = b"00000000002\0", kind: bytes = b"0", magic: bytes = b"ustar\x0000"
) -> bytes:
    """A tar header with the right checksum around whatever fields it is given."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:124] = b"0000644\x000000000\x000000000\0"
    block[124:136] = size
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = magic
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: Mapping[str, str]) -> bytes:
    body = b""
    for keyword, value in records.items():
        text = f" {keyword}={value}\n".encode()
        length = len(text) + len(str(len(text) + len(str(len(text)))))
        body += str(length).encode() + text
    return header(b"pax", b"%011o\0" % len(body), b"x") + body.ljust(-(-len(body) // 512) * 512, b"\0")


BODY = b"hi".ljust(512, b"\0")
END = bytes(1024)
GLOBAL_PATH = header(b"g", b"%011o\0" % 16, b"g") + b"16 path=../evil\n".ljust(512, b"\0")


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_of_common_writers_and_long_names(tmp_path: Path, tar_format: int) -> None:
    name = "d" * 90 + "/" + "k" * (60 if tar_format == tarfile.USTAR_FORMAT else 140)
    members = {"./" + name + ".txt": b"one", "b.txt": b"two"}
    if tar_format != tarfile.USTAR_FORMAT:
        members["Grüße.txt"] = b"three"
    importer = open_source(write_tar(tmp_path / "a.tar", members, tar_format))
    assert [(row.key, row.sample["text"]) for row in check_importer(importer)] == [
        (name_.removeprefix("./").removesuffix(".txt"), data.decode()) for name_, data in members.items()
    ]


def test_compressed_tars_and_folders_in_them(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        folder = tarfile.TarInfo("data")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        info = tarfile.TarInfo("data/1.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    (tmp_path / "x.tgz").write_bytes(gzip.compress((tmp_path / "x.tar").read_bytes()))
    (tmp_path / "x.tar").unlink()
    assert [row.key for row in check_importer(open_source(str(tmp_path)))] == ["data/1"]


def test_vectors_of_several_lengths_are_ragged(tmp_path: Path) -> None:
    source = write_tar(tmp_path / "a.tar", {"1.t.npy": npy(np.arange(3)), "2.t.npy": npy(np.arange(5))})
    assert str(open_source(source).schema["t"]) == "int64[*]"
    source = write_tar(tmp_path / "a.tar", {"1.t.npy": npy(np.arange(3)), "2.t.npy": npy(np.zeros(3))})
    with pytest.raises(SourceError, match=r"'2' \.t\.npy: an array of type float64\[3\], but int64\[3\]"):
        open_source(source)


@pytest.mark.parametrize("name", ["0.pyd", "0.pth", "0.pt", "0.pickle", "0.x.pkl"])
def test_pickles_are_never_loaded(tmp_path: Path, name: str) -> None:
    source = write_tar(tmp_path / "a.tar", {name: pickle.dumps(1)})
    with pytest.raises(SourceError, match=rf"a\.tar member '{name}': a pickle can run any code"):
        open_source(source)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": b"a", "1.png": b"b"}, r"member '1\.png': a second member for the field 'image'"),
        (
            {"1.txt": b"a", "2.txt": b"b", "1.TXT": b"c"},
            r"member '1\.TXT': the sample '1' appears a second time",
        ),
        ({"1": b"a"}, "member '1': has no extension"),
        ({"1.cls": b"one"}, r"'1' \.cls: b'one' is not an integer"),
        ({"1.json": b"{"}, r"'1' \.json: not valid JSON"),
        ({"1.txt": b"\xff"}, r"'1' \.txt: not UTF-8"),
        ({"1.npy": b"\x93NUMPY"}, r"'1' \.npy: not a readable"),
        ({"1.npy": npy(np.arange(9))[:-1]}, r"'1' \.npy: 199 bytes, but its header .* asks for 200"),
        ({"1.npy": npy(["text"])}, "floats up to 64 bits can be stored"),
        ({"1.msgpack": b""}, "MessagePack members are not read"),
        ({}, "holds no samples"),
    ],
)
def test_errors_name_tar_and_member(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(SourceError, match=rf"a\.tar.*{message}"):
        read_all(open_source(write_tar(tmp_path / "a.tar", members)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"../../x.txt") + BODY + END, r"'\.\./\.\./x\.txt' has a name that leads out"),
        (header(b"/abs.txt") + BODY + END, r"'/abs\.txt' has a name that leads out"),
        (header(b"a/../../x.txt") + BODY + END, "leads out"),
        (pax({"path": "../evil.txt"}) + header() + BODY + END, r"'\.\./evil\.txt' has a name that leads out"),
        (pax({"size": "0"}) + header() + BODY + END, r"has the size 2 in its header and 0 in its pax record"),
        (pax({"size": "1024"}) + header() + BODY + BODY + END, "has the size 2 in its header and 1024"),
        (pax({"size": "-1"}) + header() + BODY + END, "claims the size '-1'"),
        (pax({"GNU.sparse.realsize": "1099511627776"}) + header() + BODY + END, "realsize' changes how"),
        (header(kind=b"S", size=b"\x80" + (2**40).to_bytes(11, "big")) + END, "without --sparse|claims 1099"),
        (header(size=b"\x80" + (2**42).to_bytes(11, "big")) + END, "claims 4398046511104 bytes"),
        (header(size=b"\xff" * 12) + END, "claims a negative size"),
        (header(size=b"99999999999\0") + END, "not an octal number"),
        (header(kind=b"1", size=b"00000000000\0") + END, "is a hard link"),
        (header(kind=b"2", size=b"00000000000\0") + END, "is a symbolic link"),
        (header(kind=b"3", size=b"00000000000\0") + END, "is a character device"),
        (header(kind=b"6", size=b"00000000000\0") + END, "is a pipe"),
        (header(kind=b"Z") + BODY + END, "unknown type.*write the tar again without it"),
        (header(b"d", kind=b"5") + BODY + END, "claims 2 bytes of data"),
        (header(b"a.txt", b"%011o\0" % (1 << 21), b"x") + END, "extension header claims 2097152"),
        (header() + BODY + END + header(b"hidden.txt") + BODY + END, "data follows the end of the tar"),
        (header() + BODY + bytes(512), "one zero block instead of two"),
        (header() + BODY, r"ends inside a header"),
        (header() + b"h", r"ends inside member 'a\.txt'"),
        (header(size=b"00000010000\0") + BODY, r"ends inside member 'a\.txt' \(512 of 4096 bytes\)"),
        (header().replace(b"a.txt", b"b.txt") + BODY + END, "checksum is"),
        (pax({"path": "b.txt"}) + END, "not followed by a member"),
        (GLOBAL_PATH + header() + BODY + END, "a global pax header sets path"),
        (header(b"x", b"%011o\0" % 9, b"x") + b"99 a=bcd\n".ljust(512, b"\0") + END, "malformed"),
        (header(b"\xff.txt") + BODY + END, "not UTF-8"),
        (b"not a tar".ljust(512) + END, "not an octal number"),
    ],
)  # fmt: skip
def test_hostile_tars_are_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"(?s)a\.tar.*({message})"):
        open_source(str(path))


def test_a_claimed_size_is_not_allocated() -> None:
    class Counting(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            self.largest = max(self.largest, size)
            return super().read(size)

    stream = Counting(header(size=b"%011o\0" % (4 << 30)) + BODY)
    with pytest.raises(SourceError, match="ends inside member"):
        list(members_and_damage(stream, "a.tar"))
    assert stream.largest <= 32 << 20


def flipped_headers() -> Iterator[tuple[int, bytes]]:
    whole = header() + BODY + header(b"b.txt") + BODY + END
    for bit in range(512 * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)


def test_a_flipped_bit_in_a_header_is_refused_or_changes_nothing() -> None:
    for bit, damaged in flipped_headers():
        try:
            found = list(members_and_damage(io.BytesIO(damaged), "a.tar"))
        except SourceError:
            continue
        if any(isinstance(one, Member) and one.why for one in found):
            continue
        members = [(one.name, one.data) for one in found if isinstance(one, Member)]
        assert members == [("a.txt", b"hi"), ("b.txt", b"hi")], f"bit {bit}"


def test_members_apart_are_said_to_be_apart(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.png": b"A", "1.png": b"B", "0.cls": b"0", "1.cls": b"1"})
    with pytest.raises(SourceError, match=r"a\.tar member '0\.cls'.*sorted by name \(tar --sort=name\)"):
        open_source(path)


def test_names_whose_dots_become_fields_are_noted(tmp_path: Path) -> None:
    names = ["12 Song 2.0 (Live).mp3", "13 Song 3.1 (Mix).mp3", "14 Plain.mp3"]
    path = write_tar(tmp_path / "a.tar", dict.fromkeys(names, b"A"))
    notes = open_source(path).source.notes
    assert "what follows the first dot of its name ('0 (live)'" in notes[0]
    assert not open_source(write_tar(tmp_path / "b.tar", {"a.left.png": b"A"})).source.notes


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, unique=True), min_size=1, max_size=4))
def test_equal_keys_in_several_tars(tars: list[list[str]]) -> None:
    """Every sample arrives; keys are unique for every setting that promises it."""
    with tempfile.TemporaryDirectory() as text:
        for number, keys in enumerate(tars):
            write_tar(Path(text, f"{number}.tar"), {f"{key}.txt": f"{number}{key}".encode() for key in keys})
        places = [(number, key) for number, keys in enumerate(tars) for key in keys]
        settings_of: dict[str, list[str | None]] = {
            "source": [key for _, key in places],
            "prefixed": [f"{number}/{key}" for number, key in places],
            "none": [None] * len(places),
        }
        repeats = len({keys[0] for keys in tars}) < len(tars)
        for how, expected in {**settings_of, "": settings_of["prefixed" if repeats else "source"]}.items():
            rows = read_all(open_source(text, options=ImportOptions(keys=how)))
            assert [row.sample["text"] for row in rows] == [f"{number}{key}" for number, key in places]
            assert [row.key for row in rows] == expected


@pytest.mark.parametrize(("member", "kind"), [("label", "int64"), ("mask", "bytes"), ("text", "str")])
def test_a_field_that_begins_late_is_taken_as_the_message_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, kind: str
) -> None:
    monkeypatch.setattr("shardkit_tools.importers.webdataset._SCAN_SAMPLES", 2)
    late = {"label": "cls", "mask": "mask.png", "text": "txt"}[member]
    path = write_tar(tmp_path / "a.tar", {**{f"{n}.jpg": b"A" for n in range(4)}, f"3.{late}": b"1"})
    with pytest.raises(SourceError, match=rf"--schema {member}={kind}\?"):
        read_all(open_source(path))
    rows = read_all(open_source(path, options=ImportOptions(field_types={member: f"{kind}?"})))
    assert [member in row.sample for row in rows] == [False, False, False, True]


def test_names_may_hold_line_ends(tmp_path: Path) -> None:
    members = {f"{number}{end}b.txt": b"%d" % number for number in range(9) for end in ("\n", "")}
    path = write_tar(tmp_path / "a.tar", members)
    found = [(row.key, row.sample["text"]) for row in read_all(open_source(path))]
    assert found == [(name.partition(".")[0], data.decode()) for name, data in members.items()]


def test_labels_of_selinux_are_harmless(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.txt")
        info.pax_headers = {"RHT.security.selinux": "unconfined_u:object_r:default_t:s0"}
        tar.addfile(info, io.BytesIO())
    assert len(read_all(open_source(str(tmp_path)))) == 1


@pytest.mark.parametrize("extension", ["pkl", "emb.pth", "npz", "msgpack"])
def test_members_that_are_not_read_can_be_left_out(tmp_path: Path, extension: str) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.jpg": b"A", f"1.{extension}": b"?"})
    with pytest.raises(SourceError, match="--drop") as refused:
        open_source(path)
    name = str(refused.value).rpartition("--drop ")[2]
    (row,) = read_all(open_source(path, options=ImportOptions(drop=(name,))))
    assert row.sample == {"image": b"A"}
