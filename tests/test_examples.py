"""Every example runs, on a smaller problem, and leaves its figure."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")
pytest.importorskip("statsmodels")

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "plots")


@pytest.mark.parametrize("name", NAMES)
def test_example(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    example.main(["--quick", "--output", str(tmp_path)])
    figures = list(tmp_path.glob("*.png"))
    assert [figure.stem for figure in figures] == [name]
    assert figures[0].stat().st_size > 5_000
    assert f"saved {figures[0]}" in capsys.readouterr().out
