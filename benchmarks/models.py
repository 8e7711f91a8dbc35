"""Models as people write them: what plain RVGA(model).run(data) makes of each, beside NUTS.

python -m benchmarks models [NAME ...] [--part 1/4] [--output FOLDER]
python -m benchmarks models --draw FOLDER/models.json

Each model runs in a process of its own: the first run compiles, the second does not. NUTS is one chain of 500 + 1,000
iterations, and of 10,000 more where the largest difference is between 0.1 and 0.3, which the noise of 1,000 draws may
move across 0.2. Seconds are those of the processor, without these. Differences are the largest over all elements of all
latent sites, in unconstrained space: of means, in standard deviations of NUTS, and of the logarithms of standard
deviations. A posterior within 0.2 in both is right. A warning or a verdict other than "good" is an alarm. It is "true"
where the posterior is not right, and "false" where it is; one that is not given is "missed". Results are kept in the
file, so that the models can be run in parts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import _discrete_models  # noqa: F401
import _structured_models  # noqa: F401
import jax
import numpy as np
from _models import MODELS
from _results import about, parser
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import RVGA

WARMUP, DRAWS, MORE_DRAWS = 500, 1000, 10_000
CLOSE = 0.2  # in standard deviations, and in the logarithm of one
NOISE = 0.1  # of a difference by so many draws, at most
ALARMS = {
    (False, False): "none needed",
    (True, True): "true",
    (True, False): "false",
    (False, True): "missed",
}  # given, needed
MOST_SECONDS = 400  # for a model, on a clock: others may be busy
RESULT = "RESULT "


# ---------------------------------------------------------------------- one model
def run_one(name: str) -> dict[str, Any]:
    model, data, keywords = MODELS[name]()
    jax.numpy.ones(3).block_until_ready()
    found: dict[str, Any] = {"name": name}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.process_time()
        try:
            method = RVGA(model)
            posterior = method.run(data, progress_bar=False, **keywords)
            jax.block_until_ready(posterior.mean)
        except Exception as error:
            return found | {"error": f"RVGA: {type(error).__name__}: {error}"}
        cold = time.process_time() - start
        start = time.process_time()
        jax.block_until_ready(method.run(data, progress_bar=False, **keywords).mean)
        found |= {"cold": cold, "warm": time.process_time() - start}
        check = posterior.khat(data)
    told = sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})
    found |= {"rows": posterior.info["rows"], "khat": check.khat, "verdict": check.verdict.split(".")[0]}
    found |= {"warnings": told, "alarm": bool(told) or not check.verdict.startswith("good")}
    found |= {"move": max(check.moves.values(), default=math.nan)}
    try:
        return found | compare(posterior, model, data, keywords)
    except Exception as error:  # of NUTS, which is no refusal
        return found | {"error": f"NUTS: {type(error).__name__}: {error}"}


def compare(posterior, model, data, keywords) -> dict[str, Any]:
    """With NUTS: its seconds, and the differences."""
    chain = MCMC(NUTS(model), num_warmup=WARMUP, num_samples=DRAWS, progress_bar=False)
    start = time.process_time()
    chain.run(jax.random.key(0), **data, **keywords)
    draws = jax.block_until_ready(chain.get_samples())
    seconds = time.process_time() - start
    found = differences(posterior, draws)
    if abs(max(found["mean"], found["log_sd"]) - CLOSE) < NOISE:
        chain.post_warmup_state = chain.last_state
        more = []
        for _ in range(MORE_DRAWS // DRAWS):
            chain.run(jax.random.key(0), **data, **keywords)
            more.append(jax.device_get(chain.get_samples()))
            chain.post_warmup_state = chain.last_state
        found = differences(posterior, jax.tree.map(lambda *parts: np.concatenate(parts), *more))
    return found | {"nuts": seconds}


def differences(posterior, draws: dict[str, Any]) -> dict[str, Any]:
    """In unconstrained space."""
    names = posterior.site_names
    unconstrain = jax.jit(jax.vmap(posterior.program.unconstrain))
    theta = np.asarray(unconstrain({name: draws[name] for name in names}), np.float64)
    deviation = np.sqrt(np.diagonal(np.asarray(posterior.covariance, np.float64)))
    mean = np.abs(np.asarray(posterior.mean) - theta.mean(0)) / theta.std(0)
    log_sd = np.abs(np.log(deviation / theta.std(0)))
    sizes = effective_sample_size(theta[None])
    where = np.repeat(names, [int(np.prod(posterior.program.layout.shapes[name])) for name in names])
    worst = int(np.argmax(np.maximum(mean, log_sd)))
    return {
        "mean": float(mean.max()),
        "log_sd": float(log_sd.max()),
        "site": str(where[worst]),
        "smallest effective sample size": float(np.min(sizes)),
    }


# ---------------------------------------------------------------------- all models
def run_apart(name: str) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": name, "error": f"no end in {MOST_SECONDS} seconds"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[0].removeprefix(RESULT)) if lines else {"name": name, "error": done.stderr[-300:]}


def is_right(case: dict[str, Any]) -> bool:
    return max(case["mean"], case["log_sd"]) <= CLOSE


def alarm(case: dict[str, Any]) -> str:
    return ALARMS[case["alarm"], not is_right(case)]


def row(case: dict[str, Any]) -> str:
    """Of the table."""
    name = case["name"]
    if "error" in case:
        return f"| {name} | {' '.join(case['error'].split())[:150]} | | | | | | | |"
    times = f"{case['cold']:.1f} | {case['warm']:.2f} | {case['nuts']:.1f}"
    return (
        f"| {name} | {case['rows']} | {times} | {case['mean']:.2f} | {case['log_sd']:.2f} | "
        f"{case['verdict']}{', warns' if case['warnings'] else ''} | {alarm(case)} |"
    )


HEADER = "| model | rows | cold | warm | NUTS | means | log sds | verdict | alarm |\n|" + " --- |" * 9


def summary(cases: list[dict[str, Any]]) -> str:
    taken = [case for case in cases if "error" not in case]
    alarms = [alarm(case) for case in taken]
    return (
        f"{len(taken)} of {len(cases)} accepted; {sum(map(is_right, taken))} within {CLOSE}; "
        f"{sum(case['cold'] < case['nuts'] for case in taken)} before NUTS; "
        f"alarms: {', '.join(f'{alarms.count(kind)} {kind}' for kind in ALARMS.values())}"
    )


def draw(cases: list[dict[str, Any]], folder: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from plots import COLORS, REFERENCE, RVGA_COLOR, WIDTH, plt, save

    cases = sorted([case for case in cases if "error" not in case], key=lambda case: max(case["mean"], case["log_sd"]))
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(WIDTH, 0.17 * len(cases) + 1))
    places = range(len(cases))
    for key, color, label in (
        ("nuts", REFERENCE, "NUTS"),
        ("cold", RVGA_COLOR, "RVGA"),
        ("warm", COLORS[5], "RVGA, second run"),
    ):
        axes[0].plot([case[key] for case in cases], places, "o", color=color, ms=4, label=label)
    axes[0].set(xscale="log", xlabel="seconds")
    for key, marker, label in (("mean", "o", "mean"), ("log_sd", "x", "log standard deviation")):
        for alarmed, color in ((False, RVGA_COLOR), (True, COLORS[1])):
            some = [i for i in places if cases[i]["alarm"] == alarmed]
            axes[1].plot(
                [max(cases[i][key], 1e-3) for i in some],
                some,
                marker,
                color=color,
                ms=4,
                label=f"{label}{', with an alarm' if alarmed else ''}",
            )
    axes[1].axvline(CLOSE, color=REFERENCE, lw=0.8)
    axes[1].set(xscale="log", xlabel="largest difference from NUTS")
    axes[0].set_yticks(list(places), [case["name"] for case in cases], fontsize=6)
    axes[0].set_ylim(-0.7, len(cases) - 0.3)
    for axis in axes:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=6, frameon=False)
    save(figure, folder, "models")


def main(argv: list[str] | None = None) -> None:
    options: argparse.ArgumentParser = parser(__doc__ or "", drawn=True)
    options.add_argument("names", nargs="*", help="beginnings of models' names; default: all")
    options.add_argument("--part", default="1/1", help="such as 2/4: the second quarter of them")
    options.add_argument("--one", help=argparse.SUPPRESS)
    arguments = options.parse_args(argv)
    if arguments.one:
        print(RESULT + json.dumps(run_one(arguments.one)))
        return
    path = arguments.draw or arguments.output / "models.json"
    known = {case["name"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
    names = [name for name in MODELS if name.startswith(tuple(arguments.names) or "")]
    part, parts = map(int, arguments.part.split("/"))
    print(HEADER)
    for name in [] if arguments.draw else names[part - 1 :: parts]:
        known[name] = run_apart(name)
        print(row(known[name]), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about() | {"cases": list(known.values())}, indent=1))
    cases = [known[name] for name in MODELS if name in known]
    if arguments.draw:
        print("\n".join(map(row, cases)))
    print(summary(cases))
    draw(cases, path.parent)


if __name__ == "__main__":
    main()
