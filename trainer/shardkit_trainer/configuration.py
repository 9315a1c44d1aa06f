"""What a run is told: typed sections, read from TOML, changed by ``section.key=value``; no torch here.

Every key is a field below with its default and meaning; what it may be stands in its type. An unknown key, a wrong type
and a value out of range are `ConfigurationError`s that name the key, the value, what was expected and the nearest known
key.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from shardkit.errors import ConfigurationError
from shardkit.telemetry import TelemetrySettings
from shardkit.telemetry.serving import parse_listen

__all__ = [
    "CheckpointConfig", "Configuration", "DataConfig", "EvaluationConfig", "LogConfig", "ModelConfig",
    "OptimizerConfig", "ParallelConfig", "RunConfig", "ScheduleConfig", "StageConfig", "expect",
    "load_configuration",
]  # fmt: skip

Count = Annotated[int, 0]  # at least 0
Positive = Annotated[int, 1]  # at least 1
Reduction = Literal["fp32", "bf16", "int8", "powersgd", "topk"]


def expect(*rules: tuple[bool, str]) -> None:
    """Check (holds, message) rules.

    Raises:
        ConfigurationError: with the message of the first that does not hold.
    """
    for holds, message in rules:
        if not holds:
            raise ConfigurationError(message)


@dataclass(kw_only=True)
class RunConfig:
    """[run]: where, how long, from which seed."""

    directory: str = ""  # the run directory; made if missing, resumed if not
    steps: Count = 0  # optimizer steps over the whole run; 0: `epochs` decides
    epochs: Positive = 1  # passes over the dataset, where `steps` is 0
    seed: int = 0  # initialisation, dropout and crops; the plan has its own seed
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one, else cpu


@dataclass(kw_only=True)
class StageConfig:
    """[[data.stages]]: what changes from a step on; the plan is amended, so rows go on where they stood."""

    from_step: Positive = 0
    global_batch: Count = 0  # 0: as before
    weights: dict[str, int] = field(default_factory=dict)  # empty: as before

    def __post_init__(self) -> None:
        nothing = f"data.stages: nothing changes at step {self.from_step}; name global_batch or weights"
        expect((bool(self.global_batch or self.weights), nothing))


@dataclass(kw_only=True)
class DataConfig:
    """[data]: which dataset, in which plan."""

    dataset: str = ""  # as in shardkit.open: path or URL, with @ref or @sha256:…
    parts: dict[str, str] = field(default_factory=dict)  # several datasets as one, instead of `dataset`
    locations: dict[str, str] = field(default_factory=dict)  # name → URL of further copies, nearest first
    global_batch: Positive = 32  # samples per step, over all ranks
    seed: int = 0  # of the plan
    lanes: Count = 0  # 0: the plan's default
    weights: dict[str, int] = field(default_factory=dict)  # stratum pattern → integer; empty: natural
    window_blocks: int = 0  # 0: the plan's default
    cache: str = ""  # directory on the node's own disk for blocks that came over a network; empty: none
    cache_size: str = ""  # the most that it may take, such as "200GiB"; empty: most of the disk's free room
    stages: list[StageConfig] = field(default_factory=list)  # schedules of batch size and weights

    def __post_init__(self) -> None:
        steps = [stage.from_step for stage in self.stages]
        expect((steps == sorted(set(steps)), f"data.stages: from_step is {steps}, expected rising steps"))


@dataclass(kw_only=True)
class ModelConfig:
    """[model]: a built-in model, or the factory of one's own."""

    kind: str = "gpt"  # gpt, classifier, or package.module:factory
    field: str = ""  # the input field; empty: the only one that fits
    label: str = "label"  # classifier: the target field
    context: Positive = 128  # gpt: positions
    vocabulary: Positive = 256  # gpt: tokens; bytes and text are 256
    layers: Positive = 4  # gpt: blocks
    heads: Positive = 4  # gpt
    width: Positive = 128  # gpt: embedding; classifier: channels of the first stage
    stages: Positive = 3  # classifier: resolutions, each twice as wide as the one before
    blocks: Positive = 1  # classifier: residual blocks per stage
    classes: int = 0  # classifier; 0: those of the dataset
    image_size: int = 0  # classifier: side of decoded images; 0: as stored (all the same)
    norm: Literal["group", "batch"] = "group"  # classifier; batch: over all ranks (SyncBatchNorm, CUDA only)
    dropout: float = 0.0
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # for one's own factory

    def __post_init__(self) -> None:
        if ":" not in self.kind:
            _one_of("model.kind", self.kind, ("gpt", "classifier", "package.module:factory"))
        fits = self.kind != "gpt" or self.width % self.heads == 0
        expect(
            (0.0 <= self.dropout < 1.0, f"model.dropout = {self.dropout}: expected 0 ≤ dropout < 1"),
            (fits, f"model.width = {self.width} is no multiple of model.heads = {self.heads}"),
        )


