"""Sorting results into sections: sets of runs that can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .comparison import Curve, best_rates, read_curve
from .settings import RunSettings
from .strategies import BASELINE, STRATEGIES
from .tasks import TASKS


Result = dict[str, Any]
REDEFINED = "their strategies were defined in another way"
NO_BASELINE = "there is no baseline to compare with"
"""Why results are left out."""


@dataclass
class Section:
    """
    Runs with everything equal but strategy, seed and learning rate.

    Attributes:
        task (`str`): Name of the task.
        protocol (`str`): Hash of all that is equal, see [`RunSettings`].
        main (`list[dict]`): Results at the learning rate of the task.
        tuning (`list[dict]`): Results of the tuning, on seeds and prompts of its own.
        tuned (`list[dict]`): Results at the rate that the tuning has found, on the seeds of `main`.
    """

    task: str
    protocol: str
    main: list[Result] = field(default_factory=list)
    tuning: list[Result] = field(default_factory=list)
    tuned: list[Result] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name for files."""
        return f"{self.task}-{self.protocol}"

    @property
    def results(self) -> list[Result]:
        """Every result, once."""
        return list({r["key"]: r for r in (*self.main, *self.tuning, *self.tuned)}.values())

    @property
    def title(self) -> str:
        """Title of the task."""
        return TASKS[self.task].title

    @property
    def rates(self) -> dict[str, float]:
        """Tuned learning rate of each strategy."""
        return best_rates(self.tuning)

    def curves(self, accuracy: str = "held_out") -> list[Curve]:
        """Curves of the main runs."""
        return [read_curve(result, accuracy) for result in self.main]


def sort_results(results: Sequence[Result]) -> tuple[list[Section], dict[str, list[Result]]]:
    """
    Sections of results, the one with the most runs first.

    A strategy is what it is defined as now: results of earlier definitions are left out. Of runs that differ in nothing but
    how far they may go on, the longest counts.

    Args:
        results (`Sequence[dict]`): Contents of result files.

    Returns:
        `tuple[list[Section], dict[str, list[dict]]]`: The sections that have a baseline, and the results that are in none, by
        the reason.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    left_out: dict[str, list[Result]] = {}
    for result in results:
        settings = RunSettings.from_dict(result["settings"])
        known = settings.task in TASKS and settings.strategy in STRATEGIES
        if known and settings.overrides == STRATEGIES[settings.strategy].overrides:
            groups.setdefault((settings.task, settings.protocol), []).append(result)
        else:
            left_out.setdefault(REDEFINED, []).append(result)
    sections = []
    for (task, protocol), group in groups.items():
        section = _section(task, protocol, _longest(group))
        if any(result["settings"]["strategy"] == BASELINE for result in section.main):
            sections.append(section)
        else:
            left_out.setdefault(NO_BASELINE, []).extend(group)
    return sorted(sections, key=lambda section: -len(section.main)), left_out


def _longest(results: Sequence[Result]) -> list[Result]:
    chosen: dict[tuple, Result] = {}
    for result in sorted(results, key=lambda result: result["settings"]["stretch"]):
        settings = result["settings"]
        chosen[settings["strategy"], settings["seed"], settings["learning_rate"], settings["held_out"]] = result
    return list(chosen.values())


def _section(task: str, protocol: str, results: Sequence[Result]) -> Section:
    section = Section(task, protocol)
    on_test = [result for result in results if result["settings"]["held_out"] == "test"]
    default = TASKS[section.task].learning_rate
    section.main = [result for result in on_test if result["settings"]["learning_rate"] == default]
    section.tuning = [result for result in results if result["settings"]["held_out"] == "validation"]
    rates = section.rates
    section.tuned = [
        result
        for result in on_test
        if rates.get(result["settings"]["strategy"]) == result["settings"]["learning_rate"]
    ]
    return section
