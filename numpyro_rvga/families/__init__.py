"""RVGA by the family of q. Here: Gaussians of fewer numbers than a full covariance, by the updates of BONG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..bong import BONG
from ..core.expectations.by_nodes import Expectation
from ..engines.combinations import DIAGONALS


def check_unused(who_takes: str, unused: Mapping[str, bool]) -> None:
    """:raises ValueError: naming an option that is given, and not taken with these families.

    :param who_takes: how the message begins. :param unused: such options, and whether they are given.
    """
    for name, is_given in unused.items():
        if is_given:
            raise ValueError(f"{who_takes} a plain pass over the rows: leave {name} at its default.")


def online_method(
    model: Callable,
    scheme: str,
    expectation: str | Expectation,
    family: str,
    unused: Mapping[str, bool],
    **options: Any,
) -> BONG:
    """R-VGA's implicit or explicit scheme, each update projected to the family.

    :param unused: options that this does not take, and whether they are given.
    :param options: those that :class:`BONG` has too.
    :raises ValueError: naming an option that is given and not taken.
    """
    if scheme not in ("implicit", "explicit"):
        raise ValueError(f"family={family!r} takes scheme='implicit' or 'explicit', not {scheme!r}.")
    check_unused(f"family={family!r} takes", unused)
    projects = scheme == "explicit" and family in DIAGONALS
    return BONG(
        model,
        rule="implicit" if scheme == "implicit" else "bong",
        hessian=expectation,
        family=family,
        projection="exclusive" if projects else None,
        **options,
    )
