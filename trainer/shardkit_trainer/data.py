"""The data of a run on one rank: dataset, plans under amendments, mixer, and the cells of each step, read ahead."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

from torch.distributed import DistError
from torch.distributed import distributed_c10d as c10d

import shardkit
from shardkit.dataset.run_plans import Versions, configured_plans
from shardkit.errors import ConfigurationError, RunError
from shardkit.function_names import load_named
from shardkit.ledger import recorded_plan
from shardkit.ledger.bindings import (
    Amendment,
    abandoned_checkpoints,
    active_amendments,
    bind_switches,
    read_events,
)
from shardkit.loader import Rebalancing
from shardkit.plan import FunctionMixer, Mixer
from shardkit.plan.mixers import find_mixer, mixer_text
from shardkit.repository.log import parse_dataset_url

from .configuration import Configuration, DataConfig
from .distributed import World
from .run_directory import RunDirectory

READ_AHEAD: Final = 3
"""Steps from the one that ranks begin, whose samples may be read before they know of an amendment."""


class RunData:
    """The dataset of a run, at the version with which the run began, and its plans.

    `shardkit amend` may record amendments while the run trains. Rank 0 looks before each step, and the ranks exchange
    the number of the list that they apply next. So all of them change to a list after the same step, before they read a
    step that it changes (SPEC.md §6).

    Attributes:
        dataset: the open dataset.
        manifest: id of its manifest.
        parts: name → URL with version of each dataset, if several are opened as one.
        plans: one plan per stage and amendment; the first begins at step 0.
        steps: number of steps of the whole run.
        amendments: amendments in force.
        list_number: number of this list of amendments.
        abandoned_checkpoints: names of checkpoints that an amendment abandoned.
    """

    def __init__(self, config: Configuration, world: World, directory: RunDirectory):
        self._config, self._world, self._run = config, world, directory.path
        self._loader: Any = None
        self._seen: tuple[int, int, int] | None = None  # the ledger's state when rank 0 looked
        data, known = config.data, directory.manifest_of_run()
        where: Any = dict(data.parts) or data.dataset
        if known is not None or world.rank:
            pinned = known or json.loads(world.store.get("versions"))
            where = pinned.get("parts") or f"{parse_dataset_url(data.dataset)[0]}@{pinned['manifest']}"
        self.dataset: Any = shardkit.open(where, locations=data.locations)
        self.manifest: str = self.dataset.manifest.id
        self.parts: dict[str, str] = {}
        if data.parts:
            self.parts = {part.name: f"{parse_dataset_url(data.parts[part.name])[0]}@{part.manifest.id}"
                          for part in self.dataset.version.parts}  # fmt: skip
        world.store.set("versions", json.dumps({"manifest": self.manifest, "parts": self.parts}))
        self._recorded = {} if known is None else recorded_plan(directory.path, known["plan"]) or {}
        self._versions = Versions(self.dataset)
        events = [] if known is None else read_events(directory.path)
        self.abandoned_checkpoints = abandoned_checkpoints(events)
        if not world.rank:  # an amendment may be recorded while ranks start
            self._publish(0, active_amendments(events))
        self._change_to(0)
        self._mixer = _find_mixer(data)
        first = self.plans[0]
        self.steps: int = config.run.steps or config.run.epochs * (first.steps_per_epoch or first.loop_steps)

    # --- amendments --------------------------------------------------------------------------------------------------

    def look(self, step: int) -> int:
        """Return the number of the list to apply after ``step``; on rank 0, read a changed ledger first."""
        if self._world.rank:
            return self.list_number
        border = step + READ_AHEAD
        stat = (self._run / "ledger" / "state.json").stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen and all(one.from_step != border for one in self.amendments):
            return self.list_number
        self._seen = seen
        active = bind_switches(self._run, border, {one.number for one in self.amendments})
        if active == self.amendments:
            return self.list_number
        self._publish(self.list_number + 1, active)
        return self.list_number + 1

    def amend(self, number: int, step: int) -> tuple[list[Amendment], int]:
        """Change to the plans of a list that rank 0 has published.

        Returns:
            The new amendments, and the end of the stage that contains ``step``.
        """
        before = {one.number for one in self.amendments}
        self._change_to(number)
        self._cells.end = self._stage(step)[1]
        return [one for one in self.amendments if one.number not in before], self._cells.end

    def _publish(self, number: int, amendments: Sequence[Amendment]) -> None:
        self._world.store.set(f"amendments-{number}", json.dumps([asdict(one) for one in amendments]))

    def _change_to(self, number: int) -> None:
        self.list_number, text = number, self._world.store.get(f"amendments-{number}")
        self.amendments = [Amendment(**one) for one in json.loads(text)]
        data, amend = asdict(self._config.data), self._versions.amend
        self.plans = configured_plans(self.dataset.plan, data, self._recorded, self.amendments, amend)

    # --- loaders -----------------------------------------------------------------------------------------------------

    def _stage(self, step: int) -> tuple[int, int]:
        """Return the number of the stage that contains a step, and the stage's end step."""
        begins = [0, *(plan.from_step for plan in self.plans[1:]), self.steps]
        number = min(bisect_right(begins, step), len(self.plans)) - 1
        return number, min(begins[number + 1], self.steps)

    def open_loader(self, step: int) -> tuple[Any, CellsAhead, int]:
        """Open the loader of the stage of ``step``; return it, its cells from ``step`` on, and the stage's end step."""
        self.close_loader()
        data, parallel, world = self._config.data, self._config.parallel, self._world
        number, end = self._stage(step)
        plan = self.plans[number]
        dataset: Any = self._versions.at(plan.population.identity)
        rebalance: Rebalancing | bool = False
        if parallel.rebalance:
            store = c10d.PrefixStore(f"rebalance-{number}", world.store)
            rebalance = Rebalancing(every=parallel.rebalance_every, store=store, timeout_s=parallel.timeout_s)
        try:
            self._loader = dataset.loader(
                plan, rank=world.rank, world=world.size, by_cell=True, uneven=True, run=str(self._run),
                amendments=False,  # they are stages here
                mixer=self._mixer,
                assignment=parallel.assignment, rebalance=rebalance, telemetry=self._config.log.telemetry(),
                store=c10d.PrefixStore(f"loader-{number}", world.store) if world.size > 1 else None,
                cache=data.cache or None, cache_size=data.cache_size or None, share=data.share,
                **({"device": world.device, "device_prefetch": data.device_prefetch} if data.device_prefetch else {}),
            )  # fmt: skip
        except RunError as error:
            if isinstance(error.__cause__, DistError):  # a rank is missing: handle it as in a collective
                raise error.__cause__ from error
            raise
        self._loader.seek(step)
        # a decision of a mixer waits for other ranks in the store
        in_turn = parallel.rebalance or self._mixer is not None
        self._cells = CellsAhead(self._loader, step, end, in_turn=in_turn)
        return self._loader, self._cells, end

    def close_loader(self) -> None:
        """Close the open loader and its cells, if any."""
        if self._loader is not None:
            self._cells.close()
            self._loader.close()
            self._loader = None


