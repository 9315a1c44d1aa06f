"""Files of lines whose rows are counted become the blocks of files whose rows are parsed, or the same error."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ShardkitError
from shardkit_tools.adopting import adopt
from shardkit_tools.importers import ImportOptions

TEXTS = st.text('a\u00e4 \\"\U0001f600', max_size=8)
ROWS = st.one_of(
    st.builds(lambda n, t: json.dumps({"n": n, "t": t}), st.integers(-9, 9), TEXTS),
    st.builds(
        lambda n, t: json.dumps({"n": n, "t": t}, ensure_ascii=False),
        st.integers(-9, 9),
        TEXTS.map(lambda t: t * 40),
    ),
    st.sampled_from(["", " ", "\t", '{"n": 1, "t": "\\ud800"}', '{"n": 2, "t": "\\uD83D\\uDE00"}']),
)
CELLS = st.sampled_from(["1,x", "2,y y", '3,"a\nb"', "4,", "", "x" * 300 + ",5", "6,\r"])


def _settings(index: Any) -> bytes:
    settings: bytes = index.common.tobytes()
    return settings


def adopted(path: Path, root: Path, check: str) -> tuple[Any, ...]:
    """Return facts about the blocks of a file, or the error."""
    try:
        adopt([path], root, options=ImportOptions(check=check), block_size="64B")  # type: ignore[arg-type]  # literals
    except ShardkitError as error:
        return (str(error),)
    index = shardkit.open(root).reader.index(0)
    found = [dict(row) for row in shardkit.open(root)]
    return (
        *(getattr(index, name).tolist() for name in ("block_start", "block_offset", "block_size", "block_xxh3")),
        index.tail_sha256, index.head_sha256, _settings(index), found,
    )  # fmt: skip


@settings(max_examples=60)
@given(
    lines=st.lists(ROWS, min_size=1, max_size=30), cells=st.lists(CELLS, min_size=1, max_size=20),
    is_csv=st.booleans(), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans(), mark=st.booleans(),
)  # fmt: skip
def test_counted_rows_have_the_blocks_of_parsed_rows(
    lines: list[str], cells: list[str], is_csv: bool, end: str, last: bool, mark: bool
) -> None:
    text = end.join(["n,t", *cells] if is_csv else lines) + end * last
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.csv" if is_csv else "a.jsonl")
        path.write_bytes(b"\xef\xbb\xbf" * mark + text.encode())
        parsed, counted = (adopted(path, Path(folder) / check, check) for check in ("decode", "none"))
    assert counted == parsed
