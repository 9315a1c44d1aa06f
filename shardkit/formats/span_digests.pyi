"""SHA-256 of several buffers, two at a time, in one call during which other threads run (span_digests.c).

Importing it fails on a processor without instructions for SHA-256.
"""

from collections.abc import Sequence

def sha256_each(pieces: Sequence[bytes | bytearray | memoryview], /) -> list[bytes]:
    """The SHA-256 of each buffer, 32 bytes."""
