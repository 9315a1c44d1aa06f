"""Measure what loaders lose, repeat and move when they are interrupted, and write docs/interruptions.md.

    python tools/bench/interruptions/run.py                    all loaders: several hours on two processors
    python tools/bench/interruptions/run.py mosaicml --seeds 3

Each library gets a virtual environment of its own, at its current version. Runs that the results have with the same
versions are kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from bench.interruptions.environments import ENVIRONMENTS, python_of  # noqa: E402
from bench.interruptions.page import RESULTS, write  # noqa: E402


def main() -> None:
    loaders = [name for name in ENVIRONMENTS if name != "broken"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "adapters", nargs="*", metavar="ADAPTER", help=f"default: all of {', '.join(loaders)}"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "shardkit-interruptions",
                        help="for environments, data and logs")  # fmt: skip
    asked = parser.parse_args()
    unknown = [name for name in asked.adapters if name not in loaders]
    if unknown:
        parser.error(f"no adapter {', '.join(unknown)}; there are {', '.join(loaders)}")
    failed = []
    for name in asked.adapters or loaders:
        try:
            command = [
                python_of(name, asked.folder), str(Path(__file__).with_name("measure.py")), name,
                "--data", str(asked.folder / "data"), "--out", str(RESULTS / f"{name}.json"),
                "--seeds", str(asked.seeds),
            ]  # fmt: skip
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name}: {error}")
    write()
    if failed:
        sys.exit("not measured:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
