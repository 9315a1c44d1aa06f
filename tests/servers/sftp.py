"""An SFTP server over a folder, in this process, for the tests of the compatible path; needs paramiko."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers.environments import Unavailable

__all__ = ["sftp"]


@contextlib.contextmanager
def sftp(folder: Path, home: Path) -> Iterator[str]:
    """Serve a folder on 127.0.0.1 to whoever has the key that is put below ``home/.ssh``.

    Yields:
        The URL of the folder.

    Raises:
        Unavailable: paramiko is not installed.
    """
    try:
        paramiko: Any = importlib.import_module("paramiko")
    except ImportError as error:
        raise Unavailable("paramiko is not installed, which fsspec's sftp:// needs as well") from error
    key = paramiko.RSAKey.generate(2048)
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    key.write_private_key_file(str(home / ".ssh" / "id_rsa"))
    listener = socket.create_server(("127.0.0.1", 0))
    transports: list[Any] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            transport = paramiko.Transport(connection)
            transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _files(folder))
            transport.start_server(server=_access(key))
            transports.append(transport)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"sftp://tester@127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for transport in transports:
            transport.close()
        thread.join(10)


def _access(key: Any) -> Any:
    paramiko: Any = importlib.import_module("paramiko")

    class Access(paramiko.ServerInterface):  # type: ignore[misc]
        def check_auth_publickey(self, username: str, offered: Any) -> Any:
            good = offered.asbytes() == key.asbytes()
            return paramiko.AUTH_SUCCESSFUL if good else paramiko.AUTH_FAILED

        def get_allowed_auths(self, username: str) -> str:
            return "publickey"

        def check_channel_request(self, kind: str, chanid: int) -> Any:
            return paramiko.OPEN_SUCCEEDED

    return Access()


def _files(folder: Path) -> Any:  # noqa: C901 (one line for each kind of request)
    """What paramiko's server calls, over the files of a folder; errors are told by their number."""
    paramiko: Any = importlib.import_module("paramiko")

    def real(path: str) -> str:
        return str(folder) + os.path.normpath(f"/{path}")

    def told(action: Any) -> Any:
        try:
            found = action()
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        return paramiko.SFTP_OK if found is None else found

    def attributes(path: str, status: os.stat_result) -> Any:
        return paramiko.SFTPAttributes.from_stat(status, os.path.basename(path))

    class Files(paramiko.SFTPServerInterface):  # type: ignore[misc]
        def list_folder(self, path: str) -> Any:
            return told(lambda: [attributes(one.name, one.stat()) for one in os.scandir(real(path))])

        def stat(self, path: str) -> Any:
            return told(lambda: attributes(path, os.stat(real(path))))

        def lstat(self, path: str) -> Any:
            return told(lambda: attributes(path, os.lstat(real(path))))

        def open(self, path: str, flags: int, attr: Any) -> Any:
            def opened() -> Any:
                mode = "r+b" if flags & (os.O_WRONLY | os.O_RDWR) else "rb"
                file = os.fdopen(os.open(real(path), flags, 0o600), mode)
                handle = paramiko.SFTPHandle(flags)
                handle.readfile = handle.writefile = file
                return handle

            return told(opened)

        def remove(self, path: str) -> Any:
            return told(lambda: os.remove(real(path)))

        def posix_rename(self, oldpath: str, newpath: str) -> Any:
            return told(lambda: os.replace(real(oldpath), real(newpath)))

        def rename(self, oldpath: str, newpath: str) -> Any:
            return told(lambda: os.rename(real(oldpath), real(newpath)))

        def mkdir(self, path: str, attr: Any) -> Any:
            return told(lambda: os.mkdir(real(path)))

        def rmdir(self, path: str) -> Any:
            return told(lambda: os.rmdir(real(path)))

    return Files
