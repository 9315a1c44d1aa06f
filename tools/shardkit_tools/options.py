"""Helpers that declare options, and the options shared by several commands."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def option(shown: str, text: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option for `Annotated` from its help form, such as ``option("--out -o FILE", "…")``."""
    words = shown.split()
    names = [word for word in words if word.startswith("-")]
    metavar = " ".join(words[len(names) :]) or None
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **more)


def argument(shown: str, text: str, **more: Any) -> Any:
    """Return an argument for `Annotated`, such as ``argument("ROOT[@REF]", "…")``."""
    return typer.Argument(metavar=shown, help=text, **more)


_ADVICE = re.compile(r"(?:shardkit|tar)\b[^;:,()]*|(?<![\w-])--[a-z][a-z-]+")


def advice_for(command: Any, text: str) -> str:
    """Return a message of an importer that names `shardkit build` before each option that a command lacks.

    Args:
        command: the click command that prints the message.
        text: the message.
    """
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return _ADVICE.sub(
        lambda found: (
            f"shardkit build {found[0]}" if found[0][0] == "-" and found[0] not in own else found[0]
        ),
        text,
    )


_SHARDS, _VERSION, _COPIES, _RUNNING = (
    functools.partial(option, panel=panel) for panel in ("Shards", "Version", "Copies", "Running")
)

JsonFlag = Annotated[bool, option("--json", "Print one JSON document.")]


EngineName = Literal["local", "ray"]
ShardFormat = Literal["tar", "arrow"]

# ---- Dataset versions and commits

RootArgument = Annotated[str, argument("ROOT", "The dataset's root, not a copy of it.")]
VersionArgument = Annotated[str, argument("ROOT[@REF]", "The version; without @REF: main.")]
MessageOption = Annotated[str, option("--message -m TEXT", "Reason of the change, for the log.")]
AuthorOption = Annotated[str, option("--author NAME", "Author of the change, for the log.")]
SkipOption = Annotated[
    str, option("--skip A:B", "Leave out steps A to B-1: step A has the samples that step B had.")
]
ExcludeOption = Annotated[
    Path | None, option("--exclude FILE", "Leave out the samples of a list, one value a line.")
]
WeightsOption = Annotated[
    list[str] | None,
    option(
        "--weights PATTERN=WEIGHT",
        "Weight of the strata that a pattern names, such as 'web*=2'; others have 1; may be repeated.",
    ),
]
RefOption = Annotated[str, _VERSION("--ref NAME", "The ref that the version gets.")]
ReplaceOption = Annotated[
    bool,
    _VERSION("--replace", "Move the ref even if it names samples of another schema, or was moved meanwhile."),
]

# ---- Settings of a version (`VersionSettings`). The default depends on the command.

