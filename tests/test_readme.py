"""README and guides: commands are one line each, links lead somewhere, options are listed, and the Python runs."""

import ast
import re
from pathlib import Path

import pytest

import numpyro_rvga
from numpyro_rvga.core.gaussians import FAMILIES, PARAMETERIZATIONS
from numpyro_rvga.core.updates.rules import RULES
from numpyro_rvga.engines.combinations import PAPER_HESSIANS
from numpyro_rvga.fixed_point import SCHEDULES
from numpyro_rvga.options import EXPECTATIONS
from numpyro_rvga.presets import PRESETS
from numpyro_rvga.rvga import SCHEMES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, *GUIDES, CONTRIBUTING, ROOT / "examples" / "README.md"]
MOST_LINES = 200  # of the README


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """What GitHub makes of headings: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def with_python(pages):
    return [page for page in pages if blocks(page, "python")]


def name_of(page):
    return str(page.relative_to(ROOT))


def test_readme_is_short():
    assert len(text_of(README).splitlines()) <= MOST_LINES


def test_commands_are_one_line_each():
    first, second = blocks(README, "bash")[:2]
    for command in (first, second):
        assert len(command.strip().splitlines()) == 1
        assert "venv" in command and "pip install" in command
    assert first.strip().endswith("examples/quickstart.py")
    assert "pytest" in second


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([\w-]+))?\)", text_of(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), path
        assert not anchor or anchor in anchors(target), (path, anchor)
    for script in re.findall(r"examples/\w+\.py", text_of(page)):
        assert (ROOT / script).is_file(), script


def test_readme_links_all_guides():
    for guide in GUIDES:
        assert f"]({name_of(guide)})" in text_of(README), guide.name


def test_pictures_are_small():
    for picture in (ROOT / "examples" / "figures").iterdir():
        assert picture.stat().st_size < 200_000, picture


def test_contributing_names_code_that_exists():
    """Files of the package, and functions as in `path/file.py`: `function` and `another`."""
    text = text_of(CONTRIBUTING)
    files = set(re.findall(r"`((?:core|model|engines|streams|results|families)/[\w/]+\.py|\w+\.py)`", text))
    assert len(files) > 20
    for file in files:
        assert (ROOT / "numpyro_rvga" / file).is_file(), file
    for folder in (
        path.parent.relative_to(ROOT / "numpyro_rvga") for path in (ROOT / "numpyro_rvga").rglob("__init__.py")
    ):
        assert folder == Path() or f"`{folder.as_posix()}/`" in text, folder
    for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?: and )?)+)", text):
        code = (ROOT / "numpyro_rvga" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b(def|class) {name}\b", code), (file, name)


@pytest.mark.parametrize(
    "algorithm", ["implicit R-VGA", "EKF", "BONG low-rank lin-hess", "BBB", "FP-incremental", "LO-FI"]
)
def test_contributing_leads_to_the_update_equation_of(algorithm):
    """The functions that the table names, or their files, say the update of q in symbols."""
    rows = [line.split("|")[1:3] for line in text_of(CONTRIBUTING).splitlines() if line.startswith("|")]
    name = rf"(^|[ ,]){re.escape(algorithm)}($|[ ,;])"
    cell = next(where for names, where in rows if re.search(name, names.strip()))
    path, functions = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?: and )?)+)", cell)[0]
    tree = ast.parse((ROOT / "numpyro_rvga" / path).read_text(encoding="utf-8"))
    named = [node for node in ast.walk(tree) if getattr(node, "name", None) in re.findall(r"\w+", functions)]
    text = "".join(ast.get_docstring(node) or "" for node in (tree, *named))
    assert re.search(r"(Lambda|Sigma|mu|m)['(].* = |gradient of E_q", text), (path, functions)


def test_options_are_all_listed():
    text = "".join(map(text_of, GUIDES))
    for option in (
        *SCHEMES,
        *EXPECTATIONS,
        *RULES,
        *PAPER_HESSIANS,
        *FAMILIES,
        *PARAMETERIZATIONS,
        *PRESETS,
        *SCHEDULES,
    ):
        assert f'`"{option}"`' in text, option


def test_public_names_are_all_listed():
    for name in numpyro_rvga.__all__:
        assert f"`{name}`" in text_of(README), name


@pytest.mark.parametrize("page", with_python([README, *GUIDES]), ids=name_of)
def test_python_runs(page, capsys):
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), names)
    if page == README:
        assert "slopes" in capsys.readouterr().out
