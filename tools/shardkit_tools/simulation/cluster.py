"""Descriptions of clusters: read from TOML with units such as ``"6GB/s"``, and changed by ``name=value``."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

from shardkit.errors import ConfigurationError, NotFoundError
from shardkit.ranges import Range, parse_duration, parse_size, shown

_BITS: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)bit/s\s*")
_COUNT: Final = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?(?:[eE]\d+)?)\s*([kMG]?)\s*")
_THOUSANDS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}

_MANY: Final = Range(0, 1e30)
_COUNT_RANGE: Final = Range(0, 2**62)  # of rows and their sums, as int64


def parse_rate(value: object) -> float:
    """Parse bytes per second, such as ``"6GB/s"`` or ``"100Gbit/s"``. 0 and ``"unlimited"`` give inf."""
    if value in ("0", "unlimited"):
        return float("inf")
    if isinstance(value, str) and (bits := _BITS.fullmatch(value)) is not None:
        return float(bits[1]) * _THOUSANDS[bits[2]] / 8
    if isinstance(value, str) and value.endswith("/s"):
        return float(parse_size(value.removesuffix("/s")))
    if _is_number(value):
        return _MANY.check("bytes per second", value, float) or float("inf")
    raise ConfigurationError(f'{value!r}: a rate is expected, such as "6GB/s" or "100Gbit/s"')


def parse_count(value: object) -> int:
    """Parse a whole number, such as 8192, ``"1e9"``, ``"100k"`` or ``"1_000_000"``."""
    if _is_number(value) and (number := _COUNT_RANGE.check("count", value, float)) == int(number):
        return int(number)
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    number = float(found[1].replace(",", "").replace("_", "")) * _THOUSANDS[found[2]] if found else -1.0
    if found is None or not _COUNT_RANGE.holds(number) or number != int(number):
        raise ConfigurationError(f'{value!r}: a whole number is expected, such as 64, "1e9" or "100k"')
    return int(number)


def parse_number(value: object) -> float:
    """Parse a number of at least 0."""
    try:
        return float(_MANY.check("number", float(value) if isinstance(value, str) else value, float))
    except ValueError as error:
        raise ConfigurationError(f"{shown(value)}: a number from 0 on is expected") from error


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


REDUCTIONS = ("ring", "tree", "hierarchical", "none")


def _as(parser: Callable[[Any], object], default: Any, *, least: float | None = None) -> Any:
    return field(default=default, metadata={"parser": parser, "least": least})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{value!r}: a text is expected")
    return value


def _flag(value: object) -> bool:
    if value not in (True, "true", "yes", "on", False, "false", "no", "off"):
        raise ConfigurationError(f"{value!r}: true or false is expected")
    return value in (True, "true", "yes", "on")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Number and hardware of the machines, which are all alike."""

    nodes: int = _as(parse_count, 1, least=1)
    ranks: int = _as(parse_count, 8, least=1)  # per node
    cache: int = _as(parse_size, 0)  # bytes per node; 0: no cache
    memory: int = _as(parse_size, 2 << 30, least=1 << 20)  # bytes per rank for blocks
    threads: int = _as(parse_count, 8, least=1)  # loader threads per rank
    disk_read: float = _as(parse_rate, 3e9)  # bytes/s of the cache's disk
    nic: float = _as(parse_rate, 12.5e9)  # bytes/s in each direction
    verify: float = _as(parse_rate, 1e9)  # bytes/s per rank for checks, decompression and gathering
    price_per_hour: float = _as(parse_number, 0.0)  # dollars per node
    power_idle: float = _as(parse_number, 0.0)  # watts per node
    power_busy: float = _as(parse_number, 0.0)  # watts per node


