"""The error tree is what its docstring prints, and every error survives the way out of a worker process."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from shardkit import errors
from shardkit.errors import ShardkitError

EVERY = sorted(
    (found for found in vars(errors).values() if inspect.isclass(found) and issubclass(found, ShardkitError)),
    key=lambda found: found.__name__,
)

# Pinned: a program that catches an error or matches on its kind may rely on each line.
TREE = """
ShardkitError: shardkit
  CommitError: commit
    CommitConflict: commit-conflict
    CommitUnknown: commit-unknown
  FormatError: format
  IntegrityError: integrity
  MissingDependency(ImportError): dependency
  NotFoundError(LookupError): not-found
    AbsentError: absent
    SampleIndexError(IndexError): sample-index
  RunError(RuntimeError): run
  SourceError: source
  StateError(ValueError): state
  StoreError(OSError): store
    StoreFullError: store-full
    StoreReadOnlyError: store-read-only
  UsageError(ValueError): usage
    ConfigurationError: configuration
    PlanError: plan
    SampleError: sample
    SchemaError: schema
"""


def drawn(error: type[ShardkitError], depth: int = 0) -> list[str]:
    builtins = [base.__name__ for base in error.__bases__ if not issubclass(base, ShardkitError)]
    also = f"({builtins[0]})" if builtins != ["Exception"] and builtins else ""
    lines = [f"{'  ' * depth}{error.__name__}{also}: {error.kind}"]
    for child in sorted(error.__subclasses__(), key=lambda found: found.__name__):
        if child.__module__ == errors.__name__:
            lines += drawn(child, depth + 1)
    return lines


def test_the_tree_is_pinned() -> None:
    assert drawn(ShardkitError) == TREE.strip().splitlines()


def test_the_docstring_prints_the_tree() -> None:
    documentation = errors.__doc__ or ""
    for error in EVERY:
        line = next(line for line in documentation.splitlines() if re.search(rf"\b{error.__name__}\b", line))
        assert error is ShardkitError or re.search(rf"\s{error.kind}(\s|$)", line), (
            "the column heads are in the root's line"
        )
    assert set(errors.__all__) == {error.__name__ for error in EVERY}


def test_kinds_are_unique() -> None:
    assert len({error.kind for error in EVERY}) == len(EVERY)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: error.__name__)
def test_every_error_survives_pickling(error: type[ShardkitError]) -> None:
    message = (
        "shard 3f9a… block 17: XXH3 mismatch; read it from “mirror” instead; run: shardkit repair data/cats"
    )
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error(message), protocol))
        assert type(copy) is error
        assert str(copy) == message
        assert copy.args == (message,)
        assert copy.kind == error.kind
