"""Draw the chart of README from the results of the interruption benchmark: the answers to its three questions."""

from __future__ import annotations

from html import escape
from typing import Any

from bench.interruptions.counting import ANSWERS
from bench.interruptions.scenarios import QUESTIONS, UNCHANGED

COLOURS = {
    "light": {
        "text": "#1f2328", "quiet": "#59636e", "back": "#ffffff", "random": "#eaeef2",
        "exact": "#0b7285", "reordered": "#c5f6fa", "refuses": "#ffec99", "stalls": "#ffd8a8", "wrong": "#d9480f",
        "on_exact": "#ffffff", "on_wrong": "#ffffff",
    },
    "dark": {
        "text": "#f0f6fc", "quiet": "#9198a1", "back": "#0d1117", "random": "#21262d",
        "exact": "#3bc9db", "reordered": "#164852", "refuses": "#5c4a00", "stalls": "#6b3d00", "wrong": "#ff922b",
        "on_exact": "#0d1117", "on_wrong": "#0d1117",
    },
}  # fmt: skip
HEADS = ("same 2 ranks", "other workers", "other ranks: 2, 3, 1, 4")
WORDS = {
    "exact": "exact",
    "reordered": "nothing lost, other order",
    "refuses": "refuses",
    "stalls": "stands still",
    "wrong": "silently wrong",
}
WIDTH, LEFT, COLUMN, STEP, TOP = 760, 244, 167, 27, 88


def answers(result: dict[str, Any], key: str) -> dict[str, int]:
    """Return the answers of a scenario, best first, with the number of seeds of each."""
    found = [run["answer"] for run in result["runs"].get(key, {}).values()]
    return {answer: found.count(answer) for answer in ANSWERS if answer in found}


def words_of(result: dict[str, Any], key: str, answer: str) -> str:
    """Return the words for an answer in a scenario."""
    runs = [run for run in result["runs"][key].values() if run["answer"] == answer]
    if answer == "reordered" and not any(run["moved"] for run in runs):
        return "nothing lost, other fillers"
    return WORDS[answer]


def documented_loss(result: dict[str, Any], key: str) -> str:
    """Return what the documentation says that a resume loses, if the loader loses samples in a scenario."""
    lossy = key in UNCHANGED and "wrong" in answers(result, key)
    return str(result.get("documented", "")) if lossy else ""


def constant_only(result: dict[str, Any]) -> bool:
    """Whether a loader is exact on other ranks only while ranks × workers is constant."""
    exact = ["exact"]
    return list(answers(result, "ranks")) != exact and list(answers(result, "constant")) == exact


def chart(results: list[dict[str, Any]], colours: dict[str, str]) -> str:
    """Return the SVG: a row for each loader, a column for each question; the worst answer colours a cell."""
    height = TOP + STEP * len(results) + 62

    def text(x: float, y: int, words: str, size: int, colour: str = "text", more: str = "") -> str:
        return f'<text x="{x:g}" y="{y}" font-size="{size}" fill="{colours[colour]}"{more}>{escape(words)}</text>'

    fonts = "system-ui, -apple-system, Segoe UI, sans-serif"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="{fonts}">',
        "<title>Samples of a resumed run, compared with the undisturbed run of the same loader</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{colours["back"]}"/>',
        text(16, 28, "A run is killed and resumed: does each step have the samples it would have had?", 15,
             more=' font-weight="600"'),
        text(16, 48, "Two epochs of 2,016 samples, killed three times; loaders used as their documentation says, if it "
             "describes resuming", 12, "quiet"),
    ]  # fmt: skip
    middle = ' text-anchor="middle"'
    parts += [
        text(LEFT + COLUMN * (at + 0.5), TOP - 9, head, 12, "quiet", middle) for at, head in enumerate(HEADS)
    ]
    for number, result in enumerate(results):
        y = TOP + STEP * number
        weight = ' font-weight="600"' if result["label"].startswith("shardkit") else ""
        parts.append(text(16, y + 17, result["label"].replace("`", ""), 12, more=weight))
        for at, key in enumerate(QUESTIONS):
            colour, words = _cell(result, key)
            x = LEFT + COLUMN * at
            if colour:
                parts.append(
                    f'<rect x="{x + 2}" y="{y + 1}" width="{COLUMN - 4}" height="{STEP - 3}" rx="3" '
                    f'fill="{colours[colour]}"/>'
                )
            ink = f"on_{colour}" if f"on_{colour}" in colours else "text"
            parts.append(text(x + COLUMN / 2, y + 17, words, 11 if len(words) < 28 else 10, ink, middle))
    parts += [
        text(16, height - 36, "* exact while ranks × workers is constant. † not documented for other ranks. "
             "‡ documented: the shuffle buffer is lost. (n): seeds.", 11, "quiet"),
        text(16, height - 18, f"{_facts(results)} Versions, counts and seven harder scenes: docs/interruptions.md", 11,
             "quiet"),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _cell(result: dict[str, Any], key: str) -> tuple[str, str]:
    """Return the name of the colour of a cell, and its words."""
    found = answers(result, key)
    if not found:
        return "", "–"
    if result["random"]:
        return "random", "random by design"
    worst = list(found)[-1]
    if len(found) == 1:
        words = words_of(result, key, worst)
    else:
        words = ", ".join(f"{words_of(result, key, answer)} ({count})" for answer, count in found.items())
    if key == "ranks" and constant_only(result):
        words += " *"
    elif key == "ranks" and result["elastic"].startswith("no") and worst != "exact":
        words += " †"
    elif documented_loss(result, key):
        words += " ‡"
    return worst, words


def _facts(results: list[dict[str, Any]]) -> str:
    """Return a sentence with the number of seeds and the dates of the runs that the chart shows."""
    counts = [len(result["runs"][key]) for result in results for key in QUESTIONS if result["runs"].get(key)]
    dates = sorted({result["date"] for result in results})
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{seeds} seeds a cell, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
