"""The house: rooms know only those before them, the trainer is one class, and TRL's state is the engine's business."""

import ast
import graphlib
import inspect
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from transformers import Trainer
from transformers.generation import GenerationMixin
from trl import GRPOTrainer

import lze_trl
from lze_trl import LZEGRPOTrainer
from lze_trl.trl_contract import PRIVATE


PACKAGE = Path(lze_trl.__file__).parent

# Which room, or module beside the rooms, may import which
ROOMS = {
    "version": "",
    "seeding": "",
    "files": "",
    "fingerprint": "",
    "signals": "",
    "claim": "",
    "redaction": "",
    "names": "",
    "prompt_checks": "",
    "strategies": "names",
    "settings": "memory names redaction strategies",
    "batch": "",
    "select": "batch",
    "pack": "batch",
    "memory": "batch select",
    "plan": "batch memory prompt_checks seeding select",
    "rollout": "batch memory plan seeding",
    "record": "batch files memory names redaction rollout version",
    "servers": "fingerprint redaction",
    "remote": "record",
    "rewards": "names",
    "data": "memory names prompt_checks redaction rewards",
    "evaluation": "data files names record rewards servers",
    "app": "files forecast profile record remote strategies version",
    "selfplay": "batch data evaluation memory rewards seeding settings",
    "trl_contract": "",
    "config": "memory pack plan redaction rollout select settings strategies",
    "checks": "config files memory names plan prompt_checks rollout select",
    "checkpoint": "files",
    "hub": "app checkpoint files names record redaction remote version",
    "engine": "batch checks evaluation memory names pack rewards rollout select",
    "build": "batch config memory pack plan rollout select",
    "forecast": "batch engine memory record rollout",
    "profile": "batch checkpoint claim engine files fingerprint forecast memory plan record redaction rollout seeding servers",
    "step": "batch engine memory pack plan record rollout seeding select",
    "trainer": "app build checkpoint checks claim config engine fingerprint forecast hub selfplay memory names plan profile prompt_checks record "
    "remote rollout select servers signals step trl_contract",
    "job": "app checkpoint checks claim config data evaluation files forecast hub names profile prompt_checks record redaction remote rewards "
    "rollout select selfplay settings signals strategies trainer version",
}
PURE = (
    "batch seeding select.energy select.selectors select.advantages memory.state memory.posterior memory.foresight memory.unseen "
    "plan.planners plan.stream pack.layout pack.weights rollout.controllers"
)


