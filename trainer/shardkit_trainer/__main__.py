"""``torchrun -m shardkit_trainer run.toml section.key=value … [--allow-changes=KEY,…]``: one rank of a run."""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> int:
    """Train on this rank and return the exit code; print shardkit's own errors as one line that names the rank."""
    from shardkit.errors import ShardkitError
    from shardkit.exit_codes import ExitCode, exit_code

    from .configuration import load_configuration

    option = "--allow-changes="
    allowed = [
        key for a in arguments if a.startswith(option) for key in a.removeprefix(option).split(",") if key
    ]
    arguments = [a for a in arguments if not a.startswith(option)]
    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(files) > 1:
        print(f"usage: shardkit_trainer run.toml section.key=value …; got files: {files}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        config = load_configuration(files[0] if files else None, overrides)
        from .distributed import RESTART
        from .training import train

        summary = train(config, allow_changes=allowed)
    except ShardkitError as error:
        print(f"rank {os.environ.get('RANK', '0')}: {error.kind}: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    if summary.finished:
        return ExitCode.DONE
    return ExitCode.INTERRUPTED if summary.asked else RESTART


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
