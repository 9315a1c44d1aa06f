"""`shardkit audit`: what a run consumed, proven, compared and traced."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardkit.audit import (
    Audit,
    audit_run,
    compare_runs,
    describe_ranked,
    find_plans,
    find_spikes,
    html_report,
    load_run,
    losses_of_step,
    make_statement,
    rank_samples,
    read_envelope,
    samples_of_step,
    sign_statement,
    uses_of,
    uses_of_many,
    verify_envelope,
)
from shardkit.audit.plans import RunPlan
from shardkit.audit.result import HEADINGS, facts_of
from shardkit.audit.run_record import RunRecord
from shardkit.copies.shard_checks import Level
from shardkit.dataset.lookups import list_samples
from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.function_names import load_named
from shardkit.stores.file_operations import explained
from shardkit_tools import console, options
from shardkit_tools.commands.verify import parse_share
from shardkit_tools.console import count_text
from shardkit_tools.main import CommandPage, GroupPage
from shardkit_tools.observing.spike_page import spike_page
from shardkit_tools.options import argument, option
from shardkit_tools.row_lists import AbsentOption, read_values, sample_number

_SHOWN = 20
_DEFAULT = "check"
_STATEMENT = "audit.dsse.json"

RunArgument = Annotated[Path, argument("RUN", "The run directory.")]
DatasetOption = Annotated[
    str | None,
    option("--dataset ROOT", "Root of the dataset, if it has moved since the run."),
]


class AuditGroup(GroupPage):
    """A group of commands; without the name of one, `check` runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Choose the command; called by typer."""
        return super().resolve_command(ctx, args if args[0] in self.commands else [_DEFAULT, *args])


group = typer.Typer(
    cls=AuditGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True},
)


@group.callback()
def audit() -> None:
    """Prove which samples a run consumed, compare two runs, trace samples.

    audit RUN is audit check RUN: the ledger, every step against the plan, coverage, checkpoints and the data. Only the
    last reads samples: --manifest-only leaves it out.

    Exit codes: 0 clean, or deviations that the ledger explains; 3 could not check; 4 violated. diff: 5 where the runs
    diverge. trace --exclude: 5 if a listed sample was used, or an entry of the list is absent from the dataset.

    Example: shardkit audit runs/a && shardkit audit trace runs/a --exclude takedown.txt
    """


# ---- audit RUN


@group.command(_DEFAULT, cls=CommandPage)
def check_command(
    run: RunArgument,
    level: Annotated[
        Level,
        option("--level list|attested|stored|read|decode", "How the shards are checked, as in verify."),
    ] = "read",
    only_manifest: Annotated[
        bool, option("--manifest-only", "Do not look at the shards, only at the manifest and its pages.")
    ] = False,
    sample: Annotated[str, option("--sample SHARE", "Look at a share of the shards, such as 5%.")] = "100%",
    dataset: DatasetOption = None,
    jobs: options.JobsOption = None,
    html: Annotated[Path | None, option("--html FILE", "Write the report as one HTML page, too.")] = None,
    sign: Annotated[Path | None, option("--sign KEY", "Sign the result with this Ed25519 key (PEM).")] = None,
    verify_key: Annotated[
        Path | None, option("--verify-key KEY", "Check a signed result by this public key (PEM).")
    ] = None,
    statement: Annotated[
        Path | None, option("--statement FILE", f"The signed result; default: {_STATEMENT} in the run.")
    ] = None,
    lock: Annotated[
        Path | None, option("--lock FILE", "State the digest of this lock file in the signed result.")
    ] = None,
    mixer: Annotated[
        str | None,
        option(
            "--mixer MODULE:FUNCTION", "Function of your own that decided the weights, to compute them again."
        ),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Check a run: ledger, every step against the plan, coverage, checkpoints, data.

    Example: shardkit audit runs/a --level stored --html audit.html
    """
    signed = statement or run / _STATEMENT
    claim = _claim(signed, verify_key) if verify_key is not None else None
    with console.long_work() as status:
        result = audit_run(
            run,
            dataset=dataset,
            level=None if only_manifest else level,
            sample=parse_share(sample),
            jobs=jobs or os.cpu_count() or 1,
            statement=claim,
            mixer=None if mixer is None else load_named("--mixer", mixer, "function"),
            report=lambda what, done, of: status.show(f"{what}: {done:,} of {of:,}"),
        )
    if html is not None:
        _write(html, html_report(result).encode())
    if sign is not None:
        _write(signed, sign_statement(make_statement(result, lock=lock), sign))
    written = [path for path, asked in ((html, html), (signed, sign)) if asked is not None]
    console.present(
        as_json, lambda: _document(result), lambda: _print_audit(result, written), result.exit_code
    )


