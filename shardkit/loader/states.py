"""States to resume from: their checks, the step after a batch, and the check that a step has the plan's cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.errors import ConfigurationError, StateError
from shardkit.loader.batch import Batch
from shardkit.plan import Plan
from shardkit.ranges import Range, shown

__all__ = ["STATE_VERSION", "check_geometry", "check_mapping", "check_state", "check_step", "step_after"]

_STEPS = Range(0, 2**62)
STATE_VERSION = 1
"""Version of the dict that `Loader.state_dict` returns."""


def check_state(state: Mapping[str, Any], plan: Plan, manifest: str) -> int:
    """Return the step at which a state continues.

    Raises:
        StateError: the state is malformed, or belongs to another plan or manifest; see `Loader.load_state_dict`.
    """
    check_mapping(state)
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"loader state of version {state.get('version')!r}: this shardkit reads version {STATE_VERSION}"
        )
    step = check_step("loader state: step", state.get("step"))
    found: Plan | None = plan
    until = step  # up to this step, at most the state's own, the plan and `found` are the same
    while found is not None:
        if (state.get("plan"), state.get("manifest")) == (found.digest, found.population.identity):
            if step <= until:
                return step
            raise StateError(
                f"this state is of step {step}, and the plan differs from step {until} on; load a state of step "
                f"{until} or earlier"
            )
        until, found = min(until, found.from_step), found.parent
    expected = {"manifest": manifest, "plan": plan.digest}
    differing = [name for name, value in expected.items() if state.get(name) != value]
    details = "; ".join(f"{n} is {state.get(n)!r} in the state, {expected[n]!r} here" for n in differing)
    opened = "Open the dataset at that manifest and make" if "manifest" in differing else "Make"
    raise StateError(
        f"this state belongs to {'other data' if 'manifest' in differing else 'another plan of the same data'}: "
        f"{details}. {opened} the plan with the settings of the run, or start at step 0"
    )


def check_mapping(state: object) -> None:
    """Raise StateError for a value that cannot be a state."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"loader state: {shown(state)} is no state; pass the dict that loader.state_dict() returned"
        )


def step_after(batch: object) -> int:
    """Return the step that follows a batch or a list of cells; raise StateError for other values."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Batch):
        raise StateError(
            f"state_dict(after={shown(batch)}): the batch that the loader handed out is expected, before a "
            "collate_fn or a copy to a device changes its type"
        )
    return first.step + 1


def check_step(name: str, step: object) -> int:
    """Return a step number as an int; raise StateError if it is not one."""
    try:
        return int(_STEPS.check(name, step))
    except ConfigurationError as error:
        raise StateError(f"{error}: steps count from 0 over the whole run") from None


def check_geometry(plan: Plan, step: int) -> None:
    """Raise StateError if the step belongs to a parent plan with other lanes, cells or rows."""
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
