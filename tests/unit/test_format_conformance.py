"""The conformance suite, run on every (format, compression) pair that exists."""

from __future__ import annotations

from tests.format_conformance import FormatConformance


class TestTarPlain(FormatConformance):
    format, compression = "tar", "none"


class TestArrowPlain(FormatConformance):
    format, compression = "arrow", "none"


class TestArrowZstd(FormatConformance):
    format, compression = "arrow", "zstd"


class TestArrowZstdNine(FormatConformance):
    format, compression = "arrow", "zstd:9"
