"""Sorting results into sections: sets of runs that can be compared."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .comparison import Curve, Setting, best_rates, read_curve, tuning
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
    Runs with everything equal except for strategy, seed and learning rate.

    Attributes:
        task (`str`): Name of the task.
        protocol (`str`): Hash of all that is equal, see [`RunSettings`].
        every (`int`): Steps between evaluations, of the run with the fewest.
        main (`list[dict]`): Results at the learning rate of the comparison; none if only the tuning was made.
        tuning (`list[dict]`): Results of the tuning, on seeds and prompts of its own.
        tuned (`list[dict]`): Results at the rate that the tuning has found, on the seeds of `main`.
    """

    task: str
    protocol: str
    every: int = 1
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
    def steps(self) -> int:
        """Optimizer steps of the baseline."""
        return self.results[0]["settings"]["steps"]

    @property
    def title(self) -> str:
        """Title of the task, and precision."""
        precision = "bfloat16" if self.results[0]["settings"]["training"]["bf16"] else "float32"
        return f"{TASKS[self.task].title}, {precision}"

    @property
    def rates(self) -> dict[str, float]:
        """Tuned learning rate of each strategy."""
        return best_rates(self.settings[1])

    @property
    def settings(self) -> tuple[float, list[Setting]]:
        """What the tuning has found, see [`~comparison.tuning`]."""
        return tuning(self.curves("tuning"), self.steps, BASELINE)

    def curves(self, of: str = "main") -> list[Curve]:
        """Return the curves of the `main`, `tuning` or `tuned` results."""
        return [read_curve(result, self.every) for result in getattr(self, of)]


def sort_results(results: Sequence[Result]) -> tuple[list[Section], dict[str, list[Result]]]:
    """
    Return the sections of results, the one with the most runs first.

    A strategy is what it is defined as now: results of earlier definitions are left out. Of runs that differ in nothing but
    how far they may go on, or how often they were evaluated, the longest, then the one evaluated the most often counts.

    Args:
        results (`Sequence[dict]`): Contents of result files.

    Returns:
        `tuple[list[Section], dict[str, list[dict]]]`: The sections that have a baseline or a tuning, and the results that are
        in none, by the reason.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    left_out: dict[str, list[Result]] = {}
    for result in results:
        settings = RunSettings.from_dict(result["settings"])
        known = settings.task in TASKS and settings.strategy in STRATEGIES
        if known and settings.overrides == STRATEGIES[settings.strategy].overrides:
            # Evaluations change nothing of a run
            alike = replace(settings, eval_every=1).protocol
            groups.setdefault((settings.task, alike), []).append(result)
        else:
            left_out.setdefault(REDEFINED, []).append(result)
    sections = []
    for group in groups.values():
        section = _section(_longest(group))
        if not any(result["settings"]["strategy"] == BASELINE for result in section.main):
            if section.main:
                left_out.setdefault(NO_BASELINE, []).extend(section.main)
            section.main, section.tuned = [], []
        if section.results:
            sections.append(section)
    return sorted(sections, key=lambda section: -len(section.main)), left_out


def _longest(results: Sequence[Result]) -> list[Result]:
    chosen: dict[tuple, Result] = {}
    for result in sorted(results, key=lambda r: (r["settings"]["stretch"], -r["settings"]["eval_every"])):
        settings = result["settings"]
        chosen[settings["strategy"], settings["seed"], settings["learning_rate"], settings["held_out"]] = result
    return list(chosen.values())


def _section(results: Sequence[Result]) -> Section:
    seldom = RunSettings.from_dict(max((r["settings"] for r in results), key=lambda settings: settings["eval_every"]))
    section = Section(seldom.task, seldom.protocol, seldom.eval_every)
    on_test = [result for result in results if result["settings"]["held_out"] == "test"]
    # The rate of most runs of the baseline; the task's own may have changed since
    bases = [result for result in on_test if result["settings"]["strategy"] == BASELINE]
    counts = Counter(result["settings"]["learning_rate"] for result in bases or on_test)
    rate = max(counts, key=lambda rate: (counts[rate], rate == TASKS[section.task].learning_rate), default=None)
    section.main = [result for result in on_test if result["settings"]["learning_rate"] == rate]
    section.tuning = [result for result in results if result["settings"]["held_out"] == "validation"]
    rates = section.rates if section.tuning else {}
    section.tuned = [
        result
        for result in on_test
        if rates.get(result["settings"]["strategy"]) == result["settings"]["learning_rate"]
    ]
    return section
