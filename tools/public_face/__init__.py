"""The public face: everything that a user may have typed, called, matched on or plotted, collected from the code.

::

    python -m public_face            compare, and write tests/golden/public_face.json again
    python -m public_face --check    compare alone

`face` holds what each name means: a name that goes, or whose meaning changes, has to stand in CHANGELOG.md under
"Unreleased", in backquotes; until it does, nothing is written. `words` holds help texts and first lines of docstrings,
which change freely.
"""

from __future__ import annotations

from public_face import declared, observed
from public_face.comparing import Face


def collect() -> tuple[Face, Face]:
    """Meanings and words of everything public, from the code that is imported."""
    told = {"commands": declared.commands(), "python": declared.python_names(), "errors": declared.errors()}
    face: Face = {section: meanings for section, (meanings, _) in told.items()}
    face |= {
        "settings": declared.settings(), "trainer": declared.trainer_settings(), "extras": declared.extras(),
        "exit codes": declared.exit_codes(), "metrics": declared.metrics(),
    }  # fmt: skip
    face |= observed.live_names() | observed.events()
    return face, {section: {k: v for k, v in words.items() if v} for section, (_, words) in told.items()}
