"""What a run is told: typed sections, read from TOML, changed by ``section.key=value``; no torch here.

Every key is a field below with its default and meaning. An unknown key, a wrong type and a value out of range are
`ConfigurationError`s that name the key, the value, what was expected and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from shardkit.errors import ConfigurationError
from shardkit.telemetry import TelemetrySettings
from shardkit.telemetry.serving import parse_listen

__all__ = [
    "CheckpointConfig",
    "Configuration",
    "DataConfig",
    "EvaluationConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "ScheduleConfig",
    "StageConfig",
    "load_configuration",
]

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
EXACT = ("off", "int64", "fp64")
REDUCTIONS = ("fp32", "bf16", "int8", "powersgd", "topk")


@dataclass(kw_only=True)
class RunConfig:
    """[run]: where, how long, from which seed."""

    directory: str = ""  # the run directory; made if missing, resumed if not
    steps: int = 0  # optimizer steps over the whole run; 0: `epochs` decides
    epochs: int = 1  # passes over the dataset, where `steps` is 0
    seed: int = 0  # initialisation, dropout and crops; the plan has its own seed
    device: str = "auto"  # auto: cuda where there is one, else cpu

    def __post_init__(self) -> None:
        _at_least("run.steps", self.steps, 0)
        _at_least("run.epochs", self.epochs, 1)
        _one_of("run.device", self.device, ("auto", "cpu", "cuda"))


@dataclass(kw_only=True)
class StageConfig:
    """[[data.stages]]: what changes from a step on; the plan is amended, so rows go on where they stood."""

    from_step: int = 0
    global_batch: int = 0  # 0: as before
    weights: dict[str, int] = field(default_factory=dict)  # empty: as before

    def __post_init__(self) -> None:
        _at_least("data.stages: from_step", self.from_step, 1)
        _at_least("data.stages: global_batch", self.global_batch, 0)
        if not self.global_batch and not self.weights:
            raise ConfigurationError(
                f"data.stages: nothing changes at step {self.from_step}; name global_batch or weights"
            )


@dataclass(kw_only=True)
class DataConfig:
    """[data]: which dataset, in which plan."""

    dataset: str = ""  # as in shardkit.open: path or URL, with @ref or @sha256:…
    parts: dict[str, str] = field(default_factory=dict)  # several datasets as one, instead of `dataset`
    locations: dict[str, str] = field(default_factory=dict)  # name → URL of further copies, nearest first
    global_batch: int = 32  # samples per step, over all ranks
    seed: int = 0  # of the plan
    lanes: int = 0  # 0: the plan's default
    weights: dict[str, int] = field(default_factory=dict)  # stratum pattern → integer; empty: natural
    window_blocks: int = 0  # 0: the plan's default
    cache: str = ""  # directory on the node's own disk for blocks that came over a network; empty: none
    cache_size: str = ""  # the most that it may take, such as "200GiB"; empty: most of the disk's free room
    stages: list[StageConfig] = field(default_factory=list)  # schedules of batch size and weights

    def __post_init__(self) -> None:
        _at_least("data.global_batch", self.global_batch, 1)
        _at_least("data.lanes", self.lanes, 0)
        steps = [stage.from_step for stage in self.stages]
        if steps != sorted(set(steps)):
            raise ConfigurationError(f"data.stages: from_step is {steps}, expected rising steps")


@dataclass(kw_only=True)
class ModelConfig:
    """[model]: a built-in model, or the factory of one's own."""

    kind: str = "gpt"  # gpt, classifier, or package.module:factory
    field: str = ""  # the input field; empty: the only one that fits
    label: str = "label"  # classifier: the target field
    context: int = 128  # gpt: positions
    vocabulary: int = 256  # gpt: tokens; bytes and text are 256
    layers: int = 4  # gpt: blocks
    heads: int = 4  # gpt
    width: int = 128  # gpt: embedding; classifier: channels of the first stage
    stages: int = 3  # classifier: resolutions, each twice as wide as the one before
    blocks: int = 1  # classifier: residual blocks per stage
    classes: int = 0  # classifier; 0: those of the dataset
    image_size: int = 0  # classifier: side of decoded images; 0: as stored (all the same)
    norm: str = "group"  # classifier: group, or batch: over all ranks' samples (SyncBatchNorm, CUDA only)
    dropout: float = 0.0
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # for one's own factory

    def __post_init__(self) -> None:
        if ":" not in self.kind:
            _one_of("model.kind", self.kind, ("gpt", "classifier", "package.module:factory"))
        _one_of("model.norm", self.norm, ("group", "batch"))
        for name in ("context", "vocabulary", "layers", "heads", "width", "stages", "blocks"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigurationError(f"model.dropout = {self.dropout}: expected 0 ≤ dropout < 1")
        if self.kind == "gpt" and self.width % self.heads:
            raise ConfigurationError(
                f"model.width = {self.width} is no multiple of model.heads = {self.heads}"
            )


@dataclass(kw_only=True)
class OptimizerConfig:
    """[optimizer]: AdamW or SGD, and what happens to the gradient before."""

    name: str = "adamw"
    lr: float = 1e-3  # the peak, at `reference_batch` samples per step
    scaling: str = "none"  # with the global batch: none, linear, sqrt
    reference_batch: int = 0  # the batch that `lr` was chosen for; needed by scaling
    weight_decay: float = 0.1  # matrices only: never on biases, norms, embeddings of one dimension
    beta1: float = 0.9  # SGD: the momentum
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0  # global gradient norm; 0: no clipping
    skip_nonfinite: int = 0  # steps in a row with such a gradient that are skipped; one more ends the run

    def __post_init__(self) -> None:
        _one_of("optimizer.name", self.name, ("adamw", "sgd"))
        _one_of("optimizer.scaling", self.scaling, ("none", "linear", "sqrt"))
        if self.scaling != "none" and self.reference_batch < 1:
            raise ConfigurationError(
                f"optimizer.scaling = {self.scaling!r} needs optimizer.reference_batch ≥ 1"
            )
        if self.lr <= 0:
            raise ConfigurationError(f"optimizer.lr = {self.lr}: expected a positive number")


@dataclass(kw_only=True)
class ScheduleConfig:
    """[schedule]: the learning rate as a pure function of the step."""

    kind: str = "cosine"  # constant, linear, cosine, wsd (warm-up, stable, decay)
    warmup: int = 0  # steps from 0 to the peak
    decay: int = 0  # wsd: steps of the decay at the end
    final: float = 0.1  # the last rate as a share of the peak

    def __post_init__(self) -> None:
        _one_of("schedule.kind", self.kind, ("constant", "linear", "cosine", "wsd"))
        _at_least("schedule.warmup", self.warmup, 0)
        _at_least("schedule.decay", self.decay, 0)


@dataclass(kw_only=True)
class ParallelConfig:
    """[parallel]: how the ranks share the work."""

    strategy: str = "ddp"  # ddp, zero1, zero2, zero3
    shard_ranks: int = 0  # zero2, zero3: ranks that share one copy, such as those of a node (HSDP); 0: all
    exact: str = "off"  # off, int64 (bit-equal on any number of ranks), fp64 (cheaper, equal in practice)
    reduction: str = "fp32"  # what travels: fp32, bf16, int8, powersgd, topk
    rank: int = 4  # powersgd: of the factors
    density: float = 0.05  # topk: share of the gradient that is sent
    correction: float = 0.0  # topk: momentum correction; the optimizer's own (beta1) should be 0 then
    sync_every: int = 1  # steps between averagings; > 1: local SGD with the outer optimizer below (ddp)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    pass_samples: int = 32  # samples per forward pass at most; a pass is made of whole cells. exact: one cell
    precision: str = "fp32"  # fp32, bf16, fp16: autocast; reduction stays as above
    activation_checkpointing: bool = False
    compile: bool = False
    threads: int = 1  # per rank; exact results depend on it
    rebalance: bool = False  # move lanes away from slow ranks, by what cells are seen to cost
    rebalance_every: int = 16  # steps between two looks
    recovery: str = "restart"  # of all ranks, by torchrun, when one dies; in-process: of the dead one
    timeout_s: float = 120.0  # a rank that does not answer for so long is named, and the run ends
    shutdown_s: int = 30  # after a signal or a failure: what ranks get to save and end before they are killed

    def __post_init__(self) -> None:
        _one_of("parallel.strategy", self.strategy, STRATEGIES)
        _one_of("parallel.exact", self.exact, EXACT)
        _one_of("parallel.reduction", self.reduction, REDUCTIONS)
        _one_of("parallel.recovery", self.recovery, ("restart", "in-process"))
        _one_of("parallel.precision", self.precision, ("fp32", "bf16", "fp16"))
        for name in ("pass_samples", "threads", "sync_every", "rank", "rebalance_every"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)
        _at_least("parallel.shard_ranks", self.shard_ranks, 0)
        if self.shard_ranks and (self.exact != "off" or self.strategy not in {"zero2", "zero3"}):
            raise ConfigurationError(
                "parallel.shard_ranks: expected strategy zero2 or zero3 with exact = off"
            )
        if self.rebalance and self.shard_ranks:
            raise ConfigurationError(
                "parallel.rebalance: expected shard_ranks = 0: between copies torch sums gradients where nobody can"
                " measure how long a rank waits for the others, so a slow one cannot be told from them"
            )
        if self.exact != "off" and self.strategy == "zero3":
            raise ConfigurationError("parallel.exact: expected strategy ddp, zero1 or zero2, got zero3")
        plain = self.exact == "off" and self.strategy in {"ddp", "zero1"}
        if self.reduction != "fp32" and not plain:
            raise ConfigurationError(
                f"parallel.reduction = {self.reduction!r}: expected ddp or zero1 with exact = off"
            )
        if self.sync_every > 1 and (
            self.strategy != "ddp" or self.exact != "off" or self.reduction != "fp32"
        ):
            raise ConfigurationError("parallel.sync_every > 1: expected ddp, exact = off, reduction = fp32")


@dataclass(kw_only=True)
class CheckpointConfig:
    """[checkpoint]: when, and how many stay."""

    every: int = 100  # steps; the last step is always saved
    keep: int = 3  # newest checkpoints that stay; 0: all
    replicas: list[str] = field(default_factory=list)  # folders or URLs that get a copy of each
    asynchronous: bool = True  # write while training goes on
    resume: bool = True  # go on from the newest checkpoint of the run directory

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 1)
        _at_least("checkpoint.keep", self.keep, 0)


