"""The plan: a pure function from manifest and settings to the samples of every lane and step.

No I/O, no clock, no threads. Cells are computed with integers in closed form, so any step costs the same.
SPEC.md has the mathematics.
"""

from shardkit.notebook import pages

from .assignment import Assignment, assign, data_coordinates
from .costs import Costs, encode_costs
from .making import make_plan
from .mixers import ADO, FunctionMixer, Mixer, Temperature
from .permutation import Place, draw, draws
from .plan import Plan, cell_digest
from .population import Population

__all__ = [
    "ADO", "Assignment", "Costs", "FunctionMixer", "Mixer", "Place", "Plan", "Population", "Temperature", "assign",
    "cell_digest", "data_coordinates", "draw", "draws", "encode_costs", "make_plan",
]  # fmt: skip


def _plan_page(plan: Plan) -> str:
    from .report import plan_page  # imported only when a notebook shows a plan

    return plan_page(plan)


pages[Plan] = _plan_page
