"""The strategies that are compared: names, and what each sets in the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .settings import BenchError, unknown_name


BASELINE = "grpo"
"""Name of the strategy that all others are compared with."""


@dataclass(frozen=True)
class Strategy:
    """
    A strategy.

    Attributes:
        title (`str`): What tables and plots call it.
        overrides (`dict`):
            Fields of [`LZEGRPOConfig`]; `oracle`, see [`Oracle`]; `prompts`, how many times as many are in a step as the task says;
            `alone`, the gate's rule with vLLM servers, see [`Threshold`]; and `profile`, see [`~benchmarks.profiled`]: "state" to begin
            with it, "kept" to train on the prompts that it keeps.
        trl (`bool`): Whether plain TRL runs it; its overrides are then fields of [`~trl.GRPOConfig`], and `prompts`.
    """

    title: str
    overrides: dict[str, Any] = field(default_factory=dict)
    trl: bool = False


def _selecting(selector: str, **overrides: Any) -> dict[str, Any]:
    """A strategy that only selects: every prompt gets its rollouts."""
    return {"selector": selector, "pruning": "none", **overrides}


STRATEGIES: dict[str, Strategy] = {
    BASELINE: Strategy("GRPO (TRL)", trl=True),
    # Plain TRL at other shapes: fewer or more prompts a step, or as many completions of twice as many prompts
    "grpo_quarter": Strategy("GRPO (TRL), 1/4 of the prompts", {"prompts": 0.25}, trl=True),
    "grpo_half": Strategy("GRPO (TRL), half the prompts", {"prompts": 0.5}, trl=True),
    "grpo_three_quarters": Strategy("GRPO (TRL), 3/4 of the prompts", {"prompts": 0.75}, trl=True),
    "grpo_double": Strategy("GRPO (TRL), twice the prompts", {"prompts": 2}, trl=True),
    "grpo_g4": Strategy("GRPO (TRL), G = 4", {"num_generations": 4}, trl=True),
    "all": Strategy("all groups", _selecting("all", selection_ratio=1.0)),
    # The default of the package
    "exact": Strategy("exact: live groups, loss over all rows", _selecting("zero_variance", loss_normalizer="all")),
    # Its updates are plain TRL's, so these show for less what plain TRL does with fewer prompts a step
    "exact_quarter": Strategy(
        "exact, 1/4 of the prompts", _selecting("zero_variance", loss_normalizer="all", prompts=0.25)
    ),
    "exact_half": Strategy("exact, half the prompts", _selecting("zero_variance", loss_normalizer="all", prompts=0.5)),
    # The same completions, of twice as many prompts
    "exact_g4": Strategy("exact, G = 4", _selecting("zero_variance", loss_normalizer="all", num_generations=4)),
    "gate_g4": Strategy(
        "gate, G = 4", _selecting("zero_variance", loss_normalizer="all", num_generations=4, controller="gate")
    ),
    "random": Strategy("random 40 %", _selecting("random", selection_ratio=0.4)),
    "zero_variance": Strategy("zero-variance filter", _selecting("zero_variance")),
    "variance": Strategy("variance, 40 %", _selecting("variance", selection_ratio=0.4)),
    "lze": Strategy("LZE, 40 %", _selecting("energy", selection_ratio=0.4)),
    # Weighs each row as full data does: a gain of `lze` that is gone here was a larger step, not a better choice
    "lze_all_rows": Strategy(
        "LZE, 40 %, loss over all rows", _selecting("energy", selection_ratio=0.4, loss_normalizer="all")
    ),
    # As published: a prompt that was solved twice in a row sits out, its slot with it; one in ten is re-checked in each pass
    "lze_pruned": Strategy("LZE + pruning", _selecting("energy", selection_ratio=0.4, pruning="skip")),
    # Their slots go to other prompts
    "lze_refilled": Strategy("LZE + pruning, refilled", _selecting("energy", selection_ratio=0.4, pruning="refill")),
    # As published: 8 completions a round, at most 4 rounds, 4 kept of each prompt, all prompts trained on
    "reinforce_ada": Strategy(
        "Reinforce-Ada, balanced",
        _selecting(
            "all",
            selection_ratio=1.0,
            controller="reinforce_ada_balanced",
            controller_kwargs={"round_size": 8, "max_rounds": 4, "kept": 4},
        ),
    ),
    # As published: further prompts until the batch is full of live groups
    "dapo": Strategy(
        "DAPO refill",
        _selecting("zero_variance", selection_ratio=1.0, controller="dynamic", controller_kwargs={"max_rounds": 10}),
    ),
    # As the package has it: prompts without a signal are left out at random, and their slots filled with live groups
    "greso": Strategy("GRESO", {"strategy": "greso"}),
    # Knows the true pass rates: what foresight could save at best
    "oracle": Strategy("oracle, loss over all rows", _selecting("zero_variance", loss_normalizer="all", oracle=0.9)),
    "oracle_x4": Strategy(
        "oracle, 4 × the prompts", _selecting("zero_variance", loss_normalizer="all", oracle=0.9, prompts=4)
    ),
    # As the package has it: the best prompts of four batches, and further ones for the groups that it stops
    "gate_default": Strategy("`strategy: gate`", {"strategy": "gate"}),
    **{
        f"gate_default_{hold}": Strategy(
            f"`strategy: gate`, `hold: {hold}`", {"strategy": "gate", "controller_kwargs": {"hold": hold}}
        )
        for hold in ("completions", "nothing")
    },
    # Its groups go on by a threshold from the batches before, as with vLLM servers, instead of by a ranking of the batch
    "gate_default_alone": Strategy(
        "`strategy: gate`, by the rule with vLLM servers", {"strategy": "gate", "alone": True}
    ),
    "gate_default_g4": Strategy("`strategy: gate`, G = 4", {"strategy": "gate", "num_generations": 4}),
    "gate_default_columns": Strategy("`strategy: gate`, `report_by`", {"strategy": "gate", "report_by": ["kind"]}),
    # The same without what goes beyond a batch: one completion of each prompt, the others where the group is likely to be alive
    "gate": Strategy(
        "one-completion gate, loss over all rows",
        _selecting("zero_variance", controller="gate", loss_normalizer="all"),
    ),
    # The places of the groups that it stops go to further prompts
    **{
        f"gate_{hold}": Strategy(
            f"gate that holds {what}",
            _selecting("zero_variance", controller="gate", loss_normalizer="all", controller_kwargs={"hold": hold}),
        )
        for hold, what in (("signal", "the signal"), ("completions", "the completions"))
    },
    # By the rule with vLLM servers
    "gate_alone": Strategy(
        "one-completion gate, each group by itself",
        _selecting("zero_variance", controller="gate", loss_normalizer="all", alone=True),
    ),
    "gate_pruned": Strategy(
        "one-completion gate + pruning",
        _selecting("zero_variance", controller="gate", loss_normalizer="all", pruning="skip"),
    ),
    "gate_g4_alone": Strategy(
        "gate, G = 4, each group by itself",
        _selecting("zero_variance", loss_normalizer="all", num_generations=4, controller="gate", alone=True),
    ),
    "gate_g4_x3": Strategy(
        "gate, G = 4, 3 × the prompts",
        _selecting("zero_variance", loss_normalizer="all", num_generations=4, controller="gate", prompts=3),
    ),
}
# What `python -m benchmarks.profiled` compares: without a profile, and with it
PROFILED = {name: f"{name}_profiled" for name in ("gate", "gate_default", "lze_refilled", "greso")}
STRATEGIES["grpo_kept"] = Strategy("GRPO (TRL), on the prompts that a profile keeps", {"profile": "kept"}, trl=True)
STRATEGIES |= {
    end: Strategy(f"{STRATEGIES[name].title}, from a profile", STRATEGIES[name].overrides | {"profile": "state"})
    for name, end in PROFILED.items()
}
BASIC_GATE = {"strategy": "gate", "window": 1, "controller_kwargs": {"hold": "nothing"}}
"""Settings of the basic gate, the arm `gate`: a batch keeps to its prompts."""
NOT_SETTINGS = ("oracle", "prompts", "alone", "profile")
"""Overrides that are no fields of [`LZEGRPOConfig`]."""

QUICK = (BASELINE, "exact", "lze", "gate")
"""The strategies of `--quick`."""


def chosen_strategies(names: Sequence[str]) -> list[str]:
    """
    Check names of strategies.

    Returns:
        `list[str]`: Each of them once, in the order of `STRATEGIES`, and the baseline, which every table needs.

    Raises:
        BenchError: One of them does not exist.
    """
    if not names:
        raise BenchError(f"No strategy is given. Known are {', '.join(STRATEGIES)}.")
    for name in names:
        if name not in STRATEGIES:
            raise unknown_name("strategy", name, STRATEGIES)
    return [name for name in STRATEGIES if name in names or name == BASELINE]
