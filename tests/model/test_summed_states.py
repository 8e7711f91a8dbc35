"""Discrete latent variables of the whole model, or of groups of rows: summed out where all rows are at hand."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from scipy import optimize, stats

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.model.terms import local
from numpyro_rvga.model.terms.dependence import dependence

RNG = np.random.default_rng(0)
COUNTS = {"counts": np.concatenate([RNG.poisson(4.0, 12), RNG.poisson(1.0, 13)])}
ITEM, VOTER = np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20)
TRUTH = RNG.random(20) < 0.4
VOTES = {"item": ITEM, "voter": VOTER, "vote": (TRUTH[ITEM] ^ (RNG.random(60) < 0.2)).astype(int)}


def change_point(counts):
    early, late = numpyro.sample("early", dist.Gamma(2, 0.5)), numpyro.sample("late", dist.Gamma(2, 0.5))
    change = numpyro.sample("change", dist.DiscreteUniform(0, len(counts) - 1))
    rate = jnp.where(jnp.arange(len(counts)) < change, early, late)
    numpyro.sample("y", dist.Poisson(rate), obs=counts)


def change_point_by_hand(counts):
    early, late = numpyro.sample("early", dist.Gamma(2, 0.5)), numpyro.sample("late", dist.Gamma(2, 0.5))
    n = len(counts)
    before = jnp.arange(n) < jnp.arange(n)[:, None]
    each = dist.Poisson(jnp.where(before, early, late)).log_prob(counts).sum(axis=1)
    numpyro.factor("y", logsumexp(each) - jnp.log(n))
    return early, late


def scaled_rates(counts):
    """The prior of positive sites is scaled, and not their Jacobians."""
    with handlers.scale(scale=0.3):
        early, late = numpyro.sample("early", dist.Gamma(2, 0.5)), numpyro.sample("late", dist.Gamma(2, 0.5))
    change = numpyro.sample("change", dist.DiscreteUniform(0, len(counts) - 1))
    numpyro.sample("y", dist.Poisson(jnp.where(jnp.arange(len(counts)) < change, early, late)), obs=counts)


def scaled_rates_by_hand(counts):
    numpyro.factor("scaled", -0.7 * dist.Gamma(2, 0.5).log_prob(jnp.stack(change_point_by_hand(counts))).sum())


def voters(item, voter, vote):
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("voters", 3):
        right = numpyro.sample("right", dist.Beta(6, 2))
    with numpyro.plate("items", 20):
        truth = numpyro.sample("truth", dist.Bernoulli(share), infer={"enumerate": "parallel"})
    numpyro.sample("vote", dist.Bernoulli(jnp.where(truth[item] == 1, right[voter], 1 - right[voter])), obs=vote)


def voters_by_hand(votes):
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("voters", 3):
        right = numpyro.sample("right", dist.Beta(6, 2))
    with numpyro.plate("items", len(votes)):
        zero, one = (dist.Bernoulli(p).log_prob(votes).sum(axis=1) for p in (1 - right, right))
        numpyro.factor("vote", jnp.logaddexp(jnp.log1p(-share) + zero, jnp.log(share) + one))


@pytest.mark.parametrize(
    "model, data, by_hand, data_by_hand",
    [
        (change_point, COUNTS, change_point_by_hand, COUNTS),
        (scaled_rates, COUNTS, scaled_rates_by_hand, COUNTS),
        (voters, VOTES, voters_by_hand, {"votes": VOTES["vote"].reshape(20, 3)}),
    ],
)
def test_the_posterior_is_that_of_the_sum_over_states(model, data, by_hand, data_by_hand):
    found = RVGA(model).run(data, progress_bar=False)
    expected = RVGA(by_hand).run(data_by_hand, progress_bar=False)
    assert found.info["rows"] == "joint"
    np.testing.assert_allclose(found.mean, expected.mean, atol=0.02)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=0.02)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=0.02)


@pytest.mark.parametrize("scale", [None, 3.0])
def test_a_prior_beside_the_states_may_be_improper(scale):
    """A wide normal in its place is not the model's own density, and is taken as it is."""

    def model(counts):
        early = numpyro.sample("early", dist.ImproperUniform(dist.constraints.positive, (), ()))
        late = numpyro.sample("late", dist.Gamma(2, 0.5))
        change = numpyro.sample("change", dist.DiscreteUniform(0, len(counts) - 1))
        numpyro.sample("y", dist.Poisson(jnp.where(jnp.arange(len(counts)) < change, early, late)), obs=counts)

    posterior = RVGA(model, improper_prior_scale=scale).run(COUNTS, progress_bar=False)
    draws = posterior.sample_posterior(jax.random.key(0), (4000,), COUNTS)
    before = np.mean([COUNTS["counts"][: int(k)].mean() for k in draws["change"] if k])
    assert np.mean(draws["early"]) == pytest.approx(before, rel=0.1)


