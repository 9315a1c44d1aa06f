"""Every error that shardkit raises on purpose, grouped by what the catcher would do.

::

    ShardkitError                  kind               the catcher would
    ├── UsageError (ValueError)    usage              mend the call or the configuration
    │   ├── SchemaError            schema             mend the schema, or the field type
    │   ├── SampleError            sample             mend the sample (names key, field, value)
    │   ├── PlanError              plan               choose other plan settings
    │   └── ConfigurationError     configuration      mend the named setting
    ├── SourceError                source             mend the named source file and row
    ├── NotFoundError (LookupError) not-found         name something that exists
    │   ├── AbsentError            absent             correct the list, or allow absent entries
    │   └── SampleIndexError (IndexError) sample-index  ask for a sample number that exists
    ├── IntegrityError             integrity          read another copy; repair
    ├── FormatError                format             not trust whoever wrote these bytes
    ├── StoreError (OSError)       store              look at the disk or the network, then try again
    │   ├── StoreFullError         store-full         make room
    │   └── StoreReadOnlyError     store-read-only    get the right to write
    ├── CommitError                commit
    │   ├── CommitConflict         commit-conflict    look at the other commit, then decide
    │   └── CommitUnknown          commit-unknown     ask later whether it landed
    ├── StateError (ValueError)    state              resume with the plan and manifest of the state
    ├── RunError (RuntimeError)    run                look at the named rank, step and stage
    └── MissingDependency (ImportError) dependency    install the named extra

A message names the thing, the value, what was expected and the next action. `kind` is stable and may be matched on.
Every error survives pickling, so that worker processes can hand theirs to the caller.
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
    """Root of the tree: catches everything that shardkit raises on purpose."""

    kind: ClassVar[str] = "shardkit"


class UsageError(ShardkitError, ValueError):
    """The call or the configuration cannot be carried out as it stands."""

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
    """Entries of a list that a dataset does not hold."""

    kind = "absent"


class SampleIndexError(NotFoundError, IndexError):
    """A sample number past either end of a dataset."""

    kind = "sample-index"


class IntegrityError(ShardkitError):
    """Bytes that are not the bytes that were written: size or digest differ."""

    kind = "integrity"


class FormatError(ShardkitError):
    """Bytes whose digest is right and whose content is not what shardkit writes."""

    kind = "format"


class StoreError(ShardkitError, OSError):
    """A store that does not answer, or answers with an error."""

    kind = "store"


class StoreFullError(StoreError):
    """No room is left in a store."""

    kind = "store-full"


class StoreReadOnlyError(StoreError):
    """A store that may not be written."""

    kind = "store-read-only"


class CommitError(ShardkitError):
    """A commit that is not in the log."""

    kind = "commit"


class CommitConflict(CommitError):
    """Another commit moved what this one wanted to move."""

    kind = "commit-conflict"


class CommitUnknown(CommitError):
    """Whether the commit landed could not be found out."""

    kind = "commit-unknown"


class StateError(ShardkitError, ValueError):
    """A loader or checkpoint state that belongs to other data or another plan."""

    kind = "state"


class RunError(ShardkitError, RuntimeError):
    """A run that cannot go on: a rank, thread or stage failed or stalled."""

    kind = "run"


class MissingDependency(ShardkitError, ImportError):
    """An optional package that this call needs."""

    kind = "dependency"
