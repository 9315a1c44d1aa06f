"""`shardkit tune`: measure this machine and a store, and propose settings with the measurement for each."""

from __future__ import annotations

import os
import re
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from shardkit.errors import ConfigurationError, MissingDependency, RunError
from shardkit.ranges import parse_duration, parse_size
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text
from shardkit_tools.options import argument, option
from shardkit_tools.tuning.all_reduce import measure_all_reduce
from shardkit_tools.tuning.measuring import measure_checkpoint, measure_machine, measure_ranges
from shardkit_tools.tuning.proposing import Needs, Proposal, Ranges, Saving, propose

_TRAINER = {"window_blocks": ("data", "window_blocks"), "sync_every": ("parallel", "sync_every"),
            "checkpoint_every": ("checkpoint", "every")}  # fmt: skip
_BYTES = ("block_size", "shard_size", "read_ahead", "memory")  # other settings are counts
_BEGIN, _END = "# shardkit tune: for builds and loaders", "# shardkit tune: end"
_NOTED = {
    "memory": "ds.loader(…, memory={})",
    "concurrency": "ReadSettings(first_concurrency={})",
    "accumulation": "cells of a rank between two synchronisations: {}",
}
_NOTES = re.compile(rf"\n*^{_BEGIN}$.*?^{_END}$", re.MULTILINE | re.DOTALL)


def write_settings(path: Path, proposals: Mapping[str, Proposal]) -> list[str]:
    """Write proposals into a new or existing file, and return the settings as ``section.name = value``."""
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        changed, said = merge(text, proposals, str(path))
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as file:
            file.write(changed)
        os.replace(file.name, path)  # whole or not at all
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from None
    return said


def merge(text: str, proposals: Mapping[str, Proposal], where: str) -> tuple[str, list[str]]:
    """Return the text with the proposals, and a line for each changed setting. Applying twice gives the same text."""
    _check(text, where)
    said = []
    text = _NOTES.sub("", text)
    for name, (section, key) in _TRAINER.items():
        if name in proposals:
            text = _with(text, section, key, proposals[name].value)
            said.append(f"{section}.{key} = {proposals[name].value}")
    if notes := _notes(proposals):
        text = "\n".join([text.rstrip(), "", _BEGIN, *notes, _END, ""])
    _check(text, where)
    return text, said


def _check(text: str, where: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is no TOML: {error}; nothing was written") from None


def _notes(values: Mapping[str, Proposal]) -> list[str]:
    build = [
        f"--{n.replace('_', '-')} {values[n].value}" for n in ("block_size", "shard_size") if n in values
    ]
    found = [f"shardkit build … {' '.join(build)}"] if build else []
    found += [text.format(values[name].value) for name, text in _NOTED.items() if name in values]
    return [f"#   {text}" for text in found]


def _with(text: str, section: str, key: str, value: int) -> str:
    """Return TOML text with a key set: in its line, after the section's heading, or in a new section at the end."""
    heading = re.search(rf"^\s*\[\s*{section}\s*\]\s*(#.*)?$", text, re.MULTILINE)
    if heading is None:
        return f"{text.rstrip()}\n\n[{section}]\n{key} = {value}\n".lstrip("\n")
    end = re.compile(r"^\s*\[", re.MULTILINE).search(text, heading.end())
    before, own, after = (
        text[: heading.end()],
        text[heading.end() : end and end.start()],
        text[end.start() :] if end else "",
    )
    own, found = re.subn(rf"^(\s*{key}\s*=\s*)[^#\s]*", rf"\g<1>{value}", own, count=1, flags=re.MULTILINE)
    return f"{before}{own}{after}" if found else f"{before}\n{key} = {value}{own}{after}"


_QUICK = 0.25  # share of the time for each question with --quick


def tune(
    root: Annotated[str, argument("[ROOT[@REF]]", "A dataset whose store is measured too.")] = "",
    disk: Annotated[Path, option("--disk FOLDER", "A folder on the disk that is measured.")] = Path(),
    size: Annotated[str, option("--bytes SIZE", "Size of the dataset, if no ROOT is given.")] = "100GB",
    lanes: Annotated[int, option("--lanes N", "Lanes of a rank.", min=1)] = 8,
    ranks: Annotated[int, option("--ranks N", "Ranks of a machine.", min=1)] = 2,
    nodes: Annotated[int, option("--nodes N", "Machines.", min=1)] = 1,
    cell: Annotated[str, option("TIME", "Time to compute a cell.")] = "20ms",
    gradient: Annotated[str, option("SIZE", "Bytes summed over the ranks.")] = "100MB",
    reduce: Annotated[
        bool, option("--reduce/--no-reduce", "Measure an all-reduce and a checkpoint; needs torch.")
    ] = True,
    quick: Annotated[bool, option("--quick", "Measure for a quarter of the time, for a first idea.")] = False,
    apply: Annotated[
        Path | None, option("FILE", "Write the settings into this configuration; comments stay.")
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Measure this machine in under a minute and propose settings, each with its measurement.

    Block and shard size, window, reading ahead, memory, concurrency, accumulation, how often to synchronise and to
    save. Busy machines measure low: run it when nothing else runs.

    Example: shardkit tune data/cats --gradient 500MB --cell 35ms --apply train.toml
    """
    begun, share = time.perf_counter(), _QUICK if quick else 1.0
    needs_bytes, cell_s, gradient_bytes = parse_size(size), parse_duration(cell), parse_size(gradient)
    ranges: Ranges | None = None
    saving: Saving | None = None
    reducing, missing = None, ""
    with console.long_work() as status:

        def tell(text: str) -> None:
            status.show(f"{time.perf_counter() - begun:4.0f} s  {text}")

        if root:
            ranges, needs_bytes = measure_ranges(root, seconds=1.0 * share, tell=tell)
        machine = measure_machine(disk, seconds=2.0 * share, tell=tell)
        if reduce:
            try:
                saving = measure_checkpoint(disk, tell=tell)
                tell("all-reduce")
                reducing = measure_all_reduce(ranks=max(2, min(4, ranks)))
            except (MissingDependency, RunError) as error:  # the rest is worth telling
                missing = str(error)
    proposals = propose(
        machine, ranges, reducing, Needs(needs_bytes, lanes, ranks, nodes, cell_s, gradient_bytes), saving
    )
    written: list[str] = []
    if apply is not None:
        written = write_settings(apply, proposals)
    seconds = time.perf_counter() - begun
    document: dict[str, Any] = {"seconds": seconds, "machine": machine, "proposals": proposals}
    if ranges is not None:
        document["ranges"] = {
            "is_local": ranges.is_local,
            "latency_s": ranges.latency_s,
            "stream": ranges.stream,
            "single_s": ranges.single_s,
            "rates": [{"bytes": b, "at_a_time": c, "rate": r} for (b, c), r in ranges.rates.items()],
        }
    if reducing is not None:
        document["all_reduce_s"] = reducing
    if saving is not None:
        document["checkpoint"] = saving
    rates = {name: rate for name, rate in vars(machine).items() if isinstance(rate, float)}
    page = document | {
        "not_measured": missing,
        "machine": {name: f"{bytes_text(round(rate))}/s" for name, rate in rates.items()},
        "proposals": {
            name: {"value": bytes_text(one.value) if name in _BYTES else one.value, "why": one.why}
            for name, one in proposals.items()
        },
        "written": written,
    }
    console.present(as_json, lambda: document, lambda: console.print_document(page))
