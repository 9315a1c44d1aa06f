"""The plan: who reads what, when; pure, closed form, integers (SPEC.md).

- ``population``: the rows of a manifest, as columns over segments.
- ``plan``: settings and a population to a `Plan`; amendments.
- ``assignment``: lanes to ranks.
- ``strata``, ``weights``, ``settings``: what is dealt alone, what is pooled; what a caller writes, resolved.
- ``deal``, ``stage``, ``tree``: how many of each stratum a lane has drawn before any step.
- ``natural``, ``weighted``: the grids of the two kinds of weights.
- ``base_order``, ``deck``, ``tapes``, ``cells``: which rows those are, shuffled.
- ``permutation``, ``rounding``, ``recent``: keyed permutations, exact sums, a bounded memory.
"""

from .assignment import Assignment, assign, data_coordinates
from .plan import Plan, cell_digest, make_plan
from .population import Population
from .settings import EARLIER_WINDOW_BLOCKS

__all__ = [
    "EARLIER_WINDOW_BLOCKS", "Assignment", "Plan", "Population", "assign", "cell_digest", "data_coordinates",
    "make_plan",
]  # fmt: skip
