"""`shardkit amend`: change the plan of a run from a step on."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from shardkit.audit.amendments import ChangeRequest, amend_run, next_start, running_job
from shardkit.audit.run_record import check_run_directory
from shardkit.errors import UsageError
from shardkit.ledger.bindings import Amendment, active_amendments, is_applied, read_events, undo_amendment
from shardkit_tools import console, options
from shardkit_tools.options import ExcludeOption, SkipOption, WeightsOption, argument, option
from shardkit_tools.row_lists import AbsentOption, read_values

_SHORT = re.compile(r"[0-9./]{1,40}([eE][+-]?[0-9]{1,2})?")  # the digits of 1e9999 are no text of a ledger

FieldOption = Annotated[
    str | None, option("--field FIELD", "What --exclude names; default: keys, or else numbers.")
]


def amend(
    run: Annotated[Path, argument("RUN", "The run directory.")],
    skip: SkipOption = "",
    exclude: ExcludeOption = None,
    field: FieldOption = None,
    allow_absent: AbsentOption = False,
    weights: WeightsOption = None,
    from_step: Annotated[
        int | None,
        option(
            "--from-step K",
            "First step with the change; default: that of --skip, or the step at which the run continues; in a "
            "running job a step about 10 seconds ahead.",
            min=0,
        ),
    ] = None,
    listed: Annotated[bool, option("--list", "List the amendments in force.")] = False,
    undo: Annotated[bool, option("--undo", "Take back the newest amendment, before it is applied.")] = False,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    dataset: Annotated[
        str | None,
        option("--dataset ROOT", "Root of the dataset, if it has moved since the run."),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Change the plan of a run from a step on; the running job or the next start applies it.

    The ledger of the run records the change, who made it and why, and audits account for it. While `shardkit train`
    runs, all its ranks apply the change at the same later step. Otherwise the trainer continues from the newest
    checkpoint that is not later than the change; ds.loader(plan, run=RUN) takes a state that is not later.

    Example: shardkit amend runs/a --skip 41200:41260 --message 'loss spike, broken crawl'
    """
    is_change = bool(skip or exclude is not None or weights)
    if sum((is_change, listed, undo)) != 1:
        raise UsageError("amend takes --skip, --exclude or --weights, or --list, or --undo")
    document: dict[str, Any]
    if undo:
        document = {"undone": _document(undo_amendment(run, message=message, author=author))}
    elif listed:
        check_run_directory(run)
        events = read_events(run)
        document = {
            "amendments": [
                _document(one) | {"applied": is_applied(one, events)} for one in active_amendments(events)
            ]
        }
    else:
        request = change_request(
            skip=skip,
            exclude=exclude,
            field=field,
            allow_absent=allow_absent,
            weights=weights,
            from_step=from_step,
        )
        made = amend_run(run, request, message=message, author=author, dataset=dataset)
        document = _document(made) | {"plan": made.plan}
        if job := running_job(run):
            document["running_job"] = f"process {job} applies it at step {made.from_step}"
        else:
            document["continues_from"] = next_start(run)
    console.present(as_json, lambda: document)


def change_request(
    *,
    skip: str,
    exclude: Path | None,
    weights: list[str] | None,
    field: str | None = None,
    allow_absent: bool = False,
    from_step: int | None = None,
    resume_from: int | None = None,
) -> ChangeRequest:
    """Return the change that options ask for."""
    return ChangeRequest(
        skip=_parse_skip(skip) if skip else None,
        exclude=None if exclude is None else read_values(exclude),
        field=field,
        allow_absent=allow_absent,
        weights=_parse_weights(weights) if weights else None,
        from_step=from_step,
        resume_from=resume_from,
    )


def _parse_skip(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    are_steps = colon and all(one.isascii() and one.isdigit() and len(one) < 19 for one in (first, end))
    if are_steps and int(first) < int(end):
        return int(first), int(end)
    raise UsageError(f"--skip {text!r}: expected A:B with A < B, such as 41200:41260")


def _parse_weights(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        pattern, equals, weight = text.rpartition("=")
        try:
            value = Fraction(weight) if _SHORT.fullmatch(weight) else Fraction(-1)
        except (ValueError, ZeroDivisionError):
            value = Fraction(-1)
        if not equals or not pattern or value < 0:
            raise UsageError(
                f"--weights {text!r}: expected PATTERN=WEIGHT with a weight of 0 or more, such as 'web*=2'"
            )
        found[pattern] = str(value)
    return found


def _document(amendment: Amendment) -> dict[str, Any]:
    made = datetime.fromtimestamp(amendment.time / 1e9, UTC)
    return {
        "amendment": amendment.number,
        "change": str(amendment),
        "author": amendment.author,
        "message": amendment.message,
        "time": made.isoformat(timespec="seconds"),
    }
