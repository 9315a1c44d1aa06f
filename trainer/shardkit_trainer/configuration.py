"""Settings of a run: typed sections, read from TOML and changed by ``section.key=value``. Does not import torch.

Every key is a field below: its default is the field's, its allowed values are in the type (numbers with a range), and
its meaning is in the comment on the same line. An unknown key, a wrong type and a value out of range raise
`ConfigurationError` with the key, the value, the expected value and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from shardkit.errors import ConfigurationError, PlanError
from shardkit.plan.mixers import mixer_text
from shardkit.ranges import Range, parse_size, shown
from shardkit.telemetry import TelemetrySettings
from shardkit.telemetry.pages import parse_listen

Steps = Annotated[int, Range(0, 10**12)]
SomeSteps = Annotated[int, Range(1, 10**12)]
Samples = Annotated[int, Range(0, 10**9)]
SomeSamples = Annotated[int, Range(1, 10**9)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Size = Annotated[int, Range(0, 10**6)]
SomeSize = Annotated[int, Range(1, 10**6)]
Weight = Annotated[int, Range(0, 2**30 - 1)]
Share = Annotated[float, Range(0, 1, below=True)]
Reduction = Literal["fp32", "bf16", "int8", "powersgd", "topk"]


def expect(*rules: tuple[bool, str]) -> None:
    """Raise `ConfigurationError` for the first (holds, message) rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise ConfigurationError(message)


class Section:
    """Base of all sections; refuses numbers out of range, in TOML and in Python alike."""

    _section = ""  # name in the file

    def __init_subclass__(cls, *, section: str) -> None:
        cls._section = section

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, allowed = get_args(hint)
                setattr(self, name, allowed.check(f"{self._section}.{name}", getattr(self, name), kind))


@dataclass(kw_only=True)
class RunConfig(Section, section="run"):
    """[run]: run directory, length, seed and device."""

    directory: str = ""  # the run directory; made if missing, otherwise the run in it is resumed
    steps: Steps = 0  # optimizer steps over the whole run; 0: `epochs` decides
    epochs: SomeSize = 1  # passes over the dataset; used if `steps` is 0
    seed: Seed = 0  # initialisation, dropout and crops; the plan has its own seed
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available, otherwise cpu


@dataclass(kw_only=True)
class StageConfig(Section, section="data.stages[]"):
    """[[data.stages]]: changes from a step on. They amend the plan, so each stratum continues at its next row."""

    from_step: SomeSteps = 0  # the first step of the stage
    global_batch: Samples = 0  # 0: as before
    weights: dict[str, Weight] = field(default_factory=dict)  # empty: as before

    def __post_init__(self) -> None:
        super().__post_init__()
        nothing = f"data.stages: nothing changes at step {self.from_step}; name global_batch or weights"
        expect((bool(self.global_batch or self.weights), nothing))


