"""The errors that shardkit raises, grouped by how a caller can respond.

::

    ShardkitError                  kind               response of the caller
    ├── UsageError (ValueError)    usage              fix the call or the configuration
    │   ├── SchemaError            schema             fix the schema or the field type
    │   ├── SampleError            sample             fix the sample (key, field and value are in the message)
    │   ├── PlanError              plan               choose other plan settings
    │   └── ConfigurationError     configuration      fix the named setting
    ├── SourceError                source             fix the named source file and row
    ├── NotFoundError (LookupError) not-found         name something that exists
    │   ├── AbsentError            absent             correct the list, or allow absent entries
    │   └── SampleIndexError (IndexError) sample-index  use a sample number that exists
    ├── IntegrityError             integrity          read another copy, or repair
    ├── FormatError                format             do not trust the writer of these bytes
    ├── StoreError (OSError)       store              check the disk or the network, then retry
    │   ├── StoreFullError         store-full         free some space
    │   └── StoreReadOnlyError     store-read-only    obtain write access
    ├── CommitError                commit
    │   ├── CommitConflict         commit-conflict    inspect the other commit, then decide
    │   └── CommitUnknown          commit-unknown     check later whether it landed
    ├── StateError (ValueError)    state              resume with the plan and manifest of the state
    ├── RunError (RuntimeError)    run                inspect the named rank, step and stage
    └── MissingDependency (ImportError) dependency    install the named extra

A message names the subject, the value, the expected value and the next action. `kind` is stable across releases, so
programs may compare it. Every error can be pickled, so that worker processes can pass errors to the caller.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AbsentError",
    "CommitConflict",
    "CommitError",
    "CommitUnknown",
    "ConfigurationError",
    "FormatError",
    "IntegrityError",
    "MissingDependency",
    "NotFoundError",
    "PlanError",
    "RunError",
    "SampleError",
    "SampleIndexError",
    "SchemaError",
    "ShardkitError",
    "SourceError",
    "StateError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "UsageError",
]


class ShardkitError(Exception):
    """Base class of all errors that shardkit raises.

    Attributes:
        kind: stable name of the class.
        is_of_row: True for an error of one row of a source, whose other rows can be read.
    """

    kind: ClassVar[str] = "shardkit"
    is_of_row: bool = False


class UsageError(ShardkitError, ValueError):
    """A call or configuration that is not valid."""

    kind = "usage"


class SchemaError(UsageError):
    """A schema or a field type that shardkit cannot write."""

    kind = "schema"


class SampleError(UsageError):
    """A sample that does not fit its schema."""

    kind = "sample"


class PlanError(UsageError):
    """Plan settings that the dataset cannot satisfy."""

    kind = "plan"


class ConfigurationError(UsageError):
    """A configuration key or value that is unknown or out of range."""

    kind = "configuration"


class SourceError(ShardkitError):
    """A source file or row that cannot be imported."""

    kind = "source"


class NotFoundError(ShardkitError, LookupError):
    """A dataset, ref, object, sample or run that does not exist."""

    kind = "not-found"


class AbsentError(NotFoundError):
    """Entries of a list that are not in the dataset."""

    kind = "absent"


class SampleIndexError(NotFoundError, IndexError):
    """A sample number out of range."""

    kind = "sample-index"


class IntegrityError(ShardkitError):
    """Bytes whose size or digest differs from the bytes that were written."""

    kind = "integrity"


class FormatError(ShardkitError):
    """Bytes whose digest is correct but whose content is not valid."""

    kind = "format"


class StoreError(ShardkitError, OSError):
    """A store that does not respond, or returns an error."""

    kind = "store"


class StoreFullError(StoreError):
    """A store without free space."""

    kind = "store-full"


class StoreReadOnlyError(StoreError):
    """A store without write access."""

    kind = "store-read-only"


class CommitError(ShardkitError):
    """A commit that is not in the log."""

    kind = "commit"


class CommitConflict(CommitError):
    """A commit that conflicts with another, for example because both move the same ref."""

    kind = "commit-conflict"


class CommitUnknown(CommitError):
    """A commit whose outcome could not be determined."""

    kind = "commit-unknown"


class StateError(ShardkitError, ValueError):
    """A loader or checkpoint state that belongs to other data or another plan."""

    kind = "state"


class RunError(ShardkitError, RuntimeError):
    """A run that cannot continue: a rank, thread or stage failed or stalled."""

    kind = "run"


class MissingDependency(ShardkitError, ImportError):
    """An optional package that is needed but not installed."""

    kind = "dependency"
