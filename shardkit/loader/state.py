"""The state of a loader: a step number and two digests, checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.errors import StateError
from shardkit.plan import Plan

__all__ = ["STATE_VERSION", "check_state"]

STATE_VERSION = 1


def check_state(state: Mapping[str, Any], plan: Plan, manifest: str) -> int:
    """The step at which a state goes on; see `Loader.load_state_dict`."""
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"loader state of version {state.get('version')!r}: this shardkit reads version {STATE_VERSION}"
        )
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateError(f"loader state: step is {step!r}, a whole number from 0 on is expected")
    if _is_of_ancestor(state, plan, step):
        return step
    expected = {"manifest": manifest, "plan": plan.digest}
    differing = [name for name, value in expected.items() if state.get(name) != value]
    if differing:
        details = "; ".join(f"{n} is {state.get(n)!r} in the state, {expected[n]!r} here" for n in differing)
        raise StateError(
            f"this state belongs to other data: {details}. Open the dataset at that manifest and make the plan "
            "with the settings of the run, or start at step 0"
        )
    return step


def _is_of_ancestor(state: Mapping[str, Any], plan: Plan, step: int) -> bool:
    """Whether the state was taken with a plan that `plan` amends, before they part."""
    parent, until = getattr(plan, "parent", None), getattr(plan, "from_step", None)
    while parent is not None and until is not None and step <= until:
        if state.get("plan") == parent.digest and state.get("manifest") == parent.population.identity:
            return True
        parent, until = getattr(parent, "parent", None), getattr(parent, "from_step", None)
    return False