@dataclass(kw_only=True)
class EvaluationConfig:
    """[evaluation]: a pass over every sample of another ref, exactly once on any world size."""

    dataset: str = ""  # empty: no evaluation
    every: int = 0  # steps; 0: at the end only
    global_batch: int = 0  # 0: as in training

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 0)


@dataclass(kw_only=True)
class LogConfig:
    """[log]: what is written where."""

    every: int = 10  # steps between lines on the console; metrics have every step
    tensorboard: bool = False
    profile_steps: int = 0  # torch.profiler over so many steps …
    profile_from: int = 5  # … after so many of this process
    peak_flops: float = 0.0  # of one rank, for the model's share of it; 0: measured at the start
    price_per_hour: float = 0.0  # of one rank, in dollars
    watts: float = 0.0  # of one rank
    telemetry_s: float = 2.0  # seconds between records for shardkit top; 0: none
    listen: str = ""  # HOST:PORT of each node's /metrics and /healthz, as 127.0.0.1:9400; empty: nowhere

    def __post_init__(self) -> None:
        _at_least("log.every", self.every, 1)
        if self.telemetry_s and self.telemetry_s < 0.01:
            raise ConfigurationError(f"log.telemetry_s = {self.telemetry_s}: expected 0 or at least 0.01")
        if self.listen:
            parse_listen(self.listen)

    def telemetry(self) -> TelemetrySettings | None:
        """For the loader of the run."""
        if not self.telemetry_s:
            return None
        return TelemetrySettings(interval_s=self.telemetry_s, listen=self.listen or None)


