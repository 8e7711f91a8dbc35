"""Groups that stay with the part that has their rows: the shared sites' posterior is that of one solve of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from clusters import QUIET
from group_models import dense_posterior, design_of, off

from numpyro_rvga import BONG, RVGA, FixedPointVI

dask_distributed = pytest.importorskip("distributed")
parquet = pytest.importorskip("pyarrow.parquet")

from numpyro_rvga import distributed  # noqa: E402

pytestmark = QUIET
PLATE = {"plate": "users", "index": "user", "size": "num_users", "progress_bar": False}


def choices(user, x, num_users, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("users", num_users):
        above = numpyro.sample("above", dist.Normal(0, scale))
        level = numpyro.deterministic("level", slopes[1] + above)
        trend = numpyro.sample("trend", dist.Normal(0, 0.5))
    numpyro.deterministic("odds", jnp.exp(slopes[0]))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=level[user] + (slopes[0] + trend[user]) * x), obs=y)


def measured(user, X, num_users, y=None):
    """Linear and Gaussian, with a vector for each group."""
    centre = numpyro.sample("centre", dist.MultivariateNormal(jnp.ones(2), jnp.array([[2.0, 0.5], [0.5, 1.0]])))
    slope = numpyro.sample("slope", dist.Normal(0.5, 2))
    with numpyro.plate("users", num_users):
        own = numpyro.sample("own", dist.Normal(centre, 0.7).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(jnp.sum(own[user] * X[:, :2], axis=1) + slope * X[:, 2], 0.5), obs=y)


def counts(user, num_users, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("users", num_users):
        level = numpyro.sample("level", dist.Normal(mean, scale))
        numpyro.sample("believed", dist.Normal(mean, 2.0), obs=0.8)  # for each group, of the shared sites
    with numpyro.plate("rows", len(user)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level[user])), obs=y)


@pytest.fixture(scope="module")
def client():
    with dask_distributed.Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as client:
        yield client


@pytest.fixture(scope="module")
def chosen():
    rng = np.random.default_rng(0)
    user, level = rng.permutation(np.repeat(np.arange(60), 4)), rng.normal(0.4, 0.8, 60)
    x = rng.normal(size=len(user))
    y = (level[user] + 0.7 * x > rng.logistic(size=len(user))).astype(int)
    return {"user": user, "x": x, "y": y}


@pytest.fixture(scope="module")
def best(chosen):
    return FixedPointVI(choices).run(chosen, num_users=60, progress_bar=False)


def cut(data, side, labels=lambda user: user):
    """Parts by group. ``side``: of each group."""
    return [
        {name: labels(array[at]) if name == "user" else array[at] for name, array in data.items()}
        for at in (side[data["user"]] == part for part in np.unique(side))
    ]


def test_parts_with_groups_of_their_own_meet_the_best_gaussian_of_all_rows(client, tmp_path, chosen, best):
    share = np.bincount(chosen["user"], chosen["y"])
    side = (np.argsort(np.argsort(share)) >= 38).astype(int)  # groups with many ones apart
    parts = cut(chosen, side, labels=lambda user: np.char.add("u", user.astype(str)))
    found = distributed.run_groups(RVGA(choices), parts, folder=tmp_path / "users", client=client, **PLATE)
    assert off(found, best) < 0.02 and abs(found.elbo - best.elbo) < 0.01 and found.info["converged"]
    assert (found.num_rows, found.num_groups, found.site_names) == (240, 60, ("scale", "slopes"))
    table = parquet.read_table(tmp_path / "users")
    user = np.array([int(label[1:]) for label in table["user"].to_pylist()])
    deviation = np.asarray(best.gaussian.deviation())
    for name in ("above", "trend"):
        at = best.program.layout.indices[name][user]
        np.testing.assert_allclose(table[f"{name}.mean"], np.asarray(best.mean)[at], atol=0.01)
        np.testing.assert_allclose(table[f"{name}.sd"], deviation[at], rtol=0.01)
    draws = found.sample_posterior(jax.random.key(0), (20, 1000), groups=["u7", "u41"])
    whole = best.sample_posterior(jax.random.key(1), (20_000,))
    assert draws["level"].shape == (20, 1000, 2) and draws["slopes"].shape == (20, 1000, 2)
    assert set(draws) == set(whole)

    def moments(draws, level):
        every = np.stack([draws["slopes"][..., 1].ravel(), draws["odds"].ravel(), *level.T], axis=1)
        return every.mean(axis=0), np.cov(every.T)

    found, expected = moments(draws, draws["level"].reshape(-1, 2)), moments(whole, whole["level"][:, [7, 41]])
    np.testing.assert_allclose(found[0], expected[0], atol=0.04)
    np.testing.assert_allclose(found[1], expected[1], atol=0.03)


def test_linear_gaussian_groups_have_the_exact_posterior_and_evidence(client, tmp_path):
    rng, n = np.random.default_rng(1), 7
    user = np.concatenate([np.arange(n), rng.integers(0, n, 40)])
    X = rng.normal(size=(len(user), 3))
    y = X @ [1.0, 0.0, -1.0] + rng.normal(size=len(user))
    mean, covariance, evidence = dense_posterior(design_of(user, X, n), y, np.full(len(user), 0.25), n)

    parts = cut({"user": user, "X": X, "y": y}, np.array([0, 0, 0, 1, 1, 1, 2]))
    found = distributed.run_groups(RVGA(measured), parts, folder=tmp_path / "users", client=client, **PLATE)
    np.testing.assert_allclose(found.mean, mean[:3], atol=1e-6)
    np.testing.assert_allclose(found.covariance, covariance[:3, :3], atol=1e-8)
    np.testing.assert_allclose(found.elbo, evidence, atol=1e-6)
    table = parquet.read_table(tmp_path / "users")
    np.testing.assert_array_equal(table["user"], np.arange(n))
    np.testing.assert_allclose(table["own[1].mean"], mean[4::2], atol=1e-6)
    np.testing.assert_allclose(table["own[1].sd"], np.sqrt(np.diagonal(covariance))[4::2], atol=1e-7)


def test_counts_in_single_precision(client, tmp_path):
    rng = np.random.default_rng(2)
    user = np.repeat(np.arange(60), 5)
    data = {"user": user, "y": rng.poisson(np.exp(rng.normal(1, 1, 60))[user])}
    best = FixedPointVI(counts).run(data, num_users=60, progress_bar=False)
    with jax.enable_x64(False):
        parts = cut(data, (np.arange(60) >= 25).astype(int))
        found = distributed.run_groups(RVGA(counts), parts, folder=tmp_path, client=client, **PLATE)
        assert found.mean.dtype == np.float32
    assert off(found, best) < 0.02 and abs(found.elbo - best.elbo) < 0.01


def test_groups_of_one_row_each(client, tmp_path):
    data = {"user": np.arange(40), "y": np.random.default_rng(4).poisson(np.repeat([1, 3, 9, 2], 10))}
    best = FixedPointVI(counts).run(data, num_users=40, progress_bar=False)
    found = distributed.run_groups(
        RVGA(counts), cut(data, np.arange(40) % 2), folder=tmp_path / "users", client=client, **PLATE
    )
    assert off(found, best) < 0.02 and abs(found.elbo - best.elbo) < 0.01


def test_what_is_no_group_of_a_part_is_refused(client, tmp_path, chosen):
    def run(model=choices, parts=None, method=RVGA, **options):
        parts = cut(chosen, np.arange(60) % 2) if parts is None else parts
        where = {"folder": tmp_path / "new", "client": client}
        return distributed.run_groups(method(model), parts, **PLATE | where | options)

    halves = [{name: array[half::2] for name, array in chosen.items()} for half in (0, 1)]
    with pytest.raises(ValueError, match=r"member .* of plate 'users' has rows in part 0 and in part 1"):
        run(parts=halves)
    with pytest.raises(ValueError, match=r"part 0: no latent site is in a plate 'groups': .* are \['users'\]"):
        run(plate="groups")
    with pytest.raises(ValueError, match="index='who' is no argument of the model, which takes"):
        run(index="who")
    with pytest.raises(ValueError, match="'num_users' is of the data"):
        run(num_users=60)
    with pytest.raises(ValueError, match="part 0: the model needs 'user'"):
        run(parts=[{"x": chosen["x"], "y": chosen["y"]}])
    unnamed = [{**part, "user": np.where(part["user"] == 1, np.nan, part["user"])} for part in halves]
    with pytest.raises(ValueError, match=r"part [01]: array 'user' has no label in row \d+"):
        run(parts=unnamed)
    with pytest.raises(ValueError, match="groups are for RVGA"):
        run(method=BONG)
    with pytest.raises(ValueError, match="there are no parts"):
        run(parts=[])
    with pytest.raises(ValueError, match="mesh is of devices of this process, and workers have their own: leave mesh"):
        run(method=lambda model: RVGA(model, mesh=jax.make_mesh((1,), ("rows",))))

    def neighbours(user, x, num_users, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("users", num_users):
            level = numpyro.sample("level", dist.Normal(mean, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=level[user] + level[0]), obs=y)

    with pytest.raises(
        ValueError, match="part 0: site 'y' of row 0 depends on other members of the plate than its own"
    ):
        run(neighbours)

    def chained(x, num_users, user=None, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("users", num_users):
            level = numpyro.sample("level", dist.Normal(mean, 1))
        numpyro.factor("sum", -0.5 * jnp.sum(level) ** 2)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=level[user]), obs=y)

    with pytest.raises(ValueError, match="part 0: the data have no array 'user'"):
        run(chained, parts=[{"x": chosen["x"], "y": chosen["y"]}])
    with pytest.raises(ValueError, match="part 0: the prior term of site 'sum' depends on several members"):
        run(chained)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "part-00000.parquet").touch()
    with pytest.raises(ValueError, match="holds Parquet files already"):
        run(folder=tmp_path / "old")