@dataclass(kw_only=True)
class DataConfig(Section, section="data"):
    """[data]: the dataset, its plan and the node's cache."""

    dataset: str = ""  # path or URL, with @ref or @sha256:…, as in shardkit.open
    parts: dict[str, str] = field(default_factory=dict)  # name → dataset, opened as one, instead of `dataset`
    locations: dict[str, str] = field(default_factory=dict)  # name → URL of a further copy, nearest first
    global_batch: SomeSamples = 32  # samples per step, over all ranks
    seed: Seed = 0  # seed of the plan
    lanes: Size = 0  # number of lanes; 0: the plan's default
    weights: dict[str, Weight] = field(default_factory=dict)  # stratum pattern → weight; empty: by size
    window_blocks: Size = 0  # blocks per shuffle window; 0: the plan's default
    cost: str = ""  # cost of a sample, such as "len(tokens)**2", to balance ranks; empty: equal costs
    balance: Literal["", "spread", "align"] = ""  # with cost; empty: spread
    cache: str = ""  # directory on the node's own disk for blocks read over a network; empty: none
    share: bool = False  # serve the node's cache to the run's other nodes, and read their caches
    cache_size: str = ""  # largest size of the cache, such as "200GiB"; empty: most of the free space
    device_prefetch: Annotated[int, Range(0, 64)] = 0  # steps to copy ahead to run.device
    stages: list[StageConfig] = field(default_factory=list)  # changes of batch size and weights by step
    mixer: str = ""  # ado, temperature or package.module:function: decides weights in the run; empty: none
    mixer_every: Steps = 0  # steps between decisions of the mixer, a multiple of the lanes
    mixer_arguments: dict[str, Any] = field(default_factory=dict)  # of ado and temperature

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = [stage.from_step for stage in self.stages]
        expect(
            (steps == sorted(set(steps)), f"data.stages: from_step is {steps}, expected rising steps"),
            (
                not self.balance or bool(self.cost),
                f"data.balance = {self.balance!r}: expected it only with data.cost",
            ),
            (not self.share or bool(self.cache), "data.share = true: expected data.cache with it"),
            (
                not self.cost or not self.stages,
                "data.cost: expected no data.stages",
            ),
            (
                bool(self.mixer) == bool(self.mixer_every) and (bool(self.mixer) or not self.mixer_arguments),
                f"data.mixer = {self.mixer!r}, data.mixer_every = {self.mixer_every}: expected both or neither",
            ),
            (
                not self.mixer or not (self.cost or self.stages),
                "data.mixer: expected no data.cost or data.stages",
            ),
        )
        try:
            if self.mixer:
                mixer_text(self.mixer, self.mixer_every, self.mixer_arguments)
        except PlanError as error:
            raise ConfigurationError(f"data.mixer: {error}") from error
        try:
            parse_size(self.cache_size or "0")
        except ConfigurationError as error:
            raise ConfigurationError(f"data.cache_size = {self.cache_size!r}: {error}") from error


@dataclass(kw_only=True)
class ModelConfig(Section, section="model"):
    """[model]: a built-in model, or your own factory."""

    kind: str = "gpt"  # gpt, classifier, or package.module:factory
    field: str = ""  # the input field; empty: the only suitable field
    label: str = "label"  # classifier: the target field
    context: Samples = 0  # gpt: positions; 0: the length of a row, or 128 for rows of various lengths
    vocabulary: SomeSamples = 256  # gpt: number of tokens; 256 for bytes and text
    layers: SomeSize = 4  # gpt: transformer blocks
    heads: SomeSize = 4  # gpt: attention heads
    width: SomeSize = 128  # gpt: embedding; classifier: channels of the first stage
    stages: Annotated[int, Range(1, 16)] = 3  # classifier: resolutions; each stage doubles the channels
    blocks: SomeSize = 1  # classifier: residual blocks per stage
    classes: Samples = 0  # classifier: number of classes; 0: as in the dataset
    image_size: Size = 0  # classifier: side of decoded images in pixels; 0: arrays keep their size
    norm: Literal["group", "batch"] = "group"  # classifier; batch: SyncBatchNorm over all ranks, CUDA only
    dropout: Share = 0.0  # gpt: share of activations that dropout sets to zero
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # for your own factory

    def __post_init__(self) -> None:
        super().__post_init__()
        if ":" not in self.kind:
            one_of("model.kind", self.kind, ("gpt", "classifier", "package.module:factory"))
        fits = self.kind != "gpt" or self.width % self.heads == 0
        expect(
            (fits, f"model.width = {self.width} is no multiple of model.heads = {self.heads}"),
        )


