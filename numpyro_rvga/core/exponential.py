"""Exponential families of single entries of theta: gamma on the log scale, beta on the logit scale.

An entry theta = offset + sign * t has the density exp(a T1(t) + b T2(t) - A(a, b)), with natural parameters a, b > 0:

- gamma: T = (t, -exp(t)), the logarithm of a Gamma(a, b) variable (with sign -1, of an inverse gamma one);
- beta: T = (log s(t), log s(-t)), the logit of a Beta(a, b) variable, s the logistic function.

Both are log-concave. A Dirichlet distribution is a product of the latter: its sticks are independent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import digamma, gammainc, gammaincc, polygamma
from jax.scipy.stats import norm

from .special import log_beta, log_gamma

NEWTON_STEPS = 12
MOST_TERMS = 300  # of a continued fraction
RARE = {64: 1e7, 32: 1e4}  # the larger parameter of a beta variable that is nearly a gamma variable
NEARLY_NORMAL = {64: 3000.0, 32: 300.0}  # natural parameters beyond which quantiles follow from four cumulants


class Entries(NamedTuple):
    """Which entries are of which family, (H,) each; arrays broadcast against these from the left.

    :ivar is_gamma: or else beta. :ivar sign: 1 or -1. :ivar offset: of theta.
    """

    is_gamma: Array
    sign: Array
    offset: Array

    def statistics(self, theta: Array) -> Array:
        """T at theta (..., H): (..., H, 2)."""
        t = self.sign * (theta - self.offset)
        of_gamma = t, -jnp.exp(jnp.where(self.is_gamma, t, 0.0))
        of_beta = jax.nn.log_sigmoid(t), jax.nn.log_sigmoid(-t)
        return jnp.stack([jnp.where(self.is_gamma, g, b) for g, b in zip(of_gamma, of_beta)], axis=-1)

    def log_normalizer(self, natural: Array) -> Array:
        """A at natural parameters (H, 2): (H,)."""
        a, b = natural[..., 0], natural[..., 1]
        return jnp.where(self.is_gamma, log_gamma(a) - a * jnp.log(b), log_beta(a, b))

    def expected_statistics(self, natural: Array) -> Array:
        """E[T], (H, 2): the gradient of A."""
        a, b = natural[..., 0], natural[..., 1]
        of_both = digamma(a + b)
        first = digamma(a) - jnp.where(self.is_gamma, jnp.log(b), of_both)
        return jnp.stack([first, jnp.where(self.is_gamma, -a / b, digamma(b) - of_both)], axis=-1)

    def kl_divergence(self, natural: Array, other: Array) -> Array:
        """KL(q || other), summed over entries."""
        linear = jnp.sum((natural - other) * self.expected_statistics(natural), axis=-1)
        return jnp.sum(linear - self.log_normalizer(natural) + self.log_normalizer(other))

    def log_prob(self, natural: Array, theta: Array) -> Array:
        """The log densities of theta (..., H), entry by entry."""
        return jnp.sum(natural * self.statistics(theta), axis=-1) - self.log_normalizer(natural)

    def mean(self, natural: Array) -> Array:
        return self.offset + self.sign * self._cumulants(natural)[0]

    def variance(self, natural: Array) -> Array:
        return self._cumulants(natural)[1]

    def quantile(self, natural: Array, score: Array) -> Array:
        """theta (..., H) where the distribution function is that of the standard normal at ``score`` (..., H)."""
        bits = jnp.finfo(natural.dtype).bits
        score = self.sign * score
        is_normal = jnp.min(jnp.where(self.is_gamma[:, None], natural[:, :1], natural), axis=-1) > NEARLY_NORMAL[bits]
        safe = jnp.where(is_normal[:, None], 1.0, natural)
        small, large = jnp.min(safe, axis=-1), jnp.max(safe, axis=-1)
        is_rare, side = ~self.is_gamma & (large > RARE[bits]), jnp.where(safe[:, 0] < safe[:, 1], 1.0, -1.0)
        # Of a beta variable v with b much larger than a, -log(1 - v) is nearly Gamma(a, b + (a - 1) / 2).
        of_rare = jnp.stack([small, large + 0.5 * (small - 1)], axis=-1)
        own = self._replace(is_gamma=self.is_gamma | is_rare)
        side = jnp.where(is_rare, side, 1.0)
        t = own._solved(jnp.where(is_rare[:, None], of_rare, safe), side * score)
        odds = jnp.log(jnp.expm1(jnp.exp(jnp.where(is_rare, t, 0.0))))
        t = jnp.where(is_normal, self._expanded(natural, score), side * jnp.where(is_rare, odds, t))
        return self.offset + self.sign * t

    # ------------------------------------------------------------------ of t
    def _cumulants(self, natural: Array) -> list[Array]:
        """The first four."""
        a, b = natural[..., 0], natural[..., 1]
        derivatives = []
        for order in range(4):
            of_a = digamma(a) if order == 0 else polygamma(order, a)
            of_b = digamma(b) if order == 0 else polygamma(order, b)
            rest = jnp.log(b) if order == 0 else jnp.zeros_like(b)
            derivatives.append(of_a - jnp.where(self.is_gamma, rest, (-1) ** order * of_b))
        return derivatives

    def _expanded(self, natural: Array, z: Array) -> Array:
        """Cornish and Fisher's expansion."""
        mean, variance, third, fourth = self._cumulants(natural)
        deviation = jnp.sqrt(variance)
        skewness, excess = third / deviation**3, fourth / variance**2
        shape = (z**2 - 1) * skewness / 6 + (z**3 - 3 * z) * excess / 24 - (2 * z**3 - 5 * z) * skewness**2 / 36
        return mean + deviation * (z + shape)

    def _solved(self, natural: Array, z: Array) -> Array:
        """Quantiles by Newton's method for the logarithm of the smaller tail, which is concave: from the second step on
        it comes from one side, and never passes the solution."""
        mean, variance, *_ = self._cumulants(natural)
        is_low = z < 0
        target, precision = norm.logcdf(-jnp.abs(z)), 8 * jnp.finfo(natural.dtype).eps

        def step(carry):
            count, t, _ = carry
            low, high = self._log_tails(natural, t)
            tail = jnp.where(is_low, low, high)
            log_density = jnp.sum(natural * self._own.statistics(t), axis=-1) - self.log_normalizer(natural)
            slope = jnp.exp(log_density - tail)
            change = jnp.where(is_low, tail - target, target - tail) / slope
            return count + 1, t - change, jnp.any(jnp.abs(change) > precision * (1 + jnp.abs(t)))

        a, b = natural[..., 0], natural[..., 1]
        most = jnp.log((a + jnp.sqrt(-2 * a * target) - target) / b)  # Laurent and Massart's bound of a gamma quantile
        start = mean + jnp.sqrt(variance) * z
        start = jnp.where(self.is_gamma & ~is_low, jnp.minimum(start, most), start)
        goes_on = lambda carry: (carry[0] < NEWTON_STEPS) & carry[2]  # noqa: E731
        return lax.while_loop(goes_on, step, (0, start, jnp.asarray(True)))[1]

    @property
    def _own(self) -> Entries:
        """Of t itself."""
        return self._replace(sign=jnp.ones_like(self.sign), offset=jnp.zeros_like(self.offset))

    def _log_tails(self, natural: Array, t: Array) -> tuple[Array, Array]:
        """The logarithms of the distribution function of t and of its complement."""
        a, b = jnp.broadcast_arrays(natural[..., 0], natural[..., 1], t)[:2]
        rate = jnp.where(self.is_gamma, t + jnp.log(b), 0.0)
        low, high = gammainc(a, jnp.exp(rate)), gammaincc(a, jnp.exp(rate))
        log_density, least = a * rate - jnp.exp(rate) - log_gamma(a), jnp.finfo(t.dtype).tiny
        # Where a tail is too small to be a number, its leading term.
        log_low = jnp.where(low > least, jnp.log(low), log_density - jnp.log(a))
        log_high = jnp.where(high > least, jnp.log(high), log_density - rate)
        of_beta = _log_beta_tails(jnp.where(self.is_gamma, 0.0, t), a, jnp.where(self.is_gamma, a, b))
        return jnp.where(self.is_gamma, log_low, of_beta[0]), jnp.where(self.is_gamma, log_high, of_beta[1])


