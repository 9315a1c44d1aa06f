"""Ray Train: a group of workers that shrinks and grows, with the same samples in every step.

    python examples/guides/ray_train.py

With ``ScalingConfig(num_workers=(1, 3))`` Ray Train starts as many workers as the cluster has room for. When a machine
is lost or joins, it starts the workers again, in another number, from the newest checkpoint. The state of the loader
belongs into that checkpoint:

    def train(config):
        loader = ds.loader(plan, run="/shared/runs/mine")      # rank and world size from Ray's process group
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            loader.load_state_dict(...)                        # written by 2 workers, read by 1 or 3
        for batch in loader:
            ...
            ray.train.report(metrics, checkpoint=...)          # with loader.state_dict(after=batch)

Do not use ``ray.train.torch.prepare_data_loader``, which would distribute the batches a second time. Choose lanes that
each possible number of workers divides; here 12 lanes for 1 to 4 workers.

This guide makes a cluster of Ray nodes on this machine. It removes a node in step 6, which kills a worker, and adds two
nodes in step 14. ``shardkit audit`` then proves that the run consumed the plan.
"""

# mypy: ignore-errors
# ray's types know no ranges of workers
from __future__ import annotations

import logging
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer, prepare_model

import shardkit as sk
from guide_shell import shardkit, workplace
from shardkit.audit import audit_run

STEPS, LANES, EVERY = 24, 12, 4  # steps of the run, lanes, steps per checkpoint


def make_dataset() -> None:
    """Write 960 points of a linear function."""
    with sk.create("data/points", schema={"x": "float32[8]", "y": "float32"}, format="arrow") as writer:
        for number in range(960):
            x = [float((number * (column + 3)) % 17) / 17 for column in range(8)]
            writer.add({"x": x, "y": sum(x)})


def train(config: dict[str, Any]) -> None:
    """Train on one worker, from the newest checkpoint of any number of workers."""
    ds = sk.open(config["data"])
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = getattr(model, "module", model)  # a single worker has no DDP around the model
    with ds.loader(ds.plan(global_batch=48, lanes=LANES, seed=0), run=config["run"]) as loader:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder) / "state.pt", weights_only=True)
            weights.load_state_dict(saved["model"])
            loader.load_state_dict(saved["loader"])
        while (step := loader.state_dict()["step"]) < STEPS:
            for batch in loader:
                loss = (model(batch["x"])[:, 0] - batch["y"]).square().mean()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                step = batch.step + 1
                if step % EVERY == 0:
                    report(loss, {"model": weights.state_dict(), "loader": loader.state_dict(after=batch)})
                wait_for_change(Path(config["run"]), step)
                if step == STEPS:
                    break


def wait_for_change(run: Path, step: int) -> None:
    """Stand still where the cluster changes, so that this guide does not depend on the speed of the machine."""
    world = ray.train.get_context().get_world_size()
    (run / f"reached-{step}-of-{world}").touch()
    while (step == 6 and not (run / "lost").exists()) or (step == 14 and world < 3):
        time.sleep(0.1)


def report(loss: torch.Tensor, state: dict[str, Any]) -> None:
    """Report the loss, and on rank 0 a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": float(loss)}, checkpoint=checkpoint)
    ray.train.get_all_reported_checkpoints()  # waits until it is stored: the cluster changes soon


def change_cluster(cluster: Cluster, nodes: list[Any], run: Path) -> None:
    """Lose a machine in step 6, and get two in step 14."""
    while not (run / "reached-6-of-2").exists():
        time.sleep(0.1)
    cluster.remove_node(nodes[1], allow_graceful=False)
    (run / "lost").touch()
    while not (run / "reached-14-of-1").exists():
        time.sleep(0.1)
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"trainer": 1})


def make_trainer(folder: Path, run: Path) -> TorchTrainer:
    """Return a trainer of 1 to 3 workers, which Ray starts again whenever their number changes."""
    return TorchTrainer(
        train,
        train_loop_config={"data": str(folder / "data/points"), "run": str(run)},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 3), resources_per_worker={"trainer": 1}, elastic_resize_monitor_interval_s=1
        ),
        run_config=ray.train.RunConfig(
            name="guide",
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    )


def main() -> None:
    with workplace(__doc__) as folder:
        make_dataset()
        run = folder.resolve() / "runs" / "ray"
        run.mkdir(parents=True)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="ray.")  # of its own settings
        # without hooks at exit: they set signal handlers, and nodes are added by a thread
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2}, shutdown_at_exit=False)
        try:
            nodes = [cluster.add_node(num_cpus=1, resources={"trainer": 1}) for _ in range(2)]
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            threading.Thread(target=change_cluster, args=(cluster, nodes, run), daemon=True).start()
            make_trainer(folder.resolve(), run).fit()
        finally:
            ray.shutdown()
            cluster.shutdown()
        shardkit("audit", run)
        print("workers of each start:", *(start["ranks"] for start in audit_run(run).starts))


if __name__ == "__main__":
    main()
