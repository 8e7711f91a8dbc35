"""Crossed effects: which lecturers are rated well, once it is known who rated them?

Students rate lecturers, each a few, and are more or less strict themselves. Every rating looks at one student and one
lecturer of many hundreds, which is all that is ever looked at: no matrix of all effects is factorized. The data are
made up, of the form of the InstEval data of R's lme4 package, which ``--data FOLDER`` takes instead: 73,421 ratings of
1,128 lecturers by 2,972 students. NUTS is run on the same rows.
"""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from plots import REFERENCE, RVGA_COLOR, WIDTH, compare_densities, parse_arguments, plt, save

from numpyro_rvga import FixedPointVI

SCALES = {"student_scale": "sd of students", "lecturer_scale": "sd of lecturers", "noise": "sd of the noise"}


def model(student, lecturer, service, rating=None, num_students=None, num_lecturers=None):
    mean = numpyro.sample("mean", dist.Normal(3, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    student_scale = numpyro.sample("student_scale", dist.HalfNormal(1))
    lecturer_scale = numpyro.sample("lecturer_scale", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    with numpyro.plate("students", num_students):
        strictness = numpyro.sample("strictness", dist.Normal(0, student_scale))
    with numpyro.plate("lecturers", num_lecturers):
        quality = numpyro.sample("quality", dist.Normal(0, lecturer_scale))
    with numpyro.plate("ratings", len(student)):
        expected = mean + slope * service + strictness[student] + quality[lecturer]
        numpyro.sample("rating", dist.Normal(expected, noise), obs=rating)


def make_data(num_ratings: int, num_students: int, num_lecturers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    share = rng.gamma(1.0, size=num_lecturers)  # some give large courses
    student = rng.integers(0, num_students, num_ratings)
    lecturer = rng.choice(num_lecturers, num_ratings, p=share / share.sum())
    service = (rng.random(num_ratings) < 0.4).astype(float)
    expected = 3.3 - 0.1 * service + 0.35 * rng.normal(size=num_students)[student]
    expected += 0.5 * rng.normal(size=num_lecturers)[lecturer]
    rating = expected + 1.2 * rng.normal(size=num_ratings)
    return {"student": student, "lecturer": lecturer, "service": service, "rating": rating}


def read_data(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "hier__InstEval.npz") as file:
        columns = dict(zip(file["x_names"], file["X"].T))
        rating = file["y"].astype(float)
    student, lecturer = (np.unique(columns[name], return_inverse=True)[1] for name in ("s", "d"))
    return {"student": student, "lecturer": lecturer, "service": columns["service"].astype(float), "rating": rating}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv, data="hier__InstEval.npz")
    numpyro.enable_x64()
    if arguments.data is None:
        data = make_data(*((600, 150, 70) if arguments.quick else (20_000, 1_200, 400)))
    else:
        data = read_data(arguments.data)
    counts = {"num_students": int(data["student"].max()) + 1, "num_lecturers": int(data["lecturer"].max()) + 1}
    start = time.perf_counter()
    posterior = FixedPointVI(model).run(data, **counts, progress_bar=False)
    seconds = time.perf_counter() - start

    length = 20 if arguments.quick else 500
    mcmc = MCMC(NUTS(model), num_warmup=length, num_samples=2 * length, progress_bar=False)
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), **data, **counts)
    nuts = {name: np.asarray(draws) for name, draws in mcmc.get_samples().items()}
    print(f"{len(data['rating']):,} ratings, {posterior.mean.size:,} parameters")
    print(f"FixedPointVI {seconds:.1f} s, NUTS {time.perf_counter() - start:.1f} s, both with compilation\n")

    ours = posterior.sample_posterior(jax.random.key(1), (2_000,))
    ours = {name: np.asarray(draws) for name, draws in ours.items()}
    print(f"{'':16s} {'FixedPointVI':>18s} {'NUTS':>18s}")
    for name in ("mean", "slope", *SCALES):
        ends = (f"{draws[name].mean():8.3f} +- {draws[name].std():.3f}" for draws in (ours, nuts))
        print(f"{name:16s} " + " ".join(f"{end:>18s}" for end in ends))
    for name in ("strictness", "quality"):
        shift = (ours[name].mean(0) - nuts[name].mean(0)) / nuts[name].std(0)
        ratio = ours[name].std(0) / nuts[name].std(0)
        print(
            f"{name}: means apart by {np.sqrt(np.mean(shift**2)):.3f} sd (root mean square), sds by "
            f"{100 * np.sqrt(np.mean((ratio - 1) ** 2)):.1f}%"
        )
    save(draw(ours, nuts, np.bincount(data["lecturer"])), arguments.output, "crossed_effects")


def draw(ours, nuts, sizes):
    figure = plt.figure(figsize=(WIDTH, 5.6))
    above, below = figure.subfigures(2, 1, height_ratios=[1.3, 1])
    axis = above.subplots()
    quality = ours["quality"]
    order = np.argsort(quality.mean(0))
    low, middle, high = np.quantile(quality, [0.05, 0.5, 0.95], axis=0)[:, order]
    place = np.arange(len(order))
    axis.vlines(place, low, high, color=RVGA_COLOR, lw=0.5, alpha=0.6)
    axis.plot(place, middle, color=RVGA_COLOR, lw=1.2, label="FixedPointVI, median and 90% interval")
    for end in np.quantile(nuts["quality"], [0.05, 0.95], axis=0)[:, order]:
        ends = axis.plot(place, end, ".", color=REFERENCE, ms=1.5)
    ends[0].set_label("NUTS, ends of its 90% interval")
    axis.axhline(0, color=REFERENCE, lw=0.6)
    axis.set_xlim(-1, len(order))
    axis.set_xlabel(f"lecturers in the order of their medians, rated by {sizes.min()} to {sizes.max()} students each")
    axis.set_ylabel("quality, in ratings")
    axis.legend(loc="upper left", markerscale=4)

    panels = below.subplots(1, 2 + len(SCALES))
    for panel, title, read in ((panels[0], "means", np.mean), (panels[1], "sds", np.std)):
        for name, marker, color in (("strictness", ".", "#56B4E9"), ("quality", ".", RVGA_COLOR)):
            label = "students" if name == "strictness" else "lecturers"
            panel.plot(read(nuts[name], axis=0), read(ours[name], axis=0), marker, color=color, ms=2, label=label)
        ends = panel.get_xlim()
        panel.plot(ends, ends, color=REFERENCE, lw=0.8)
        panel.set_title(f"{title} of all effects", fontsize=8)
        panel.set_xlabel("NUTS", fontsize=8)
    panels[0].set_ylabel("FixedPointVI", fontsize=8)
    panels[0].legend(markerscale=4, fontsize=7)
    for panel, (name, title) in zip(panels[2:], SCALES.items()):
        compare_densities(panel, ours[name], nuts[name], title)
    return figure


if __name__ == "__main__":
    main()
