"""Which rules, Hessians, families and projections of :class:`BONG` go together."""

from __future__ import annotations

from ..core.expectations.by_nodes import Expectation
from ..core.gaussians import FAMILIES
from ..core.updates.rules import NATURAL, UpdateRule
from ..options import EXPECTATIONS, check_positive

PAPER_HESSIANS = ("lin-hess", "lin-ef", "mc-hess", "mc-ef", "mc-fisher", "delta-hess")
HESSIANS = (*PAPER_HESSIANS, *(name for name in EXPECTATIONS if name != "linearized"))
OF_ANY_SIGN = ("mc-hess", "delta-hess")
DIAGONALS = ("diagonal", "block-diagonal")  # in which RVGA's steps are projections of the full update
PROJECTIONS = (None, *dict.fromkeys(name for family in FAMILIES.values() for name in family.projections))


def check_combination(
    rule: str | UpdateRule,
    hessian: str | Expectation,
    family: str,
    parameterization: str,
    learning_rate: float,
    num_iters: int,
    projection: str | None,
) -> None:
    """:raises ValueError: with the reason why options exclude each other."""
    check_rate(rule, learning_rate)
    if callable(rule) and parameterization != "natural":
        raise ValueError("your own rule chooses its parameters itself: leave parameterization at 'natural'.")
    if rule == "implicit" and (hessian in PAPER_HESSIANS or parameterization != "natural"):
        raise ValueError(
            "rule='implicit' takes expectations under the q that it leads to, in natural parameters: use "
            "hessian='auto' or another expectation."
        )
    if rule in ("bong", "bog", "implicit") and num_iters != 1:
        several = "blr" if rule in NATURAL else "bbb"
        raise ValueError(
            f"rule={rule!r} takes one step for each row, from the prior: more would count the row more than once. Use "
            f"rule={several!r}, whose KL divergence prevents that."
        )
    if family == "low-rank" and hessian in OF_ANY_SIGN:
        raise ValueError(
            "family='low-rank' needs a positive semi-definite curvature, and Hessians may have any sign: use "
            "hessian='mc-fisher', 'mc-ef', 'lin-ef' or 'lin-hess'."
        )
    if parameterization == "softplus" and (family != "diagonal" or rule not in ("bog", "bbb")):
        raise ValueError("parameterization='softplus' is for rule='bog' or 'bbb' with family='diagonal'.")
    if family == "low-rank" and parameterization != "natural":
        raise ValueError("family='low-rank' has one parameterization: leave it at 'natural'.")
    _check_projection(rule, hessian, family, parameterization, projection)


def _check_projection(
    rule: str | UpdateRule, hessian: str | Expectation, family: str, parameterization: str, projection: str | None
) -> None:
    """:raises ValueError: with what the projection is for."""
    if projection is None:
        return
    if projection not in FAMILIES[family].projections:
        of = [name for name, one in FAMILIES.items() if projection in one.projections]
        raise ValueError(f"projection={projection!r} is for family={' or '.join(map(repr, of))}, not {family!r}.")
    rules = ("bong", "blr") if projection == "first" else ("bong", "implicit")
    if rule not in rules or parameterization != "natural":
        raise ValueError(f"projection={projection!r} is for rule={rules[0]!r} with natural parameters.")
    if hessian in OF_ANY_SIGN:
        raise ValueError(f"projection needs a curvature of low rank: use another hessian than {hessian!r}.")


def check_rate(rule: str | UpdateRule, learning_rate: float) -> None:
    """:raises ValueError: for a rate that the rule does not take."""
    check_positive("learning_rate", learning_rate)
    if callable(rule) and learning_rate != 1.0:
        raise ValueError("your own rule has its own learning rate: leave learning_rate at 1.")
    if rule in ("bong", "implicit") and learning_rate != 1.0:
        raise ValueError(
            f"rule={rule!r} takes no learning rate: its step of one is exact for conjugate models. Use rule='blr'."
        )
    if rule == "blr" and learning_rate > 1.0:
        raise ValueError(f"rule='blr' interpolates: its learning_rate is at most 1, not {learning_rate}.")
