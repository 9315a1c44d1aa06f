"""Write the page of the read benchmark."""

from __future__ import annotations

from typing import Any

from bench.reading.figures import Spread, later, of, rates, shares, spread
from bench.reading.goals import goals

__all__ = ["report"]

_MIB = 1 << 20
_DROPPED = 0.01
"""Share of pages that may stay in a page cache that counts as dropped."""
_NOT_INSTALLED = "ModuleNotFoundError"
_MEANING = """\
Epochs are shuffled and consist of whole batches. Every repeat starts each reader as a new process. All readers run an
epoch in turn before the next epoch begins. *Touched*: the first value of every sample is read; *read once*: every byte
is read; *delivered*: no value is read. *Cold*: the first epoch of a process after its data were dropped from the page
cache. *Of the limit*: relative to the median of the limit's later epochs in the same repeat. *within* may hold twice
the size of the data in memory, *beyond* a quarter of it; otherwise the default applies. CPU is the CPU time of the
process and its children from the end of one epoch to the end of the next. *Peak* is the largest resident memory (VmHWM)
up to the last touched epoch; for memory maps it includes the mapped page cache. *Waits* last from the end of reading
one batch to the arrival of the next, in later touched epochs. *First batch*: seconds since the start of the process,
imports included. ¹: some epochs were stopped after {seconds:g} s. shardkit verifies the checksum of every block that it
reads, and ArrayRecord verifies every chunk. The other readers verify none, except limits whose labels say so."""


