"""Models with errors in what is measured, gaps, and discrete latent variables.

As in ``_models``, whose table they are entered in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _models import entry, sigmoid, standard_normal
from jax.scipy.special import logsumexp
from numpyro import handlers, sample
from numpyro.distributions import HalfNormal, Normal
from numpyro.distributions.transforms import OrderedTransform


# ---------------------------------------------------------------------- errors in what is measured, gaps
@entry
def measurement_error():
    rng, x = standard_normal(40, 25)

    def model(x_seen, x_error, y=None):
        a, b, sigma = sample("a", Normal(0, 1)), sample("b", Normal(0, 1)), sample("sigma", dist.Exponential(1))
        with numpyro.plate("rows", len(x_seen)):
            x = sample("x", Normal(0, 1))
            sample("x_seen", Normal(x, x_error), obs=x_seen)
            sample("y", Normal(a + b * x, sigma), obs=y)

    seen = x + 0.5 * rng.normal(size=40)
    return model, {"x_seen": seen, "x_error": np.full(40, 0.5), "y": 0.5 + x + 0.4 * rng.normal(size=40)}, {}


@entry
def imputed_predictor():
    rng, x = standard_normal(80, 26)
    holes = np.where(rng.random(80) < 0.2, np.nan, x)

    def model(x, y):
        mean, sd = sample("mean", Normal(0, 1)), sample("sd", dist.Exponential(1))
        gaps = np.isnan(x)
        filled = sample("filled", Normal(mean, sd).expand([gaps.sum()]).mask(False))
        x = jnp.asarray(np.nan_to_num(x)).at[np.nonzero(gaps)[0]].set(filled)
        sample("x", Normal(mean, sd), obs=x)
        a, b, sigma = sample("a", Normal(0, 1)), sample("b", Normal(0, 1)), sample("sigma", dist.Exponential(1))
        sample("y", Normal(a + b * x, sigma), obs=y)

    return model, {"x": holes, "y": 0.3 + 0.8 * x + 0.5 * rng.normal(size=80)}, {}


@entry
def seemingly_unrelated():
    rng, x = standard_normal(80, 27)

    def model(x, y):
        a, b = sample("a", Normal(0, 1).expand([2])), sample("b", Normal(0, 1).expand([2]))
        scale, chol = sample("scale", HalfNormal(1).expand([2])), sample("chol", dist.LKJCholesky(2, 2))
        mean = a + b * x[:, None]
        sample("y", dist.MultivariateNormal(mean, scale_tril=scale[:, None] * chol), obs=y)

    noise = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=80)
    return model, {"x": x, "y": x[:, None] * [1, -0.5] + 0.5 * noise}, {}


# ---------------------------------------------------------------------- mixtures, discrete latents
@entry
def mixture_ordered():
    rng, z = standard_normal(120, 30)

    def model(y):
        share = sample("share", dist.Dirichlet(jnp.ones(2)))
        means = sample("means", dist.TransformedDistribution(Normal(0, 3).expand([2]).to_event(1), OrderedTransform()))
        sd = sample("sd", HalfNormal(2).expand([2]).to_event(1))
        sample("y", dist.MixtureSameFamily(dist.Categorical(probs=share), Normal(means, sd)), obs=y)

    return model, {"y": np.where(rng.random(120) < 0.4, -1.5, 1.5) + 0.7 * z}, {}


@entry
def mixture_of_regressions():
    rng, x = standard_normal(120, 31)

    def model(x, y=None):
        share = sample("share", dist.Beta(2, 2))
        slopes = sample("slopes", Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
        sigma = sample("sigma", HalfNormal(1))
        with numpyro.plate("rows", len(x)):
            z = sample("z", dist.Bernoulli(share), infer={"enumerate": "parallel"})
            sample("y", Normal(slopes[z] * x, sigma), obs=y)

    return model, {"x": x, "y": np.where(rng.random(120) < 0.4, 1.2, -0.7) * x + 0.3 * rng.normal(size=120)}, {}


@entry
def dawid_skene():
    rng, _ = standard_normal(1, 32)
    truth = rng.integers(0, 2, 60)
    votes = np.where(rng.random((60, 4)) < [0.9, 0.8, 0.75, 0.65], truth[:, None], 1 - truth[:, None])

    def model(votes, classes):
        share = sample("share", dist.Dirichlet(jnp.ones(classes)))
        with numpyro.plate("voters", votes.shape[1]), numpyro.plate("classes", classes):
            confusion = sample("confusion", dist.Dirichlet(1 + 4 * jnp.eye(classes)[:, None]))
        with numpyro.plate("items", votes.shape[0], dim=-2):
            z = sample("z", dist.Categorical(share), infer={"enumerate": "parallel"})
            with numpyro.plate("votes_of_item", votes.shape[1], dim=-1):
                sample("votes", dist.Categorical(confusion[z, jnp.arange(votes.shape[1])]), obs=votes)

    return model, {"votes": votes}, {"classes": 2}


@entry
def change_point():
    rng, _ = standard_normal(1, 33)

    def model(counts):
        early, late = sample("early", dist.Exponential(1 / counts.mean())), sample("late", dist.Exponential(1.0))
        n = len(counts)
        change = sample("change", dist.DiscreteUniform(0, n - 1))
        rate = jnp.where(jnp.arange(n) < change, early, late)
        with numpyro.plate("days", n):
            sample("counts", dist.Poisson(rate), obs=counts)

    return model, {"counts": np.concatenate([rng.poisson(3.5, 35), rng.poisson(1, 45)])}, {}


@entry
def occupancy():
    rng, x = standard_normal(100, 34)
    there = rng.random(100) < sigmoid(0.3 + x)
    seen = (rng.random((100, 3)) < 0.5) & there[:, None]

    def model(x, seen):
        a, b, detect = sample("a", Normal(0, 2)), sample("b", Normal(0, 2)), sample("detect", dist.Beta(1, 1))
        with numpyro.plate("sites", len(x)):
            z = sample("z", dist.Bernoulli(logits=a + b * x), infer={"enumerate": "parallel"})
            sample("seen", dist.Binomial(seen.shape[1], detect * z), obs=seen.sum(1))

    return model, {"x": x, "seen": seen.astype(int)}, {}


@entry
def capture_recapture():
    rng, _ = standard_normal(1, 35)
    alive = np.cumprod(np.column_stack([np.ones(60, bool), rng.random((60, 5)) < 0.75]), axis=1).astype(bool)
    seen = (alive & (rng.random((60, 6)) < 0.6)).astype(int)
    seen[:, 0] = 1

    def model(seen):
        survive, detect = sample("survive", dist.Beta(1, 1)), sample("detect", dist.Beta(1, 1))
        last = seen.shape[1] - 1 - np.argmax(seen[:, ::-1], axis=1)
        unseen = [jnp.ones(())]
        for _ in range(seen.shape[1] - 1):
            unseen.append(1 - survive + survive * (1 - detect) * unseen[-1])
        unseen = jnp.stack(unseen[::-1])
        after = np.arange(1, seen.shape[1])
        with numpyro.plate("animals", len(seen)):
            for t in after:
                with handlers.mask(mask=t <= last):
                    sample(f"alive_{t}", dist.Bernoulli(survive), obs=jnp.ones(len(seen), int))
                    sample(f"seen_{t}", dist.Bernoulli(detect), obs=seen[:, t])
            numpyro.factor("never_again", jnp.log(unseen[last]))

    return model, {"seen": seen}, {}


@entry
def hidden_markov():
    rng, _ = standard_normal(1, 36)
    states = np.cumsum(rng.random(150) < 0.1) % 2

    def model(y):
        stay = sample("stay", dist.Beta(8, 2).expand([2]).to_event(1))
        means = sample("means", dist.TransformedDistribution(Normal(0, 2).expand([2]).to_event(1), OrderedTransform()))
        sigma = sample("sigma", HalfNormal(1))
        log_move = jnp.log(jnp.stack([jnp.array([stay[0], 1 - stay[0]]), jnp.array([1 - stay[1], stay[1]])]))

        def step(alpha, y):
            return logsumexp(alpha[:, None] + log_move, axis=0) + Normal(means, sigma).log_prob(y), None

        first = Normal(means, sigma).log_prob(y[0]) - jnp.log(2)
        numpyro.factor("forward", logsumexp(jax.lax.scan(step, first, jnp.asarray(y[1:]))[0]))

    return model, {"y": np.where(states, 1.0, -1.0) + 0.6 * rng.normal(size=150)}, {}
