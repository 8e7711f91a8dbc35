"""How well a posterior predicts: log predictive densities, error rates, calibration."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .core.compilation import jit
from .model import Program
from .model.data.rows import Arrays, Data, num_rows, pad, selected
from .model.handlers.tracing import base_distribution
from .model.predictive import METHODS, average, log_predictive, sampled_predictors, unweighted, weights
from .options import check_choice, check_count
from .results.log_joint import rows_with_outcome
from .results.posterior import Posterior

CHUNK_NUMBERS = 2**22  # in the largest array that is made of the rows that are evaluated at once
MAX_CHUNK = 4096

_evaluators: weakref.WeakKeyDictionary[Program, dict] = weakref.WeakKeyDictionary()


def log_predictive_density(
    posterior: Posterior,
    data: Data,
    *,
    method: str = "linearized",
    num_samples: int = 100,
    rng_key: Array | None = None,
) -> np.ndarray:
    """The log density of each row's outcome, averaged over q.

    Densities are averaged, not their logarithms nor the predictors. Under ``handlers.scale`` it is a power of them that
    is averaged, as in the model's likelihood, and a masked outcome has density 1.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import metrics
        >>> densities = metrics.log_predictive_density(posterior, data)
        >>> densities.shape, bool((densities < 0).all())
        ((200,), True)

    :param data: rows with their outcome, as :meth:`RVGA.run` takes them.
    :param method: ``"linearized"``: the predictors (logits, say) are linearized in the parameters at q's mean, and so
        Gaussian. Exact for linear predictors, and better for networks than ``"monte_carlo"``, which
        draws parameters. ``"plugin"``: at q's mean.
    :param num_samples: draws. Linearized rows of up to three predictors need none: they are integrated by quadrature.
    :param rng_key: of the draws. Default: ``jax.random.key(0)``.
    :return: (n,).
    :raises NotImplementedError: where rows cannot be predicted one by one, as with Gaussian processes.
    """
    return _evaluate(posterior, _rows(posterior, data), None, None, method, num_samples, rng_key)


def nlpd(posterior: Posterior, data: Data, **options: Any) -> float:
    """The mean negative log predictive density of the rows; options as for :func:`log_predictive_density`. Rows whose
    outcomes are all masked are left out.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import metrics
        >>> round(metrics.nlpd(posterior, data), 2), bool(metrics.nlpd(posterior, data) < np.log(2))  # of guessing
        (0.43, True)
    """
    rows = _rows(posterior, data)
    densities = log_predictive_density(posterior, rows, **options)
    return -float(np.mean(densities[_counted(posterior, rows)]))


def outcome_probabilities(
    posterior: Posterior,
    data: Data,
    *,
    method: str = "linearized",
    num_samples: int = 100,
    rng_key: Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of all outcomes of a discrete observed site, averaged over q. They are those of the site's own
    distribution: ``handlers.scale`` and masks do not enter.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import metrics
        >>> outcomes, probabilities = metrics.outcome_probabilities(posterior, data)
        >>> outcomes.tolist(), probabilities.shape, bool(np.allclose(probabilities.sum(1), 1, atol=1e-3))
        ([0, 1], (200, 2), True)

    :param data: rows, with their outcome (which is used for its form only).
    :return: the outcomes (K,), and their probabilities in each row, (n, K).
    :raises ValueError: if the model has not one observed site with finitely many outcomes, taken from one data array.
    """
    (name, outcomes), rows = _outcomes(posterior.program), _rows(posterior, data)
    is_weighted = bool(_weights(posterior, rows)[1])
    return outcomes, np.exp(_evaluate(posterior, rows, name, outcomes, method, num_samples, rng_key, is_weighted))


def misclassification(posterior: Posterior, data: Data, **options: Any) -> float:
    """The fraction of rows whose outcome is not the most probable one; options as for :func:`outcome_probabilities`.
    Masked rows are left out.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import metrics
        >>> round(metrics.misclassification(posterior, data), 2)
        0.2
    """
    return float(np.mean(~_scored(posterior, data, options)[0]))


def expected_calibration_error(posterior: Posterior, data: Data, *, num_bins: int = 15, **options: Any) -> float:
    """The expected calibration error of the most probable outcome.

    Rows are put into ``num_bins`` bins of equal width by the probability of their most probable outcome. The error is
    the mean over rows of the absolute difference, in their bin, of the mean probability and the fraction of rows with
    that outcome. Masked rows are left out.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import metrics
        >>> metrics.expected_calibration_error(posterior, data, num_bins=5) < 0.1
        True
    """
    check_count("num_bins", num_bins)
    right, confidence = _scored(posterior, data, options)
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(right))


