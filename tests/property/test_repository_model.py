"""A repository does what a perfect one in memory does: put, commit, tag, drop, expect, crash, reopen, in any order."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardkit.documents import sha256_digest
from shardkit.errors import CommitConflict, NotFoundError, ShardkitError, StoreError, StoreReadOnlyError
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import substituted
from tests.faults.faulty_operations import FaultyOperations

CONTENTS = [b"", b"one", b"two", b"three"]
REFS = st.sampled_from(["main", "val", "Train.1"])
TAGS = st.sampled_from(["v1", "v2"])
MANIFESTS = st.sampled_from(CONTENTS)


class RepositoryModel(RuleBasedStateMachine):
    """The model is three dicts and a list; anything that the repository does otherwise is a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.cleanup = contextlib.ExitStack()
        self.cleanup.enter_context(
            substituted(FaultyOperations(errno.EIO))
        )  # nothing fails, nothing waits for the disk
        self.objects: set[bytes] = set()
        self.refs: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.messages: list[str] = []

    def teardown(self) -> None:
        self.cleanup.close()
        shutil.rmtree(self.folder)

    @initialize()
    def create(self) -> None:
        self.repository = Repository.create(self.folder / "root")
        self.id = self.repository.id

    @rule()
    def reopen(self) -> None:
        self.repository = Repository.open(self.folder / "root")

    @rule()
    def create_again(self) -> None:
        self.repository = Repository.create(self.folder / "root")

    @rule(data=MANIFESTS, staged=st.booleans())
    def put(self, data: bytes, staged: bool) -> None:
        if staged:
            with self.repository.stage_object("manifest") as stage:
                stage.write(data)
                descriptor = self.repository.publish(stage, "manifest")
        else:
            descriptor = self.repository.put_object(data, "manifest")
        assert (descriptor.digest, descriptor.size) == (sha256_digest(data), len(data))
        self.objects.add(data)

    @rule(data=MANIFESTS)
    def get(self, data: bytes) -> None:
        if data in self.objects:
            assert self.repository.get_object(sha256_digest(data), "manifest", len(data)) == data
            assert self.repository.get_object(sha256_digest(data), "manifest") == data
        else:
            with pytest.raises(NotFoundError):
                self.repository.get_object(sha256_digest(data), "manifest")

    @rule(
        name=REFS,
        data=MANIFESTS,
        expected=st.none() | st.sampled_from([None, *CONTENTS[:2]]),
        check=st.booleans(),
    )
    def move(self, name: str, data: bytes, expected: bytes | None, check: bool) -> None:
        manifest = sha256_digest(data)
        wanted = {name: None if expected is None else sha256_digest(expected)} if check else None
        if data not in self.objects:
            with pytest.raises(NotFoundError):
                self.repository.commit({name: manifest}, message="dangling", expected=wanted)
        elif wanted is not None and self.refs.get(name) not in (wanted[name], manifest):
            with pytest.raises(CommitConflict):
                self.repository.commit({name: manifest}, message="refused", expected=wanted)
        else:
            self._commit({name: manifest}, {}, wanted)

    @rule(name=REFS)
    def drop(self, name: str) -> None:
        self._commit({name: None}, {}, None)

    @rule(name=TAGS, data=MANIFESTS)
    def tag(self, name: str, data: bytes) -> None:
        manifest = sha256_digest(data)
        if data not in self.objects:
            with pytest.raises(NotFoundError):
                self.repository.commit({}, {name: manifest}, message="dangling")
        elif self.tags.get(name, manifest) != manifest:
            with pytest.raises(CommitConflict):
                self.repository.commit({}, {name: manifest}, message="refused")
        else:
            self._commit({}, {name: manifest}, None)

    @rule(name=REFS, data=MANIFESTS, at=st.integers(0, 12), torn=st.booleans())
    def crash_in_a_commit(self, name: str, data: bytes, at: int, torn: bool) -> None:
        """A change fails for good at some call, and the process is gone: the log tells whether the commit landed."""
        before = len(self.messages)
        operations = FaultyOperations(errno.EIO, at, forever=True, torn=torn)
        acknowledged = False
        try:
            with substituted(operations):
                self.repository.put_object(data, "manifest")
                self.objects.add(data)
                self.repository.commit({name: sha256_digest(data)}, message="perhaps")
                acknowledged = True
        except ShardkitError:
            pass
        self.repository = Repository.open(self.folder / "root")
        entries = self.repository.log()
        assert len(entries) in (before, before + 1)
        assert not acknowledged or len(entries) == before + 1
        self._learn_objects()
        if len(entries) > before:
            self.refs[name] = sha256_digest(data)
            self.messages.append("perhaps")

    @rule(name=REFS)
    def read_only_refuses(self, name: str) -> None:
        reader = Repository.open(self.folder / "root", read_only=True)
        with pytest.raises(StoreReadOnlyError):
            reader.commit({name: None}, message="no")

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "repository"):
            return
        assert self.repository.id == self.id
        assert self.repository.refs == self.refs
        assert self.repository.tags == self.tags
        assert [entry.message for entry in self.repository.log()] == self.messages[::-1]
        for name, manifest in {**self.refs, **self.tags}.items():
            assert self.repository.resolve(name) == manifest
        if "main" in self.refs:
            assert self.repository.resolve() == self.refs["main"]
        else:
            with pytest.raises(NotFoundError):
                self.repository.resolve()

    def _commit(
        self, refs: dict[str, str | None], tags: dict[str, str], expected: dict[str, str | None] | None
    ) -> None:
        message = f"commit {len(self.messages) + 1}"
        entry = self.repository.commit(refs, tags, message=message, expected=expected)
        assert entry.n == len(self.messages) + 1
        self.messages.append(message)
        for name, manifest in refs.items():
            self.refs.pop(name, None)
            if manifest is not None:
                self.refs[name] = manifest
        self.tags.update(tags)

    def _learn_objects(self) -> None:
        """A put that failed may have landed, or not: both are allowed, torn is not (`get_object` verifies)."""
        for data in CONTENTS:
            try:
                assert self.repository.get_object(sha256_digest(data), "manifest") == data
                self.objects.add(data)
            except NotFoundError:
                assert data not in self.objects, "an acknowledged object is gone"
            except StoreError as error:
                raise AssertionError("the disk works again") from error


TestRepositoryModel = RepositoryModel.TestCase
TestRepositoryModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
