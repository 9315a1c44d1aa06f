"""Write the golden files below tests/golden again: `python -m tests.compat.write_golden`.

Formats and plans change rarely; a commit that writes these files says why.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.compat import test_golden_builds, test_golden_formats, test_golden_plans


def main() -> None:
    test_golden_formats.record()
    test_golden_plans.write()
    with tempfile.TemporaryDirectory() as folder:
        test_golden_builds.write(Path(folder))


if __name__ == "__main__":
    main()
