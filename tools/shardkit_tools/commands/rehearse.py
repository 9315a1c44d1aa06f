"""`shardkit rehearse`: what a loss would mean, before it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from shardkit.errors import UsageError
from shardkit.exit_codes import ExitCode
from shardkit_tools import console, options
from shardkit_tools.observing.rehearsal import Rehearsal, rehearse_loss
from shardkit_tools.options import argument, option


def rehearse(
    run: Annotated[str, argument("RUN", "The run directory.")],
    kill_node: Annotated[
        list[str] | None, option("--kill-node HOST", "A node that dies; may be given again.")
    ] = None,
    kill_rank: Annotated[list[int] | None, option("--kill-rank N", "A single rank that dies.")] = None,
    kill_location: Annotated[
        list[str] | None,
        option("--kill-location NAME", "A location of the dataset that is lost with all it holds."),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Rehearse a loss: which lanes move, what is read again and from where, which steps are repeated, what is lost.

    Nothing happens to the run: its plan is made again from its ledger, and locations are only asked what they
    have. A location whose failure domain is a dead node dies with it. Exit code 5: data would be lost; run shardkit
    replicate ROOT while it is still there.

    Example: shardkit rehearse runs/mine --kill-node node-7
    """
    if not (kill_node or kill_rank or kill_location):
        raise UsageError("name what is lost: --kill-node HOST, --kill-rank N or --kill-location NAME")
    found = rehearse_loss(
        Path(run), nodes=kill_node or (), ranks=kill_rank or (), locations=kill_location or ()
    )
    code = ExitCode.NO if found.lost else ExitCode.DONE
    console.present(as_json, found.to_json, lambda: console.print_document(_page(found)), code)


def _page(found: Rehearsal) -> dict[str, Any]:
    """The document with names for its pairs."""

    def shards(pair: tuple[int, int]) -> dict[str, int]:
        return dict(zip(("shards", "bytes"), pair, strict=True))

    return found.to_json() | {
        "lanes_per_rank": dict(zip(("now", "then"), found.lanes_per_rank, strict=True)),
        "steps_repeated": "all: no checkpoint" if found.steps_repeated is None else found.steps_repeated,
        "read_again": shards(found.read_again),
        "sources": {name: shards(pair) for name, pair in found.sources.items()},
    }