def _scored(posterior: Posterior, data: Data, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Of each row that is not masked: whether its outcome is the most probable one, and the probability of that."""
    rows, (name, _) = _rows(posterior, data), _outcomes(posterior.program)
    outcomes, probabilities = outcome_probabilities(posterior, rows, **options)
    right, counted = outcomes[probabilities.argmax(axis=1)] == np.ravel(rows[name]), _counted(posterior, rows)
    return right[counted], probabilities.max(axis=1)[counted]


def _evaluate(posterior, rows, name, outcomes, method, num_samples, rng_key, drops_weights=False) -> np.ndarray:
    """Log densities of rows under the posterior predictive, chunk by chunk: (n,), or (n, outcomes) at given
    ``outcomes`` of the array ``name``. ``drops_weights``: without the model's masks and scales."""
    check_choice("method", method, METHODS)
    check_count("num_samples", num_samples)
    program = posterior.program
    if drops_weights:
        program = _kept(program, "unweighted", unweighted)
    keys = jax.random.split(jax.random.key(0) if rng_key is None else rng_key, num_rows(rows) + 1)
    theta = posterior.sample_unconstrained(keys[0], (num_samples,)) if method == "monte_carlo" else None
    evaluate = _evaluator(program, name, method, num_samples)
    predictors, largest = sum(t.num_elements * t.num_predictors for t in program.terms), program.largest_array
    numbers = {
        "plugin": max(predictors, largest),
        "linearized": predictors * max(program.layout.size, largest),
        "monte_carlo": num_samples * max(predictors, largest),
    }[method]
    size, total, pieces = max(1, min(MAX_CHUNK, CHUNK_NUMBERS // max(numbers, 1))), len(keys) - 1, []
    if method == "linearized" and program.convolves and jax.default_backend() == "cpu":
        size = 1
    for start in range(0, total, size):
        piece, _ = pad(selected(rows, slice(start, start + size)), min(size, total))
        own = keys[1 + np.minimum(np.arange(start, start + min(size, total)), total - 1)]
        pieces.append(evaluate(posterior.gaussian, theta, piece, own, outcomes))
    return np.concatenate([np.asarray(x) for x in pieces])[:total]


def _evaluator(program: Program, name: str | None, method: str, num_samples: int) -> Any:
    """The compiled evaluation, kept for later calls: callbacks evaluate many times."""
    # A strong reference from the compiled function to the program would keep both alive forever.
    make = lambda program: jit(functools.partial(_of_rows, weakref.ref(program), name, method, num_samples))  # noqa: E731
    return _kept(program, (name, method, num_samples), make)


def _kept(program: Program, key: Any, make: Callable[[Program], Any]) -> Any:
    """What is made of a program, once."""
    made = _evaluators.setdefault(program, {})
    if key not in made:
        made[key] = make(program)
    return made[key]


def _rows(posterior: Posterior, data: Data) -> dict[str, Any]:
    """The rows with their outcomes.

    :raises NotImplementedError: where rows cannot be predicted one by one.
    """
    if posterior.program.whole:
        raise NotImplementedError(
            "the rows of this posterior are one joint solve, and cannot be predicted one by one: use "
            "posterior.predictive."
        )
    return rows_with_outcome(posterior.program, data)


def _weights(posterior: Posterior, rows: Arrays) -> tuple[Array, Array]:
    """See :func:`weights`."""
    program_of: Any = weakref.ref(posterior.program)
    evaluate = _kept(posterior.program, "weights", lambda _: jit(lambda rows: weights(program_of(), rows)))
    return evaluate(rows)


def _counted(posterior: Posterior, rows: Arrays) -> np.ndarray:
    """Which rows are not masked, (n,).

    :raises ValueError: if there is none.
    """
    counted = np.asarray(_weights(posterior, rows)[0])
    if not counted.any():
        raise ValueError("the outcomes of all rows are masked: there is none to compare predictions with.")
    return counted


def _of_rows(program_of, name, method, num_samples, gaussian, theta, rows, keys, outcomes):
    """Log densities of rows (n,), or at given outcomes (n, outcomes)."""
    program = program_of()

    def one(row, key):
        if method == "monte_carlo":
            density = functools.partial(average, program, sampled_predictors(program, theta, row, key))
        else:
            density = log_predictive(program, gaussian, row, key, num_samples, plugin=method == "plugin")
        if name is None:
            return density(row)
        values = jnp.asarray(outcomes, row[name].dtype)
        return jax.vmap(lambda value: density(row | {name: value}))(values)

    return jax.vmap(one)(rows, keys)


def _outcomes(program: Program) -> tuple[str, np.ndarray]:
    """The data array with the observed site's values, and the possible values."""
    sites = program.observed_sites
    arrays = {name for site in sites for name in program.outcome_arrays(site)}
    record = program.site_record(sites[0], program.example_row)
    fn, _ = base_distribution(record.fn)
    if len(sites) != 1 or len(arrays) != 1 or not fn.has_enumerate_support or np.size(record.value) != 1:
        raise ValueError(
            "outcome probabilities need one observed site with one value a row, from one data array, and finitely many "
            f"outcomes: the model observes {', '.join(sites)}."
        )
    return arrays.pop(), np.ravel(np.asarray(fn.enumerate_support(expand=False)))
