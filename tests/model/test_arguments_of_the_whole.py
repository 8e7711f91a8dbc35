"""What is no array among the data goes to the model as it is, in the run and in all that follows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI, Posterior

RNG = np.random.default_rng(5)
SCALE = 0.5
TABLE = {"J": 3, "group": np.repeat(np.arange(3), [4, 2, 6]), "y": RNG.normal(size=12)}


def of_a_table(table):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([table["J"]]))
    numpyro.sample("y", dist.Normal(effect[table["group"]], SCALE), obs=table["y"])


def of_parts(group, y, J, options):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([J]))
    numpyro.sample("y", dist.Normal(effect[group], options["scale"]), obs=y)


def of_ragged_lists(series):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([len(series)]))
    for number, y in enumerate(series):
        numpyro.sample(f"y{number}", dist.Normal(effect[number], SCALE), obs=y)


def of_a_list(series):
    group, y = series
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("y", dist.Normal(effect[group], SCALE), obs=y)


def constants():
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("y", dist.Normal(effect[TABLE["group"]], SCALE), obs=TABLE["y"])


CASES = {
    "a mapping": (of_a_table, {"table": TABLE}),
    "numbers and options": (of_parts, {**TABLE, "options": {"scale": SCALE}}),
    "lists of several lengths": (of_ragged_lists, {"series": np.split(TABLE["y"], [4, 6])}),
    "a list of groups and numbers": (of_a_list, {"series": [TABLE["group"], TABLE["y"]]}),
    "nothing": (constants, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_posterior_takes_the_data_that_the_run_took(case, tmp_path):
    model, data = CASES[case]
    posterior = RVGA(model).run(data, progress_bar=False)
    counts = np.bincount(TABLE["group"])
    means = np.bincount(TABLE["group"], TABLE["y"]) / SCALE**2 / (1 + counts / SCALE**2)
    np.testing.assert_allclose(posterior.mean, means, atol=1e-4)
    assert posterior.khat(data).verdict.startswith("good")
    drawn = posterior.predictive(jax.random.key(0), data, num_samples=3)
    assert all(jnp.isfinite(values).all() for values in drawn.values())
    posterior.save(tmp_path / "posterior")
    missing = {name: value for name, value in data.items() if name in ("table", "series")}
    loaded = Posterior.load(tmp_path / "posterior", model, **missing)
    np.testing.assert_allclose(loaded.mean, posterior.mean)
    assert "not_integrated" in posterior.integrate(data, progress_bar=False).info


@pytest.mark.parametrize("text", [False, True], ids=["numbers", "text too"])
def test_frames_are_taken_by_column_where_the_model_does(text):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"group": TABLE["group"], "y": TABLE["y"]} | ({"name": ["a", "b"] * 6} if text else {}))

    def of_a_frame(frame):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]))
        numpyro.sample("y", dist.Normal(effect[frame["group"].values], SCALE), obs=frame["y"].values)

    method = RVGA(of_a_frame)
    posterior = method.run({"frame": frame}, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, RVGA(constants).run({}, progress_bar=False).mean, atol=1e-5)
    assert posterior.khat({"frame": frame.copy()}).verdict.startswith("good")
    assert method.run({"frame": frame.copy()}, progress_bar=False).program is posterior.program


def test_what_is_no_array_has_to_stay_as_it_was():
    posterior = FixedPointVI(of_a_table).run({"table": TABLE}, progress_bar=False)
    with pytest.raises(ValueError, match="'table' is not as it was in the run"):
        posterior.khat({"table": {**TABLE, "y": TABLE["y"] + 1}})


def test_whole_models_have_no_update_and_say_what_to_do():
    posterior = RVGA(of_a_table).run({"table": TABLE}, progress_bar=False)
    with pytest.raises(ValueError, match="old and new rows together"):
        posterior.update({"table": TABLE})
