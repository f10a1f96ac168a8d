"""Metrics of a generation batch."""

import numpy as np

from ..batch import Table
from ..memory.state import PromptState


def batch_metrics(groups: Table, chosen: np.ndarray, state: PromptState, pass_index: int) -> dict[str, float]:
    """Metrics of a generation batch, logged under `lze/`: its groups, those chosen, and the state after the visit."""
    unscored = np.isnan(groups.pass_rates)
    metrics = {
        "pass_rate": np.nan if unscored.all() else np.nanmean(groups.pass_rates),
        "energy": groups.energies.mean(),
        "groups": len(groups),
        "group_size": groups.sizes.mean(),
        "selected_share": chosen.mean(),
        "dead_share": (~groups.alive).mean(),
        "solved_share": groups.solved.mean(),
        "replayed_share": groups.replayed.mean(),
        "forgotten": groups.forgotten.sum(),
        **state.metrics(),
        "pass": pass_index,
    }
    if chosen.any():
        scored = groups.pass_rates[chosen & ~unscored]
        metrics["selected_pass_rate"] = scored.mean() if scored.size else np.nan
    return {name: float(value) for name, value in metrics.items()}