@dataclass(kw_only=True)
class OptimizerConfig(Section, section="optimizer"):
    """[optimizer]: AdamW or SGD, and clipping of the gradient."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Range(0, 1000, above=True)] = 1e-3  # peak rate, at `reference_batch` samples
    scaling: Literal["none", "linear", "sqrt"] = "none"  # how `lr` follows the global batch
    reference_batch: Samples = 0  # samples per step for which `lr` was chosen; required by scaling
    weight_decay: Annotated[float, Range(0, 100)] = 0.1  # of matrices only, not of biases and norms
    beta1: Share = 0.9  # AdamW: decay of the first moment; SGD: momentum
    beta2: Share = 0.95  # AdamW: decay of the second moment
    epsilon: Annotated[float, Range(0, 1, above=True)] = 1e-8  # AdamW: added to the second moment's root
    clip: Annotated[float, Range(0, 1e9)] = 1.0  # largest global gradient norm; 0: no clipping
    skip_nonfinite: Size = 0  # steps in a row skipped for a non-finite gradient; one more ends the run

    def __post_init__(self) -> None:
        super().__post_init__()
        scaled = self.scaling == "none" or self.reference_batch >= 1
        expect(
            (scaled, f"optimizer.scaling = {self.scaling!r} needs optimizer.reference_batch ≥ 1"),
        )


@dataclass(kw_only=True)
class ScheduleConfig(Section, section="schedule"):
    """[schedule]: the learning rate as a pure function of the step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"  # wsd: warm-up, stable, decay
    warmup: Steps = 0  # steps of linear warm-up to the peak
    decay: Steps = 0  # wsd: steps of the final decay; 0: a tenth of all steps
    final: Annotated[float, Range(0, 1)] = 0.1  # last learning rate as a share of the peak