def _find_mixer(data: DataConfig) -> Mixer | None:
    if not data.mixer:
        return None
    text = mixer_text(data.mixer, data.mixer_every, data.mixer_arguments)
    found = find_mixer(text, data.mixer_every)
    if found is None:
        found = FunctionMixer(
            function=load_named("data.mixer =", data.mixer, "function"), every=data.mixer_every
        )
        if found.text != data.mixer:
            raise ConfigurationError(
                f"data.mixer = {data.mixer!r} is defined elsewhere: name it as {found.text!r}, a function of a module"
            )
    return found


class CellsAhead:
    """Reads the cells of steps ``step`` … ``end``−1, across epochs, one step ahead.

    Gathering and journaling a small step holds the interpreter for more than 1 % of the step. `ask` is called when
    torch begins to compute without the interpreter, so that a thread can use it meanwhile.

    Attributes:
        end: an amendment may lower it, before the last of the remaining steps is asked for.

    Args:
        loader: loader positioned at ``step``.
        in_turn: take cells only when they are needed: rebalancing needs the cost of a step before the next step, and
            while a mixer waits for other ranks in their store, torch must not need it.
    """

    def __init__(self, loader: Any, step: int, end: int, *, in_turn: bool):
        self._loader, self._asked, self.end, self._in_turn = loader, step, end, in_turn
        self._cells = self._follow(step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cells-ahead")
        self._next: Future[Any] | None = None

    def _follow(self, step: int) -> Iterator[Any]:
        """Yield the cells of each step; open an epoch during the last step of the epoch before."""
        ahead = iter(self._loader)
        while True:
            epoch, ahead = ahead, None
            for cells in epoch:
                step += 1
                if step < self.end and step == self._loader.plan.epoch_bounds(step - 1)[1]:
                    ahead = iter(self._loader)
                yield cells
            ahead = ahead or iter(self._loader)

    def ask(self) -> None:
        """Begin to take the next step's cells in the thread, if there is a next step."""
        if self._next is None and self._asked < self.end and not self._in_turn:
            self._next = self._thread.submit(next, self._cells)

    def take(self) -> Any:
        """Return the next step's cells; wait for them."""
        self._asked += 1
        if self._next is None:
            return next(self._cells)
        cells, self._next = self._next.result(), None
        return cells

    def close(self) -> None:
        """Wait for the thread. Call this before the loader is closed."""
        self._thread.shutdown(cancel_futures=True)
