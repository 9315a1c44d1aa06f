"""Take the screenshots in docs/images: the dashboard, `shardkit top` and a notebook of a training run.

    python tools/take_screenshots.py    # needs Chromium, the extras dashboard and train, Pillow

Three processes train on generated pictures. One of them is slowed, so that the pages show a straggler.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

import shardkit
from shardkit.telemetry import read_run
from shardkit_tools.commands.dashboard import dashboard_server
from shardkit_tools.commands.top import terminal_page
from shardkit_tools.observing.run_view import view_run

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TOKEN = "screenshots"  # noqa: S105  protects pages that only this machine serves, for the length of a run
MOST_BYTES = 100_000
CLASSES = {"circle": (214, 96, 77), "square": (67, 147, 195), "triangle": (127, 188, 65)}
RUN = """
[run]
directory = "runs/shapes"
steps = 220
[data]
dataset = "data/shapes@train"
global_batch = 48
lanes = 12
[model]
kind = "trainer_histogram:straggler"
image_size = 16
width = 8
stages = 1
[parallel]
exact = "int64"
rebalance = true
rebalance_every = 10
[checkpoint]
every = 60
[log]
telemetry_s = 0.25
price_per_hour = 36.0
"""
NOTEBOOK = """<!doctype html><meta charset="utf-8"><style>
body {{ font: 14px system-ui, sans-serif; margin: 16px; width: 860px }}
pre {{ background: #f3f4f6; border: 1px solid #d8dbe0; padding: 8px 10px; margin: 18px 0 8px }}
</style>{cells}"""


# ---- the dataset and the run


def draw_pictures(folder: Path) -> None:
    """Write pictures into one folder per class."""
    for kind, colour in CLASSES.items():
        (folder / kind).mkdir(parents=True)
        for number in range(400):
            picture = Image.new("RGB", (64, 64), tuple(235 - (number * step) % 40 for step in (3, 5, 7)))
            draw, at, size = ImageDraw.Draw(picture), 8 + number % 13, 26 + number % 17
            box = (at, at, at + size, at + size)
            if kind == "circle":
                draw.ellipse(box, fill=colour)
            elif kind == "square":
                draw.rectangle(box, fill=colour)
            else:
                draw.polygon([(at, at + size), (at + size, at + size), (at + size // 2, at)], fill=colour)
            picture.save(folder / kind / f"{number:03}.png")


def train(folder: Path) -> None:
    """Build the dataset and train with the commands; rank 1 is slowed."""
    draw_pictures(folder / "shapes")
    (folder / "run.toml").write_text(RUN)
    modules = os.pathsep.join([str(ROOT / "tests" / "integration"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": modules, "SHARDKIT_TEST_FAULT": "slow:1:45"}
    for line in (
        "build shapes data/shapes --stratify label --split train=0.9,val=0.1 --shard-size 64KiB --block-size 8KiB",
        "train run.toml --nproc 3",
    ):
        command = [sys.executable, "-m", "shardkit_tools", *line.split()]
        subprocess.run(command, cwd=folder, env=environment, check=True)


# ---- pictures


def save(name: str, picture: bytes) -> None:
    """Save a picture as a PNG of at most 256 colours and less than `MOST_BYTES`."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64, 32):
        made = io.BytesIO()
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            made, "PNG", optimize=True
        )
        if len(made.getvalue()) < MOST_BYTES:
            break
    else:
        raise SystemExit(f"{name}.png is {len(made.getvalue())} bytes in 32 colours; show less")
    (IMAGES / f"{name}.png").write_bytes(made.getvalue())
    kilobytes = len(made.getvalue()) // 1000
    print(f"docs/images/{name}.png  {image.size[0]}×{image.size[1]}  {kilobytes} kB, {colours} colours")


def take_dashboard(chromium: Any, run: Path) -> None:
    """Save the dashboard in its light and dark schemes and at the width of a phone."""
    with contextlib.closing(dashboard_server(run, TOKEN).start()) as server:
        for name, scheme, width, height in (
            ("dashboard-light", "light", 1280, 900), ("dashboard-dark", "dark", 1280, 900),
            ("dashboard-phone", "light", 390, 844),
        ):  # fmt: skip
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"http://127.0.0.1:{server.port}/{TOKEN}/")
            page.wait_for_selector("#events td")
            panel = page.locator("#lanes").locator("xpath=ancestor::*[contains(@class, 'panel')]")
            grid = panel.bounding_box()
            shown = grid["y"] + grid["height"] + 16 if width > 1000 else height
            clip = {"x": 0, "y": 0, "width": width, "height": shown}
            save(name, page.screenshot(full_page=True, clip=clip))
            page.close()


def take_notebook(chromium: Any, folder: Path) -> None:
    """Save the notebook representations of a dataset, a plan and a run."""
    ds = shardkit.open(folder / "data" / "shapes@train")
    cells = {
        'ds = shardkit.open("data/shapes@train")\nds': ds,
        "ds.plan(global_batch=48, lanes=12)": ds.plan(global_batch=48, lanes=12),
        'shardkit.telemetry.read_run("runs/shapes")': read_run(folder / "runs" / "shapes"),
    }
    shown = "".join(f"<pre>{code}</pre>{value._repr_html_()}" for code, value in cells.items())  # type: ignore[attr-defined]
    page = chromium.new_page(viewport={"width": 900, "height": 600})
    page.set_content(NOTEBOOK.format(cells=shown))
    save("notebook", page.screenshot(full_page=True))


def take_top(chromium: Any, run: Path) -> None:
    """Save the output of `shardkit top` in a terminal of 80 columns and 24 lines."""
    terminal, screen = (
        Console(record=record, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        for record in (False, True)
    )
    with terminal.capture() as shown:
        terminal.print(terminal_page(view_run(run), 80))
    for line in ["$ shardkit top runs/shapes", *shown.get().splitlines()][:24]:
        screen.print(Text.from_ansi(line), soft_wrap=True)
    page = chromium.new_page(viewport={"width": 724, "height": 480})
    html = screen.export_html(theme=MONOKAI)
    page.set_content(
        re.sub(r"font-family:[^\"]*?monospace", "font: 14px/1.3 'DejaVu Sans Mono', monospace", html)
    )
    save("top", page.locator("pre").screenshot())


def main() -> None:
    """Train, then save all screenshots."""
    playwright = importlib.import_module("playwright.sync_api")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, playwright.sync_playwright() as started:
        folder = Path(name)
        train(folder)
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take_dashboard(chromium, folder / "runs" / "shapes")
        take_notebook(chromium, folder)
        take_top(chromium, folder / "runs" / "shapes")
        chromium.close()


if __name__ == "__main__":
    main()
