"""`shardkit rehearse`: what a loss would mean, before it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shardkit.errors import UsageError
from shardkit.exit_codes import ExitCode
from shardkit_tools import console, options
from shardkit_tools.observing.rehearsal import Rehearsal, rehearse_loss
from shardkit_tools.options import argument, option
from shardkit_tools.texts import bytes_text, count_text

_LANES_SHOWN = 40
_LOST_SHOWN = 10


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
    have. A location whose failure domain is a dead node dies with it. Exit code 5: data would be lost.

    Example: shardkit rehearse runs/mine --kill-node node-7
    """
    if not (kill_node or kill_rank or kill_location):
        raise UsageError("name what is lost: --kill-node HOST, --kill-rank N or --kill-location NAME")
    found = rehearse_loss(
        Path(run), nodes=kill_node or (), ranks=kill_rank or (), locations=kill_location or ()
    )
    console.present(
        as_json, found.to_json, lambda: _print(found), ExitCode.NO if found.lost else ExitCode.DONE
    )


def _print(found: Rehearsal) -> None:
    what = [*(f"node {node}" for node in found.nodes), *(f"rank {rank}" for rank in found.dead if not found.nodes),
            *(f"location {name}" for name in found.locations)]  # fmt: skip
    console.print_line(f"If {', '.join(what)} died at step {count_text(found.step)}")
    before, after = found.lanes_per_rank
    slower = f"a step takes {after / before:.2f} times as long at the same pace" if after else "the run stops"
    shards, size = found.read_again
    console.print_facts([
        ("ranks left", f"{len(found.survivors)} of {len(found.survivors) + len(found.dead)}"),
        ("lanes that move", f"{len(found.moves)}; most on a rank {before} → {after}: {slower}"),
        ("steps repeated", "all: there is no checkpoint" if found.steps_repeated is None else
         f"{count_text(found.steps_repeated)} since the newest checkpoint; they see the same samples"),
        ("read again", f"{count_text(shards, 'shard')}, {bytes_text(size)}, in the epoch under way"),
        ("memory lost", f"{bytes_text(found.memory_bytes)} of verified blocks, which are read again"),
        ("data lost", f"{count_text(len(found.lost), 'shard')} of {count_text(found.asked[0])} looked for" if found.lost
         else "none"),
    ])  # fmt: skip
    if found.sources:
        console.print_heading("Read again from")
        rows = [(name, count_text(count), bytes_text(size)) for name, (count, size) in found.sources.items()]
        console.print_table(["location", ">shards", ">bytes"], rows)
    if found.moves:
        console.print_heading("Lanes")
        moves = [(lane, f"rank {old}", f"rank {new}") for lane, (old, new) in found.moves.items()]
        console.print_table([">lane", "from", "to"], moves[:_LANES_SHOWN])
        console.print_more(len(moves) - _LANES_SHOWN, "; --json has all")
    if found.lost:
        console.print_heading("Lost: no other location has")
        console.print_list(found.lost, _LOST_SHOWN)
        console.print_line("run: shardkit replicate ROOT, while it is still there")
    for note in found.notes:
        console.print_line(f"note: {note}")
