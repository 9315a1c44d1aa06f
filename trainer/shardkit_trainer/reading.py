"""The datasets of a run at its versions, its plan stage by stage, and this rank's cells of the steps to come."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.distributed import DistError
from torch.distributed import distributed_c10d as c10d

import shardkit
from shardkit.errors import RunError
from shardkit.ledger import recorded_plan
from shardkit.loader import Rebalancing
from shardkit.repository.log import parse_dataset_url

from .configuration import Configuration
from .distributed import World
from .run_directory import RunDirectory

_RESOLVED = (
    "lanes",
    "window_blocks",
)  # settings of a plan that follow from the dataset where nobody chose them


class RunData:
    """What a run reads: the dataset at the version that the run began with (a ref is resolved once), and its plans.

    Attributes:
        dataset, manifest: opened, and its id.
        parts: where several datasets are one: the URL of each, at its version.
        plans: of each stage; the first begins at step 0.
        steps: of the whole run.
    """

    def __init__(self, config: Configuration, world: World, directory: RunDirectory):
        self._config, self._directory = config, directory
        self._loader: Any = None
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
        names = ("lanes", "weights", "window_blocks", "cost", "balance")
        chosen = {name: getattr(data, name) for name in names}
        settings: dict[str, Any] = {name: value for name, value in chosen.items() if value}
        if known is not None:  # a run keeps what it began with, whatever the defaults are by now
            recorded = recorded_plan(directory.path, known["plan"]) or {}
            settings = {name: recorded[name] for name in _RESOLVED if name in recorded} | settings
            if "cost" in recorded:
                settings["round_parts"] = recorded.get("round_parts", 1)
        plan = self.dataset.plan(global_batch=data.global_batch, seed=data.seed, **settings)
        self.steps: int = config.run.steps or config.run.epochs * (plan.steps_per_epoch or plan.loop_steps)
        self.plans = [plan]
        for stage in data.stages:
            batch, weights = stage.global_batch or None, stage.weights or None
            plan = plan.amend(from_step=stage.from_step, global_batch=batch, weights=weights)
            self.plans.append(plan)

    def open_loader(self, step: int, world: World) -> tuple[Any, CellsAhead, int]:
        """The loader of the stage that ``step`` belongs to, at that step, its cells, and the step that ends it."""
        self.close_loader()
        data, parallel, directory = self._config.data, self._config.parallel, self._directory.path
        begins = [0, *(stage.from_step for stage in data.stages), self.steps]
        number = min(bisect_right(begins, step), len(self.plans)) - 1
        rebalance: Rebalancing | bool = False
        if parallel.rebalance:
            # the store's keys hold the attempt or generation already
            store = c10d.PrefixStore(f"rebalance-{number}", world.store)
            rebalance = Rebalancing(every=parallel.rebalance_every, store=store, timeout_s=parallel.timeout_s)
        try:
            self._loader = self.dataset.loader(
                self.plans[number], rank=world.rank, world=world.size, by_cell=True, uneven=True, run=str(directory),
                assignment=parallel.assignment, rebalance=rebalance, telemetry=self._config.log.telemetry(),
                store=c10d.PrefixStore(f"loader-{number}", world.store) if world.size > 1 else None,
                cache=data.cache or None, cache_size=data.cache_size or None, share=data.share,
                **({"device": world.device, "device_prefetch": data.device_prefetch} if data.device_prefetch else {}),
            )  # fmt: skip
        except RunError as error:
            if isinstance(error.__cause__, DistError):  # a rank did not come: as where it misses a collective
                raise error.__cause__ from error
            raise
        self._loader.seek(step)
        end = min(begins[number + 1], self.steps)
        self._cells = CellsAhead(self._loader, step, end, in_turn=parallel.rebalance)
        return self._loader, self._cells, end

    def close_loader(self) -> None:
        """Close what `open_loader` gave; nothing where it is closed."""
        if self._loader is not None:
            self._cells.close()
            self._loader.close()
            self._loader = None


class CellsAhead:
    """The cells of steps ``step`` … ``end``−1, epoch after epoch, one step ahead.

    Gathering and journaling a small step takes the interpreter for longer than 1 % of it. `ask` is called when torch
    begins to compute without the interpreter, so that a thread has it meanwhile.

    Args:
        loader: at ``step``.
        in_turn: take cells only when they are needed: rebalancing is told what a step has cost before the next one.
    """

    def __init__(self, loader: Any, step: int, end: int, *, in_turn: bool):
        self._loader, self._asked, self._end, self._in_turn = loader, step, end, in_turn
        self._cells = self._follow(step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cells-ahead")
        self._next: Future[Any] | None = None

    def _follow(self, step: int) -> Iterator[Any]:
        """The loader begins to read an epoch while the last step of the one before is computed."""
        ahead = iter(self._loader)
        while True:
            epoch, ahead = ahead, None
            for cells in epoch:
                step += 1
                if step < self._end and step == self._loader.plan.epoch_bounds(step - 1)[1]:
                    ahead = iter(self._loader)
                yield cells
            ahead = ahead or iter(self._loader)

    def ask(self) -> None:
        """Begin to take the next step's cells, if there is a next step."""
        if self._next is None and self._asked < self._end and not self._in_turn:
            self._next = self._thread.submit(next, self._cells)

    def take(self) -> Any:
        """The next step's cells; waits for them."""
        self._asked += 1
        if self._next is None:
            return next(self._cells)
        cells, self._next = self._next.result(), None
        return cells

    def close(self) -> None:
        """Wait until nothing more is taken; to be called before the loader is closed."""
        self._thread.shutdown(cancel_futures=True)
