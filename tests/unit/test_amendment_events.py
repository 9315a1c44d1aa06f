"""Weights in events of amendments: texts of bounded numbers only, because events may be hostile."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardkit.errors import FormatError, UsageError
from shardkit.ledger.events import check_event
from shardkit_tools.commands.amend import change_request

EVENT = {
    "kind": "amendment", "step": 3, "number": 0, "from_step": 3, "resume_from": 3, "parent": "0" * 64, "plan": "1" * 64,
    "manifest": "sha256:" + "2" * 64, "skip": None, "excluded": None, "author": "", "message": "", "time": 0,
}  # fmt: skip


@pytest.mark.parametrize("weight", ["1e999999999", "1/0", "nan", "-1", "", "9" * 5000])
def test_a_weight_that_is_no_number_of_few_digits_is_refused(weight: str) -> None:
    with pytest.raises(FormatError, match="weights"):
        check_event({**EVENT, "weights": {"*": weight}}, "event")
    with pytest.raises(UsageError, match="expected PATTERN=WEIGHT"):
        change_request(skip="", exclude=None, weights=[f"*={weight}"])


@pytest.mark.parametrize("weight", ["2", "1/3", "0.25", "1e-9", "1.5E3", "0"])
def test_weights_that_a_command_accepts_are_recorded(weight: str) -> None:
    request = change_request(skip="", exclude=None, weights=[f"web*={weight}"])
    assert request is not None
    assert request.weights == {"web*": str(Fraction(weight))}
    check_event({**EVENT, "weights": request.weights}, "event")
