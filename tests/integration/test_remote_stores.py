"""Stores do what the protocol says, settle lost answers, and print no credential."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.errors import MissingDependency, NotFoundError, StoreError, UsageError
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.remote.clients import google_options
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.remote.probing import WRITERS, probe
from shardkit.stores.store import Store
from shardkit.stores.waiting import RetryPolicy
from shardkit.testing.memory_store import MemoryStore
from shardkit.testing.store_conformance import StoreConformance
from tests.servers.google import TOKEN, GoogleServer, google_environment, google_server
from tests.servers.object_stores import (
    ACCESS_KEY,
    AZURE_ACCOUNT,
    AZURE_KEY,
    SECRET_KEY,
    azure_environment,
    azurite,
    localstack,
    moto,
    rclone,
    s3_environment,
)
from tests.servers.sftp import sftp

# ---- Stores beyond the local disk do what the protocol says, settle lost answers, and print no credential


BUCKET = "shards"


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    with moto(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def localstack_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with localstack(tmp_path_factory.mktemp("localstack"), BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def rclone_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with rclone(tmp_path_factory.mktemp("rclone"), BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def azurite_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite(tmp_path_factory.mktemp("azurite"), BUCKET) as endpoint:
        yield endpoint


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)


def new_url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/deep"


class TestMoto(StoreConformance):
    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch: pytest.MonkeyPatch, moto_endpoint: str) -> None:
        use(monkeypatch, moto_endpoint)

    def new_store(self, tmp_path: Path) -> Store:
        return open_store(new_url())


class TestLocalStack(StoreConformance):
    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch: pytest.MonkeyPatch, localstack_endpoint: str) -> None:
        use(monkeypatch, localstack_endpoint)

    def new_store(self, tmp_path: Path) -> Store:
        return open_store(new_url())

    def test_heads_are_attested(self, store: Store) -> None:
        """The store's own SHA-256 of the whole object is what the name of an object says: no byte is fetched."""
        data = os.urandom(3_000_000)
        store.put_new("objects/x", data)
        with store.stage() as stage:
            stage.write(data)
            digest = stage.digest
            stage.publish("objects/y")
        for name in ("objects/x", "objects/y"):
            stat = store.head(name)
            assert stat is not None
            assert (stat.size, stat.sha256) == (len(data), digest)


