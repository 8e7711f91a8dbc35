"""Options that the inference objects share, checked at construction."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import index
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from .core.expectations.by_nodes import Expectation

Info = dict[str, Any]
"""What a run says of itself, by name: numbers, strings, arrays, and lists and mappings of these."""
EXPECTATIONS = ("auto", "exact", "probit", "quadrature", "sigma_points", "monte_carlo", "linearized")
ORDERS = ("auto", 2, 1, 0)
LOCAL = ("auto", "marginal", "prior")
MARGINALS = ("bound", "importance")


class Options(NamedTuple):
    """Options of :class:`RVGA` and :class:`FixedPointVI` (hashable)."""

    scheme: str
    expectation: str | Expectation
    order: int | str
    tolerance: float | None
    max_iterations: int
    num_samples: int

    @property
    def as_info(self) -> dict[str, Any]:
        """The options as plain values."""
        return self._asdict() | {"expectation": described(self.expectation)}

    @property
    def has_bound(self) -> bool:
        """Whether there is a variational bound: not where derivatives are taken at a mean or a mode."""
        return self.scheme not in ("ekf", "laplace") and self.expectation != "linearized"

    def check(self, improper_prior_scale: float | None) -> None:
        """:raises ValueError: naming the option."""
        own = "(log_prob, mean, covariance) -> E[log_prob]"
        check_choice_or_own("expectation", self.expectation, EXPECTATIONS, own)
        check_choice("order", self.order, ORDERS)
        if self.expectation in ("exact", "probit", "linearized") and self.order not in ("auto", 2):
            raise ValueError(f"expectation={self.expectation!r} has one form: leave order at 'auto'.")
        if callable(self.expectation) and self.order != "auto":
            raise ValueError("your own expectation is differentiated: leave order at 'auto'.")
        for name, value in (("improper_prior_scale", improper_prior_scale), ("tolerance", self.tolerance)):
            if value is not None:
                check_positive(name, value)
        for name, value in (("max_iterations", self.max_iterations), ("num_samples", self.num_samples)):
            check_count(name, value)


def check_state(init: Any, start: Any, of_model: Callable[[Any], Any]) -> None:
    """:raises ValueError: for a state from which no run can go on: of another method, family or model.

    :param init: what is no posterior. :param start: the state before any row.
    :param of_model: of a state, the arrays whose shapes are those of the family and the model.
    """
    if type(init) is not type(start):
        raise ValueError(
            f"init must be a posterior or a state of this method, not {type(init).__name__}. Of a state of another "
            "method, pass the posterior: method.posterior(state)."
        )
    theirs, ours = (jax.tree.map(np.shape, of_model(state)) for state in (init, start))
    if theirs != ours:
        raise ValueError(
            "init is a state of another model or family: its arrays have shapes "
            f"{jax.tree.leaves(theirs, is_leaf=_is_shape)}, here they have {jax.tree.leaves(ours, is_leaf=_is_shape)}. "
            "Of a state of another family, pass the posterior: method.posterior(state)."
        )


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def default_key() -> Array:
    """``jax.random.key(0)``, without compiling a hash of the seed; not traced."""
    with jax.ensure_compile_time_eval():
        return jax.random.wrap_key_data(jax.device_put(np.zeros(2, np.uint32)), impl="threefry2x32")


def checked_key(rng_key: Array | None) -> Array:
    """The key, or :func:`default_key` for None.

    :raises ValueError: for what is no key.
    """
    if rng_key is None:
        return default_key()
    try:
        jax.random.key_data(rng_key)
    except TypeError as error:
        raise ValueError(f"rng_key must be a key of JAX's, as jax.random.key(0), not {rng_key!r}.") from error
    return rng_key


def key_numbers(rng_key: Array) -> list[int]:
    """A key as plain numbers: also a seed of NumPy's generators, which permute rows ten times as fast as JAX's."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(rng_key)).tolist()


def described(choice: Any) -> Any:
    """A choice by name: of an object that the user has handed in, what tells it from others."""
    if not callable(choice):
        return choice
    name = getattr(choice, "__qualname__", None)
    return repr(choice) if name is None else f"{choice.__module__}.{name}"


def check_choice_or_own(name: str, value: object, choices: tuple, signature: str) -> None:
    """:raises ValueError: for what is neither one of the choices nor a hashable function, with the choices."""
    if callable(value) and isinstance(value, Hashable):
        return
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, or a hashable function {signature}, not {value!r}."
        )


def check_choice(name: str, value: object, choices: tuple) -> None:
    """:raises ValueError: with the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """:raises ValueError: for what is no positive number."""
    try:
        is_positive = bool(value > 0)
    except (TypeError, ValueError):
        is_positive = False
    if not is_positive:
        raise ValueError(f"{name} must be positive, not {value!r}.")


def is_count(value: Any, least: int) -> bool:
    """Whether a value is an integer, of Python's, NumPy's or JAX's, of at least ``least``."""
    try:
        return not isinstance(value, bool) and index(value) >= least
    except TypeError:
        return False


def check_count(name: str, value: object) -> None:
    """:raises ValueError: for what is no positive integer."""
    if not is_count(value, 1):
        raise ValueError(f"{name} must be a positive integer, not {value!r}.")


def checked_size(name: str, value: Any, least: int) -> int | str:
    """The size as an integer of Python's, or 'auto'.

    :raises ValueError: if ``value`` is neither 'auto' nor an integer of at least ``least``.
    """
    if isinstance(value, str) and value == "auto":
        return value
    if not is_count(value, least):
        raise ValueError(f"{name} must be 'auto' or an integer of at least {least}, not {value!r}.")
    return index(value)


def check_shape(sample_shape: object) -> None:
    """:raises ValueError: for a number of draws in place of their shape, with the shape."""
    if not isinstance(sample_shape, (tuple, list)):
        raise ValueError(f"sample_shape must be a tuple, not {sample_shape!r}: for one axis, ({sample_shape},).")
