"""Extensions of tar members, so that webdataset and other readers decode them by their names."""

from __future__ import annotations

from .schema import FieldType

__all__ = ["member_extension", "sniff_extension"]

# (offset, magic bytes, extension); the first match wins. Four letters at most (`keys.MAX_EXTENSION`).
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"GIF87a", "gif"),
    (0, b"GIF89a", "gif"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (0, b"ID3", "mp3"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (4, b"ftyp", "mp4"),
    (0, b"%PDF-", "pdf"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav"}


def sniff_extension(payload: bytes | memoryview) -> str:
    """Extension for opaque bytes by their first 16 bytes; ``bin`` where nothing is recognised."""
    head = bytes(payload[:16])
    for offset, magic, extension in _MAGIC:
        if head.startswith(magic, offset):
            return extension
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "bin")
    # Two letters are a weak magic: the size that a BMP repeats in its header makes it a strong one.
    if head[:2] == b"BM" and int.from_bytes(head[2:6], "little") == len(payload):
        return "bmp"
    # MPEG-1/2 layer III without ID3 tag: 11 sync bits, layer 3, a bit rate and a sampling rate that exist.
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[1] & 0x18 != 0x08:
        return "mp3" if 0x10 <= head[2] < 0xF0 and head[2] & 0x0C != 0x0C else "bin"
    return "bin"


def member_extension(kind: FieldType, payload: bytes | memoryview) -> str:
    """Extension of the tar member that holds `payload`, by webdataset's conventions."""
    if kind.kind == "bytes":
        return sniff_extension(payload)
    if kind.kind == "str":
        return "txt"
    if kind.kind == "json":
        return "json"
    if kind.is_whole:
        return "cls"
    return "npy"
