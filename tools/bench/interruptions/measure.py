"""Interrupt one loader in every scenario, and count what it loses, repeats and moves.

    ENVIRONMENT/bin/python measure.py ADAPTER --data DIR --out FILE

Runs in the environment of the loader, and imports nothing of shardkit itself. Runs that FILE has with the same
versions are not repeated; delete it to measure again. The version of torch may differ: a run with another one than
the first run of FILE names it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])  # and not this folder, whose modules would hide others
from bench.interruptions.counting import Run, Steps, join, judge  # noqa: E402
from bench.interruptions.environments import ENVIRONMENTS  # noqa: E402
from bench.interruptions.ranks import Order, Report, import_ahead, load, run_segment, start_method  # noqa: E402
from bench.interruptions.samples import COLLECTIONS, Job  # noqa: E402
from bench.interruptions.scenarios import EPOCHS, SCENARIOS, Scenario, Segment, segments, undisturbed  # noqa: E402


class Measurement:
    """All runs of one loader."""

    def __init__(self, name: str, data: Path, timeout: float) -> None:
        self.name, self.adapter, self.timeout = name, load(name), timeout
        self.folder = data / name
        self.log = data / f"{name}.log"
        self._undisturbed: dict[Any, Run] = {}

    def write(self) -> None:
        """Write the data of the loader, in a process of its own, unless a run before has written it."""
        if (self.folder / "written").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was stopped while it wrote
        self.folder.mkdir(parents=True)
        writer = start_method(self.name).Process(target=_write, args=(self.name, self.folder))
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit(f"{self.name}: its data could not be written, see above")

    def result(self, scenario: Scenario, seed: int) -> dict[str, Any]:
        """Run one scenario with one seed."""
        begin = undisturbed(scenario, self.adapter.workers)
        key = (scenario.collection, begin[0], seed)
        if key not in self._undisturbed:
            self._undisturbed[key] = self.play(scenario, begin, seed)
        reference = self._undisturbed[key]
        if reference.refusal is not None:
            return {"answer": "fails undisturbed", **reference.refusal}
        length = len(reference.epochs[0])
        parts = segments(scenario, seed, length, self.adapter.workers, self.adapter.align)
        run = self.play(scenario, parts, seed, total=length if scenario.at_epoch_end else None)
        return judge(reference, run, COLLECTIONS["validation"] if scenario.validation else None)

    def play(self, scenario: Scenario, parts: list[Segment], seed: int, total: int | None = None) -> Run:
        """Run the segments after each other, each from the states of the one before."""
        run = Run([[] for _ in range(EPOCHS)])
        done: dict[int, Steps] = {}
        states: list[bytes] | None = None
        epoch = 0
        for at, part in enumerate(parts):
            jobs = [
                Job(
                    self.folder, scenario.collection, rank, part.world, part.workers, seed, epoch,
                    len(done.get(epoch, [])), parts[0].world, parts[0].workers,
                )
                for rank in range(part.world)
            ]  # fmt: skip
            order = Order(part, states, scenario.validation, total)
            for _ in range(2):  # a loader that cannot be opened is opened once more: that is no resume yet
                reports, stalled = run_segment(self.name, jobs, order, timeout=self.timeout, log=self.log)
                import_ahead(self.name, reports)
                run.refusal = _refusal(reports, stalled, at)
                if run.refusal is None or run.refusal["phase"] != "open":
                    break
            if run.refusal is not None:
                return run
            epoch = self._add(run, done, reports, epoch)
            states = [report.state or b"" for report in reports]
        if total is None:
            run.epochs = [done.get(number, []) for number in range(EPOCHS)]
        else:  # by steps: loaders differ in the epoch that they say they are in
            steps = [step for number in sorted(done) for step in done[number]]
            run.epochs = [steps[:total], steps[total:]]
        return run

    def _add(self, run: Run, done: dict[int, Steps], reports: list[Report], epoch: int) -> int:
        """Add the steps of a segment; return the epoch that the trainer is in."""
        numbers = sorted({number for report in reports for number in report.epochs})
        for number in numbers:
            steps, uneven = join([report.epochs.get(number, []) for report in reports])
            done.setdefault(number, []).extend(steps)
            run.uneven = max(run.uneven, uneven)
        for at in range(min(len(report.passes) for report in reports)):
            run.passes.append(join([report.passes[at] for report in reports])[0])
        return numbers[-1] if numbers else epoch


def _write(name: str, folder: Path) -> None:
    load(name).write(folder)
    (folder / "written").touch()


def _refusal(reports: list[Report], stalled: str, segment: int) -> dict[str, Any] | None:
    errors = [report for report in reports if report.error]
    if not errors:
        return {"phase": "stalls", "error": stalled, "segment": segment} if stalled else None
    first = errors[0]
    return {"phase": first.phase, "error": first.error, "segment": segment}


def versions(name: str) -> dict[str, str]:
    """Return the versions of the loader's packages and of Python."""
    found = {"python": platform.python_version()}
    for package in (*ENVIRONMENTS[name].packages, "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _save(path: Path, results: dict[str, Any]) -> None:
    """Write the results with a line for each run."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    runs = {key: results["runs"][key] for key in SCENARIOS if key in results["runs"]}
    lines = [
        f'  "{key}": {{\n'
        + ",\n".join(
            f'   "{seed}": {json.dumps(run)}' for seed, run in sorted(of.items(), key=lambda i: int(i[0]))
        )
        + "\n  }"
        for key, of in runs.items()
    ]
    head = json.dumps(
        {key: value for key, value in results.items() if key != "runs"}, indent=1, ensure_ascii=False
    )
    text = head[:-2] + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", choices=ENVIRONMENTS)
    parser.add_argument("--data", type=Path, required=True, help="folder for the data and the logs")
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one segment of a run")
    asked = parser.parse_args()
    measurement = Measurement(asked.adapter, asked.data, asked.timeout)
    measurement.write()
    adapter = measurement.adapter
    known = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    found = versions(asked.adapter)
    first = known.get("versions", {})
    if {**first, "torch": ""} != {**found, "torch": ""}:
        first, known = found, {}
    other_torch = {"torch": found["torch"]} if found.get("torch") != first.get("torch") else {}
    results: dict[str, Any] = {
        "label": adapter.label, "promise": adapter.promise, "link": adapter.link, "strength": adapter.strength,
        "notes": adapter.notes, "lacks": adapter.lacks, "random": adapter.random, "elastic": adapter.elastic,
        "documented": adapter.documented, "date": time.strftime("%Y-%m-%d"), "versions": first,
        "runs": known.get("runs", {}),
    }  # fmt: skip
    for seed in range(asked.seeds):
        for key in asked.scenarios:
            scenario = SCENARIOS[key]
            runs = results["runs"].setdefault(key, {})
            if str(seed) in runs or any(need in adapter.lacks for need in scenario.needs):
                continue
            begun = time.monotonic()
            runs[str(seed)] = measurement.result(scenario, seed) | other_torch
            print(
                f"{adapter.label}, {key}, seed {seed}, {time.monotonic() - begun:.1f} s: {runs[str(seed)]}",
                flush=True,
            )
            _save(asked.out, results)
    _save(asked.out, results)


if __name__ == "__main__":
    main()
