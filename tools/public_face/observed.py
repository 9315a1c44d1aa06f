"""Collect names that appear only at run time or after a failure: counters, control keys, kinds of events."""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from pathlib import Path

from public_face.comparing import Face
from public_face.declared import find_function, sources, text_of
from shardkit.ledger.events import BOUND, JOURNALED, MERGED


def live_names() -> Face:
    """Return the names in stats, telemetry and control.toml of a loader with a cache, a copy and a run directory."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    import shardkit
    from shardkit.loader import Rebalancing

    (knobs,) = find_function("loader_knobs")
    folder = Path(tempfile.mkdtemp(prefix="shardkit-face-"))
    try:
        with shardkit.create(folder / "a", schema={"x": "int64"}) as writer:
            for number in range(16):
                writer.add({"x": number}, key=str(number))
        shutil.copytree(folder / "a", folder / "b")
        dataset = shardkit.open(folder / "a", locations={"mirror": str(folder / "b")})
        plan = dataset.plan(global_batch=8, lanes=4)
        loader = dataset.loader(
            plan, rank=0, world=2, cache=folder / "c", run=folder / "run", uneven=True,
            rebalance=Rebalancing(store=HashStore()),
        )  # fmt: skip
        next(iter(loader))
        stats, values, keys = (
            loader.stats(),
            loader.telemetry.read().values,
            knobs(loader.live, loader.memory_needed),
        )
        loader.close()
    finally:
        shutil.rmtree(folder)
    own = ("change.guard_s", "change.ranks")  # keys of control.toml itself
    return {
        "stats": {re.sub("_root$", "_LOCATION", name): "number" for name in stats},
        "telemetry": {re.sub("_root$", "_LOCATION", name): "number" for name in values},
        "control": {re.sub(r"\.(mirror|root)\.", ".LOCATION.", key): "key" for key in (*keys, *own)},
    }


# ---- events, read from the source, because many are written only after a failure


def events() -> Face:
    """Return the kinds of events in events.jsonl, in the ledger, and of reads (``read_…`` in events.jsonl)."""
    found: dict[str, set[str]] = {"events": set(), "ledger events": set(), "read events": set()}
    for path in sources("shardkit", "shardkit_trainer"):
        text = text_of(path)
        if "testing" not in path.parts and re.search(r"record|event|\.note\(|\"kind\"", text):
            _scan(ast.parse(text), path, found)
    found["ledger events"] |= {*JOURNALED, *MERGED, *BOUND}
    return {
        section: {kind: "kind" for kind in sorted(kinds) if re.fullmatch(r"[a-z_*]+", kind)}
        for section, kinds in found.items()
    }


def _scan(tree: ast.Module, path: Path, found: dict[str, set[str]]) -> None:
    given: dict[str, list[ast.expr]] = {}  # name → assigned values, because a kind may be held in a variable
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name) and node.value:
            given.setdefault(target.id, []).append(node.value)
    room = "ledger events" if path.parent.name == "ledger" else "events"
    told: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            section = _section(node.func, room)
            for argument in [*node.args, *(one.value for one in node.keywords if one.arg is None)][:2]:
                if section and not _in_dicts(argument, given, found[section], told):
                    found[section] |= _texts(argument, given)
        elif isinstance(node, ast.Dict) and path.parent.name in ("loader", "ledger") and id(node) not in told:
            found[room] |= _kinds(node, given)


def _section(function: ast.Attribute, room: str) -> str | None:
    receiver = ast.unparse(function.value)
    if function.attr == "note" and "read_events" in receiver:
        return "read events"
    if function.attr == "add_event" or (function.attr == "event" and "journal" in receiver):
        return "ledger events"
    if function.attr in ("record", "event", "_record_event") and "library" not in receiver:
        return room
    return None


def _in_dicts(argument: ast.expr, given: dict[str, list[ast.expr]], kinds: set[str], told: set[int]) -> bool:
    dicts = [node for node in ast.walk(argument) if isinstance(node, ast.Dict)]
    for node in dicts:
        told.add(id(node))
        kinds |= _kinds(node, given)
    return bool(dicts)


def _kinds(node: ast.Dict, given: dict[str, list[ast.expr]]) -> set[str]:
    pairs = zip(node.keys, node.values, strict=True)
    values = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "kind"]
    return {text for value in values for text in _texts(value, given)}


def _texts(node: ast.expr, given: dict[str, list[ast.expr]]) -> set[str]:
    """Return the texts that an expression may evaluate to."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.IfExp):
        return _texts(node.body, given) | _texts(node.orelse, given)
    if isinstance(node, ast.JoinedStr):
        return {"".join(str(one.value) if isinstance(one, ast.Constant) else "*" for one in node.values)}
    if isinstance(node, ast.Dict):
        return {text for value in node.values for text in _texts(value, given)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return _texts(node.func.value, given)
    if isinstance(node, ast.Name) and node.id in given:
        rest = {name: values for name, values in given.items() if name != node.id}
        return {text for value in given[node.id] for text in _texts(value, rest)}
    return {node.id.lower()} if isinstance(node, ast.Name) and node.id.isupper() else set()