def report(facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the page in Markdown: the goals, then a table per part."""
    lines = [*_head(facts)]
    found = goals(results)
    if any(goal.met is not None for goal in found):
        lines += ["", "## Goals", "", "| | goal | measured, median (range) | |", "|---|---|---|---|"]
        said = {True: "met", False: "**missed**", None: "–"}
        lines += [f"| {goal.text} | {goal.wanted} | {goal.found} | {said[goal.met]} |" for goal in found]
        if facts["scale"] < 1:
            lines += [
                "",
                f"At scale {facts['scale']:g}: goals are for scale 1, and these figures say nothing about them.",
            ]
    for part, result in results.items():
        lines += ["", *_part(part, result)]
    return "\n".join(lines) + "\n"


def _head(facts: dict[str, Any]) -> list[str]:
    machine = (
        f"{facts['cpus']} × {facts['processor']} ({facts['machine']}), load average {facts['load_before']:.1f} before "
        f"and {facts['load_after']:.1f} after; Python {facts['python']}. Scale {facts['scale']:g}, {facts['repeats']} "
        f"repeats, {facts['took_s'] / 60:.0f} minutes. Versions: {_list_text(facts['versions'])}."
    )
    if facts["peer_versions"]:
        machine += f" Peers: {_list_text(facts['peer_versions'])}."
    return [f"# Reading, {facts['date']}", "", machine, "", _MEANING.format(seconds=facts["seconds"])]


def _list_text(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _part(part: str, result: dict[str, Any]) -> list[str]:
    readers = {name: one for name, one in result["readers"].items() if not _missing(one)}
    missing = [one["label"] for one in result["readers"].values() if _missing(one)]
    title = {
        "workers": "tokens, two DataLoader workers",
        "s3": "tokens, from a bucket (LocalStack on 127.0.0.1)",
        "pictures": "pictures of ImageNet's sizes, from a bucket that answers 10 ms late",
    }
    lines = [f"## {title.get(part, part)}: {result['rows']:,} samples, batch {result['batch']}", ""]
    if "ranges" in result:
        lines += [
            f"{result['ranges']:,} ranges of {result['bytes'] / result['ranges'] / 1024:,.0f} KiB on average.",
            "",
        ]
    full = part not in ("workers", "s3", "pictures")
    epochs = max((later(one, "touched").stop for one in readers.values()), default=0)
    ordinal = [{0: "1st", 1: "2nd", 2: "3rd"}.get(k, f"{k + 1}th") for k in range(epochs)]
    columns = ["reader", *(f"{k} epoch, touched: samples/s" for k in ordinal)]
    if full:
        columns += ["of the limit", "read once: samples/s", "of the limit", "delivered", "cold"]
    columns += ["CPU µs a sample: 1st, later", "peak MiB", "wait ms: 99.9 %, longest"]
    columns += ["first batch, s"] if full else []
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in readers.values():
        cells = _failure_lines(one) or _cells(one, readers.get("limit", {}), epochs, full=full)
        lines.append(f"| {' | '.join([one['label'], *cells])} |")
    return [*lines, *_remarks(result, missing)]


def _missing(one: dict[str, Any]) -> bool:
    return str(one.get("error", "")).startswith(_NOT_INSTALLED)


def _failure_lines(one: dict[str, Any]) -> list[str]:
    return [f"failed: {' '.join(one['error'].split())[:120]}"] if "error" in one else []


def _cells(one: dict[str, Any], limit: dict[str, Any], epochs: int, *, full: bool) -> list[str]:
    cells = [_rate(one, "touched", k) for k in range(epochs)]
    if full:
        read = later(one, "read").stop - 1
        cells += [_shares(one, limit, "touched", range(epochs)), _rate(one, "read", read)]
        cells += [_shares(one, limit, "read", range(read, read + 1))]
        cells += [_rate(one, "delivered", 0), _rate(one, "cold", 0)]
    costs = [_cell(_all(one, [k], "cpu_s", per_sample=True), 1e6, ".2f") for k in (0, max(epochs - 1, 0))]
    peak = _all(one, [max(epochs - 1, 0)], "peak")
    waits = [_cell(_all(one, later(one, "touched"), name), 1e3, ".1f") for name in ("p999_s", "longest_s")]
    cells += [", ".join(costs), _cell(peak, 1 / _MIB, ".0f"), ", ".join(waits)]
    return [*cells, *([_whole(spread(one.get("first", [])), ".2f")] if full else [])]


def _all(
    one: dict[str, Any], epochs: list[int] | range, name: str, *, per_sample: bool = False
) -> Spread | None:
    return spread(
        [
            answer[name] / (answer["samples"] if per_sample else 1)
            for epoch in epochs
            for answer in of(one, "touched", epoch)
        ]
    )


def _rate(one: dict[str, Any], mode: str, epoch: int) -> str:
    found = spread(rates(one, mode, epoch)) if epoch >= 0 else None
    cut = any(not answer["whole"] for answer in of(one, mode, epoch)) if epoch >= 0 else False
    return _whole(found, ",.0f") + ("¹" if cut else "")


def _shares(one: dict[str, Any], limit: dict[str, Any], mode: str, epochs: range) -> str:
    found = [spread(shares(one, limit, mode, epoch)) for epoch in epochs if epoch >= 0]
    return ", ".join("–" if each is None else f"{each.median:.2f}" for each in found) or "–"


def _whole(found: Spread | None, form: str) -> str:
    return "–" if found is None else found.told(form)


def _cell(found: Spread | None, factor: float, form: str) -> str:
    return "–" if found is None else f"{found.median * factor:{form}}"


def _remarks(result: dict[str, Any], missing: list[str]) -> list[str]:
    lines = []
    for key in ("shardkit", "within", "beyond"):
        facts = result["readers"].get(key, {}).get("facts", {})
        if facts.get("smaller"):
            lines.append(
                f"{key}: with the plan's {facts['smaller']}, since the data are too few for its default windows."
            )
    facts = result["readers"].get("private_blocks", {}).get("facts", {})
    if facts and not facts.get("compiled"):
        lines.append("Private blocks ran without a compiler.")
    if result.get("stayed", 0.0) > _DROPPED:
        lines.append(
            f"Cold is not cold: {result['stayed']:.0%} of the pages of some reader's files stayed in the page cache."
        )
    if missing:
        lines.append(f"Not installed: {', '.join(missing)}.")
    return ["", *lines] if lines else []
