"""A posterior as a printed table."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .fitted import Fitted

SUMMARY_PAIRS = 5_000


def print_summary(posterior: Fitted, prob: float = 0.9) -> None:
    """Print mean, standard deviation, median and central interval of every scalar of the latent sites under q.

    The figures are those of constrained values. They come from a fixed set of mirrored draws, so they are the same
    at every call; for sites on the real line the mean and the median are exact.

    **Example**

    With the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> posterior.print_summary()
        <BLANKLINE>
                        mean       std    median      5.0%     95.0%
         slopes[0]      1.28 ...
         slopes[1]     -2.03 ...
        <BLANKLINE>

    :param prob: the probability of the interval.
    :raises ValueError: if ``prob`` is not between 0 and 1.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie between 0 and 1, not {prob}.")
    shape = (SUMMARY_PAIRS, posterior.gaussian.noise_size)
    standard = jax.random.normal(jax.random.key(0), shape, posterior.mean.dtype)
    theta = posterior.gaussian.transform(jnp.concatenate([standard, -standard]))
    draws = jax.device_get(posterior.constrain_latents(theta))
    print(_summary_table({name: draws[name].astype(np.float64) for name in posterior.site_names}, prob))


def _summary_table(samples: Mapping[str, np.ndarray], prob: float) -> str:
    """The table of :func:`numpyro.diagnostics.print_summary` without the columns that concern Markov chains."""
    tails = [(1 - prob) / 2, (1 + prob) / 2]
    header = ["mean", "std", "median", *(f"{100 * tail:.1f}%" for tail in tails)]
    rows = []
    for name, draws in samples.items():
        columns = [draws.mean(0), draws.std(0), np.median(draws, 0), *np.quantile(draws, tails, axis=0)]
        for index in np.ndindex(draws.shape[1:]):
            label = f"{name}[{','.join(map(str, index))}]" if index else name
            rows.append((label, [column[index] for column in columns]))
    width = max(10, *(len(label) for label, _ in rows))
    lines = [" " * width + "".join(f" {title:>9}" for title in header)]
    lines += [f"{label:>{width}}" + "".join(f" {value:>9.2f}" for value in values) for label, values in rows]
    return "\n" + "\n".join(lines) + "\n"
