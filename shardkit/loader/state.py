"""The state of a loader: a step number and two digests, checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.errors import StateError
from shardkit.plan import Plan

__all__ = ["STATE_VERSION", "check_geometry", "check_state"]

STATE_VERSION = 1
"""Of what `Loader.state_dict` gives."""


def check_state(state: Mapping[str, Any], plan: Plan, manifest: str) -> int:
    """The step at which a state goes on; see `Loader.load_state_dict`."""
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"loader state of version {state.get('version')!r}: this shardkit reads version {STATE_VERSION}"
        )
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateError(f"loader state: step is {step!r}, a whole number from 0 on is expected")
    if _fits(state, plan, step):
        return step
    if state.get("plan") in plan.superseded_digests():
        raise StateError(
            f"this state was taken at step {step} by release 0.1, which dealt an amendment of this plan wrongly: rows "
            "came again before their pass ended. The cells are others now; to go on with them from here, load the "
            f"model and the optimizer, and call loader.seek({step}) in place of loading this state"
        )
    expected = {"manifest": manifest, "plan": plan.digest}
    differing = [name for name, value in expected.items() if state.get(name) != value]
    earlier = plan.earlier_defaults().get(str(state.get("plan"))) if differing == ["plan"] else None
    if earlier is not None:
        raise StateError(
            "this state was taken with a plan of the same settings, but with the defaults of an earlier version; make "
            f"the plan with {', '.join(f'{name}={value}' for name, value in earlier.items())} to go on"
        )
    if differing:
        details = "; ".join(f"{n} is {state.get(n)!r} in the state, {expected[n]!r} here" for n in differing)
        raise StateError(
            f"this state belongs to other data: {details}. Open the dataset at that manifest and make the plan "
            "with the settings of the run, or start at step 0"
        )
    raise AssertionError("unreachable: the state has this plan and manifest")


def check_geometry(plan: Plan, step: int) -> None:
    """Refuse to begin at a step that an amendment left to a plan with other cells or rows.

    Raises:
        StateError: says with which plan these steps are read.
    """
    found = plan
    while found.parent is not None and step < found.from_step:
        until, found = found.from_step, found.parent
        there = (found.lanes, found.cell_size, found.population.identity)
        if there != (plan.lanes, plan.cell_size, plan.population.identity):
            raise StateError(
                f"step {step}: up to step {until} this plan is its parent's, with {found.lanes} lanes of "
                f"{found.cell_size} samples over manifest {found.population.identity[:19]}…; read these steps with the "
                f"parent plan, then go on with this one at step {until}"
            )


def _fits(state: Mapping[str, Any], plan: Plan, step: int) -> bool:
    """Whether the state was taken with `plan`, or with one that it amends, before they part."""
    found: Plan | None = plan
    while found is not None:
        if state.get("plan") == found.digest:
            return state.get("manifest") == found.population.identity
        if step > found.from_step:
            return False
        found = found.parent
    return False