@dataclass(kw_only=True)
class Configuration:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.run.directory:
            raise ConfigurationError("run.directory is empty: name the folder that the run is kept in")
        if self.data.stages and not self.run.steps:
            raise ConfigurationError(
                "data.stages: expected run.steps > 0, since epochs have no common length"
            )
        if self.data.locations and self.data.parts:
            raise ConfigurationError("data.locations: expected data.dataset; locations belong to one dataset")
        if bool(self.data.dataset) == bool(self.data.parts):
            raise ConfigurationError("data.dataset or data.parts: expected exactly one of them")

    def to_json(self) -> dict[str, Any]:
        """The resolved settings, section by section."""
        return dataclasses.asdict(self)


def load_configuration(path: str | Path | None, overrides: Iterable[str] = ()) -> Configuration:
    """Settings from a TOML file, then ``section.key=value`` overrides (the value as TOML, else as text).

    Raises:
        ConfigurationError: a file that is no TOML, an unknown key, a wrong type, a value out of range.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigurationError(f"configuration {path}: no such file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"configuration {path}: {error}") from error
    for override in overrides:
        _apply(raw, override)
    built: Configuration = _build(Configuration, raw, "")
    return built


def _apply(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigurationError(
            f"override {override!r}: expected section.key=value, such as optimizer.lr=0.001"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = name.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ConfigurationError(f"override {override!r}: {section} is a value, not a section")
    raw[key] = value


def _build(kind: type[Any], raw: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(kind, include_extras=False)
    known = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    arguments = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigurationError(f"unknown key {prefix}{key}{_nearest(key, prefix)}")
        arguments[key] = _convert(known[key], value, prefix + key)
    return kind(**arguments)


def _nearest(key: str, prefix: str) -> str:
    everything = [f.name for f in dataclasses.fields(Configuration)]
    for section, section_type in get_type_hints(Configuration).items():
        everything += [f"{section}.{f.name}" for f in dataclasses.fields(section_type)]
    same_leaf = [name for name in everything if name.rpartition(".")[2] == key]
    found = same_leaf or difflib.get_close_matches(prefix + key, everything, n=1, cutoff=0.5)
    return f"; nearest known key: {found[0]}" if found else f"; known: {', '.join(sorted(everything))}"


def _convert(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{name} = {value!r}: expected a section [{name}]")
        return _build(hint, value, name + ".")
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{name} = {value!r}: expected a table")
        inner = get_args(hint)[1]
        return {k: v if inner is Any else _convert(inner, v, f"{name}.{k}") for k, v in value.items()}
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigurationError(f"{name} = {value!r}: expected a list")
        return [_convert(get_args(hint)[0], one, f"{name}[{i}]") for i, one in enumerate(value)]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigurationError(f"{name} = {value!r}: expected {hint.__name__}, got {type(value).__name__}")
    return value


def _one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{name} = {value!r}: expected one of {', '.join(allowed)}{hint}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{name} = {value}: expected at least {least}")
