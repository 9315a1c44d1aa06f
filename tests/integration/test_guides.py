"""Every guide runs to its end, says what it promises, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "examples" / "guides"
NAMES = sorted({path.stem for path in GUIDES.glob("*.py")} - {"guide_shell"})
NEEDS = {
    "clips_of_videos": ("torchcodec",),
    "images_from_s3": ("moto", "PIL", "obstore"),
    "ray_train": ("ray", "torch"),
    "training_on_images": ("PIL", "sklearn", "torch"),
    "tokens_for_language_models": ("tokenizers",),
}
SAYS = {
    "clips_of_videos": r"\(4, 8, 3, 32, 32\) uint8; each frame over the one before: 4 levels(?s:.*): the same clips",
    "images_from_s3": r"after epoch 0: ([\d,]+) bytes came from the bucket\nafter epoch 1: \1 bytes",
    "tokens_for_language_models": r"share of web: 0\.750 before step 40, 0\.500 after",
    "training_on_images": r"held out: 0\.[6-9]\d(?s:.*)resumed: the same weights",
    "costs_of_packed_rows": r"Cost squares\(boundaries\): dearest rank(?s:.*)rows of \d+ documents on rank 0 of 8",
    "costs_of_pictures": r"step 2: \d+ patches on rank 0 of 4",
    "migrating": r"data/from-mds: 300 samples",
    "elastic_training": r"read ahead by 3 and thrown away: the same 60 batches, the same weights",
    "ray_train": r"runs/ray: clean: the run consumed exactly(?s:.*)workers of each start: 2 1 (?:2 )?3",
    "quorums_of_torchft": r"24 steps in 25 tries with 6 quorums: every step is the plan's",
    "auditing": r"runs/b: clean: the run consumed exactly what its plan says(?s:.*)runs/c: violated",
    "copies_and_parity": r"missing +parity(?s:.*)data/cats: clean",
    "operating_a_cluster": r"lag: 0 bytes below policy(?s:.*)clean: the run consumed exactly what its plan says",
    "virtual_epochs": r"epoch 3: trained to step 19, validated on steps \[0, 1, 2\]\n640 rows, 640 of them different",
}


def test_every_guide_is_listed_and_checked() -> None:
    page = (GUIDES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.py\)", page)) == set(NAMES) == set(SAYS)


@pytest.mark.slow
@pytest.mark.timeout(1000)  # longer than the limit of the program: Ray waits a minute for lost workers
@pytest.mark.parametrize("name", NAMES)
def test_a_guide_runs(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    private = {n: v for n, v in os.environ.items() if not n.startswith("AWS_") and n != "BUCKET"}
    private["RAY_TMPDIR"] = "/tmp"  # paths of sockets are short
    done = subprocess.run(
        [sys.executable, "-W", "error", str(GUIDES / f"{name}.py")],
        env={**private, "TMPDIR": str(tmp_path), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert re.search(SAYS[name], done.stdout), done.stdout[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("shardkit-guide-*"))