def modules(folder: Path = PACKAGE) -> dict[str, Path]:
    """Every module of a package by its name, without the package's own."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """The modules of their package that each of these imports: at its top, in functions, and for types."""
    graph = defaultdict(set)
    for name, path in known.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ["", *package][: len(package) + 2 - node.level][1:]
                source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
                for alias in node.names:
                    below = f"{source}.{alias.name}".strip(".")
                    graph[name].add(below if below in known else source)
        graph[name].discard(name)
    return {name: targets for name, targets in graph.items() if name}  # the package's own may name what is public


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return imports_of(modules())


def test_no_module_imports_in_a_circle(imports):
    graphlib.TopologicalSorter(imports).prepare()
    benchmarks = imports_of(modules(PACKAGE.parent / "benchmarks"))
    assert len(benchmarks) > 10
    graphlib.TopologicalSorter(benchmarks).prepare()


def test_rooms_import_only_what_they_may(imports):
    wrong = []
    for name, targets in imports.items():
        room = name.partition(".")[0]
        allowed = {room, *ROOMS[room].split()}
        wrong += [
            f"{name} imports {target or 'lze_trl'}" for target in targets if target.partition(".")[0] not in allowed
        ]
    assert not wrong


def test_every_room_is_described():
    assert {name.partition(".")[0] for name in modules() if name} == set(ROOMS)
    graphlib.TopologicalSorter({room: set(others.split()) for room, others in ROOMS.items()}).prepare()


def test_pure_rooms_import_neither_trl_nor_transformers():
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module('lze_trl.{module}')\n"
        "found = sorted({name.partition('.')[0] for name in sys.modules} & {'trl', 'transformers'})\n"
        f"if found: sys.exit(f'lze_trl.{module} imports {{found}}: move what needs them to another module')\n"
        for module in PURE.split()
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_trainer_derives_from_trl_directly():
    assert [cls for cls in LZEGRPOTrainer.__mro__ if cls.__module__.startswith("lze_trl")] == [LZEGRPOTrainer]
    assert LZEGRPOTrainer.__bases__ == (GRPOTrainer,)


def assigned(tree: ast.AST) -> set[tuple[str, str]]:
    """Attributes that are assigned or deleted, each with the source of its owner."""
    return {
        (ast.unparse(node.value), node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))
    }


def attributes_of_trl() -> set[str]:
    """What TRL and transformers assign to a trainer."""
    sources = [Path(inspect.getfile(cls)) for cls in GRPOTrainer.__mro__ if issubclass(cls, Trainer)]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    return {name for tree in trees for owner, name in assigned(tree) if owner == "self"}


def test_only_the_engine_assigns_attributes_of_trl():
    theirs = attributes_of_trl()
    assert {"_step", "use_vllm", "num_generations", "_signature_columns"} <= theirs
    wrong = []
    for name, path in modules().items():
        if name == "engine":
            continue
        for owner, attribute in assigned(ast.parse(path.read_text(encoding="utf-8"))):
            if attribute in theirs and (owner == "trainer" or (owner == "self" and name == "trainer")):
                wrong.append(f"{name}: {owner}.{attribute}")
    assert not wrong


def privates_of_trl() -> set[str]:
    """Private names of TRL's trainer and its bases, and of transformers' generation."""
    classes = [cls for cls in GRPOTrainer.__mro__ if issubclass(cls, Trainer)]
    own = {name for cls in (*classes, GenerationMixin) for name in vars(cls)}
    return {name for name in own | attributes_of_trl() if name.startswith("_") and not name.startswith("__")}


def touched(path: Path, names: set[str]) -> set[str]:
    """Which names a module defines, reads or answers: as attributes, methods, class attributes and keys."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.Constant(value=str(name)):
                found.add(name)
            case ast.ClassDef(body=body):
                assigned = [
                    b.target if isinstance(b, ast.AnnAssign) else b.targets[0]
                    for b in body
                    if isinstance(b, (ast.Assign, ast.AnnAssign))
                ]
                found |= {target.id for target in assigned if isinstance(target, ast.Name)}
    return found & names


def test_what_is_private_to_trl_stands_in_one_table():
    names = privates_of_trl()
    assert {"_step", "_generate", "_get_logits_processor", "_save_checkpoint"} <= names
    doors = {"engine", "trainer", "rollout.watch"}
    used = set().union(*(touched(modules()[name], names) for name in doors))
    assert used == set(PRIVATE)
    assert len(PRIVATE) <= 15


def test_the_core_imports_what_users_ask_for_only_then():
    program = "import sys, lze_trl.trainer\n" + (
        "sys.exit(str([name for name in sys.modules if name.startswith(tuple(f'lze_trl.{room}' for room in "
        "('selfplay', 'evaluation', 'app', 'forecast', 'hub', 'job', 'data', 'servers')))]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stderr.splitlines()[-1] == "[]", result.stdout + result.stderr  # libraries write before it


def test_no_other_room_reads_privates_of_the_trainer():
    wrong = []
    for name, path in modules().items():
        if name in ("engine", "trainer"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "trainer" and node.attr.startswith("_"):
                wrong.append(f"{name}: trainer.{node.attr}")
    assert not wrong


def test_no_two_classes_have_one_name():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules().values()]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}


LINES = {"package": 20_540, "core": 15_403, "tests": 21_479}
"""Most lines of Python, scripts and styles. It goes down."""


def test_the_house_does_not_grow():
    def lines(folder: Path) -> int:
        kinds = ("*.py", "*.html", "*.js", "*.css")
        return sum(len(path.read_text("utf-8").splitlines()) for kind in kinds for path in folder.rglob(kind))

    package, rooms = lines(PACKAGE), ("selfplay", "evaluation", "app", "job", "forecast")
    core = package - sum(lines(PACKAGE / room) for room in rooms) - len((PACKAGE / "hub.py").read_text().splitlines())
    found = {"package": package, "core": core, "tests": lines(Path(__file__).parent)}
    assert all(found[name] <= most for name, most in LINES.items()), found
