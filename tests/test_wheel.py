"""What users install: the package and nothing else, which needs nothing but what it names."""

import ast
import email
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import lze_trl


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    source = tmp_path_factory.mktemp("source")
    for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("lze_trl", "benchmarks", "tests", "app"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel_file):
    names = zipfile.ZipFile(wheel_file).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lze_trl"}
    kinds = ("py", "css", "html", "js", "typed")
    files = [path for kind in kinds for path in (ROOT / "lze_trl").rglob(f"*.{kind}")]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= set(names)


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_the_wheel_names_what_the_package_imports(wheel_file):
    with zipfile.ZipFile(wheel_file) as file:
        (path,) = [name for name in file.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(file.read(path))
    named = {re.match(r"[\w.-]+", line)[0].lower() for line in metadata.get_all("Requires-Dist")}
    modules = set().union(*(imported(path) for path in (ROOT / "lze_trl").rglob("*.py")))
    distributions = packages_distributions()
    modules -= {*sys.stdlib_module_names, "lze_trl"}
    unnamed = [name for name in modules if not named & {known.lower() for known in distributions.get(name, [name])}]
    assert sorted(unnamed) == []


PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
UNSAFE |= {"trust_remote_code=True", "allow_pickle=True"}


def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (lze_trl.__version__, "Apache-2.0")


def test_the_package_runs_no_code_from_data():
    for path in (ROOT / "lze_trl").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        used = {ast.unparse(part) for call in calls for part in (call.func, *call.keywords)}
        assert not (imported(path) & PICKLES or used & UNSAFE), path