def _claim(signed: Path, key: Path) -> dict[str, Any]:
    """Return the signed result. A wrong signature is a violation: the result is not compared with it."""
    try:
        return verify_envelope(read_envelope(signed), key)
    except (IntegrityError, FormatError) as error:
        raise IntegrityError(f"violated: {signed}: {error}") from error


def _write(path: Path, data: bytes) -> None:
    with explained(f"write {path}", writing=True):
        path.write_bytes(data)


def _document(result: Audit) -> dict[str, Any]:
    coverage = [
        {**console.plain(one), "whole": one.is_whole, "exact": one.is_exact} for one in result.coverage
    ]
    checkpoints = [{"name": name, "step": step, "fits": fits} for name, step, fits in result.checkpoints]
    return {**console.plain(result), "coverage": coverage, "checkpoints": checkpoints}


_STYLES = {"violated": "red", "unknown": "yellow", "explained": "yellow", "note": "dim"}


def _print_audit(result: Audit, written: Sequence[Path | None]) -> None:
    for severity, heading in HEADINGS.items():
        found = [
            (f"{one.kind}: {one.subject}", [("", one.text)])
            for one in result.findings
            if one.severity == severity
        ]
        console.print_findings(f"{heading}: {len(found)}", found, _STYLES[severity])
    if result.findings:
        console.print_line()
    console.print_line(f"{result.run}: {result.verdict}", "bold")
    console.print_facts(facts_of(result, epochs=_SHOWN))
    for path in written:
        console.print_line(f"written: {path}")


# ---- audit diff A B


@group.command("diff", cls=CommandPage)
def diff_command(
    first: Annotated[Path, argument("A", "A run directory.")],
    second: Annotated[Path, argument("B", "Another.")],
    as_json: options.JsonFlag = False,
) -> None:
    """Say at which step two runs diverge first, and why.

    Exit codes: 0 the same samples at every step that both have, 5 they diverge.

    Example: shardkit audit diff runs/a runs/b
    """
    one, other = load_run(first), load_run(second)
    result = compare_runs(one, other, find_plans(one), find_plans(other))
    same = f"the same samples at all {count_text(result.compared, 'step')} that both have"
    answer = same if result.is_equal else f"they diverge at step {result.diverges}"
    sides = {"a": str(first), "b": str(second), "answer": answer}
    document = sides | console.plain(result) | {"violated": [*one.violations, *other.violations]}
    code = ExitCode.DONE if result.is_equal else ExitCode.NO
    console.present(as_json, lambda: document, lambda: _print_comparison(document), code)


def _print_comparison(document: dict[str, Any]) -> None:
    shown = {name: value for name, value in document.items() if name not in ("cells", "diverges")}
    shown["steps"] = "{:,} in A, {:,} in B".format(*document["steps"])
    if document["content"]:
        shown["content"] = "equal in {:,} of {:,} samples of the first common step".format(
            *document["content"]
        )
    console.print_document(shown)
    columns = [">lane", ">slot", ">sample of A", ">sample of B"]
    console.print_table(columns, document["cells"], heading=f"step {document['diverges']}")


# ---- audit trace RUN