class TestAzure(StoreConformance):
    """Azure's blobs through obstore, against Microsoft's emulator."""

    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch: pytest.MonkeyPatch, azurite_endpoint: str) -> None:
        for name, value in azure_environment(azurite_endpoint).items():
            monkeypatch.setenv(name, value)

    def new_store(self, tmp_path: Path) -> Store:
        return open_store(f"az://{BUCKET}/{uuid.uuid4().hex}/deep")

    def test_a_root_for_several_writers(self) -> None:
        several_writers_may_use("az")

    def test_errors_hold_no_credential(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:9/{AZURE_ACCOUNT}")
        address = parse_address(f"az://{BUCKET}/x")
        dead = ObjectStore(address, retry=RetryPolicy(deadline_s=0.2, attempt_s=1))
        with pytest.raises(StoreError, match=r"no connection|no answer|timed out") as caught:
            dead.get("x", max_bytes=1)
        assert AZURE_KEY not in "".join(traceback.format_exception(caught.value))

    def test_a_missing_container_is_no_empty_one(self) -> None:
        store = open_store("az://never-made/x")
        with pytest.raises(StoreError, match="ContainerNotFound"):
            store.get("shardkit.json", max_bytes=10)
        with pytest.raises(StoreError, match="ContainerNotFound"):
            store.put_new("shardkit.json", b"")


class TestGoogle(StoreConformance):
    """Google's buckets through obstore, against a strict server of the documented requests."""

    @pytest.fixture(autouse=True)
    def served(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
        with google_server(BUCKET) as served:
            for name, value in google_environment(served.endpoint).items():
                monkeypatch.setenv(name, value)
            served.page_size = 3  # listings go over several pages
            yield served
            assert served.refused == [], "all that was asked is known"

    def new_store(self, tmp_path: Path) -> Store:
        return open_store(f"gs://{BUCKET}/{uuid.uuid4().hex}/deep")

    def test_a_root_for_several_writers(self, served: GoogleServer) -> None:
        several_writers_may_use("gs")
        assert served.counts["PUT", 412] >= 2 * 5 * (WRITERS - 1), "the losers were told by the server"

    def test_a_server_that_ignores_the_condition_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shows that the server's own check is what the other tests rest on."""
        monkeypatch.setattr("tests.servers.google._check_generation", lambda request, found: None)
        url = f"gs://{BUCKET}/{uuid.uuid4().hex}"
        with pytest.raises(StoreError, match=r"put-if-absent does not hold.*single_writer=True"):
            Repository.create(url)

    def test_a_name_that_may_not_change_again_yet(self, served: GoogleServer) -> None:
        """Google lets one name change once per second; whoever is told 429 comes back."""
        served.change_every_s = 0.1
        found = probe(open_store(f"gs://{BUCKET}/{uuid.uuid4().hex}"), writers=4, rounds=2)
        assert found.winners == (1, 1)
        assert found.holds
        assert served.counts["PUT", 429] > 0

    def test_errors_hold_no_credential(
        self, monkeypatch: pytest.MonkeyPatch, store: Store, served: GoogleServer
    ) -> None:
        assert store.put_new("x", b"1")
        assert TOKEN.encode() not in pickle.dumps(store)
        address, hasty = parse_address(store.url), RetryPolicy(deadline_s=0.2, attempt_s=1)
        served.token = "another"  # what the client has is no longer taken
        with pytest.raises(StoreError, match="HTTP 401") as refused:
            ObjectStore(address, retry=hasty).get("x", max_bytes=1)
        served.token = TOKEN
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
        with pytest.raises(StoreError, match=r"no connection|no answer|timed out") as dead:
            ObjectStore(address, retry=hasty).get("x", max_bytes=1)
        for caught in (refused, dead):
            assert TOKEN not in "".join(traceback.format_exception(caught.value))

    def test_a_token_that_is_renewed(
        self, monkeypatch: pytest.MonkeyPatch, store: Store, served: GoogleServer
    ) -> None:
        """Who is told that the token is no longer taken looks for another one in the environment, once."""
        assert store.put_new("x", b"1")
        served.token = "ya29.the-next-one"
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", served.token)
        assert store.get("x", max_bytes=1) == b"1"
        served.token = "ya29.one-more"
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", served.token)
        assert store.put_new("y", b"1") is True

    def test_no_other_credential_is_sent_to_an_emulator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = google_options(
            {"STORAGE_EMULATOR_HOST": "localhost:4443", "GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}
        )
        assert found == {"base_url": "http://localhost:4443", "bearer_token": "emulator"}
        assert google_options({"STORAGE_EMULATOR_HOST": "https://other/"})["base_url"] == "https://other"
        assert google_options({"GOOGLE_BASE_URL": "https://other"}) == {}, "obstore reads that one by itself"

    def test_a_missing_bucket_is_no_empty_one(self, store: Store) -> None:
        absent = open_store("gs://never-made/x")
        assert store.head("shardkit.json") is None
        with pytest.raises(StoreError, match="NoSuchBucket"):
            absent.get("shardkit.json", max_bytes=10)
        with pytest.raises(StoreError, match="NoSuchBucket"):
            absent.put_new("shardkit.json", b"")


class TestSftp(StoreConformance):
    """A server of SFTP behind fsspec; where paramiko is installed."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        folder, home = tmp_path / "served", tmp_path / "home"
        folder.mkdir()
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        with sftp(folder, home) as url:
            yield open_store(f"{url}deep")


class TestFsspecMemory(StoreConformance):
    def new_store(self, tmp_path: Path) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/deep")


class TestFsspecFiles(StoreConformance):
    """A real file system behind fsspec, where directories exist."""

    def new_store(self, tmp_path: Path) -> Store:
        return open_store(f"local://{tmp_path}/deep")


class TestProbe:
    """Sixteen racing writers: who keeps put-if-absent, and who is refused."""

    def test_local(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "root")
        assert probe(store, rounds=2).holds
        assert list(store.list_after("")) == [], "nothing is left behind"

    def test_moto(self, monkeypatch: pytest.MonkeyPatch, moto_endpoint: str) -> None:
        use(monkeypatch, moto_endpoint)
        store = open_store(new_url())
        assert probe(store).holds
        assert list(store.list_after("")) == []

    def test_localstack(self, monkeypatch: pytest.MonkeyPatch, localstack_endpoint: str) -> None:
        use(monkeypatch, localstack_endpoint)
        found = probe(open_store(new_url()))
        assert found.winners == (1, 1, 1, 1, 1)
        assert found.holds

    def test_rclone_is_refused(self, monkeypatch: pytest.MonkeyPatch, rclone_endpoint: str) -> None:
        use(monkeypatch, rclone_endpoint)
        url = new_url()
        assert not probe(open_store(url)).holds
        with pytest.raises(StoreError, match=r"put-if-absent does not hold.*single_writer=True"):
            Repository.create(url)
        with pytest.raises(NotFoundError):
            Repository.open(url)
        alone = Repository.create(url, single_writer=True)
        manifest = alone.put_object(b"manifest", "manifest").digest
        alone.commit({"main": manifest}, message="alone")
        again = Repository.open(url)
        assert again.id == alone.id == Repository.create(url).id
        assert again.resolve() == manifest
        assert again.store.put_new("log/00000000000000000001.json", b"") is False, "it looks before it puts"

    def test_fsspec_is_refused(self) -> None:
        url = f"memory://{uuid.uuid4().hex}"
        with pytest.raises(StoreError, match="put-if-absent does not hold"):
            Repository.create(url)
        assert Repository.create(url, single_writer=True).id == Repository.open(url).id


def test_addresses() -> None:
    assert parse_address("S3://bucket/a%20b".replace("%20", "_")).url == "s3://bucket/a_b"
    assert parse_address("gcs://bucket/").url == "gs://bucket"
    assert parse_address("sftp://me@host:22/data").url == "sftp://me@host:22/data"
    for secret in (
        "s3://key:hidden@bucket/x",
        "s3://hidden@bucket/x",
        "sftp://me:hidden@host/x",
        "https://host/x?X-Amz-Signature=hidden",
        "az://box/x#hidden",
        "s3://bucket/x hidden",
    ):
        with pytest.raises(UsageError) as caught:
            parse_address(secret)
        assert "hidden" not in str(caught.value)
    for bad in ("s3://", "s3:///x", "s3://bucket/../x", "s3://bucket/a//b"):
        with pytest.raises(UsageError):
            parse_address(bad)
    assert parse_address("abfss://container/a").url == "az://container/a"
    with pytest.raises(UsageError, match=r"AZURE_STORAGE_ACCOUNT_NAME=acct and give az://data/a$"):
        parse_address("abfss://data@acct.dfs.core.windows.net/a")


def test_a_missing_bucket_is_no_empty_one(monkeypatch: pytest.MonkeyPatch, moto_endpoint: str) -> None:
    use(monkeypatch, moto_endpoint)
    store = open_store("s3://never-made/x")
    with pytest.raises(StoreError, match="NoSuchBucket"):
        store.get("shardkit.json", max_bytes=10)
    with pytest.raises(StoreError, match="NoSuchBucket"):
        store.put_new("shardkit.json", b"")


FORKED = """
import os, sys
from shardkit.stores.local import open_store
store = open_store(sys.argv[1])
assert store.get("x", max_bytes=9) == b"before"
child = os.fork()
if not child:
    code = 1
    try:
        assert store.get("x", max_bytes=9) == b"before"
        assert store.get_range("x", 5, 1) == b"e"
        assert store.put_new("y", b"child") is True
        assert store.put_new("x", b"child") is False
        assert list(store.list_after("")) == ["x", "y"]
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert store.get("y", max_bytes=9) == b"child"
"""


def test_a_forked_child_goes_on(monkeypatch: pytest.MonkeyPatch, moto_endpoint: str) -> None:
    """obstore's own threads do not live in the child, where its calls hang for ever."""
    use(monkeypatch, moto_endpoint)
    url = new_url()
    open_store(url).put_new("x", b"before")
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", FORKED, url], check=True, timeout=120)


def test_errors_and_pickles_hold_no_credential(monkeypatch: pytest.MonkeyPatch, moto_endpoint: str) -> None:
    use(monkeypatch, moto_endpoint)
    store = open_store(new_url())
    store.put_new("x", b"1")
    assert SECRET_KEY.encode() not in pickle.dumps(store)
    assert ACCESS_KEY.encode() not in pickle.dumps(store)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
    dead = ObjectStore(parse_address(store.url), retry=RetryPolicy(deadline_s=0.2, attempt_s=1))
    for action in (
        lambda: dead.get("x", max_bytes=1),
        lambda: dead.put_new("x", b""),
        lambda: dead.head("x"),
        lambda: list(dead.list_after("")),
    ):
        with pytest.raises(StoreError, match=r"no connection|no answer|timed out") as caught:
            action()
        told = "".join(traceback.format_exception(caught.value)) + repr(dead)
        assert SECRET_KEY not in told
        assert ACCESS_KEY not in told


def test_settings_that_no_client_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of credentials that is not there, or is none, is an error of ours that does not quote it."""
    (tmp_path / "key.json").write_text('{"private_key": "hidden"')
    for file in ("absent.json", "key.json"):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / file))
        store = open_store("gs://bucket/x")
        for action in (
            lambda store=store: store.head("x"),
            lambda store=store: store.put_new("x", b""),
            lambda store=store: list(store.list_after("")),
        ):
            with pytest.raises(StoreError, match="credentials is unusable") as caught:
                action()
            assert "hidden" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        ("credential_process = {folder}/absent", "a file that the environment or configuration names"),
        ("credential_process = /bin/echo none", "unusable configuration"),
        ("role_arn = arn:aws:iam::123456789012:role/x\nsource_profile = nobody", "names another one"),
        (
            "role_arn = arn:aws:iam::123456789012:role/x\nweb_identity_token_file = {folder}/absent",
            "a file that the environment or configuration names|gave none; .*renew them",
        ),
        (
            (
                "sso_session = one\nsso_account_id = 123456789012\nsso_role_name = r\n[sso-session one]\n"
                "sso_start_url = https://127.0.0.1/\nsso_region = us-east-1"
            ),
            "the SSO session has no valid token; .*renew them",
        ),
    ],
)
def test_without_credentials_no_object_is_said_to_be_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str, told: str
) -> None:
    """boto3 raises FileNotFoundError for a token that is not there, as obstore does for an object."""
    (tmp_path / "config").write_text("[profile x]\nregion = us-east-1\n" + profile.format(folder=tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_CONFIG_FILE": f"{tmp_path}/config", "AWS_PROFILE": "x", "HOME": str(tmp_path),
                        "AWS_EC2_METADATA_DISABLED": "true"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    store = open_store("s3://bucket/x")
    assert isinstance(store, ObjectStore)
    store = store.with_retry(RetryPolicy(deadline_s=0))
    for ask in (lambda: store.head("x"), lambda: store.get("x", max_bytes=9)):
        with pytest.raises(StoreError, match=told):
            ask()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install .*obstore"):
        open_store("s3://bucket/x").put_new("x", b"")


def several_writers_may_use(scheme: str) -> None:
    """A root of this scheme takes commits, and its store lets one of many win."""
    url = f"{scheme}://{BUCKET}/{uuid.uuid4().hex}"
    first = Repository.create(url)
    manifest = first.put_object(b"manifest", "manifest").digest
    Repository.open(url).commit({"main": manifest}, message="first")
    assert first.resolve() == manifest
    assert probe(open_store(f"{scheme}://{BUCKET}/{uuid.uuid4().hex}")).winners == (1, 1, 1, 1, 1)


# ---- Every store does what the protocol says


class TestLocalStore(StoreConformance):
    def new_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "not" / "yet" / "there")


class TestMemoryStore(StoreConformance):
    def new_store(self, tmp_path: Path) -> Store:
        return MemoryStore()

    def reopened(self, store: Store) -> Store:
        return store
