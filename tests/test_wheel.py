"""What users install: the package and nothing else, and a package that needs nothing else."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names of the files in the wheel of this checkout."""
    source = tmp_path_factory.mktemp("source")
    for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("lze_trl", "benchmarks", "tests", "app"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_the_wheel_holds_the_package_alone(wheel):
    assert {name.partition("/")[0].partition("-")[0] for name in wheel} == {"lze_trl"}
    assert not [name for name in wheel if "bench" in name or "stress" in name or "synthetic" in name]


def test_the_wheel_holds_the_whole_package(wheel):
    files = [path for kind in ("py", "css", "html", "js", "typed") for path in (ROOT / "lze_trl").rglob(f"*.{kind}")]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= set(wheel)


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_the_package_imports_neither_benchmarks_nor_tests():
    outside = {"benchmarks", "tests", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    found = {path.relative_to(ROOT).as_posix(): imported(path) & outside for path in (ROOT / "lze_trl").rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
