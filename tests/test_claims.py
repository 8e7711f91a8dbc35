"""The papers' benchmark says of each claim whether it holds, also for methods that are refused."""

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("_paper_claims")


def found(benchmark, scores, ms=1.0):
    nlpd = {"plugin": scores, "linearized": [9.0] * len(scores)}
    return benchmark.Found((1.0, 1.0), {}, {50: scores}, nlpd, [0.1], ms)


@pytest.mark.parametrize(
    "worse, holds, starts",
    [
        ([0.5, 0.7, 0.6], "yes", "3 of 3"),
        ([0.1, 0.2, 0.1], "no", "0 of 3"),
        ([0.5, 0.1, 0.6], "no difference", "2 of 3"),
    ],
)
def test_a_claim_is_judged_start_by_start(benchmark, worse, holds, starts):
    scores = [0.3, 0.4, 0.35]
    said = benchmark.compared(benchmark.CLAIMS[0], found(benchmark, scores), found(benchmark, worse))
    difference = np.subtract(worse, scores)
    assert (said["holds"], said["after 50"], said["starts"]) == (holds, holds, starts)
    assert said["difference"] == pytest.approx(difference.mean())
    assert said["standard error"] == pytest.approx(np.sqrt(np.sum((difference - difference.mean()) ** 2) / 2 / 3))


def test_a_refused_method_loses(benchmark):
    claim, method = benchmark.CLAIMS[0], found(benchmark, [0.3, 0.4])
    assert benchmark.compared(claim, method, None) == {"first": 0.35, "second": "refused", "holds": "yes"}
    assert benchmark.compared(claim, None, method)["holds"] == "no"
    assert benchmark.compared(claim, None, None)["holds"] == "no difference"
    slower = benchmark.compared(claim._replace(measure="ms"), method, method._replace(ms=2.0))
    assert slower == {"first": 1.0, "second": 2.0, "holds": "yes"}


def test_every_method_is_part_of_a_claim_and_every_claim_of_methods_that_run(benchmark):
    compared = [{claim.better, claim.worse} for claim in benchmark.CLAIMS]
    assert set.union(*compared) == set(benchmark.METHODS)


@pytest.mark.parametrize("refused", ["bog", "none"])
def test_each_claim_is_said_once_whatever_is_refused(benchmark, monkeypatch, capsys, refused):
    names = iter(benchmark.METHODS)

    def found_of(problem, options, effort):
        assert len(problem.train["y"]) <= effort.num_rows and len(problem.test["y"]) <= benchmark.NUM_TEST
        name = next(names)
        return None if name == refused else found(benchmark, list(0.1 * len(name) + np.array([0.1, 0.2])))

    monkeypatch.setattr(benchmark, "found_of", found_of)
    *_, lines = benchmark.claims(None, quick=True)
    said = [(line["better"], line["worse"], line["measure"]) for line in lines if "better" in line]
    assert sorted(said) == sorted((claim.better, claim.worse, claim.measure) for claim in benchmark.CLAIMS)
    assert all(line["holds"] in ("yes", "no", "no difference") for line in lines if "better" in line)
    assert [line["method"] for line in lines if line.get("refused")] == [refused] * (refused == "bog")
    assert capsys.readouterr().out.count("holds:") == len(benchmark.CLAIMS)
