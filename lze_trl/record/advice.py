"""Advice while a training goes on: what keeps its groups from teaching, and which setting would help."""

from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pandas as pd

from ..batch import Batch, differ, group_mean
from ..memory.threshold import best_yield
from .causes import CAUSES, same_texts
from .causes import causes as causes_of


PATIENCE = 50
"""Generation batches over which a cause must have held."""

_FEW = 10  # generation batches, or groups, that are enough for a sentence where all of them agree
_OF_GROUPS = 0.2  # share of the groups that one cause must have killed
_MOST = 0.5  # share of rows, or groups, from which a sentence is due
_MOVES = 1e-3  # share of weights that move in an update, below which most of it is lost in rounding
_WORTH = 0.9  # price below which another strategy is named
_FULL = 0.95  # share of its range from which a reward is at its highest
_CHANCE = 0.1  # share of dead groups that pass rates which differ may add to what chance makes dead
_ACCURACY = ("accuracy", "exact_match")  # in the name of a reward
_LARGER = (4, 8, 16, 32)  # group sizes that are named
# What makes the rest beside the point is said first. `causes` are all other causes: the most frequent one comes first
_SEVERITY = (
    *("collapsed", "learning_rate", "bfloat16", "unscored", "weights", "constant", "reward", "failed", "group_size"),
    *("causes", "value", "often_cut", "shaping", "logprobs", "left_out", "gate"),
)
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


def _batches(count: int) -> str:
    return f"{count} generation batches" if count > 1 else "generation batch"


