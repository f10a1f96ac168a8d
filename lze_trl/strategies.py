"""Strategies: what one name sets in the configuration. `docs/choosing.md` says where each was published."""

from typing import Any

from .names import near


MOVED = {
    **{
        name: ("selector_kwargs", name)
        for name in ("gumbel_scale", "difficulty_floor", "momentum_weight", "ema_decay")
    },
    "pruning_streak": ("planner_kwargs", "streak"),
    "replay_ratio": ("planner_kwargs", "replay_ratio"),
    **{f"greso_{name}": ("planner_kwargs", name) for name in ("exploration", "target", "step")},
    "round_size": ("controller_kwargs", "round_size"),
    "max_rounds": ("controller_kwargs", "max_rounds"),
    "kept_completions": ("controller_kwargs", "kept"),
    "gate_explore": ("controller_kwargs", "explore"),
    **{
        f"vllm_{name}": ("vllm_server_kwargs", name)
        for name in ("sync_dir", "sync_tolerance", "max_concurrent_requests", "request_timeout", "recovery_timeout")
    },
    "self_instruct": ("self_play", "instruct"),
    **{
        f"instruct_{name}": ("self_play", name)
        for name in (
            *("template", "examples", "own", "requests", "temperature", "top_p", "max_tokens"),
            *("presence_penalty", "overlap", "max_rounds", "stock", "reuse"),
        )
    },
}
"""Settings of earlier versions that are now in a block, and their name there."""

REMOVED: dict[str, str] = {
    **{name: f"Write it as `{new}` in `{block}`." for name, (block, new) in MOVED.items()},
    "replay_ratio": "Write it as `replay_ratio` in `planner_kwargs`, or, for the gate, as `recheck` in `controller_kwargs`.",
    "pruning_policy": "Write `planner`.",
    "selection_warmup": "Leave it out: every group is eligible at a `selection_ratio` of 1.0.",
    "selection_ramp": "Leave it out, and set `selection_ratio` alone.",
    **dict.fromkeys(
        ("rollout_budget", "allocation_temperature", "min_rollouts", "max_rollouts", "young_rollouts"),
        "Leave it out: `controller: allocation` is gone.",
    ),
    "instruct_exemplars": "Leave it out: its own exemplars are drawn alike.",
    "instruct_refuse_overlap": "Leave it out: no new problem may resemble an evaluation problem.",
    **dict.fromkeys(
        ("dataset_split", "dataset_config", "eval_dataset_split", "eval_dataset_config"),
        "Write it behind the dataset: `org/name?config=…&split=…`.",
    ),
    "advantage_statistics": "Leave it out: groups for which the vote abstains count in no statistics.",
    "label_confidence": "Leave it out: energies are those of the votes as they are.",
    "surplus_max_age": "Leave it out: live groups that an update has no room for are dropped and counted.",
    "micro_step_cost": "Leave it out. `max_tokens_per_micro_batch` bounds micro-batches.",
}
"""Settings of earlier versions, and what to write instead."""

DEFAULT = "exact"
"""The strategy of a configuration that names none."""

_EVERY_GROUP = {"selector": "all", "selection_ratio": 1.0, "pruning": "none"}
_LIVE_GROUPS = {"selector": "zero_variance", "selection_ratio": 1.0}

BASE: dict[str, Any] = {
    "selector": "energy",
    "selection_ratio": 0.4,
    "loss_normalizer": "selected",
    "planner": "solved",
    "controller": "uniform",
    "scale_rewards": "group",
    "deduplicate": True,
}
"""What a strategy has unless it says otherwise: the published method."""

STRATEGIES: dict[str, dict[str, Any]] = {
    # the updates of plain GRPO, without computing the groups that have no gradient
    DEFAULT: {"selector": "zero_variance", "loss_normalizer": "all", "deduplicate": False},
    # one completion of each prompt; the others where the group is likely to be alive
    "gate": {"selector": "zero_variance", "loss_normalizer": "all", "pruning": "none", "controller": "gate"},
    # the 40 % of the groups with the highest energy; the slots of solved prompts go to others
    "lze": {},
    # every group, in TRL's micro-batches: plain TRL
    "grpo": _EVERY_GROUP | {"packing": False, "deduplicate": False},
    # further prompts until the batch is full of live groups
    "dapo": _LIVE_GROUPS | {"pruning": "none", "controller": "dynamic", "controller_kwargs": {"max_rounds": 10}},
    # rounds of 8 until a prompt has 2 passes and 2 fails, 4 kept
    "reinforce_ada": _EVERY_GROUP
    | {
        "controller": "reinforce_ada_balanced",
        "controller_kwargs": {"round_size": 8, "max_rounds": 4, "kept": 4},
        "pass_threshold": 0.7,
        "scale_rewards": "none",
    },
    # prompts without a signal are left out at random, and their slots filled with live groups
    "greso": _LIVE_GROUPS | {"planner": "greso", "controller": "dynamic"},
}
"""Fields of [`LZEGRPOConfig`] by the name of a strategy; the others are those of `BASE`."""

REMOVED_STRATEGIES = {
    "zero_variance": "`strategy: exact` with `loss_normalizer: selected` and `pruning: none`",
    "random": "`strategy: lze` with `selector: random` and `pruning: none`",
    "variance": "`strategy: lze` with `selector: variance` and `pruning: none`",
    "reinforce_ada_positive": "`strategy: reinforce_ada` with `controller: reinforce_ada_positive`",
    "lze_reinforce_ada": "`strategy: reinforce_ada` with `selector: energy`, `selection_ratio: 0.4` and `pruning: refill`",
    "lze_dynamic": "`strategy: lze` with `controller: dynamic`",
}
"""Strategies of earlier versions, and what to write instead."""


def settings_of(name: str) -> dict[str, Any]:
    """All settings of a strategy, those of `BASE` included; a `ValueError` lists the known names."""
    if name in REMOVED_STRATEGIES:
        raise ValueError(f"There is no `strategy` {name!r} any more. Write {REMOVED_STRATEGIES[name]}.")
    if name not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {list(STRATEGIES)}, got {name!r}.{near(str(name), STRATEGIES)}")
    return BASE | STRATEGIES[name]
