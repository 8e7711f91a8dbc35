"""The README's commands are one line each, what it names exists, and its Python runs."""

import re
from pathlib import Path

import numpyro_rvga
from numpyro_rvga.bong import PAPER_HESSIANS
from numpyro_rvga.core.gaussians import CHARTS, FAMILIES
from numpyro_rvga.core.rules import RULES
from numpyro_rvga.options import EXPECTATIONS
from numpyro_rvga.presets import PRESETS
from numpyro_rvga.rvga import SCHEMES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_commands_are_one_line_each():
    first, second = blocks("bash")[:2]
    for command in (first, second):
        assert len(command.strip().splitlines()) == 1
        assert "venv" in command and "pip install" in command
    assert first.strip().endswith("examples/quickstart.py")
    assert "pytest" in second


def test_files_that_it_names_exist():
    links = re.findall(r"\]\(((?!http)[^)#]+)(?:#[\w-]+)?\)", README)
    scripts = re.findall(r"examples/\w+\.py", README)
    assert links and scripts
    for path in [*links, *scripts]:
        assert (ROOT / path).is_file(), path


def test_pictures_are_small():
    for picture in (ROOT / "examples" / "figures").iterdir():
        assert picture.stat().st_size < 200_000, picture


def test_options_are_all_listed():
    for option in (*SCHEMES, *EXPECTATIONS, *RULES, *PAPER_HESSIANS, *FAMILIES, *CHARTS, *PRESETS):
        assert f'`"{option}"`' in README, option


def test_public_names_are_all_listed():
    for name in numpyro_rvga.__all__:
        assert f"`{name}`" in README, name


def test_python_runs(capsys):
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["posterior"], numpyro_rvga.Posterior)
    assert "slopes" in capsys.readouterr().out