def test_draws_of_a_change_point_follow_its_probabilities():
    posterior = RVGA(change_point).run(COUNTS, progress_bar=False)
    drawn = posterior.sample_posterior(jax.random.key(0), (4000,), data=COUNTS)
    counts, place = COUNTS["counts"], np.arange(25)
    rate = jnp.where(place < place[:, None], drawn["early"][:, None, None], drawn["late"][:, None, None])
    each = jax.nn.softmax(dist.Poisson(rate).log_prob(counts).sum(axis=2), axis=1)
    frequency = np.bincount(np.asarray(drawn["change"]), minlength=25) / 4000
    np.testing.assert_allclose(frequency, each.mean(axis=0), atol=0.03)


def hidden_markov(y, starts=None):
    """Chains of two states; those that start later have no states before."""
    means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 0.5).to_event(1))
    stay = numpyro.sample("stay", dist.Beta(4, 2))

    def step(state, now):
        value, is_on = now
        with numpyro.plate("chains", y.shape[1]), numpyro.handlers.mask(mask=is_on):
            one = jnp.where(state == 1, stay, 1 - stay)
            state = numpyro.sample("state", dist.Bernoulli(one), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(means[state], 0.7), obs=value)
        return jnp.where(is_on, state, 0), None

    is_on = jnp.ones(y.shape, bool) if starts is None else jnp.arange(len(y))[:, None] >= jnp.asarray(starts)
    scan(step, jnp.zeros(y.shape[1], int), (y, is_on))


def forward(y, starts=None):
    means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 0.5).to_event(1))
    stay = numpyro.sample("stay", dist.Beta(4, 2))
    transition = jnp.log(jnp.array([[stay, 1 - stay], [1 - stay, stay]]))
    total = 0.0
    for chain, start in enumerate(np.zeros(y.shape[1], int) if starts is None else starts):
        each = dist.Normal(means, 0.7).log_prob(y[start:, chain, None])
        alpha = transition[0] + each[0]
        for emission in each[1:]:
            alpha = logsumexp(alpha[:, None] + transition, axis=0) + emission
        total += logsumexp(alpha)
        # a masked site has density one for each of its states, two at each step
        total += start * jnp.log(2.0)
    numpyro.factor("y", total)


@pytest.mark.parametrize("starts", [None, np.array([0, 1, 2, 3, 4])], ids=["equal", "of five lengths"])
def test_chains_of_states_are_summed_over_as_by_the_forward_algorithm(starts):
    rng = np.random.default_rng(1)
    number = 2 if starts is None else len(starts)
    states = rng.integers(0, 2, (2, number)).repeat(5, axis=0)
    data = {"y": np.where(states == 1, 1.0, -1.0) + 0.7 * rng.normal(size=states.shape)}
    data |= {} if starts is None else {"starts": starts}
    found = RVGA(hidden_markov).run(data, progress_bar=False)
    expected = RVGA(forward).run(data, progress_bar=False)
    np.testing.assert_allclose(found.mean, expected.mean, atol=0.02)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=0.01)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=0.02)
    drawn = found.sample_posterior(jax.random.key(0), (100,), data=data)["state"]
    is_on = np.arange(10)[:, None] >= (np.zeros(number, int) if starts is None else starts)
    assert drawn.shape == (100, 10, number)
    assert (np.asarray(drawn) == states)[:, is_on].mean() > 0.85


def animals(y):
    """Not there yet, there, and gone: most steps are impossible, and then no single state makes them possible."""
    enter = numpyro.sample("enter", dist.Uniform(0, 1).expand([y.shape[1]]).to_event(1))
    stay, seen = numpyro.sample("stay", dist.Uniform(0, 1)), numpyro.sample("seen", dist.Uniform(0, 1))

    def step(state, now):
        value, enters = now
        with numpyro.plate("animals", len(y)):
            of_state = jnp.array([[1 - enters, enters, 0.0], [0.0, stay, 1 - stay], [0.0, 0.0, 1.0]])
            state = numpyro.sample("state", dist.Categorical(of_state[state]), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Bernoulli(jnp.where(state == 1, seen, 0.0)), obs=value)
        return state, None

    scan(step, jnp.zeros(len(y), int), (jnp.asarray(y).T, enter))


