"""What a release says about itself, and what SECURITY.md promises."""

import ast
from pathlib import Path

import pytest
import yaml

import lze_trl


ROOT = Path(__file__).parents[1]
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
UNSAFE_FLAGS = {"trust_remote_code", "allow_pickle"}


def unsafe(source: str) -> set[str]:
    """Imports and calls of a module that can run code from data."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            found.add(node.module)
        elif isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & UNSAFE_CALLS
            found |= {
                word.arg for word in node.keywords if word.arg in UNSAFE_FLAGS and ast.unparse(word.value) == "True"
            }
    return found


def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (lze_trl.__version__, "Apache-2.0")


def test_the_package_runs_no_code_from_data():
    paths = sorted((ROOT / "lze_trl").rglob("*.py"))
    found = {str(path): unsafe(path.read_text(encoding="utf-8")) for path in paths}
    assert paths and not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("torch.load(path)", "torch.load"),
        ("yaml.load(text, Mine)", "yaml.load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
    ],
)
def test_the_search_for_unsafe_code_finds_it(source, found):
    assert unsafe(source) == {found}