@dataclass(frozen=True, kw_only=True)
class Store:
    """The store that holds the shards."""

    latency: float = _as(parse_duration, 0.03)  # seconds to the first byte
    stream: float = _as(parse_rate, 90e6)  # bytes/s of one request
    bandwidth: float = _as(parse_rate, float("inf"))  # bytes/s of one location, shared by all nodes
    requests_per_second: float = _as(parse_number, 0.0)  # limit of one location; 0: no limit
    concurrency: int = _as(parse_count, 16, least=1)  # concurrent requests per rank
    ahead: int = _as(parse_size, 256 << 20)  # bytes read ahead per rank, at most a quarter of memory
    copies: int = _as(parse_count, 1, least=1)  # locations with a complete copy
    price_per_million_requests: float = _as(parse_number, 0.0)  # dollars
    price_per_gb: float = _as(parse_number, 0.0)  # dollars per GB of egress
    price_per_gb_month: float = _as(parse_number, 0.0)  # dollars per GB and month of storage, per copy
    outages_per_year: float = _as(parse_number, 0.0)  # per location
    outage: float = _as(parse_duration, 1800.0)  # seconds per outage


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """The all-reduce of gradients at the end of each step."""

    model: str = _as(_text, "hierarchical")
    gradient: int = _as(parse_size, 0)  # bytes summed
    link_latency: float = _as(parse_duration, 1e-5)  # seconds
    inner_bandwidth: float = _as(parse_rate, 200e9)  # bytes/s between ranks of a node
    oversubscription: float = _as(parse_number, 1.0, least=1)  # factor of the network between nodes
    overlap: float = _as(parse_number, 0.0)  # share of the all-reduce that overlaps with computation


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training job and its plan."""

    cell: float = _as(parse_duration, 0.01)  # seconds of computation per cell
    global_batch: int = _as(parse_count, 512)
    lanes: int = _as(parse_count, 0)  # 0: the plan's default
    window_blocks: int = _as(parse_count, 16)
    epochs: int = _as(parse_count, 2, least=1)
    seed: int = _as(parse_count, 0)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults and the reaction to them."""

    node_failures_per_year: float = _as(parse_number, 0.0)  # per node
    detect: float = _as(parse_duration, 30.0)  # seconds until a failure is detected
    restart: float = _as(parse_duration, 120.0)  # seconds until the processes run again
    checkpoint: int = _as(parse_size, 0)  # bytes loaded after a restart
    checkpoint_steps: int = _as(parse_count, 500, least=1)  # steps between checkpoints
    slow_share: float = _as(parse_number, 0.0)  # share of all ranks that is slow at any time
    slow_factor: float = _as(parse_number, 2.0, least=1)  # time per cell of a slow rank, relative
    slow_for: float = _as(parse_duration, 1800.0)  # mean seconds that a rank is slow
    rebalance: bool = _as(_flag, True)  # move lanes away from slow ranks


@dataclass(frozen=True, kw_only=True)
class Data:
    """The dataset: the version at `root`, or a synthetic one."""

    root: str = _as(_text, "")  # empty: synthetic
    rows: int = _as(parse_count, 1_000_000, least=1)
    shards: int = _as(parse_count, 0)  # 0: as many as have 256 MiB each
    strata: int = _as(parse_count, 1, least=1)
    bytes: int = _as(parse_size, 0)  # bytes of the dataset; 0: 100 KB per sample
    block: int = _as(parse_size, 1 << 20, least=1)  # bytes per block


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Description of a cluster, its job and its dataset."""

    name: str = "cluster"
    nodes: Nodes = Nodes()
    store: Store = Store()
    reduce: Reduce = Reduce()
    work: Work = Work()
    faults: Faults = Faults()
    data: Data = Data()

    def __post_init__(self) -> None:
        for part in (getattr(self, section) for section in _SECTIONS):
            for one in fields(part):
                value, least = getattr(part, one.name), one.metadata["least"]
                if least is not None and value < least:
                    raise ConfigurationError(f"{one.name} is {value}: at least {least} is expected")
        if self.reduce.model not in REDUCTIONS:
            raise ConfigurationError(f"model is {self.reduce.model!r}: {', '.join(REDUCTIONS)} is expected")
        if not 0 <= self.reduce.overlap <= 1 or not 0 <= self.faults.slow_share < 1:
            raise ConfigurationError("overlap and slow_share are shares: 0 to 1 is expected")

    @property
    def world(self) -> int:
        return self.nodes.nodes * self.nodes.ranks


_SECTIONS = ("nodes", "store", "reduce", "work", "faults", "data")


def load_cluster(path: Path) -> Cluster:
    """Read a description from a TOML file.

    Raises:
        NotFoundError: the file does not exist.
        ConfigurationError: the file cannot be read, or a name or value is invalid.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(
            f"{path} does not exist; examples/clusters/ has descriptions to begin with"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from None
    cluster = Cluster(name=str(document.pop("name", path.stem)))
    for section, values in document.items():
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path}: {section} is a value, a section is expected: [{section}]")
        for name, value in values.items():
            cluster = _with(cluster, f"{section}.{name}", value, f"{path}: ")
    return cluster


def with_changes(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """Return the cluster with ``name=value`` changes, such as ``cache=500GB`` or ``store.latency=20ms``.

    Raises:
        ConfigurationError: a name is unknown or a value is invalid.
    """
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ConfigurationError(f"{change!r}: name=value is expected, such as cache=500GB")
        cluster = _with(cluster, name.strip(), text.strip(), "")
    return cluster


def _with(cluster: Cluster, name: str, value: object, where: str) -> Cluster:
    """Return the cluster with one value changed. The name may omit the section."""
    known = {
        f"{section}.{one.name}": one for section in _SECTIONS for one in fields(getattr(cluster, section))
    }
    key = next((one for one in known if one == name or one.endswith(f".{name}")), None)
    if key is None:
        plain = [one.rpartition(".")[2] for one in known]
        near = difflib.get_close_matches(name.rpartition(".")[2], plain, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ConfigurationError(f"{where}{name} is unknown; {hint}")
    try:
        parsed = known[key].metadata["parser"](value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}{key}: {error}") from None
    section, _, plain_name = key.partition(".")
    made: Cluster = replace(cluster, **{section: replace(getattr(cluster, section), **{plain_name: parsed})})
    return made
