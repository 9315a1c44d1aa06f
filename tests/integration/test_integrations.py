"""Frameworks resume from their own checkpoints with the batch after the one trained on last, and skip nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(LeafSpec|num_workers|save_on|checkpoint|pin_memory|sync).*:UserWarning"
    ),
]
STEPS, END = 5, 12  # of an epoch, of the run


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "points")
    with shardkit.create(root, schema={"x": "float32[4]", "i": "int64"}) as writer:
        for i in range(8 * STEPS):
            writer.add({"x": np.full(4, i, np.float32), "i": i})
    return shardkit.open(root)


def _loader(ds: shardkit.Dataset, workers: int) -> Any:
    plan = ds.plan(global_batch=8, lanes=2, seed=3)
    if workers:
        return shardkit.torch.DataLoader(shardkit.torch.dataset(ds, plan), num_workers=workers)
    return ds.loader(plan, tensors=True)


def _expected(ds: shardkit.Dataset) -> list[list[int]]:
    loader = _loader(ds, 0)
    return [batch["i"].tolist() for _ in range(3) for batch in loader]


@pytest.mark.parametrize(("workers", "stop"), [(0, 3), (2, 7), (2, 5), (0, 10)])
def test_transformers(
    ds: shardkit.Dataset, tmp_path: Path, workers: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from shardkit.integrations.transformers import use_loader

    seen: list[list[int]] = []

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, i: Any) -> dict[str, Any]:
            seen.append(i.tolist())
            return {"loss": self.layer(x).square().mean()}

    def skipped(*_: Any) -> None:
        raise AssertionError("batches were read to be skipped")

    monkeypatch.setattr(transformers.trainer, "skip_first_batches", skipped)
    for end, resume in ((stop, None), (END, str(tmp_path / f"checkpoint-{stop}"))):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=end, save_steps=stop, use_cpu=True, report_to=[], disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model=Model(), args=arguments)
        use_loader(trainer, _loader(ds, 0))
        use_loader(trainer, _loader(ds, workers))  # as when a cell of a notebook is run again
        trainer.train(resume_from_checkpoint=resume)
    assert seen == _expected(ds)[:END]

    path = Path(str(resume), "trainer_state.json")
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["LoaderState"]
    path.write_text(json.dumps(state))
    use_loader(trainer, _loader(ds, workers))
    with pytest.warns(RuntimeWarning, match=rf"step {stop} has no state .* with batch 0 of the plan"):
        trainer.train(resume_from_checkpoint=resume)


@pytest.mark.parametrize(
    ("workers", "stop", "unit"),
    [(0, 3, "steps"), (2, 7, "steps"), (0, 10, "steps"), (0, 1, "epochs"), (2, 2, "epochs")],
)
def test_lightning(ds: shardkit.Dataset, tmp_path: Path, workers: int, stop: int, unit: str) -> None:
    """Lightning loads no state of loaders after the end of an epoch, if epochs are counted."""
    lightning = pytest.importorskip("pytorch_lightning")
    from shardkit.integrations.lightning import PlanDataModule

    seen: list[list[int]] = []

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            seen.append(batch["i"].tolist())
            return self.layer(batch["x"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    path = tmp_path / "saved.ckpt"
    for end in (stop, END if unit == "steps" else 3):
        counted = (
            {"max_steps": end}
            if unit == "steps"
            else {"max_epochs": end, "reload_dataloaders_every_n_epochs": 1}
        )
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **counted,
            enable_checkpointing=False, default_root_dir=str(tmp_path), use_distributed_sampler=False,
        )  # fmt: skip
        resume = {"ckpt_path": str(path), "weights_only": False} if path.exists() else {}
        data = PlanDataModule(lambda: _loader(ds, workers))
        trainer.fit(Model(), datamodule=data, **resume)
        trainer.save_checkpoint(path)
    assert seen == _expected(ds)[: END if unit == "steps" else 3 * STEPS]

    lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=str(tmp_path), use_distributed_sampler=False,
    ).fit(Model(), datamodule=data)  # fmt: skip
    assert seen[-1] == seen[0], "another trainer begins anew"


@pytest.mark.parametrize(("workers", "stop"), [(0, 3), (2, 7), (2, 5)])
def test_accelerate(ds: shardkit.Dataset, tmp_path: Path, workers: int, stop: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    seen: list[list[int]] = []
    for end in (stop, END):
        accelerator = accelerate.Accelerator(cpu=True)
        loader = _loader(ds, workers)
        assert accelerator.prepare(loader) is loader
        if not workers:
            accelerator.register_for_checkpointing(loader)
        if end == END:
            accelerator.load_state(str(tmp_path))
        while len(seen) < end:
            for batch in loader:
                seen.append(batch["i"].tolist())
                if len(seen) == end:
                    break
        accelerator.save_state(str(tmp_path))
    assert seen == _expected(ds)[:END]
