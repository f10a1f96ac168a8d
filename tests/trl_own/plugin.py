"""A plugin of pytest: each test runs once for each of some trainers, which it finds under the name `GRPOTrainer`."""

import functools
import gc
import importlib.metadata
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
import transformers
from trl import GRPOConfig, GRPOTrainer, import_utils

from agents import ImagesOnly
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer

from .stand_ins import IMAGES_ONLY


@dataclass
class NothingLeftOut(LZEGRPOConfig):
    """Settings with which our trainer trains on every group, as TRL's does."""

    strategy: str = "grpo"


SIDES = {
    "trl": (GRPOTrainer, GRPOConfig),
    "lze": (LZEGRPOTrainer, LZEGRPOConfig),
    "lze-grpo": (LZEGRPOTrainer, NothingLeftOut),
}
KINDS = BY_BOTH, BY_TRL, EXPLAINED, BY_OURS, BY_NONE, SKIPPED = (
    "passed with both",
    "passed with TRL only",
    "passed with TRL only, for a reason",
    "passed with ours only",
    "failed with both",
    "skipped with both",
)
REASONS = {
    "TestGRPOTrainer::test_prepare_input_called_with_correct_data": "it compares whole dataset rows, and ours have a "
    "column more, `lze_prompt_id`"
}
MARK = "by {}"  # in the name of a test


def pytest_addoption(parser):
    parser.addoption("--ours", default="lze", help=f"what to compare TRL's trainer with, of {', '.join(SIDES)}")


def _gone(name: str):
    """Tests of an older TRL ask for optional packages that the installed one no longer knows: those are not there."""
    if name.startswith("is_") and name.endswith("_available"):
        return lambda *args, **kwargs: False
    raise AttributeError(name)


def pytest_configure(config):
    import_utils.__getattr__ = _gone
    # The trainer itself asks for jmespath where it needs it: below transformers 5.13
    import_utils.is_jmespath_available = lambda: True
    for name in IMAGES_ONLY:
        transformers.AutoProcessor.register(getattr(transformers, name), ImagesOnly, exist_ok=True)
    config.pluginmanager.register(Comparison())


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # TRL collects garbage after each test
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)  # accelerate parses it in each training


def pytest_unconfigure():
    gc.unfreeze()


def pytest_generate_tests(metafunc):
    sides = ["trl", *metafunc.config.getoption("ours").split(",")]
    metafunc.parametrize("side", sides, indirect=True, ids=MARK.format)


@pytest.fixture(autouse=True)
def side(request, monkeypatch):
    """Give the classes of a side TRL's names."""
    trainer, config = SIDES[request.param]
    monkeypatch.setattr(request.module, "GRPOTrainer", trainer)
    monkeypatch.setattr(request.module, "GRPOConfig", config)


def kind_of(name: str, theirs: str, ours: str) -> str:
    """One of `KINDS`, by the outcomes with both trainers."""
    if theirs == ours:
        return {"passed": BY_BOTH, "failed": BY_NONE, "skipped": SKIPPED}[ours]
    if theirs == "passed":
        return EXPLAINED if name in REASONS else BY_TRL
    return BY_OURS if ours == "passed" else BY_NONE


class Comparison:
    """How each test ended, by side."""

    def __init__(self):
        self.ended: dict[str, dict[str, str]] = defaultdict(dict)
        self.reasons: dict[tuple[str, str], str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Note the outcome of a test, and why it failed or was skipped."""
        report = yield
        side = item.callspec.params["side"]
        mark = MARK.format(side)
        name = item.nodeid.partition("::")[2]
        for form in (f"[{mark}]", f"-{mark}", f"{mark}-"):
            name = name.replace(form, "")
        if report.when == "call" or report.outcome != "passed":
            self.ended[name][side] = report.outcome
        if call.excinfo is not None:
            reason = call.excinfo.exconly().partition("\n")[0]
            self.reasons.setdefault((name, side), reason)
        return report

    def kinds(self, side: str) -> dict[str, str]:
        """How each test of one side compares with that of TRL's trainer."""
        return {
            name: kind_of(name, ended["trl"], ended[side])
            for name, ended in self.ended.items()
            if ended.keys() >= {"trl", side}  # a run may be interrupted
        }

    def pytest_terminal_summary(self, terminalreporter, config):
        """Print the table, and every test that did not pass with both."""
        write = terminalreporter.write_line
        for side in config.getoption("ours").split(","):
            kinds = self.kinds(side)
            counts = Counter(kinds.values())
            terminalreporter.section(f"trl and {side}")
            for kind in KINDS:
                write(f"{counts[kind]:4d} {kind}")
            for kind in (BY_TRL, EXPLAINED, BY_OURS, BY_NONE):
                for name in (name for name in kinds if kinds[name] == kind):
                    write(f"{kind}: {name}")
                    write(f"     {self.reasons.get((name, side)) or self.reasons.get((name, 'trl'), '')}")
                    if kind == EXPLAINED:
                        write(f"     {REASONS[name]}")
            skipped = Counter(self.reasons.get((name, side), "") for name in kinds if kinds[name] == SKIPPED)
            for reason, count in skipped.most_common():
                write(f"{SKIPPED}: {count} for {reason}")

    def pytest_sessionfinish(self, session):
        """Fail if a test passes with TRL's trainer only; what fails with both is not ours."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            worse = any(BY_TRL in self.kinds(side).values() for side in session.config.getoption("ours").split(","))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if worse else pytest.ExitCode.OK
