"""Runs that look like training without being one: for tests, measurements and pictures of the app."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lze_trl.batch import Batch, Table
from lze_trl.memory.state import PromptState
from lze_trl.record import GenerationRecord, Meta, TelemetryWriter
from lze_trl.record.ledger import Ledger, TokenCost
from lze_trl.record.tables import prompt_columns, row_columns


_SUBJECTS = ("algebra", "geometry", "number theory", "counting", "probability")
_TOKEN_COST = TokenCost(forward=2.0 * 1.6e6, train=6.0 * 1.6e6)


@dataclass
class SyntheticTraining:
    """
    A learner whose skill grows with the groups it is trained on.

    Each prompt has a difficulty; the chance that a completion passes is a logistic function of skill minus difficulty.

    Args:
        num_prompts (`int`): Prompts of the dataset.
        groups_per_batch (`int`): P.
        group_size (`int`): G.
        selection_ratio (`float`): ρ; 1.0 trains on every group and prunes nothing.
        seed (`int`): Seed of everything that is drawn.
        completions (`bool`): Whether completions have text.
    """

    num_prompts: int = 256
    groups_per_batch: int = 64
    group_size: int = 8
    selection_ratio: float = 0.4
    seed: int = 0
    completions: bool = True

    def __post_init__(self):
        self._rng = np.random.default_rng(self.seed)
        self._difficulty = self._rng.normal(0.0, 2.5, self.num_prompts)
        self._ids = np.random.default_rng(0).integers(-(2**63), 2**63, self.num_prompts, dtype=np.int64)
        prune = self.selection_ratio < 1.0
        self._state = PromptState(prunes=prune, capacity=self.num_prompts)
        self._skill = -0.5
        self._queue: list[int] = []
        self._pass = 0
        self._ledger = Ledger(logprob_passes=1)

    @property
    def meta(self) -> Meta:
        """What a trainer would say of the run."""
        settings = {
            "selector": "energy" if self.selection_ratio < 1 else "all",
            "selection_ratio": self.selection_ratio,
            "pruning": "refill" if self.selection_ratio < 1 else "none",
            "num_generations": self.group_size,
            "selector_kwargs.momentum_weight": 0.3,
            "seed": self.seed,
            "model_name_or_path": "synthetic",
        }
        return Meta(settings, ["accuracy_reward", "format_reward"])

    def generations(self, count: int) -> Iterator[GenerationRecord]:
        """Make the next generation batches."""
        for generation in range(count):
            yield self._generation(generation)

    def _next_prompts(self) -> np.ndarray:
        chosen: list[int] = []
        while len(chosen) < min(self.groups_per_batch, self.num_prompts):
            if not self._queue:
                pruned = self._state.pruned(self._ids)
                replays = np.flatnonzero(pruned)
                replays = self._rng.permutation(replays)[: max(1, len(replays) // 10)]
                active = np.concatenate([np.flatnonzero(~pruned), replays])
                self._ledger.visits_skipped += self.num_prompts - len(active)
                self._queue = self._rng.permutation(active).tolist()
                self._pass += 1
            index = self._queue.pop()
            if index not in chosen or self.num_prompts > self.groups_per_batch * 4:
                chosen.append(index)
        return np.unique(chosen)

    def _generation(self, generation: int) -> GenerationRecord:
        rng, size = self._rng, self.group_size
        prompts = self._next_prompts()
        num_groups = len(prompts)
        group = np.repeat(np.arange(num_groups), size)
        chance = 1.0 / (1.0 + np.exp(self._difficulty[prompts] - self._skill))  # (P,)
        passed = rng.random(num_groups * size) < chance[group]  # (B,)
        form = rng.random(num_groups * size) < 0.95
        rewards = np.stack([passed, form], axis=1).astype(np.float64)  # (B, 2)
        rollouts = Batch.of(
            prompt_ids=self._ids[prompts],
            group=group,
            outcomes=passed.astype(np.float64),
            rewards=rewards @ np.array([1.0, 0.1]),
            prompt_tokens=np.full(len(group), 24),
            completion_tokens=rng.integers(4, 64, len(group)),
        )
        groups = self._state.score_and_store(rollouts)
        selected = self._select(groups)
        self._skill += 0.02 * selected.sum() / max(num_groups * 0.4, 1) + self._rng.normal(0.0, 0.04)
        self._account(rollouts, selected)
        pruned = self._state.pruned(rollouts.prompt_ids)
        rows = row_columns(rollouts.with_rows(rewards_per_func=rewards, loss_tokens=rollouts.completion_tokens))
        texts = [_completion_text(prompts[g], passed[row]) for row, g in enumerate(group)]
        levels = np.clip(self._difficulty[prompts] + 3, 1, 5).astype(int).tolist()
        facts = [{"subject": _SUBJECTS[i % len(_SUBJECTS)], "level": n} for i, n in zip(prompts, levels, strict=True)]
        return GenerationRecord(
            step=generation,
            generation=generation,
            pass_index=self._pass,
            prompts=prompt_columns(
                groups,
                selected=selected,
                pruned=pruned,
                text=np.array([_prompt_text(index) for index in prompts], dtype=object),
                columns=np.array(facts, dtype=object),
            ),
            rows=rows | {"completion": np.array(texts if self.completions else [None] * len(texts), dtype=object)},
            ledger=self._ledger.summary(_TOKEN_COST),
        )

    def _select(self, groups: Table) -> np.ndarray:
        keep = round(self.selection_ratio * len(groups))
        if self.selection_ratio >= 1:
            return np.ones(len(groups), dtype=bool)
        ranked = np.argsort(-(groups.energies + self._rng.gumbel(0, 0.03, len(groups))))
        ranked = ranked[groups.alive[ranked]][:keep]
        selected = np.zeros(len(groups), dtype=bool)
        selected[ranked] = True
        return selected

    def _account(self, rollouts: Batch, selected: np.ndarray):
        ledger, chosen = self._ledger, np.flatnonzero(selected[rollouts.group])
        before = ledger.update_tokens
        ledger.add(rollouts.num_rows, rollouts, chosen)
        ledger.rollout_seconds += 2e-5 * float((rollouts.prompt_tokens + rollouts.completion_tokens).sum())
        ledger.update_seconds += 4e-5 * (ledger.update_tokens - before)


def _prompt_text(index: int) -> str:
    a, b = 10 + index * 37 % 90, 10 + index * 53 % 90
    subject = _SUBJECTS[index % len(_SUBJECTS)]
    return f"Problem {index} ({subject}): a shop sells {a} boxes of {b} pens each. How many pens does it sell?"


def _completion_text(index: int, passed: bool) -> str:
    answer = (10 + index * 37 % 90) * (10 + index * 53 % 90) + (0 if passed else 1 + index % 7)
    return f"Each box holds the same number, so I multiply.\nThe answer is \\boxed{{{answer}}}."


def record_synthetic_run(
    directory: str, training: SyntheticTraining, generations: int, seconds_per_generation: float = 0.0
):
    """
    Write the telemetry of a synthetic run.

    Args:
        directory (`str`): Telemetry folder, `<run>/telemetry`.
        training ([`SyntheticTraining`]): What to record.
        generations (`int`): Number of generation batches.
        seconds_per_generation (`float`, *optional*, defaults to `0.0`): Time to wait between them.
    """
    writer = TelemetryWriter(directory, training.meta)
    for record in training.generations(generations):
        record.max_steps = generations
        writer.record(record)
        reward = float(record.rows["reward"].mean())
        writer.record_step(record.step, {"reward": reward, "loss": 1.0 / (1 + record.step)})
        if seconds_per_generation:
            time.sleep(seconds_per_generation)
        elif record.generation % 64 == 63:
            writer.flush()
    writer.close()
