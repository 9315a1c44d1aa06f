"""Read-only HTTP server of a cache's blocks, for neighbouring nodes.

A neighbour verifies each block by its digest, so it need not trust this machine. The server sends only files that are
named by 64 hexadecimal digits in the cache's folder, and accepts no data.
"""

from __future__ import annotations

import os
import re
from typing import Final

from shardkit.errors import NotFoundError, StoreError
from shardkit.reading.cache.block_cache import BLOCKS, MARKER
from shardkit.stores.file_operations import Directories, active, read_exactly
from shardkit.telemetry.pages import NOT_FOUND, Answer, PageServer

_PATH: Final = re.compile(r"/blocks/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_MOST_REQUESTS: Final = 64
"""Maximum number of concurrent requests; more are refused with 503."""


class CacheServer(PageServer):
    """Serves ``/blocks/<ab>/<hex>`` of a cache directory; neighbours use `url` as a location.

    Args:
        path: Directory of the cache.
        bind: Host and port to listen on; port 0 selects a free one.

    Raises:
        NotFoundError: There is no cache at `path`.
        StoreError: The server cannot listen on the address.
    """

    def __init__(self, path: str | os.PathLike[str], bind: tuple[str, int]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        if not os.path.isfile(os.path.join(self.path, MARKER)):
            raise NotFoundError(
                f"no cache at {self.path}: expected {MARKER} in it; a loader with cache= makes one"
            )
        self._directories, self._process = Directories(self.path), os.getpid()
        super().__init__(*bind, self._block, most_requests=_MOST_REQUESTS)

    def close(self) -> None:
        """Stop serving; does nothing in a forked child, whose parent continues."""
        if self._process == os.getpid():
            super().close()

    def _block(self, path: str) -> Answer:
        match = _PATH.fullmatch(path)
        if match is None:
            return NOT_FOUND
        try:
            with self._directories.opened((BLOCKS, match[1])) as folder:
                file = active().open_file(folder, match[2])
            try:
                data = read_exactly(file, 0, active().stat_open(file).st_size)
            finally:
                active().close(file)
        except (OSError, StoreError):
            return NOT_FOUND
        return 200, "application/octet-stream", data