@group.command("trace", cls=CommandPage)
def trace_command(
    run: RunArgument,
    sample: Annotated[str | None, option("--sample N|KEY", "List every step that had this sample.")] = None,
    step: Annotated[
        int | None, option("--step K", "List the samples of a step, and where their bytes came from.", min=0)
    ] = None,
    exclude: Annotated[
        Path | None, option("--exclude FILE", "Prove that none of a list, one value a line, was ever used.")
    ] = None,
    field: Annotated[
        str | None,
        option(
            "--field FIELD",
            "What --exclude or --sample names: key, number, url, image:sha256, …; default: keys, or else numbers.",
        ),
    ] = None,
    allow_absent: AbsentOption = False,
    dataset: DatasetOption = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Trace a sample, a step, or a list of samples that must not have been used.

    The answer follows from the plan and the ledger; run `shardkit audit RUN` first to know that the ledger is sound.
    Exit codes of --exclude: 0 none of them was used; 5 some were, or some are not in the dataset (--allow-absent leaves
    these out); 4 where the record of the run is not sound.

    Example: shardkit audit trace runs/a --exclude takedown.txt --field url
    """
    if sum(one is not None for one in (sample, step, exclude)) != 1:
        raise UsageError("audit trace takes one of --sample, --step and --exclude")
    record = load_run(run)
    plans = find_plans(record, dataset)
    if record.violations and not as_json:
        worst = record.violations[0]
        console.print_line(f"the record of this run is not sound ({worst.subject}: {worst.text})", "red")
    if not plans:
        raise NotFoundError(
            f"{run}: the plan cannot be made again: " + "; ".join(one.text for one in record.findings)[:500]
        )
    code = ExitCode.DONE
    document: dict[str, Any]
    if sample is not None:
        number = sample_number(next(iter(plans.values())).dataset, sample, field)
        uses = uses_of(record, plans, number)
        document = {"sample": number, "consumed": len(uses), "uses": uses}
    elif step is not None:
        document = {"step": step, "samples": samples_of_step(record, plans, step)}
    elif exclude is not None:
        document = _trace_list(record, plans, read_values(exclude), field)
        is_complete = allow_absent or not document["absent"]
        code = ExitCode.DONE if is_complete and not document["used"] else ExitCode.NO
    console.present(as_json, lambda: document, exit_code=ExitCode.DAMAGED if record.violations else code)


def _trace_list(
    record: RunRecord, plans: dict[int, RunPlan], values: list[str], field: str | None
) -> dict[str, Any]:
    first = plans[min(plans)].dataset
    listed = list_samples(first, values, field)
    samples, absent, taken = set(listed.samples.tolist()), set(listed.absent), listed.field
    if taken == "number":  # of the first version
        uses = uses_of_many(record, plans, samples)
    else:  # each version is searched: a later one may have values that the first one lacks
        found = {first.manifest.id: listed}
        for version, other in {one.dataset.manifest.id: one.dataset for one in plans.values()}.items():
            if version not in found:
                found[version] = list_samples(other, values, taken)
        absent = absent.intersection(*(one.absent for one in found.values()))
        samples = samples.union(*(one.samples.tolist() for one in found.values()))
        asked = {number: found[one.dataset.manifest.id].samples.tolist() for number, one in plans.items()}
        uses = uses_of_many(record, plans, asked)
    answer = "these were used" if uses else "none of the list was ever used"
    if not samples and absent:
        answer = f"nothing of the list is in the dataset, taken as {taken}: this proves nothing"
    elif absent:
        answer += f"; {len(absent)} of {len(values)} are not in the dataset, taken as {taken}: nothing is said of these"
    return {"answer": answer, "listed": len(values), "field": taken, "absent": sorted(absent),
            "in_dataset": sorted(samples), "used": sorted({use.sample for use in uses}), "uses": uses}  # fmt: skip


# ---- audit spikes RUN


@group.command("spikes", cls=CommandPage)
def spikes_command(
    run: RunArgument,
    step: Annotated[
        int | None,
        option("--step K", "Show the samples of this step; default: of the largest spike.", min=0),
    ] = None,
    top: Annotated[int, option("--top N", "Show this many steps and samples.", min=1)] = 10,
    threshold: Annotated[
        float, option("--threshold Z", "Smallest score of a spike, in robust standard deviations.", min=0)
    ] = 6.0,
    window: Annotated[
        int, option("--window N", "Number of earlier steps with which a step is compared.", min=2)
    ] = 100,
    of_all: Annotated[
        bool,
        option("--samples", "Rank the samples of all steps by their losses among those of near steps."),
    ] = False,
    open_page: Annotated[
        bool, option("--open", "Write a page with the fields of the samples, and open it in a browser.")
    ] = False,
    dataset: DatasetOption = None,
    as_json: options.JsonFlag = False,
) -> None:
    """List steps of abnormal loss, and the samples of one of them with their losses, keys, strata and sources.

    Losses come from loader.note(batch, losses) in the training loop, or from log.sample_losses of the trainer. The
    answer rests on the ledger as it is; run `shardkit audit RUN` to know that it is sound.

    Example: shardkit audit spikes runs/a && shardkit audit spikes runs/a --step 41237 --top 20
    """
    record = load_run(run, is_checked=False)
    losses = record.losses()
    document: dict[str, Any]
    if of_all:
        ranked = rank_samples(losses, top=top, window=window)
        found = describe_ranked(record, find_plans(record, dataset), losses, ranked)
        console.present(as_json, lambda: {"steps": len(losses.steps), "samples": found})
        return
    spikes = find_spikes(losses, threshold=threshold, window=window)
    chosen = spikes[0].step if step is None and spikes else step
    document = {"steps": len(losses.steps), "found": len(spikes), "spikes": spikes[:top]}
    if chosen is not None:
        plans = find_plans(record, dataset)
        samples, shares = losses_of_step(record, plans, losses, chosen)
        document |= {"step": chosen, "strata": shares[:top], "samples": samples[:top]}
        if open_page:
            number = next(number for number, first, end in record.legs() if first <= chosen < end)
            html = spike_page(str(run), chosen, plans[number].dataset, samples[:top])
            document["page"] = str(_write_page(f"step-{chosen}.html", html))
    console.present(as_json, lambda: document)


def _write_page(name: str, html: str) -> Path:
    """Write a page to a new temporary folder; open it if a person sees the output."""
    path = Path(tempfile.mkdtemp(prefix="shardkit-spikes-")) / name
    _write(path, html.encode())
    if console.is_terminal():
        typer.launch(str(path))
    return path