def accuracy_reward(pass_reward: str | None, reward_names: list[str]) -> str | None:
    """
    Return the reward function that says whether a completion is right: the user's `pass_reward`, else the only one whose name says so, as
    `accuracy_reward` and `exact_match_reward` do; `None` if that is the total, or not known.
    """
    named = {name for name in reward_names if any(word in name.lower() for word in _ACCURACY)}
    if pass_reward is None and len(named) == 1:
        (pass_reward,) = named
    return None if pass_reward == "total" else pass_reward


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
        self._recent: deque[dict[str, float]] = deque(maxlen=PATIENCE)

    def see(
        self, batch: Batch, causes: np.ndarray, forecasts: np.ndarray, learning_rate: float, moved: float = np.nan
    ):
        """
        Enter a generation batch that was scored. `causes` are those of [`~lze_trl.record.causes.causes`], and `forecasts` the
        probabilities of being alive that were known before it; both of shape `(P,)`. `moved` is the share of the weights in bfloat16
        that differ from those of the batch before, NaN if it is not known.
        """
        rewards, group, count = batch.rewards_per_func, batch.group, batch.num_groups
        rows = batch.rows.cut_off if "cut_off" in batch.rows else np.zeros(1)
        known = [column[~np.isnan(column)] for column in rewards.T]
        others = [np.nansum(np.delete(rewards, i, axis=1), axis=1) for i in range(rewards.shape[1])]
        drawn, told = causes != "stopped", causes_of(batch, by_one=True)
        one_text = np.isin(causes, ("constant", "same_text")) & same_texts(batch)
        numbers = {
            **{cause: np.mean(np.where(drawn, causes, told) == cause) for cause in CAUSES},
            "dead": np.mean(causes != ""),  # or stopped: as a rule, because they looked dead
            "dead_whole": np.mean(causes[drawn] != "") if drawn.any() else np.nan,
            "stopped": np.mean(~drawn),
            "one_text": np.mean(one_text[drawn]) if drawn.any() else 0.0,
            "empty": np.mean((batch.completion_tokens <= 1) & (rows == 0)),  # nothing but an end token
            "outcome": np.nan_to_num(group_mean(batch.outcomes, group, count)).mean(),
            "graded": not np.isin(batch.outcomes[~np.isnan(batch.outcomes)], (0.0, 1.0)).all(),
            "cut_off_rows": rows.mean(),
            "failed": batch.failed.mean() if "failed" in batch.rows else 0.0,
            "rate": learning_rate,
            "moved": moved,
            "price": self._price(batch, forecasts),
            "blind": np.isnan(batch.logprobs).all(),
        }
        for i, (column, other) in enumerate(zip(known, others, strict=True)):
            numbers[f"low.{i}"], numbers[f"high.{i}"] = column.min(initial=np.inf), column.max(initial=-np.inf)
            numbers[f"mean.{i}"] = column.mean() if len(column) else np.nan
            numbers[f"without.{i}"] = np.mean(~differ(other, group, count)[drawn]) if drawn.any() else np.nan
        for column, values in batch.facts.get("values", {}).items():
            for value in sorted({*values[:count]}):
                own = values[:count] == value
                became = Counter([name or "alive" for name in told[own].tolist()])
                became["completions"] = int(own[group].sum())
                numbers |= {f"`{column} = {value}`/{name}": number for name, number in became.items()}
        self._recent.append({name: float(number) for name, number in numbers.items()})

    def _price(self, batch: Batch, forecasts: np.ndarray) -> float:
        """
        Estimate completions for each live group over those of this batch, had the groups been chosen by what was remembered of them. A gate
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
        """Return the sentences by their cause, the most severe first. Once a run has `ended`, its batches are enough even if they are few."""
        said = self._lines(ended)
        kinds = {name: name.partition(".")[0] for name in said}
        places = {name: _SEVERITY.index(kind if kind in _SEVERITY else "causes") for name, kind in kinds.items()}
        return {name: said[name] for name in sorted(said, key=places.__getitem__)}

    def _lines(self, ended: bool) -> dict[str, str]:
        of_data = {"left_out": self.left_out} if self.left_out else {}
        if not self._recent:
            return of_data
        table = pd.DataFrame(self._recent)
        enough = len(self._recent) >= _FEW
        collapsed = self._of_collapse(table) if ended or enough else {}
        flat = enough and (table["dead"] == 1.0).all()
        if not (ended or flat or len(self._recent) == PATIENCE):
            return of_data | collapsed
        batches = _batches(len(self._recent))
        settings = self._of_settings(table, batches)
        if collapsed:
            return of_data | collapsed | settings
        of_groups = self._of_groups(table, batches) | self._of_values(table, batches)
        return of_data | of_groups | self._of_rewards(table, batches) | settings

    def _of_collapse(self, table: pd.DataFrame) -> dict[str, str]:
        """Say that the policy answers most prompts with one text or with none: whatever the rewards say follows from that."""
        latest = table.tail(_FEW).mean(skipna=False)
        if latest["empty"] < _MOST and min(latest["dead"], latest["one_text"]) < _MOST:
            return {}
        batches = _batches(min(len(self._recent), _FEW))
        what = f"{latest['one_text']:.0%} of the groups drawn in full had one text only"
        if latest["empty"] >= _MOST:
            what = f"{latest['empty']:.0%} of the completions were empty"
        full, fell = [], []
        for i, name in enumerate(self.reward_names):
            high, mean, before = table[f"high.{i}"].max(), latest[f"mean.{i}"], table[f"mean.{i}"][0]
            if mean > 0.0 and mean >= _FULL * high:
                full.append(f"`{name}` ({mean:.3g} of {high:.3g})")
            elif mean < before:
                fell.append(f"`{name}` went from {before:.3g} to {mean:.3g}")
        on, but = f" on {' and '.join(full)}" * bool(full), f"; {', '.join(fell)}" * bool(fell)
        cure = "the weight of what rewards such a text, or the learning rate" if full else "the learning rate"
        return {"collapsed": f"In the last {batches}, {what}: the policy has collapsed{on}{but}. Lower {cure}."}

    def _of_groups(self, table: pd.DataFrame, batches: str) -> dict[str, str]:
        said, dead, limit = {}, table["dead"].mean(), self.args.max_completion_length
        # Without one, transformers' `generate` ends after 20 tokens
        at_limit, higher = ("", "") if limit is None else (f" at {limit} tokens", f": {2 * limit}")
        stopped = " or stopped early" if table["stopped"].any() else ""
        too_small = self._of_size(table, dead, batches)
        for cause in sorted(CAUSES, key=lambda name: -table[name].mean()):
            share = table[cause].mean()
            if too_small and cause in ("solved", "hopeless"):
                continue
            if dead >= _MOST and share >= _OF_GROUPS:
                at = at_limit if cause == "cut_off" else ""
                told = f"{dead:.0%} of the groups of the last {batches} were dead{stopped}, {share:.0%} of all groups with this cause:"
                said[cause] = f"{told} {CAUSES[cause]}{at}. {self._cure(cause)}"
        rows = table["cut_off_rows"].mean()
        if rows >= _MOST and "cut_off" not in said:
            told = f"{rows:.0%} of the completions of the last {batches} were cut off{at_limit}."
            said["often_cut"] = f"{told} Set `max_completion_length{higher}`, or ask for shorter answers."
        return said | too_small

    def _cure(self, cause: str) -> str:
        skips = self.args.strategy == "lze" or self.args.pruning in ("skip", "refill")
        return "Use harder prompts." if cause == "solved" and skips else _CURES[cause]

    def _of_values(self, table: pd.DataFrame, batches: str) -> dict[str, str]:
        """Name the values of a column of the data whose groups were all dead, while others of it lived."""
        said: dict[str, str] = {}
        sums: defaultdict[str, Counter] = defaultdict(Counter)
        for name in table:
            key, _, counted = name.partition("/")
            if counted:
                sums[key][counted] += table[name].sum()
        for key, own in sums.items():
            of_column = [other for name, other in sums.items() if name.split(" = ")[0] == key.split(" = ")[0]]
            share = own["completions"] / max(sum(other["completions"] for other in of_column), 1.0)
            cause, groups = max(CAUSES, key=own.__getitem__), own.total() - own["completions"]
            if groups >= _FEW and not own["alive"] and own[cause] and any(other["alive"] for other in of_column):
                told = f"{key} took {share:.0%} of the completions of the last {batches}, and all of its {groups:,.0f} groups were dead,"
                why = f"{own[cause] / groups:.0%} with this cause: {CAUSES[cause]}. {self._cure(cause)}"
                said[f"value.{key}"] = f"{told} {why} Or leave its prompts out."
        return said

    def _of_size(self, table: pd.DataFrame, dead: float, batches: str) -> dict[str, str]:
        """Say that groups are too small for the pass rate, if as many are dead as chance makes dead where every prompt passes as often."""
        size, rate = self.args.num_generations, table["outcome"].mean()
        by_chance = dead_at(rate, size)
        larger = next((other for other in _LARGER if other > size and dead_at(rate, other) < _MOST), None)
        if dead < _MOST or by_chance < _MOST or table["graded"].any() or larger is None or dead > by_chance + _CHANCE:
            return {}
        told = f"{dead:.0%} of the groups of the last {batches} were dead, and at their pass rate of {rate:.2f} chance alone makes"
        would = f"{by_chance:.0%} of the groups of {size} dead; of groups of {larger}, it would be {dead_at(rate, larger):.0%}."
        return {"group_size": f"{told} {would} Set `num_generations: {larger}`, with fewer prompts in a batch."}

    def _of_rewards(self, table: pd.DataFrame, batches: str) -> dict[str, str]:
        if len(self.reward_names) < 2:
            return {}
        said, dead, main = {}, table["dead_whole"].mean(), self._main_reward(table)
        for i, name in enumerate(self.reward_names):
            low, high = table[f"low.{i}"].min(), table[f"high.{i}"].max()
            without = table[f"without.{i}"].mean()
            if low > high:
                told = f"The reward `{name}` was None for every completion of the last {batches}"
                said[f"reward.{i}"] = f"{told}: its format was never parsed, or it lacks a dataset column."
            elif low == high:
                told = f"The reward `{name}` was {low:g} for every completion of the last {batches}: what it asks for was never, or always, met."
                said[f"reward.{i}"] = f"{told} Show the format in the prompt, or leave the reward out."
            elif i != main and dead <= 1.0 - _MOST and without - dead >= _MOST:
                told = f"{without - dead:.0%} of the groups of the last {batches} were alive only because `{name}` differed within them."
                cure = "Give it the weight 0 in `reward_weights`, or set `alive: outcome` with `pass_reward`"
                said[f"shaping.{i}"] = f"{told} {cure}, unless it is what you want to train."
        return said

    def _main_reward(self, table: pd.DataFrame) -> int:
        """Return the place of the reward to be learned: the one that says whether a completion is right, else the one that can give the most."""
        if (name := accuracy_reward(self.args.pass_reward, self.reward_names)) in self.reward_names:
            return self.reward_names.index(str(name))
        weights = self.args.reward_weights or [1.0] * len(self.reward_names)
        highest = [table[f"high.{i}"].max() for i in range(len(weights))]  # -inf for one that was always None
        most = [abs(weight) * high if weight else -np.inf for weight, high in zip(weights, highest, strict=True)]
        return int(np.argmax(most))

    def _of_settings(self, table: pd.DataFrame, batches: str) -> dict[str, str]:
        said, price, moved = {}, table["price"].mean(), table["moved"]
        if not table["rate"].any():
            told = f"The learning rate was 0 in each of the last {batches}: no weight changes."
            said["learning_rate"] = f"{told} Set `learning_rate`, and check the warmup and the scheduler."
        if moved.count() >= _FEW and moved.mean() < _MOVES:
            told = f"Only {moved.mean():.2%} of the weights moved between two batches of the last {batches}"
            why = "rounding swallows updates, and servers sample from weights that lag behind"
            cures = "Raise `learning_rate`; or keep the weights in float32, the servers' too (`--dtype float32`)"
            said["bfloat16"] = f"{told}, in bfloat16: {why}. {cures}; or use float16 (`fp16`)."
        if table["failed"].any():
            told = f"{table['failed'].mean():.1%} of the completions of the last {batches} failed, and were left out."
            cure = "leave these out of the training set, or mend the server or the environment"
            said["failed"] = f"{told} The log names their prompts and says why: {cure}."
        if self.args.controller == "gate" and table["blind"].all():
            told = f"The gate had no log-probabilities of the completions of the last {batches}: it judges by rewards alone, and saves less."
            said["logprobs"] = f"{told} Let your `rollout_func` return `logprobs`."
        if price < _WORTH:
            # A recording does not hold the rewards of single completions, which a gate goes by
            where = "`lze-trl forecast` on the folder of this run"
            if table["graded"].any():
                where = "`lze-trl forecast` on the recipe, or `trainer.forecast()`,"
            told = f"`strategy: gate` would have rolled out at most {price:.2f} × the completions"
            said["gate"] = f"{told} of the last {batches} for as many live groups each. {where} prices it."
        return said

    def metrics(self) -> dict[str, float]:
        """Count the sentences that are due."""
        return {"advice": float(len(self.lines()))}

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the latest batches."""
        frame = pd.DataFrame(self._recent)
        return {"recent": frame.to_numpy(dtype=np.float64), "names": list(frame)}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint; of a run with other rewards, begin anew."""
        names = state.get("names", [])
        same = sum(name.startswith("low.") for name in names) == len(self.reward_names)
        rows = state["recent"].tolist() if same else []
        self._recent = deque([dict(zip(names, row, strict=True)) for row in rows], PATIENCE)


def dead_at(rate: float, size: int) -> float:
    """Return the probability that all of `size` completions pass, or all fail, at a pass rate."""
    return float(rate**size + (1.0 - rate) ** size)