@dataclass(kw_only=True)
class OptimizerConfig:
    """[optimizer]: AdamW or SGD, and what happens to the gradient before."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3  # the peak, at `reference_batch` samples per step
    scaling: Literal["none", "linear", "sqrt"] = "none"  # with the global batch
    reference_batch: int = 0  # the batch that `lr` was chosen for; needed by scaling
    weight_decay: float = 0.1  # matrices only: never on biases, norms, embeddings of one dimension
    beta1: float = 0.9  # SGD: the momentum
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0  # global gradient norm; 0: no clipping
    skip_nonfinite: int = 0  # steps in a row with such a gradient that are skipped; one more ends the run

    def __post_init__(self) -> None:
        scaled = self.scaling == "none" or self.reference_batch >= 1
        expect(
            (scaled, f"optimizer.scaling = {self.scaling!r} needs optimizer.reference_batch ≥ 1"),
            (self.lr > 0, f"optimizer.lr = {self.lr}: expected a positive number"),
        )


@dataclass(kw_only=True)
class ScheduleConfig:
    """[schedule]: the learning rate as a pure function of the step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"  # wsd: warm-up, stable, decay
    warmup: Count = 0  # steps from 0 to the peak
    decay: Count = 0  # wsd: steps of the decay at the end
    final: float = 0.1  # the last rate as a share of the peak


