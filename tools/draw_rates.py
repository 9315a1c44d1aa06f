"""Draw the chart of README from committed results: rows per second of the loaders that can resume.

    python tools/draw_rates.py            writes docs/rates-light.svg and docs/rates-dark.svg
    python tools/draw_rates.py --check    fails if they differ from the results

The results are the table of tokens in tools/bench/results/read-peers.md, the third epoch.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "bench" / "results" / "read-peers.md"
COLOURS = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "own": "#0b7285", "other": "#adb5bd", "back": "#ffffff"},
    "dark": {"text": "#f0f6fc", "quiet": "#9198a1", "own": "#3bc9db", "other": "#495057", "back": "#0d1117"},
}
WIDTH, LEFT, BAR, STEP, TOP = 760, 190, 22, 34, 64


def rates(text: str) -> tuple[str, dict[str, int]]:
    """Return the date of the results and the rate of each loader that can resume, fastest first.

    The name of a loader ends in ¹ if its epoch was stopped early, as in the table.
    """
    date = re.search(r"\d{4}-\d\d-\d\d", text)
    section = text.partition("## tokens")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0].strip("* ")
        if len(cells) < 4 or name in ("reader", "") or set(name) == {"-"}:
            continue
        if name.startswith("limit") or "cannot resume" in name or "memory=" in name:
            continue
        stopped = "¹" if cells[3].endswith("¹") else ""
        found[name + stopped] = int(cells[3].rstrip("¹").replace(",", ""))
    if not found or date is None:
        raise SystemExit(f"{RESULTS}: no table of tokens, or no date")
    return date[0], dict(sorted(found.items(), key=lambda item: -item[1]))


def chart(date: str, found: dict[str, int], colours: dict[str, str]) -> str:
    """Return the SVG: a bar per loader, on a linear axis from zero."""
    most = max(found.values())
    height = TOP + STEP * len(found) + 34

    def text(x: int, y: int, words: str, size: int, colour: str = "text", more: str = "") -> str:
        return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colours[colour]}"{more}>{words}</text>'

    def bar(x: int, y: int, width: int, colour: str) -> str:
        return f'<rect x="{x}" y="{y}" width="{width}" height="{BAR}" rx="3" fill="{colours[colour]}"/>'

    fonts = "system-ui, -apple-system, Segoe UI, sans-serif"
    conditions = (
        "8 KiB token rows, shuffled, third epoch, two processor cores; shardkit and Grain compare checksums"
    )
    rest = f"¹ epoch stopped early. Measured once, {date}; more loaders and workloads: docs/speed.md"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="{fonts}">',
        "<title>Rows of tokens read per second, loaders that can resume</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{colours["back"]}"/>',
        text(16, 28, "Rows read per second, by loaders that can resume", 16, more=' font-weight="600"'),
        text(16, 48, conditions, 12, "quiet"),
    ]
    for number, (name, rate) in enumerate(found.items()):
        y = TOP + STEP * number
        length = max(2, round(rate / most * (WIDTH - LEFT - 90)))
        own = name == "shardkit"
        weight = ' font-weight="600"' if own else ""
        parts.append(text(LEFT - 10, y + 16, name, 13, more=f' text-anchor="end"{weight}'))
        parts.append(bar(LEFT, y, length, "own" if own else "other"))
        parts.append(text(LEFT + length + 8, y + 16, f"{rate:,}", 13, more=weight))
    parts += [text(16, height - 14, rest, 11, "quiet"), "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the charts, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    date, found = rates(RESULTS.read_text())
    readme = (ROOT / "README.md").read_text()
    missing = [name for name, rate in found.items() if f"{rate:,}" not in readme]
    if missing:
        sys.exit(f"README.md does not have the rates of {', '.join(missing)} that {RESULTS} has")
    for name, colours in COLOURS.items():
        path, text = ROOT / "docs" / f"rates-{name}.svg", chart(date, found, colours)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is not what the results say; run: python tools/draw_rates.py")


if __name__ == "__main__":
    main()