def animals_by_hand(y):
    enter = numpyro.sample("enter", dist.Uniform(0, 1).expand([y.shape[1]]).to_event(1))
    stay, seen = numpyro.sample("stay", dist.Uniform(0, 1)), numpyro.sample("seen", dist.Uniform(0, 1))
    alpha = jnp.ones((len(y), 3)) * jnp.array([1.0, 0.0, 0.0])
    for enters, value in zip(enter, y.T):
        of_state = jnp.array([[1 - enters, enters, 0.0], [0.0, stay, 1 - stay], [0.0, 0.0, 1.0]])
        emission = jnp.where(value[:, None] == 1, jnp.array([0.0, 1.0, 0.0]) * seen, 1 - jnp.array([0, 1, 0]) * seen)
        alpha = (alpha @ of_state) * emission
    numpyro.factor("y", jnp.log(alpha.sum(axis=1)).sum())


def test_chains_with_impossible_steps_are_not_tied_to_each_other():
    rng = np.random.default_rng(5)
    first, last = np.sort(rng.integers(0, 6, (2, 25)), axis=0)[..., None]
    times = np.arange(6)
    data = {"y": ((times >= first) & (times <= last) & (rng.random((25, 6)) < 0.6)).astype(int)}
    found = RVGA(animals).run(data, progress_bar=False)
    expected = RVGA(animals_by_hand).run(data, progress_bar=False)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=0.05)
    np.testing.assert_allclose(found.mean, expected.mean, atol=0.05)


def spammers(votes):
    """Who guesses says nothing about the truth: on it a vote depends where its voter does not guess."""
    sincere = numpyro.sample("sincere", dist.Beta(2, 2).expand([votes.shape[1]]).to_event(1))
    with numpyro.plate("items", len(votes), dim=-2):
        truth = numpyro.sample("truth", dist.DiscreteUniform(0, 2), infer={"enumerate": "parallel"})
        with numpyro.plate("voters", votes.shape[1], dim=-1):
            says = numpyro.sample("says", dist.Bernoulli(sincere), infer={"enumerate": "parallel"})
            probs = jnp.where(says[..., None] == 1, jax.nn.one_hot(truth, 3) * 0.97 + 0.01, 1 / 3)
            numpyro.sample("vote", dist.Categorical(probs), obs=votes)


def spammers_by_hand(votes):
    sincere = numpyro.sample("sincere", dist.Beta(2, 2).expand([votes.shape[1]]).to_event(1))
    given = sincere[:, None] * jnp.where(votes[..., None] == jnp.arange(3), 0.98, 0.01) + (1 - sincere[:, None]) / 3
    numpyro.factor("vote", logsumexp(jnp.log(given).sum(axis=1), axis=1).sum() - len(votes) * jnp.log(3.0))


@pytest.mark.parametrize("voters", [4, 15], ids=["48 states together", "98,304 states together"])
def test_a_variable_that_matters_in_some_states_only_is_summed_over(voters):
    rng = np.random.default_rng(2)
    truth, guess = rng.integers(0, 3, (30, 1)), rng.integers(0, 3, (30, voters))
    votes = np.where(rng.random((30, voters)) < np.linspace(0.2, 0.9, voters), truth, guess)
    found = RVGA(spammers).run({"votes": votes}, progress_bar=False)
    expected = RVGA(spammers_by_hand).run({"votes": votes}, progress_bar=False)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=0.1)
    np.testing.assert_allclose(found.mean, expected.mean, atol=0.05)


