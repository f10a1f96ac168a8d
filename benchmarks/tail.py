"""
What it would bring to fill the tail of a batch with first completions of the next one, on paper.

    python -m benchmarks.tail [--shapes 64x8 128x4 512x8] [--live 0.4 0.25] [--batches 200] [--seed 0]

The gate asks for one completion of every prompt and completes the groups that it goes on with. Towards its end a batch leaves places of
the engine empty. First completions of the next batch could fill them, but new weights come in between, and a group never mixes two
versions of the weights: so they could only decide, and every group that goes on would be asked for whole, one completion more. What has
begun must also have ended before the new weights come. `--live` is the share of groups that the gate goes on with; lengths, places and
seconds a step are those of the timed server ([`benchmarks.timed_server`]). *Rounds* and *streaming* are the gate as it is.
"""

import argparse
from collections import Counter

import numpy as np
from rich.console import Console

from .tables import table
from .timed_server import Timing, on_paper


def seconds(timing: Timing, prompts: int, group_size: int, live: float, batches: int, seed: int) -> dict[str, float]:
    """Return the seconds and tokens of the rollouts, × those of plain GRPO."""
    rng = np.random.default_rng(seed)
    sums: Counter[str] = Counter()
    before = None
    for _ in range(batches + 1):
        deviations = rng.normal(size=(prompts, group_size + 1)) + rng.normal(size=(prompts, 1)) / 2
        lengths = np.maximum(1, np.round(timing.median * np.exp(timing.sigma * deviations)))
        groups, rest, first = lengths[:, :group_size], lengths[:, 1:group_size], lengths[:, :1]
        chosen = np.flatnonzero(rng.random(prompts) < live)
        if before is not None:
            row = {
                "plain": on_paper(timing, groups),
                "rounds": on_paper(timing, first) + on_paper(timing, rest[chosen]),
                "streaming": on_paper(timing, first, {i: rest[i] for i in chosen}),
                "filled": on_paper(timing, [*before, *first]),
                "plain tokens": groups.sum(),
                "tokens": first.sum() + rest[chosen].sum(),
                "filled tokens": first.sum() + before.sum(),
            }
            sums.update(row)
        before = lengths[chosen, 1:]  # whole groups, by the weights that have come
    return {name: value / sums["plain tokens" if "tokens" in name else "plain"] for name, value in sums.items()}


def main():
    """Run `python -m benchmarks.tail`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tail", description=__doc__.splitlines()[1])
    parser.add_argument("--shapes", nargs="+", default=["64x8", "128x4", "512x8"])
    parser.add_argument("--live", nargs="+", type=float, default=[0.4, 0.25])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    columns = ["rounds", "streaming", "filled", "tokens", "filled tokens"]
    rows = []
    for live in given.live:
        for shape in given.shapes:
            prompts, group_size = map(int, shape.split("x"))
            for sigma in (0.5, 1.0):
                found = seconds(Timing(sigma=sigma), prompts, group_size, live, given.batches, given.seed)
                cells = [f"{found[name]:.2f}" for name in columns]
                rows.append([f"{prompts} × {group_size}", f"{live:.0%}", f"{sigma}", *cells])
    titles = ["gate in rounds, seconds ×", "streaming", "tail filled", "tokens ×", "tail filled"]
    Console().print(table(["prompts × G", "goes on with", "σ", *titles], rows), soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