def _log_beta_tails(t: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """The logarithms of the beta distribution function at the logistic function of t, and of its complement: the one
    on whose side of the mean t is by a continued fraction, which loses no digits, the other from it."""
    below = jax.nn.sigmoid(t) < (a + 1) / (a + b + 2)
    first, second = jnp.where(below, a, b), jnp.where(below, b, a)
    log_density = a * jax.nn.log_sigmoid(t) + b * jax.nn.log_sigmoid(-t) - log_beta(a, b)
    own = log_density + jnp.log(_fraction(first, second, jax.nn.sigmoid(jnp.where(below, t, -t))) / first)
    other = jnp.log1p(-jnp.exp(jnp.minimum(own, -jnp.finfo(t.dtype).eps)))
    return jnp.where(below, own, other), jnp.where(below, other, own)


def _fraction(a: Array, b: Array, x: Array) -> Array:
    """The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    eps, tiny = jnp.finfo(x.dtype).eps, jnp.finfo(x.dtype).tiny ** 0.5

    def nonzero(value):
        return jnp.where(jnp.abs(value) < tiny, tiny, value)

    def proceed(carry):
        m, c, d, value, _ = carry
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = jnp.ones_like(x)
        for coefficient in (even, odd):
            d = 1 / nonzero(1 + coefficient * d)
            c = nonzero(1 + coefficient / c)
            change = change * c * d
        return m + 1, c, d, value * change, jnp.abs(change - 1)

    d = 1 / nonzero(1 - (a + b) * x / (a + 1))
    start = jnp.ones((), x.dtype), jnp.ones_like(x), d, d, jnp.ones_like(x)
    return lax.while_loop(lambda carry: (carry[0] < MOST_TERMS) & jnp.any(carry[4] > 4 * eps), proceed, start)[3]


def regressed(statistics: Array, values: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Weighted least squares of values (K,) on one and statistics (K, p): the latters' coefficients (p,), and the root
    mean squares of the residual and of what is explained.

    Under the distribution that nodes and weights stand for, the coefficients are the gradient of the values'
    expectation in the expected statistics (Salimans and Knowles, 2013). Values that are linear in the statistics have
    their own coefficients, at whatever nodes.
    """
    root = jnp.sqrt(weights / jnp.sum(weights))

    def centered(x):
        return (x - jnp.tensordot(root**2, x, 1)) * root.reshape(-1, *[1] * (x.ndim - 1))

    columns, values = centered(statistics), centered(values)
    scale = jnp.linalg.norm(columns, axis=0)
    q, r = jnp.linalg.qr(columns / scale)
    explained = q.T @ values
    coefficients = jax.scipy.linalg.solve_triangular(r, explained) / scale
    return coefficients, jnp.linalg.norm(values - q @ explained), jnp.linalg.norm(explained)
