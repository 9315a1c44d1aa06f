"""Which file system a directory lies on: a cache shared through `flock` needs one of this machine's own."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from shardkit.errors import UsageError

_NETWORK: Final = re.compile(
    "nfs[34]?|cifs|smb[23]?|smbfs|ncpfs|afs|ceph|lustre|lustre_tgt|gpfs|beegfs|panfs|pvfs2|orangefs|gfs2?|ocfs2|glusterfs|9p|davfs|wekafs|vastnfs|quobyte|moosefs|afpfs|webdav"
)
_NETWORK_FUSE: Final = re.compile(
    "sshfs|s3fs|gcsfuse|goofys|geesefs|rclone|gluster|juicefs|ceph|davfs|mount-s3|moose|blobfuse|quobyte|curlftpfs|lizardfs|seaweed|alluxio|hdfs"
)


def check_local(path: str) -> None:
    """Refuse a cache directory on a network file system.

    Raises:
        UsageError: It is one; says what to do.
    """
    kind = filesystem_of(path)
    if kind is not None and is_network(kind):
        raise UsageError(
            f"cache {path} lies on a network file system ({kind}): locks there are not the machine's own, and every "
            "hit would cross the network; use a directory on a local disk, such as /var/tmp/shardkit, or leave the "
            "cache out: a shared file system can be the dataset's root itself"
        )


def is_network(kind: str) -> bool:
    """Whether a file system of this kind is shared over a network."""
    return _NETWORK.fullmatch(kind) is not None or (
        kind.startswith("fuse") and _NETWORK_FUSE.search(kind) is not None
    )


def filesystem_of(path: str, mounts: str | None = None) -> str | None:
    """Kind of the file system that holds `path` or will: "ext4", "nfs4", "fuse.sshfs"; None where nobody tells.

    Args:
        path: Need not exist.
        mounts: The text of ``/proc/self/mountinfo`` (proc(5)), read where it is None.
    """
    if mounts is None:
        mounts = ""
        with contextlib.suppress(OSError):
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].encode("latin-1", "replace").decode("unicode_escape")  # spaces are written as octal
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two mounts at one place the later one covers the other
            best, kind = point, after.split()[0]
    return kind
