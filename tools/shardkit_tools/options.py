"""Options that several commands take, each declared once; `Annotated` where all of them take it in the same form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


def option(shown: str, text: str, **more: Any) -> Any:
    """An option for `Annotated`, its names and value as its help shows them: ``option("--out -o FILE", "…")``."""
    words = shown.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(words[len(names) :]) or None, help=text, **more)


def argument(shown: str, text: str, **more: Any) -> Any:
    """An argument for `Annotated`: ``argument("ROOT[@REF]", "…")``."""
    return typer.Argument(metavar=shown, help=text, **more)


_SHARDS = functools.partial(typer.Option, rich_help_panel="Shards")
_VERSION = functools.partial(typer.Option, rich_help_panel="Version")
_COPIES = functools.partial(typer.Option, rich_help_panel="Copies")
_RUNNING = functools.partial(typer.Option, rich_help_panel="Running")


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


class EngineName(StrEnum):
    """Who does the work."""

    LOCAL = "local"
    RAY = "ray"


class ShardFormat(StrEnum):
    """The format of shards."""

    TAR = "tar"
    ARROW = "arrow"


# ---- The version that a command is about, and its commit

RootArgument = Annotated[str, typer.Argument(metavar="ROOT", help="The dataset's root, not a copy of it.")]
VersionArgument = Annotated[
    str, typer.Argument(metavar="ROOT[@REF]", help="The version; without @REF: main.")
]
MessageOption = Annotated[str, typer.Option("--message", "-m", help="Why, for the log.")]
AuthorOption = Annotated[str, typer.Option("--author", help="Who, for the log.")]
RefOption = Annotated[str, _VERSION("--ref", metavar="NAME", help="The ref that the version gets.")]
ReplaceOption = Annotated[
    bool,
    _VERSION("--replace", help="Even if the ref names samples of another schema, or was moved meanwhile."),
]

# ---- Settings of a version (`VersionSettings`); the default depends on the command

SCHEMA = typer.Option(
    "--schema",
    metavar="FIELD=TYPE",
    rich_help_panel="Source",
    help="FIELD=TYPE instead of the inferred type; may be repeated.",
)
STRATIFY = _VERSION("--stratify", metavar="FIELD", help="Balance batches by this field; may be repeated.")
SPLIT = _VERSION("--split", metavar="NAME=SHARE,…", help="Refs and shares, such as train=0.9,val=0.1.")
SPLIT_BY = _VERSION(
    "--split-by", metavar="FIELD", help="Keep samples of one value of this field in one split."
)
ABOUT = _VERSION(
    "--about",
    metavar="FILE",
    help="about.toml: licence, source, contact; [stratum.NAME] where they differ.",
)
LOOKUP = _VERSION("--lookup", metavar="FIELD,…", help="Make samples findable, such as key,url,image:sha256.")
COST = _VERSION(
    "--cost",
    metavar="EXPR",
    help='Write what samples cost, for plans that balance ranks, such as "len(tokens)**2"; may be repeated.',
)
FORMAT = _SHARDS("--format", help="tar for media, arrow for numbers and text.")
COMPRESSION = _SHARDS("--compression", metavar="NAME[:LEVEL]", help="none, zstd, zstd:1…19; arrow also lz4.")
SHARD_SIZE = _SHARDS("--shard-size", metavar="SIZE", help="Raw bytes per shard.")
BLOCK_SIZE = _SHARDS(
    "--block-size",
    metavar="SIZE",
    help="Raw bytes per block; by default those of the ref as it stands, else 256KiB.",
)
SEED = _SHARDS("--seed", help="Of the shuffle.")
SHUFFLE = _SHARDS("--shuffle/--no-shuffle", help="Mix the samples, or keep the source's order in a stratum.")

# ---- Where copies go, and what a commit waits for

LocationOption = Annotated[
    list[str] | None,
    _COPIES(
        "--location",
        metavar="NAME=URL",
        help="Another place for copies: NAME=URL[,domain=…][,rank=…][,weight=…]; may be repeated.",
    ),
]
CopiesOption = Annotated[
    int | None,
    _COPIES("--copies", min=1, metavar="N", help="In distinct failure domains, ROOT's among them."),
]
CriticalOption = Annotated[
    list[str] | None,
    _COPIES(
        "--critical",
        metavar="STRATUM=N",
        help="More copies of shards with this stratum; may be repeated.",
    ),
]
ParityOption = Annotated[
    str | None,
    _COPIES("--parity", metavar="K+2|none", help="Sets of K shards with 2 parity objects, such as 8+2."),
]
ModeOption = Annotated[
    str | None,
    _COPIES(
        "--mode",
        metavar="sync|async|hybrid",
        help="What a commit waits for: all copies; none; those of metadata and critical strata.",
    ),
]
FurtherLocationOption = Annotated[
    list[str] | None,
    typer.Option(
        "--location",
        metavar="NAME=URL",
        help="A further place with copies, beside those that the root knows; may be given again.",
    ),
]

# ---- How the work is done

EngineOption = Annotated[
    EngineName, _RUNNING("--engine", help="This machine, or a Ray cluster; the result is the same.")
]
AddressOption = Annotated[
    str | None,
    _RUNNING(
        "--address",
        metavar="HOST:PORT",
        help="Of a running Ray cluster, or auto; without it --engine ray starts one here.",
    ),
]
JobsOption = Annotated[
    int | None,
    _RUNNING("--jobs", "-j", min=1, metavar="N", help="Processes; default: one per processor."),
]
ChecksOption = Annotated[
    int, typer.Option("--jobs", "-j", min=1, max=64, metavar="N", help="Copies checked at once.")
]
ScratchOption = Annotated[
    Path | None,
    _RUNNING(
        "--scratch",
        metavar="FOLDER",
        help="Folder for about as many bytes as the source has, which all workers see; default: in ROOT.",
    ),
]
DryRunOption = Annotated[bool, _RUNNING("--dry-run", help="Read and check everything, write nothing.")]
BandwidthOption = Annotated[
    str | None, _RUNNING("--bandwidth", metavar="RATE", help="At most this, such as 200MB/s.")
]
BetweenOption = Annotated[
    str | None,
    _RUNNING(
        "--between",
        metavar="FROM-TO",
        help="Only at this time of day, such as 22:00-06:00; waits until then.",
    ),
]


def settings_for(function: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command that a function takes under the same name, as it takes them.

    Args:
        function: with one parameter for each setting.
        given: every option of the command by its name.
    """
    wanted = inspect.signature(function).parameters
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in given.items()
        if name in wanted
    }