SCHEMA = option("--schema FIELD=TYPE", "FIELD=TYPE instead of the inferred type; may be repeated.", "Source")
DTYPE = option("--dtype TYPE", "Type of the tokens in .bin files, such as uint16.", "Source")
ROW = option("--row N", "Tokens of a row in .bin files, such as 2048.", "Source", show_default=False)
ENCODING = option(
    "--encoding NAME", "Encoding of CSV that is not UTF-8, such as latin-1 or cp1252.", "Source"
)
QUOTE = option(
    "--quote CHARACTER|none",
    "Character around cells of CSV and TSV; none: quotes are plain characters.",
    "Source",
)
CHECK = option(
    "--check decode|none",
    "Decode the pictures of a folder, and every value of adopted files, to find those that are cut short or damaged; "
    "default: decode JPEG, PNG and GIF in folders of up to 100,000 files.",
    "Source",
)
FOLLOW_LINKS = option(
    "--follow-links",
    "Follow symbolic links out of SOURCE; default: only if all files are links.",
    "Source",
)
CLASSES = option("--classes/--no-classes", "Whether the folders in SOURCE are classes.", "Source")
SPLIT_FOLDERS = option(
    "--split-folders/--no-split-folders",
    "Whether the folders in SOURCE are splits, with the classes in them; default: yes if they are named train, val, "
    "valid, validation, test or dev. A build makes a ref of each.",
    "Source",
)
ON_ERROR = option(
    "--on-error raise|skip", "Stop at a row that cannot be read, or skip and list it.", "Source"
)
STRATIFY = _VERSION("--stratify FIELD", "Balance batches by this field; may be repeated.")
SPLIT = _VERSION("--split NAME=SHARE,…", "Refs and shares, such as train=0.9,val=0.1.")
SPLIT_BY = _VERSION("--split-by FIELD", "Keep samples of one value of this field in one split.")
ABOUT = _VERSION("--about FILE", "about.toml: licence, source, contact; [stratum.NAME] where they differ.")
LOOKUP = _VERSION(
    "--lookup FIELD,…", "Fields by which `shardkit find` finds samples, such as key,url,image:sha256."
)
COST = _VERSION(
    "--cost EXPR",
    'Store the cost of each sample, such as "len(tokens)**2", for plans that balance ranks; may be repeated.',
)
FORMAT = _SHARDS("--format tar|arrow", "Default: tar if rows hold files, otherwise arrow with zstd.")
COMPRESSION = _SHARDS("--compression NAME[:LEVEL]", "none; for arrow also zstd or zstd:1…19.")
SHARD_SIZE = _SHARDS("--shard-size SIZE", "Raw bytes per shard.")
BLOCK_SIZE = _SHARDS(
    "--block-size SIZE",
    "Raw bytes per block; default: as in the version of the ref, otherwise 256KiB, or up to 1MiB for large rows.",
)
SEED = _SHARDS("--seed N", "Seed of the shuffle.")
SHUFFLE = _SHARDS("--shuffle/--no-shuffle", "Mix the samples, or keep the source's order in a stratum.")

# ---- Locations and policy of copies

LocationOption = Annotated[
    list[str] | None,
    _COPIES(
        "--location NAME=URL",
        "Another location of copies: NAME=URL[,domain=…][,rank=…][,weight=…]; may be repeated.",
    ),
]
CopiesOption = Annotated[
    int | None, _COPIES("--copies N", "Number of copies in distinct failure domains, including ROOT.", min=1)
]
CriticalOption = Annotated[
    list[str] | None,
    _COPIES("--critical STRATUM=N", "More copies of shards with this stratum; may be repeated."),
]
ParityOption = Annotated[
    str | None, _COPIES("--parity K+2|none", "Add 2 parity objects to each set of K shards, such as 8+2.")
]
ModeOption = Annotated[
    str | None,
    _COPIES(
        "--mode sync|async|hybrid",
        "Copies that a commit waits for: all; none; those of metadata and critical strata.",
    ),
]
FurtherLocationOption = Annotated[
    list[str] | None,
    option(
        "--location NAME=URL",
        "Another location of copies, which the root does not list; may be repeated.",
    ),
]

# ---- Execution

EngineOption = Annotated[
    EngineName,
    _RUNNING("--engine local|ray", "Work on this machine or on a Ray cluster; the result is the same."),
]
AddressOption = Annotated[
    str | None,
    _RUNNING(
        "--address HOST:PORT",
        "Address of a running Ray cluster, or auto; default: start one here.",
    ),
]
JobsOption = Annotated[int | None, _RUNNING("--jobs -j N", "Processes; default: one per processor.", min=1)]
ChecksOption = Annotated[int, option("--jobs -j N", "Copies checked at once.", min=1, max=64)]
ScratchOption = Annotated[
    Path | None,
    _RUNNING(
        "--scratch FOLDER",
        "Folder that all workers see, with room for about the size of the source; default: in ROOT.",
    ),
]
DryRunOption = Annotated[bool, _RUNNING("--dry-run", "Read and check everything, but write nothing.")]
BandwidthOption = Annotated[str | None, _RUNNING("--bandwidth RATE", "Largest rate, such as 200MB/s.")]
BetweenOption = Annotated[
    str | None,
    _RUNNING("--between FROM-TO", "Work only at these hours, such as 22:00-06:00, and wait until then."),
]


def settings_for(function: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command that are parameters of a function."""
    wanted = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in wanted}
