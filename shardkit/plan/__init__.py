"""The plan: who reads what, when; pure, closed form, integers (SPEC.md)."""

from .plan import Plan, cell_digest, make_plan
from .population import Population

__all__ = ["Plan", "Population", "cell_digest", "make_plan"]