def test_states_that_are_all_tied_together_are_refused():
    def parity(y):
        p = numpyro.sample("p", dist.Beta(2, 2))
        bits = numpyro.sample("bits", dist.Bernoulli(p).expand([14]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(0.1 + 0.8 * (bits.sum() % 2)), obs=y)

    with pytest.raises(NotImplementedError, match="site 'bits': 14 discrete latent variables enter the same terms"):
        RVGA(parity).run({"y": np.array([1, 0, 1])}, progress_bar=False)


def test_a_number_of_states_beyond_floating_point_is_named():
    def parity(y):
        bits = numpyro.sample("bits", dist.Bernoulli(0.5).expand([1100]).to_event(1))
        p = numpyro.sample("p", dist.Beta(2, 2))
        numpyro.sample("y", dist.Bernoulli(p * (0.1 + 0.8 * (bits.sum() % 2))), obs=y)

    with pytest.raises(NotImplementedError, match=r"have 1\.36e\+331 states together"):
        RVGA(parity).run({"y": np.array([1, 0, 1])}, progress_bar=False)


LOCATIONS, DEVIATIONS, FACTORS = np.array([-1.0, 1.5]), np.array([0.5, 1.0]), np.array([1.0, 2.0])


def latent_mixture(y, num_groups, own_factors):
    """The prior of a latent site depends on a state, and the outcomes may too."""
    groups = numpyro.plate("groups", num_groups, dim=-1)
    with groups:
        state = numpyro.sample("state", dist.Bernoulli(0.4))
        theta = numpyro.sample("theta", dist.Normal(jnp.array(LOCATIONS)[state], jnp.array(DEVIATIONS)[state]))
    factor = jnp.array(FACTORS)[state] if own_factors else jnp.ones(num_groups)
    with numpyro.plate("rows", len(y), dim=-2), groups:
        numpyro.sample("y", dist.Normal(theta * factor, 1.5), obs=y)


def log_joint(theta, y, own_factors):
    """Of a group, for each state, (..., 2)."""
    theta, factors = np.asarray(theta)[..., None], FACTORS if own_factors else np.ones(2)
    of_theta = np.log([0.6, 0.4]) + stats.norm.logpdf(theta, LOCATIONS, DEVIATIONS)
    return of_theta + sum(stats.norm.logpdf(outcome, theta * factors, 1.5) for outcome in y)


def best_gaussian(y, own_factors):
    """Mean, deviation, bound and the probability of the second state, by a dense grid and a search over it."""
    nodes = np.linspace(-10, 10, 4001)
    weights = stats.norm.pdf(nodes) * (nodes[1] - nodes[0])

    def bound(x):
        value = weights @ np.logaddexp.reduce(log_joint(x[0] + np.exp(x[1]) * nodes, y, own_factors), axis=1)
        return value + x[1] + 0.5 * np.log(2 * np.pi * np.e)

    best = min(
        [optimize.minimize(lambda x: -bound(x), (mean, -1.0), method="Nelder-Mead") for mean in (-1, 0, 1)],
        key=lambda found: found.fun,
    )
    of_state = log_joint(best.x[0] + np.exp(best.x[1]) * nodes, y, own_factors)
    second = weights @ np.exp(of_state[:, 1] - np.logaddexp.reduce(of_state, axis=1))
    return best.x[0], np.exp(best.x[1]), -best.fun, second


@pytest.mark.parametrize("method, num_groups", [(RVGA, 3), (FixedPointVI, 1)])
@pytest.mark.parametrize("own_factors", [False, True], ids=["in the prior alone", "in the outcomes too"])
def test_the_prior_of_a_latent_site_is_summed_over_the_states_that_it_depends_on(method, num_groups, own_factors):
    y = np.array([[0.3, -2.0, 4.0], [1.9, -0.5, 5.5], [2.4, -3.0, 3.0]])[:, :num_groups]
    options = {"num_groups": num_groups, "own_factors": own_factors}
    posterior = method(latent_mixture).run({"y": y}, progress_bar=False, **options)
    means, deviations, bounds, seconds = np.transpose([best_gaussian(column, own_factors) for column in y.T])
    np.testing.assert_allclose(posterior.elbo, np.sum(bounds), atol=2e-3)
    np.testing.assert_allclose(posterior.mean, means, atol=0.01)
    np.testing.assert_allclose(np.sqrt(np.diagonal(posterior.covariance)), deviations, rtol=0.01)
    draws = posterior.sample_posterior(jax.random.key(0), (4000,), {"y": y})
    np.testing.assert_allclose(np.mean(draws["state"], axis=0), seconds, atol=0.03)
    program, theta = posterior.program, posterior.mean + 0.3
    sums = program.log_likelihood(theta, program.inputs({"y": y}))
    assert list(sums) == list(program.likelihood_sites) == (["y+theta"] if own_factors else ["y"])
    exact = sum(np.logaddexp.reduce(log_joint(t, column, own_factors)) for t, column in zip(theta, y.T))
    np.testing.assert_allclose(program.log_prior(theta) + sum(map(np.sum, sums.values())), exact, atol=1e-6)


@pytest.mark.parametrize("missed", [0, 3], ids=["of an outcome", "of the latent site"])
def test_a_term_whose_states_were_missed_is_not_taken(monkeypatch, missed):
    """The sum's density is not the model's then, and no check of the sum by itself could tell."""

    def short_sighted(*args):
        depends = dependence(*args)
        depends[missed] = False
        return depends

    def model(y):
        with numpyro.plate("groups", 2):
            state = numpyro.sample("state", dist.Bernoulli(0.4))
        theta = numpyro.sample("theta", dist.Normal(jnp.array(LOCATIONS)[state[0]], 1.0))
        numpyro.sample("y", dist.Normal(theta + state[0] + 2 * state[1], 1.5), obs=y)

    data = {"y": np.array([0.3, -2.0, 4.0])}
    assert np.isfinite(RVGA(model).run(data, progress_bar=False).elbo)
    monkeypatch.setattr(local, "dependence", short_sighted)
    with pytest.raises(ValueError, match="'state': the sum over their states was read wrongly"):
        RVGA(model).run(data, progress_bar=False)


def test_a_support_that_depends_on_states_is_refused():
    def model(y):
        state = numpyro.sample("state", dist.Bernoulli(0.5))
        width = numpyro.sample("width", dist.Uniform(0, jnp.array([1.0, 3.0])[state]))
        numpyro.sample("y", dist.Normal(width, 1.0), obs=y)

    with pytest.raises(NotImplementedError, match="site 'width': its support depends on discrete latent sites"):
        RVGA(model).run({"y": np.ones(5)}, progress_bar=False)


def screened(gene, change):
    """States of genes with a few rows each. What all genes add to a location, and take off, leaves rounding."""
    share, slab = numpyro.sample("share", dist.Beta(1, 5)), numpyro.sample("slab", dist.HalfNormal(2.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("genes", 30):
        hit = numpyro.sample("hit", dist.Bernoulli(share))
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    all_of_them = jnp.mean(hit)
    with numpyro.plate("rows", len(change)):
        location = (hit * effect * slab)[gene] + all_of_them - all_of_them
        numpyro.sample("change", dist.Normal(location, noise), obs=change)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_rounding_ties_no_terms_together(double):
    """Two runs of one computation may differ in the last place."""
    rng = np.random.default_rng(45)
    gene = np.repeat(np.arange(30), 4)
    effects = rng.normal(0, 2, 30) * rng.binomial(1, 0.2, 30)
    with jax.enable_x64(double):
        rows = {"gene": gene, "change": effects[gene] + 0.4 * rng.normal(size=120)}
        engine, *_ = RVGA(screened)._family._engines.together(rows, {}, jax.random.key(0))
    ((component, _),) = engine.program.row_parts
    assert component.size == 30 and component.discrete.shape == (30, 1)


def labels_of_two(labels, seen):
    """Each item has a class, and two labels of which one may be missing."""
    right = numpyro.sample("right", dist.Beta(8, 2).expand([2]).to_event(1))
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("items", len(labels), dim=-2):
        kind = numpyro.sample("kind", dist.Bernoulli(share))
        with numpyro.plate("labelers", 2, dim=-1):
            says_one = jnp.where(kind == 1, right, 1 - right)
            numpyro.sample("label", dist.Bernoulli(says_one).mask(seen), obs=labels)


def test_what_is_missing_in_the_first_row_depends_on_its_states_in_others():
    rng = np.random.default_rng(0)
    kind = rng.binomial(1, 0.6, 40)
    labels = np.where(rng.random((40, 2)) < 0.85, kind[:, None], 1 - kind[:, None])
    seen = rng.random((40, 2)) < 0.7
    seen[0] = [True, False]
    posterior = RVGA(labels_of_two).run({"labels": labels, "seen": seen}, progress_bar=False)
    program = posterior.program
    theta = posterior.sample_unconstrained(jax.random.key(0), (1,))[0]
    found = program.log_likelihood(theta, program.inputs(program.rows({"labels": labels, "seen": seen})))
    sites = program.constrain(theta)
    by_kind = []
    for state, probability in ((1, sites["share"]), (0, 1 - sites["share"])):
        says_one = sites["right"] if state else 1 - sites["right"]
        each = np.where(labels == 1, np.log(says_one), np.log1p(-says_one))
        by_kind.append(np.log(probability) + np.where(seen, each, 0).sum(axis=1))
    np.testing.assert_allclose(sum(x.sum() for x in found.values()), np.logaddexp(*by_kind).sum(), rtol=1e-10)
