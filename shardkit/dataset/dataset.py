"""One version of a dataset, to inspect, plan and load."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.sample_view import first_page
from shardkit.dataset.samples import Samples, numbers_of, population_of, removed_samples
from shardkit.errors import PlanError, UsageError
from shardkit.loader import Loader, LoaderConfig, Rebalancing, Sources
from shardkit.notebook import page, table
from shardkit.plan import Assignment, Mixer, Plan, make_plan
from shardkit.plan.settings import LEAST_LANES, few_lanes
from shardkit.ranges import parse_size
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit.stores.local import check_vacant

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.telemetry import TelemetrySettings

_log = logging.getLogger("shardkit.plan")


class Dataset(Samples):
    """A version of a dataset: immutable, addressed by its manifest. Made by `shardkit.open`.

    Reading is lazy: opening reads only the manifest and its pages. Every sample is verified when it is read.
    """

    # ---- properties

    @property
    def repository(self) -> Repository:
        """Repository of the dataset; for a merged dataset, the first part's."""
        return self.version.parts[0].repository

    @property
    def strata(self) -> dict[str, int]:
        """Number of selected rows of each stratum, by name."""
        return {s.name: s.selected for s in self.manifest.strata if not s.pooled}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of folder classes: `classes[label]`; empty if labels have no names."""
        return self.manifest.classes

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {kind}" for name, kind in self.schema.items())
        return f"<shardkit dataset {self.manifest.id[:19]}… {len(self):,} samples ({fields})>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        fields = table(["field", "type"], self.schema.items(), most=200)
        labels = self.manifest.labels
        counts = table(["stratum", "samples"], ((labels[name], rows) for name, rows in self.strata.items()))
        parts = fields, counts, first_page(self.schema, self.head)
        return page("dataset", f"{self.manifest.id[:19]}…", f"{len(self):,} samples", *parts)

    # ---- versions and views

    def at(self, manifest: str) -> Self:
        """Return another version of the same repository, which is read and verified in the same way.

        Args:
            manifest: its id, ``"sha256:…"``.

        Raises:
            NotFoundError: the repository does not have it.
        """
        return type(self)(load_manifest(self.repository, manifest), verify=self._verify)

    def select(
        self, where: str | None = None, rows: Sequence[int] | NDArray[np.int64] | None = None
    ) -> Dataset:
        """Return a view of some samples; nothing is written. `shardkit select` commits it as a version.

        Args:
            where: a condition over scalar and str fields, such as ``"label < 5"``; as in SQL, a comparison with a
                missing value is neither true nor false.
            rows: sample numbers of *this* dataset, in any order; negative ones count from the end.

        Examples:
            >>> few = ds.select(where="label < 2")
            >>> len(few), few.strata["0"]
            (40, 20)
        """
        if (where is None) == (rows is None):
            raise UsageError("select takes either where= or rows=")
        masks = (
            self._masks_where(where)
            if where is not None
            else self._masks_rows(
                numbers_of(list(rows) if isinstance(rows, tuple) else rows, len(self), "select(rows=…)")
            )
        )
        from shardkit.dataset.selecting import select_rows

        return Dataset(select_rows(self.version, masks, row_strata=self.row_strata), verify=self._verify)

    def row_strata(self, shard: int) -> NDArray[np.int32] | None:
        """Return the own stratum of each row of a shard, (rows,) int32, or None without pooled strata."""
        return self.reader.index(shard).row_stratum

    def _masks_rows(self, samples: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
        where = self.rows.locate(samples)
        masks = [np.zeros(rows, dtype=np.bool_) for rows in self.table.rows.tolist()]
        for shard, mask in enumerate(masks):
            mask[where.row[where.shard == shard]] = True
        return masks

    def _masks_where(self, text: str) -> list[NDArray[np.bool_]]:
        from shardkit.dataset.expressions import Where

        condition = Where(text, self.schema)
        masks = [self.version.mask(shard) for shard in range(len(self.table))]
        for shard, mask in enumerate(masks):
            index = self.reader.index(shard)
            for block in range(index.blocks):
                first, last = int(index.block_start[block]), int(index.block_start[block + 1])
                if mask[first:last].any():
                    mask[first:last] &= condition.of_block(self.reader.read(shard, block))
        return masks

    # ---- plan and load

    def plan(self, global_batch: int, seed: int = 0, **settings: Any) -> Plan:
        """Return the order of training on this dataset: a pure function of the manifest and these settings.

        Args:
            global_batch: samples per step over all ranks.
            seed: seed of every shuffle.
            settings: lanes, weights, stages, cost, group_by, sequence, remainder, window_blocks, epoch_steps,
                shuffle: see `shardkit.plan.make_plan`. For ``sequence=``, the tokens per row are taken from
                the schema if exactly one field is a row of numbers of fixed length; otherwise pass
                ``row_tokens=``.

        ``cost="len(tokens)**2"`` defines the cost of a sample from integer fields, ``bytes(field)``,
        ``len(field)`` and ``squares(field)`` (for ascending borders, the sum of squared lengths). Costs come
        from the pieces that ``shardkit build --cost`` or ``shardkit rebuild --cost`` wrote, read for the
        windows of a step; without them from the indexes of tar shards, which hold sizes and lengths. The
        cells of a lane then cost nearly the same, so that ranks wait less for each other. ``balance="align"``
        also puts the expensive cells of all lanes in the same steps; steps then differ in cost, and batches
        are less alike.

        If the default leaves fewer than 8 lanes, the logger ``shardkit.plan`` warns and names batch sizes
        that allow more.

        Examples:
            >>> plan = ds.plan(global_batch=20, seed=0)
            >>> plan.steps_per_epoch
            10
        """
        if settings.get("sequence") is not None and "row_tokens" not in settings:
            lengths = [field.shape[0] for field in self.schema.values() if len(field.shape) == 1]
            settings["row_tokens"] = lengths[0] if len(lengths) == 1 else None
        population = population_of(self.manifest, self.table)
        if settings.get("cost") is not None:
            from shardkit.dataset.costs import costs_of

            settings["cost"] = costs_of(self, settings["cost"])
            if settings.get("balance") == "align":
                _log.warning(
                    "plan: balance='align' gathers dear samples in the same steps: gradients vary more"
                )
        plan = make_plan(population, global_batch=global_batch, seed=seed, **settings)
        if settings.get("lanes") is None and plan.lanes < LEAST_LANES:
            few = few_lanes(population, plan.global_batch)
            if few:
                _log.warning("plan: %s", few)
        return plan

    def amend(self, plan: Plan, *, to: Dataset, from_step: int, **changes: Any) -> Plan:
        """Return a plan that continues with a version that lacks some samples of this one.

        Until `from_step` it equals `plan`. From there on it has the samples that the epoch, or with explicit weights
        each pass, has left, without the removed ones; then whole epochs of the other version. Sample numbers are those
        of the version that a step belongs to. Load the steps from `from_step` on with ``to.loader(…)``.

        Args:
            plan: a plan of this dataset.
            to: a version or view with fewer samples of the same shards, such as ``ds.select(…)`` or what
                ``shardkit select --exclude`` has made.
            from_step: first step that may differ.
            changes: weights, global_batch or lanes, as for `Plan.amend`.

        Raises:
            PlanError: `plan` is not of this dataset, or `to` has other samples, or they are in another order.

        Examples:
            >>> clean = ds.select(rows=range(150))
            >>> ds.amend(plan, to=clean, from_step=4).population.rows
            150
        """
        if plan.population.identity != self.manifest.id:
            raise PlanError(
                f"the plan is of {plan.population.identity[:19]}…, and this dataset is {self.manifest.id[:19]}…; call "
                "amend of the plan's dataset"
            )
        other = population_of(to.manifest, to.table)
        return plan.amend(from_step=from_step, manifest=other, removed=removed_samples(self, to), **changes)

    def losses(self, run: str | os.PathLike[str]) -> pa.Table:
        """Return the losses that `Loader.note` recorded in a run directory, joined with the samples of this version.

        Steps that the run has abandoned are left out, and a repeated step has its newest losses. A loss of a cell is
        given to each of its samples. Substitutes (``on_error=``) are shown as the samples that they replaced.

        Args:
            run: the run directory.

        Returns:
            Columns: step (int64), sample (int64, number in this version, null if it lacks the sample), stratum
            (dictionary of string), loss (float32); ordered by step and place.

        Raises:
            NotFoundError: the run has no losses, or consumed another dataset.
            FormatError: a file of the run directory was changed.

        Examples:
            >>> with ds.loader(plan, run="runs/a") as loader:
            ...     for batch in loader:
            ...         loader.note(batch, batch["label"])
            >>> ds.losses("runs/a").num_rows
            200
        """
        from shardkit.dataset.run_losses import losses_table

        return losses_table(self, run)

    def loader(
        self,
        plan: Plan,
        *,
        rank: int | None = None,
        world: int | None = None,
        mesh: Any = None,
        lanes: Sequence[int] | None = None,
        fields: Sequence[str] | None = None,
        by_cell: bool = False,
        uneven: bool = False,
        assignment: Literal["near", "fixed"] | Assignment = "near",
        store: Any = None,
        rebalance: bool | Rebalancing = False,
        memory: int | str | None = None,
        threads: int | None = None,
        prefetch: int | None = None,
        tensors: bool | None = None,
        device: Any = None,
        device_prefetch: int = 2,
        decode: Mapping[str, Any] | None = None,
        transform: Any = None,
        batch_transform: Any = None,
        workers: Literal["threads", "processes"] = "threads",
        on_error: Literal["raise", "substitute", "mask"] = "raise",
        stall_s: float = 60.0,
        on_stall: Any = None,
        run: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_size: int | str | None = None,
        share: bool | str = False,
        telemetry: TelemetrySettings | Literal[True] | None = True,
        stride: int = 1,
        offset: int = 0,
        fill: Mapping[str, Any] | None = None,
        restart: bool = False,
        amendments: bool = True,
        mixer: Mixer | None = None,
    ) -> Loader:
        """Return a loader over `plan` for one rank; iterate over it once per epoch.

        A loop that is left early continues in the next one, at the batch after the last delivered one. A
        "virtual epoch" is therefore ``itertools.islice(loader, steps)``. Pass ``restart=True`` for
        validation.

        Without torch, batches hold numpy arrays, which JAX and TensorFlow accept directly::

            for batch in ds.loader(plan):  # JAX
                state = update(state, {name: jnp.asarray(batch[name]) for name in ("x", "y")})

            loader = ds.loader(plan, tensors=False)  # TensorFlow: one pass over the data set is one epoch
            tf.data.Dataset.from_generator(
                lambda: ({"x": batch["x"], "y": batch["y"]} for batch in loader),
                output_signature={
                    "x": tf.TensorSpec((None, 8), tf.float32),
                    "y": tf.TensorSpec((None,), tf.int64),
                },
            )

        Args:
            plan: made by `plan` of this dataset.
            rank: this rank; without `rank` and `world`, taken from the process group, or from RANK and
                WORLD_SIZE.
            world: number of ranks that share the plan.
            mesh: a torch DeviceMesh: ranks with the same data-parallel coordinate read the same cells.
            lanes: the lanes of this rank instead of its even share.
            fields: the fields to gather; by default all.
            by_cell: return a list of batches per step, one per lane; for a type checker: ``cast(list[Batch],
                …)``.
            uneven: allow ranks to hold unequal numbers of samples; the loss must then use `batch.weight`.
            assignment: ``"near"``: each rank of a process group begins with an equal number of lanes, chosen
                so that most of their bytes are in its node's `cache`, or with the lanes that the ledger of
                `run` recorded for these ranks on these nodes. ``"fixed"``: rank r of R always has lanes r·L/R
                to (r+1)·L/R − 1, as without a process group. Or an Assignment made elsewhere.
            store: a torch store, used only by the ranks that `rank` and `world` name: they compare their
                inputs and distribute lanes through it, as ranks of a process group do.
            rebalance: move lanes away from slow ranks during the run, through the process group's store;
                needs `uneven`, and `loader.watch(model)` or `loader.computed()` in the training loop.
            memory: bound for the blocks of this rank in memory, for example ``"512MiB"``; workers share it.
                The default is what the windows of its lanes need; less is refused. Exceeded only if the
                blocks of one step need more.
            threads: number of threads that read, verify and transform; by default the number of processors,
                at most 8.
            prefetch: number of finished steps that may wait; 0 gathers each step on demand. The default is 0
                for steps of up to 8 MiB that are only copied, and 4 otherwise. If rows are decoded or
                transformed, the following step is prepared as well, and more steps if they are small.
            tensors: torch tensors instead of numpy arrays; by default if torch is imported.
            device: a torch device: batches are delivered there, ready on the current stream; they are copied
                from pinned memory on a separate stream. Images are copied as bytes and normalised on the
                device.
            device_prefetch: number of finished steps that may be in transfer. State and ledger do not count
                them.
            decode: field → `images.random_resized_crop` or a similar decoder, which writes into the batch;
                ``"rgb8"``, ``"gray8"``, ``"numpy"``, ``"json"``, ``"text"``; or a function of the bytes.
            transform: ``transform(sample, rng) -> sample`` or ``transform(sample) -> sample``; rng depends only on
                (seed, step, lane, slot).
            batch_transform: ``batch_transform(fields, rngs) -> fields``, called for one batch after the other
                while rows of the next batch are transformed.
            workers: where `decode` and `transform` run; processes are spawned and need functions that pickle.
            on_error: treatment of verified rows that do not decode: ``"raise"``; ``"substitute"`` takes
                another sample of the same stratum, the same one in every topology; ``"mask"`` substitutes and
                adds the field "valid", which is false in those rows.
            stall_s: a wait of this many seconds is reported, with rank, lane, shard and stage.
            on_stall: called with the report as a dict; by default it is a RuntimeWarning.
            run: run directory, in which consumed cells are journaled and events are recorded.
            cache: directory on a local disk for blocks read over a network; all ranks and runs of a machine
                may share it. Without it, blocks are streamed.
            cache_size: maximum size of the cache, for example ``"200GiB"``; by default most of the disk's
                free space.
            share: read blocks from the `cache` of other nodes of the process group before the root, and serve
                this node's blocks, read-only, to clients that know their SHA-256. True listens on a free port
                of the interface that leads to the process group's store, ``"HOST:PORT"`` there. Use it only
                in a network where every host that reaches that port may read the data.
            telemetry: settings for monitoring a run with a directory (`shardkit top`); None disables it.
            stride: deliver only every `stride`-th step, from the `offset`-th on; worker processes share steps
                this way.
            offset: see `stride`.
            fill: optional field → value in batches for rows without one (`batch.valid[field]` marks rows that
                have one); by default zeros, an empty array, or None in a list.
            restart: every loop begins at the start of its epoch, even if the previous loop was left early.
            amendments: apply the amendments of the plan that ``shardkit amend`` recorded in `run`.
            mixer: decides the weights of strata from the losses that ``loader.note`` records, such as
                ``ADO(every=512)``; `plan` has the first weights, and ``loader.plan`` the decisions. Requires
                `run`, which keeps the decisions.

        Raises:
            ConfigurationError: The rank, world or a size is impossible, the memory is less than the windows
                need, or the lanes do not divide evenly.
            MissingDependency: A decoder needs a package that is not installed.
            StateError: Ranks of the process group would read different data; the message names rank and
                difference.

        Examples:
            >>> with ds.loader(plan) as loader:
            ...     for batch in loader:
            ...         shape = batch["image"].shape  # (rows of this rank, 8, 8)
            >>> tuple(shape), loader.epoch
            ((20, 8, 8), 1)
        """
        if run is not None:
            check_vacant(run, "run")
        if cache is not None:
            check_vacant(cache, "cache")
            if run is not None and os.path.realpath(run) == os.path.realpath(cache):
                raise UsageError(
                    f"run= and cache= are both {cache}: a cache evicts files; give it its own folder"
                )
        config = LoaderConfig(
            rank=rank, world=world, mesh=mesh, lanes=lanes, fields=fields, by_cell=by_cell, uneven=uneven,
            assignment=assignment, store=store,
            rebalance=Rebalancing() if rebalance is True else None if rebalance is False else rebalance,
            memory=None if memory is None else parse_size(memory), threads=threads, prefetch=prefetch, tensors=tensors,
            device=device, device_prefetch=device_prefetch,
            decode={} if decode is None else decode, transform=transform, batch_transform=batch_transform,
            workers=workers, on_error=on_error, stall_s=stall_s, on_stall=on_stall,
            run=None if run is None else Path(run), stride=stride, offset=offset, fill={} if fill is None else fill,
            restart=restart, mixer=mixer,
            cache=None if cache is None else Path(cache),
            cache_size=None if cache_size is None else parse_size(cache_size), share=share, telemetry=telemetry,
        )  # fmt: skip
        check_plan(plan, self.manifest.id)
        dataset = self
        if run is not None and amendments:
            from shardkit.dataset.run_plans import apply_amendments  # imported only for loaders with a run

            dataset, plan = apply_amendments(self, plan, run)
        if mixer is not None:
            plan = plan.mixed(mixer.text, mixer.every)
        return Loader(plan, dataset._sources(plan), config)  # noqa: SLF001

    def _sources(self, plan: Plan) -> Sources:
        return Sources(
            manifest=self.manifest.id,
            schema=self.schema.stored,
            rows=self.rows,
            reader=self.reader,
            block_bytes=self._block_bytes,
            mean_block_bytes=plan.population.mean_block_bytes + self._added_block_bytes,
            row_bytes=self._row_bytes,
            fetch=self.__getitem__,
            describe=self.name_of,
        )

    def _row_bytes(self, fields: Sequence[str]) -> int:
        """Return the typical size in bytes of these fields of a row.

        Fields of variable size share equally the mean row size less the fixed fields.
        """
        sizes = {name: self.schema[name].item_bytes for name in self.schema}
        fixed = sum(size for size in sizes.values() if size is not None)
        variable = [name for name, size in sizes.items() if size is None]
        rest = max(1, self.manifest.raw_bytes // max(1, self.manifest.rows) - fixed)
        typical = rest // max(1, len(variable))
        sizes |= {name: kind.item_bytes for name, kind in self.schema.stored.items()}
        wanted = (sizes[name] for name in fields)
        return sum(typical if size is None else size for size in wanted) or 1

    def _block_bytes(self, block: int) -> int:
        shard = self.rows.shard_of_block(block)[0]
        tables = [self.table, *(one.table for one in self.version.added)]
        return sum(int(table.largest_block[shard]) for table in tables)

    @property
    def _added_block_bytes(self) -> int:
        """Mean raw bytes of the added fields in a block."""
        return sum(int(one.table.raw_bytes.sum()) for one in self.version.added) // max(1, self.rows.blocks)

    def describe(self) -> Mapping[str, Any]:
        """Return the figures that `shardkit show --json` prints: plain types only."""
        return {
            "id": self.manifest.id,
            "samples": len(self),
            "strata": self.strata,
            "classes": list(self.classes),
        }


def check_plan(plan: object, manifest_id: str) -> None:
    """Refuse anything but a plan of this version."""
    if not isinstance(plan, Plan):
        batch = plan if isinstance(plan, int) and not isinstance(plan, bool) and plan > 0 else 512
        raise UsageError(
            f"ds.loader({plan!r:.60}): a loader takes a plan; make one first: "
            f"ds.loader(ds.plan(global_batch={batch}, seed=0))"
        )
    if plan.population.identity != manifest_id:
        raise UsageError(
            f"this plan was made for manifest {plan.population.identity[:19]}…, the dataset is "
            f"{manifest_id[:19]}…; make the plan with ds.plan(…) of the same dataset"
        )