@dataclass(kw_only=True)
class ParallelConfig(Section, section="parallel"):
    """[parallel]: how ranks share the work."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp"  # memory per rank: trainer SPEC.md §3
    shard_ranks: Size = 0  # zero2, zero3: ranks per copy, such as the ranks of a node (HSDP); 0: all
    exact: Literal["off", "int64", "fp64"] = "off"  # int64: bit-equal; fp64: cheaper, equal in practice
    reduction: Reduction = "fp32"  # format or compression of gradients in transit
    rank: Annotated[int, Range(1, 10_000)] = 4  # powersgd: rank of the factors
    density: Annotated[float, Range(0, 1, above=True)] = 0.05  # topk: share of the gradient that is sent
    correction: Share = 0.0  # topk: momentum correction; set optimizer.beta1 to 0 with it
    sync_every: SomeSize = 1  # steps between averagings; > 1: local SGD with an outer optimizer (ddp)
    outer_lr: Annotated[float, Range(0, 100, above=True)] = 0.7  # learning rate of the outer optimizer
    outer_momentum: Share = 0.9  # momentum of the outer optimizer
    pass_samples: SomeSamples = 32  # most samples per forward pass, in whole cells; exact: one cell
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of autocast; `reduction` is independent of it
    activation_checkpointing: bool = False  # recompute activations in the backward pass, to save memory
    compile: bool = False  # compile the model's blocks with torch.compile
    threads: Annotated[int, Range(1, 4096)] = 1  # threads per rank; exact results depend on it
    assignment: Literal["near", "fixed"] = "near"  # near: lanes to the nodes that cache them; fixed: in order
    rebalance: bool = False  # move lanes away from slow ranks, by the measured times of cells
    rebalance_every: SomeSize = 16  # steps between two decisions
    timeout_s: Annotated[float, Range(0.1, 604_800)] = 120.0  # wait for a silent rank before the run fails
    shutdown_s: Annotated[int, Range(1, 86_400)] = 30  # time for ranks to save and end before they are killed

    def __post_init__(self) -> None:
        super().__post_init__()
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
class CheckpointConfig(Section, section="checkpoint"):
    """[checkpoint]: intervals, retention and replicas."""

    every: SomeSteps = 100  # steps between saves; the last step is always saved
    keep: Size = 3  # number of newest checkpoints to keep; 0: all
    replicas: list[str] = field(default_factory=list)  # folders or URLs that get a copy of each checkpoint
    asynchronous: bool = True  # write in the background while training continues
    resume: bool = True  # continue from the newest checkpoint of the run directory


@dataclass(kw_only=True)
class EvaluationConfig(Section, section="evaluation"):
    """[evaluation]: a pass over every sample of another dataset or ref, exactly once on any world size."""

    dataset: str = ""  # path or URL, as for data.dataset; empty: no evaluation
    every: Steps = 0  # steps between evaluations; 0: at the end only
    global_batch: Samples = 0  # samples per step; 0: as in training


@dataclass(kw_only=True)
class LogConfig(Section, section="log"):
    """[log]: console, metrics, profiling, costs and telemetry."""

    every: SomeSteps = 10  # steps between lines on the console; metrics have every step
    sample_losses: bool = False  # keep the loss of every sample, for shardkit audit spikes
    tensorboard: bool = False  # write TensorBoard files to metrics/tensorboard
    profile_steps: Size = 0  # number of steps to record with torch.profiler; 0: none
    profile_from: Steps = 5  # steps of this process before the profile
    peak_flops: Annotated[float, Range(0, 1e21)] = 0.0  # of one rank, per second; 0: measured at the start
    price_per_hour: Annotated[float, Range(0, 1e6)] = 0.0  # price of one rank, in dollars
    watts: Annotated[float, Range(0, 1e6)] = 0.0  # power of one rank
    telemetry_s: Annotated[float, Range(0.01, 86_400, zero=True)] = 2.0  # between telemetry records; 0: none
    listen: str = ""  # HOST:PORT of each node's /metrics and /healthz, as 127.0.0.1:9400; empty: none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen:
            parse_listen(self.listen)

    def telemetry(self) -> TelemetrySettings | None:
        if not self.telemetry_s:
            return None
        return TelemetrySettings(interval_s=self.telemetry_s, listen=self.listen or None)


@dataclass(kw_only=True)
class Configuration:
    """The settings of a run."""

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
        late = max((one.from_step for one in data.stages if one.from_step >= self.run.steps), default=0)
        expect(
            (bool(self.run.directory), "run.directory is empty: name the folder that the run is kept in"),
            (not data.stages or self.run.steps > 0,
             "data.stages: expected run.steps > 0, since epochs have no common length"),
            (not late,
             f"data.stages: from_step = {late} is behind the end: expected less than run.steps = {self.run.steps}"),
            (not data.locations or not data.parts,
             "data.locations: expected data.dataset; locations belong to one dataset"),
            (data.mixer in ("", "temperature") or self.log.sample_losses,
             f"data.mixer = {data.mixer!r} decides by the losses of samples: expected log.sample_losses = true"),
            (bool(data.dataset) != bool(data.parts), "data.dataset or data.parts: expected exactly one of them"),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the settings as {section: {key: value}}."""
        return dataclasses.asdict(self)


