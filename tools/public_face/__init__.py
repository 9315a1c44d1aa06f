"""Collect the public interface from the code: every name that a user may type, call, match on or plot.

::

    python -m public_face            compare, and rewrite tests/golden/public_face.json
    python -m public_face --check    compare only

`face` maps each name to its meaning. If a name is removed or its meaning changes, a fragment in changes/ must mention
the name in backquotes; otherwise the file is not written. `words` holds help texts and the first lines of docstrings,
which may change freely.
"""

from __future__ import annotations

from public_face import declared, observed
from public_face.comparing import Face


def collect() -> tuple[Face, Face]:
    """Return the meanings and the words of all public names of the imported code."""
    told = {"commands": declared.commands(), "python": declared.python_names(), "errors": declared.errors()}
    face: Face = {section: meanings for section, (meanings, _) in told.items()}
    face |= {
        "settings": declared.settings(), "trainer": declared.trainer_settings(), "extras": declared.extras(),
        "exit codes": declared.exit_codes(), "metrics": declared.metrics(),
    }  # fmt: skip
    face |= observed.live_names() | observed.events()
    return face, {section: {k: v for k, v in words.items() if v} for section, (_, words) in told.items()}