@dataclass(kw_only=True)
class ParallelConfig:
    """[parallel]: how the ranks share the work."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp"
    shard_ranks: Count = 0  # zero2, zero3: ranks that share one copy, such as those of a node (HSDP); 0: all
    exact: Literal["off", "int64", "fp64"] = "off"  # int64: bit-equal; fp64: cheaper, equal in practice
    reduction: Reduction = "fp32"  # what travels
    rank: Positive = 4  # powersgd: of the factors
    density: float = 0.05  # topk: share of the gradient that is sent
    correction: float = 0.0  # topk: momentum correction; the optimizer's own (beta1) should be 0 then
    sync_every: Positive = 1  # steps between averagings; > 1: local SGD with the outer optimizer below (ddp)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    pass_samples: Positive = 32  # samples per forward pass at most; passes are whole cells. exact: one cell
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # autocast; reduction stays as above
    activation_checkpointing: bool = False
    compile: bool = False
    threads: Positive = 1  # per rank; exact results depend on it
    rebalance: bool = False  # move lanes away from slow ranks, by what cells are seen to cost
    rebalance_every: Positive = 16  # steps between two looks
    recovery: Literal["restart", "in-process"] = "restart"  # when one dies: of all, or of that one
    timeout_s: float = 120.0  # a rank that does not answer for so long is named, and the run ends
    shutdown_s: int = 30  # after a signal or a failure: what ranks get to save and end before they are killed

    def __post_init__(self) -> None:
        exact, whole = self.exact != "off", self.strategy in {"ddp", "zero1"}
        plain = self.strategy == "ddp" and not exact and self.reduction == "fp32"
        blind = "torch sums gradients between copies where nobody can measure how long a rank waits for the others"
        expect(
            (not self.shard_ranks or not (exact or whole),
             "parallel.shard_ranks: expected strategy zero2 or zero3 with exact = off"),
            (not self.shard_ranks or not self.rebalance,
             f"parallel.rebalance: expected shard_ranks = 0: {blind}"),
            (not exact or self.strategy != "zero3",
             "parallel.exact: expected strategy ddp, zero1 or zero2, got zero3"),
            (self.reduction == "fp32" or (whole and not exact),
             f"parallel.reduction = {self.reduction!r}: expected ddp or zero1 with exact = off"),
            (self.sync_every == 1 or plain,
             "parallel.sync_every > 1: expected ddp, exact = off, reduction = fp32"),
        )  # fmt: skip


@dataclass(kw_only=True)
class CheckpointConfig:
    """[checkpoint]: when, and how many stay."""

    every: Positive = 100  # steps; the last step is always saved
    keep: Count = 3  # newest checkpoints that stay; 0: all
    replicas: list[str] = field(default_factory=list)  # folders or URLs that get a copy of each
    asynchronous: bool = True  # write while training goes on
    resume: bool = True  # go on from the newest checkpoint of the run directory


@dataclass(kw_only=True)
class EvaluationConfig:
    """[evaluation]: a pass over every sample of another ref, exactly once on any world size."""

    dataset: str = ""  # empty: no evaluation
    every: Count = 0  # steps; 0: at the end only
    global_batch: Count = 0  # 0: as in training


@dataclass(kw_only=True)
class LogConfig:
    """[log]: what is written where."""

    every: Positive = 10  # steps between lines on the console; metrics have every step
    tensorboard: bool = False
    profile_steps: int = 0  # torch.profiler over so many steps …
    profile_from: int = 5  # … after so many of this process
    peak_flops: float = 0.0  # of one rank, for the model's share of it; 0: measured at the start
    price_per_hour: float = 0.0  # of one rank, in dollars
    watts: float = 0.0  # of one rank
    telemetry_s: float = 2.0  # seconds between records for shardkit top; 0: none
    listen: str = ""  # HOST:PORT of each node's /metrics and /healthz, as 127.0.0.1:9400; empty: nowhere

    def __post_init__(self) -> None:
        seconds = self.telemetry_s
        expect((not seconds or seconds >= 0.01, f"log.telemetry_s = {seconds}: expected 0 or at least 0.01"))
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
        data = self.data
        expect(
            (bool(self.run.directory), "run.directory is empty: name the folder that the run is kept in"),
            (not data.stages or self.run.steps > 0,
             "data.stages: expected run.steps > 0, since epochs have no common length"),
            (not data.locations or not data.parts,
             "data.locations: expected data.dataset; locations belong to one dataset"),
            (bool(data.dataset) != bool(data.parts), "data.dataset or data.parts: expected exactly one of them"),
        )  # fmt: skip

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
    example = "section.key=value, such as optimizer.lr=0.001"
    expect((bool(equals and name), f"override {override!r}: expected {example}"))
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = name.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        expect((isinstance(raw, dict), f"override {override!r}: {section} is a value, not a section"))
    raw[key] = value


def _build(kind: type[Any], raw: Mapping[str, Any], prefix: str) -> Any:
    known = get_type_hints(kind, include_extras=True)
    arguments = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigurationError(f"unknown key {prefix}{key}{_nearest(key, prefix)}")
        arguments[key] = _convert(known[key], value, prefix + key)
    return kind(**arguments)


def _nearest(key: str, prefix: str) -> str:
    sections = get_type_hints(Configuration)
    everything = [f"{name}.{leaf}" for name, kind in sections.items() for leaf in get_type_hints(kind)]
    everything += sections
    same_leaf = [name for name in everything if name.rpartition(".")[2] == key]
    found = same_leaf or difflib.get_close_matches(prefix + key, everything, n=1, cutoff=0.5)
    return f"; nearest known key: {found[0]}" if found else f"; known: {', '.join(sorted(everything))}"


def _convert(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the type of a key, its parts converted likewise."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _one_of(name, _typed(str, value, name), inner)
    if origin is Annotated:
        _typed(inner[0], value, name)
        expect((value >= inner[1], f"{name} = {value}: expected at least {inner[1]}"))
        return value
    if origin is dict:
        table = _typed(dict, value, name, "a table")
        return {k: v if inner[1] is Any else _convert(inner[1], v, f"{name}.{k}") for k, v in table.items()}
    if origin is list:
        items = _typed(list, value, name, "a list")
        return [_convert(inner[0], one, f"{name}[{i}]") for i, one in enumerate(items)]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, _typed(dict, value, name, f"a section [{name}]"), name + ".")
    if hint is float and type(value) is int:
        return float(value)
    return _typed(hint, value, name)


def _typed(kind: type[Any], value: Any, name: str, expected: str = "") -> Any:
    if type(value) is not kind:  # True is no integer here
        what = expected or kind.__name__
        raise ConfigurationError(f"{name} = {value!r}: expected {what}, got {type(value).__name__}")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{name} = {value!r}: expected one of {', '.join(allowed)}{hint}")
    return value
