"""What a release says about itself: version, citation, changelog, and what SECURITY.md promises."""

import ast
from pathlib import Path

import pytest
import yaml

import lze_trl


ROOT = Path(__file__).parents[1]
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "yaml.unsafe_load", "yaml.full_load"}
UNSAFE_NAMES = {"yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader"}  # `yaml.load` takes one of them, or a safe one


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def unsafe(source: str) -> set[str]:
    """Imports and calls of a module that can run code from data."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            found.add(node.module)
        elif isinstance(node, ast.ClassDef):
            found |= {ast.unparse(base) for base in node.bases} & UNSAFE_NAMES
        elif isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & UNSAFE_CALLS
            risky = {"trust_remote_code", "allow_pickle"}
            found |= {
                ast.unparse(value) for value in (*node.args, *(word.value for word in node.keywords))
            } & UNSAFE_NAMES
            found |= {word.arg for word in node.keywords if word.arg in risky and ast.unparse(word.value) == "True"}
    return found


def test_the_citation_names_the_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == lze_trl.__version__
    assert citation["license"] == "Apache-2.0"


def test_every_paper_of_a_strategy_is_cited():
    cited = {reference["url"] for reference in yaml.safe_load(read("CITATION.cff"))["references"]}
    named = {
        word for word in read("docs/choosing.md").replace("(", " ").replace(")", " ").split() if "arxiv.org" in word
    }
    assert len(named) >= 5
    assert named <= cited


def test_the_changelog_opens_with_what_is_unreleased():
    headings = [line for line in read("CHANGELOG.md").splitlines() if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"


@pytest.mark.parametrize("path", sorted((ROOT / "lze_trl").rglob("*.py")), ids=lambda path: path.stem)
def test_the_package_runs_no_code_from_data(path):
    assert not unsafe(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("torch.load(path)", "torch.load"),
        ("eval('1')", "eval"),
        ("yaml.load(text, yaml.Loader)", "yaml.Loader"),
        ("class Mine(yaml.UnsafeLoader): pass", "yaml.UnsafeLoader"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
    ],
)
def test_the_search_for_unsafe_code_finds_it(source, found):
    assert unsafe(source) == {found}