def load_configuration(path: str | Path | None, overrides: Iterable[str] = ()) -> Configuration:
    """Load settings from a TOML file or a run's run.json, then apply ``section.key=value`` overrides.

    The value of an override is parsed as TOML, or taken as text if it is not valid TOML.

    Raises:
        ConfigurationError: the file is missing or not valid TOML, or a key or value is wrong.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
            # the run.json of a run directory contains the settings of the run
            raw = json.loads(text)["configuration"] if Path(path).suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError as error:
            raise ConfigurationError(f"configuration {path}: no such file") from error
        except (
            ValueError,
            KeyError,
            TypeError,
            OSError,
        ) as error:  # also numbers that Python refuses to read
            raise ConfigurationError(f"configuration {path}: {error}") from error
    for override in overrides:
        _apply(raw, override)
    built: Configuration = build(Configuration, raw)
    return built


def _apply(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    example = "section.key=value, such as optimizer.lr=0.001"
    expect((bool(equals and name), f"override {override!r}: expected {example}"))
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # not TOML, or a number that Python refuses to read
        value = text
    *sections, key = name.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        expect((isinstance(raw, dict), f"override {override!r}: {section} is a value, not a section"))
    raw[key] = value


# ---- from raw values to sections


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``allowed``, otherwise raise `ConfigurationError`."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{name} = {shown(value)}: expected one of {', '.join(allowed)}{hint}")
    return value


def build(kind: type[Any], raw: Mapping[str, Any], prefix: str = "", whole: type[Any] | None = None) -> Any:
    """Build a section from raw values.

    Args:
        kind: dataclass of the section, or of the whole configuration.
        raw: values by key, as TOML or JSON gives them.
        prefix: path of the section in messages, such as ``data.``.
        whole: configuration from which messages suggest the nearest known key; None: ``kind``.

    Raises:
        ConfigurationError: an unknown key, a wrong type or a value out of range.
    """
    whole = whole or kind
    known = get_type_hints(kind, include_extras=True)
    arguments = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigurationError(f"unknown key {prefix}{key}{_nearest(whole, key, prefix)}")
        arguments[key] = _convert(known[key], value, prefix + key, whole)
    return kind(**arguments)


def _nearest(whole: type[Any], key: str, prefix: str) -> str:
    sections = get_type_hints(whole)
    everything = [f"{name}.{leaf}" for name, kind in sections.items() for leaf in get_type_hints(kind)]
    everything += sections
    same_leaf = [name for name in everything if name.rpartition(".")[2] == key]
    found = same_leaf or difflib.get_close_matches(prefix + key, everything, n=1, cutoff=0.5)
    return f"; nearest known key: {found[0]}" if found else f"; known: {', '.join(sorted(everything))}"


def _convert(hint: Any, value: Any, name: str, whole: type[Any]) -> Any:
    """Return ``value`` converted to a key's type, recursively."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return one_of(name, _to_type(str, value, name), inner)
    if origin is Annotated:
        return inner[1].check(name, value, inner[0])
    if origin is dict:
        table = _to_type(dict, value, name, "a table")
        if inner[1] is Any:
            return dict(table)
        return {k: _convert(inner[1], v, f"{name}.{k}", whole) for k, v in table.items()}
    if origin is list:
        items = _to_type(list, value, name, "a list")
        return [_convert(inner[0], one, f"{name}[{i}]", whole) for i, one in enumerate(items)]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, _to_type(dict, value, name, f"a section [{name}]"), name + ".", whole)
    return _to_type(hint, value, name)


def _to_type(kind: type[Any], value: Any, name: str, expected: str = "") -> Any:
    if type(value) is not kind:  # not isinstance: True is not an integer here
        what = expected or kind.__name__
        raise ConfigurationError(f"{name} = {shown(value)}: expected {what}, got {type(value).__name__}")
    return value


# ---- documentation


def describe(kind: type[Any], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return (key, default, allowed values, meaning) of every key, from the fields and the comments next to them."""
    rows = []
    hints, meanings = get_type_hints(kind, include_extras=True), _meanings(kind)
    for one in dataclasses.fields(kind):
        hint, name = hints[one.name], prefix + one.name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            rows += describe(hint, f"{name}.")
            continue
        default: Any = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        rows.append((name, _default_text(default), _type_text(hint), meanings.get(one.name, "")))
        if get_origin(hint) is list and dataclasses.is_dataclass(get_args(hint)[0]):
            rows += describe(get_args(hint)[0], f"{name}[].")
    return rows


def _type_text(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(inner)
    if origin is Annotated:
        return str(inner[1].text(inner[0]))
    if origin is dict:
        return "a table" if inner[1] is Any else f"a table, each {_type_text(inner[1])}"
    if origin is list and dataclasses.is_dataclass(inner[0]):
        return "a list of sections"
    if origin is list:
        return f"a list, each {_type_text(inner[0])}"
    return {str: "text", bool: "true or false"}[hint]


def _default_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in ("", {}, []) else str(value)


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Return the comment next to each field; empty if the sources are not installed."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))
