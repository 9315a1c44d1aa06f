"""Compare the public interface with the frozen one, and freeze it again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from public_face import collect
from public_face.comparing import Difference, Face, differences, unexplained

_TOP: Final = Path(__file__).resolve().parents[2]
CHANGES: Final = _TOP / "changes"
FROZEN: Final = _TOP / "tests" / "golden" / "public_face.json"


def load(path: Path) -> tuple[Face, Face]:
    """Return the meanings and words of the frozen face, both empty if the file does not exist."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return document.get("face", {}), document.get("words", {})


def main(arguments: list[str] | None = None) -> int:
    """Write the face, unless a removal or a change is not named in a fragment of changes/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    face, words = collect()
    return freeze(face, words, FROZEN, next_section(CHANGES), check=given.check)


def next_section(folder: Path) -> str:
    """Return the fragments of the next release as a section of a changelog."""
    entries = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("+*.md"))]
    return "# Changes\n\n## Unreleased\n\n" + "".join(f"- {entry}" for entry in entries)


def report(found: list[Difference]) -> str:
    """Return the differences as text, one per line."""
    return "\n".join(map(str, found))


def freeze(face: Face, words: Face, path: Path, changelog: str, *, check: bool = False) -> int:
    """Compare a face with the frozen one and write it; return 1 if a difference is unexplained."""
    old, old_words = load(path)
    found = differences(old, face)
    silent = unexplained(found, changelog)
    print(report(found if old else []), end="\n" if found and old else "")
    if silent:
        print(f"{len(silent)} gone or changed without a word in changes/:\n{report(silent)}")
        return 1
    if check:
        if old_words != words:
            print("Docstring heads or help texts changed; run: python -m public_face")
        return int(bool(found or old_words != words))
    document = {"face": face, "words": words}
    path.write_text(
        json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
