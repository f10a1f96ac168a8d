"""Advice while a training goes on: what keeps its groups from teaching, and which setting would help."""

from collections import deque
from typing import Any

import numpy as np

from ..batch import Batch, differ
from ..memory.threshold import best_yield
from .causes import CAUSES


PATIENCE = 50
"""Generation batches over which a cause must have held."""

_FEW = 10  # are enough where every group was dead
_OF_GROUPS = 0.2  # share of the groups that one cause must have killed
_MOST = 0.5  # share of rows, or groups, from which a sentence is due
_WORTH = 0.9  # price below which another strategy is named
_CURES = {
    "unscored": "Check that answers are parsed, and that the reward functions get the dataset columns that they read.",
    "weights": "Check `reward_weights`: they are 0 for what differs, or cancel it.",
    "solved": "Use harder prompts, or let `strategy: lze` skip solved ones.",
    "constant": "Check the reward: it does not depend on the completion.",
    "cut_off": "Raise `max_completion_length`, or ask for shorter answers.",
    "same_text": "Raise `temperature`.",
    "hopeless": "Use easier prompts or a warm start, or raise `num_generations`.",
    "equal": "Use a reward with more steps, or raise `num_generations`.",
}


class Advice:
    """
    Sentences on the latest generation batches, at most one a cause, and only where it has held for [`PATIENCE`] batches, or
    where every group of ten batches or more was dead.

    Numbers of each batch are kept, a few dozen, so that a resumed run says what an uninterrupted one says.
    """

    def __init__(self, args: Any, reward_names: list[str]):
        self.args = args
        self.reward_names = reward_names
        self.left_out = ""  # a sentence on prompts that are too long
        self._recent: deque[np.ndarray] = deque(maxlen=PATIENCE)

    @property
    def _names(self) -> list[str]:
        of_funcs = [f"{kind}.{i}" for kind in ("low", "high", "without") for i in range(len(self.reward_names))]
        return [*CAUSES, "dead", "cut_off_rows", "failed", "rate", "price", "blind", *of_funcs]

    def see(self, batch: Batch, causes: np.ndarray, forecasts: np.ndarray, learning_rate: float):
        """
        Enter a generation batch that was scored. `causes` are those of [`~lze_trl.record.causes.causes`], and `forecasts` the
        probabilities of being alive that were known before it; both of shape `(P,)`.
        """
        rewards, group, count = batch.rewards_per_func, batch.group, batch.num_groups
        rows = batch.rows.cut_off if "cut_off" in batch.rows else np.zeros(1)
        known = [column[~np.isnan(column)] for column in rewards.T]
        others = [np.nansum(np.delete(rewards, i, axis=1), axis=1) for i in range(rewards.shape[1])]
        drawn = causes != "stopped"
        if not drawn.any():
            return
        whole = causes[drawn]
        numbers = {
            **{cause: np.mean(whole == cause) for cause in CAUSES},
            "dead": np.mean(whole != ""),
            "cut_off_rows": rows.mean(),
            "failed": batch.failed.mean() if "failed" in batch.rows else 0.0,
            "rate": learning_rate,
            "price": self._price(batch, forecasts),
            "blind": np.isnan(batch.logprobs).all(),
            **{f"low.{i}": column.min(initial=np.inf) for i, column in enumerate(known)},
            **{f"high.{i}": column.max(initial=-np.inf) for i, column in enumerate(known)},
            **{f"without.{i}": np.mean(~differ(column, group, count)[drawn]) for i, column in enumerate(others)},
        }
        self._recent.append(np.array([numbers[name] for name in self._names], dtype=np.float64))

    def _price(self, batch: Batch, forecasts: np.ndarray) -> float:
        """
        Completions for each live group over those of this batch, had the groups been chosen by what was remembered of them. A gate
        also sees their first completions, so it saves more; 1 where it would save nothing, NaN where a controller chose already.
        """
        if self.args.controller != "uniform" or not batch.alive.any():
            return np.nan
        others = self.args.num_generations - 1
        goes_on = forecasts >= others * best_yield(forecasts, others)
        kept = batch.alive[goes_on].sum()
        drawn = batch.num_groups + others * goes_on.sum()
        return min(1.0, drawn / kept * batch.alive.sum() / batch.num_rows) if kept else 1.0

    def lines(self, ended: bool = False) -> dict[str, str]:
        """Sentences by their cause. Once a run has `ended`, its batches are enough even if they are few."""
        of_data = {"left_out": self.left_out} if self.left_out else {}
        if not self._recent:
            return of_data
        table = dict(zip(self._names, np.stack(self._recent, axis=1), strict=True))
        flat = len(self._recent) >= _FEW and (table["dead"] == 1.0).all()
        if not (ended or flat or len(self._recent) == PATIENCE):
            return of_data
        batches = f"{len(self._recent)} generation batches" if len(self._recent) > 1 else "generation batch"
        said = self._of_groups(table, batches) | self._of_rewards(table, batches) | self._of_settings(table, batches)
        return of_data | said

    def _of_groups(self, table: dict[str, np.ndarray], batches: str) -> dict[str, str]:
        said, dead, limit = {}, table["dead"].mean(), self.args.max_completion_length
        # Without one, transformers' `generate` ends after 20 tokens
        at_limit, higher = ("", "") if limit is None else (f" at {limit} tokens", f": {2 * limit}")
        for cause, what in CAUSES.items():
            share = table[cause].mean()
            if dead >= _MOST and share >= _OF_GROUPS:
                at = at_limit if cause == "cut_off" else ""
                skips = self.args.strategy == "lze" or self.args.pruning in ("skip", "refill")
                cure = "Use harder prompts." if cause == "solved" and skips else _CURES[cause]
                said[cause] = (
                    f"{dead:.0%} of the groups of the last {batches} were dead, {share:.0%} with this cause: {what}{at}. {cure}"
                )
        rows = table["cut_off_rows"].mean()
        if rows >= _MOST and "cut_off" not in said:
            said["cut_off"] = (
                f"{rows:.0%} of the completions of the last {batches} were cut off{at_limit}. Set "
                f"`max_completion_length{higher}`, or ask for shorter answers."
            )
        return said

    def _of_rewards(self, table: dict[str, np.ndarray], batches: str) -> dict[str, str]:
        if len(self.reward_names) < 2:
            return {}
        said, dead = {}, table["dead"].mean()
        for i, name in enumerate(self.reward_names):
            low, high, without = table[f"low.{i}"].min(), table[f"high.{i}"].max(), table[f"without.{i}"].mean()
            if low > high:
                said[f"reward.{i}"] = (
                    f"The reward `{name}` was None for every completion of the last {batches}: its format was never parsed, or it "
                    "lacks a dataset column."
                )
            elif low == high:
                said[f"reward.{i}"] = (
                    f"The reward `{name}` was {low:g} for every completion of the last {batches}: what it asks for was never, or "
                    "always, met. Show the format in the prompt, or leave the reward out."
                )
            elif dead <= 1.0 - _MOST and without - dead >= _MOST:
                said[f"shaping.{i}"] = (
                    f"{without - dead:.0%} of the groups of the last {batches} were alive only because `{name}` differed within "
                    "them. Give it the weight 0 in `reward_weights`, or set `alive: outcome` with `pass_reward`, unless it is what you want to train."
                )
        return said

    def _of_settings(self, table: dict[str, np.ndarray], batches: str) -> dict[str, str]:
        said, prices = {}, table["price"][~np.isnan(table["price"])]
        if not table["rate"].any():
            said["learning_rate"] = (
                f"The learning rate was 0 in each of the last {batches}: no weight changes. Set `learning_rate`, and check the "
                "warmup and the scheduler."
            )
        if table["failed"].any():
            said["failed"] = (
                f"{table['failed'].mean():.1%} of the completions of the last {batches} failed, and were left out. The log names their prompts "
                "and says why: leave these out of the training set, or mend the server or the environment."
            )
        if self.args.controller == "gate" and table["blind"].all():
            said["logprobs"] = (
                f"The gate had no log-probabilities of the completions of the last {batches}: it judges by rewards alone, and saves less. "
                "Let your `rollout_func` return `logprobs`."
            )
        if len(prices) and prices.mean() < _WORTH:
            said["gate"] = (
                f"`strategy: gate` would have rolled out at most {prices.mean():.2f} × the completions of the last {batches} for as "
                "many live groups each. `lze-trl forecast` on the folder of this run prices it."
            )
        return said

    def metrics(self) -> dict[str, float]:
        """How many sentences are due."""
        return {"advice": float(len(self.lines()))}

    def state_dict(self) -> dict[str, Any]:
        """Numbers of the latest batches."""
        return {"recent": np.array(self._recent).reshape(len(self._recent), len(self._names))}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint; of a run with other rewards, begin anew."""
        recent = state["recent"]
        self._recent.clear()
        if recent.shape[1:] == (len(self._names),):
            self._recent.extend(recent)
