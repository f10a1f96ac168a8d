"""How much there is to be had from foreseeing dead groups: a controller that knows the true pass rates."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lze_trl.batch import Batch, Prompts
from lze_trl.memory.identity import prompt_id
from lze_trl.rollout.controllers import RolloutController

from .evaluation import Evaluation


class Oracle(RolloutController):
    """
    Draws whole groups of the prompts that are likeliest to be alive, by the pass rates that the policy has at this moment,
    until they hold a share of all live groups that can be expected. The others get no completions.

    Args:
        group_size (`int`): G.
        share (`float`): Share of the expected live groups to keep, in (0, 1].
        rows (`Sequence[dict]`): Training prompts with `prompt` and `solution`.
        max_completion_length (`int`): Completions are cut after so many tokens.
    """

    def __init__(self, group_size: int, share: float, rows: Sequence[dict[str, str]], max_completion_length: int):
        self.group_size, self.share, self.length = group_size, share, max_completion_length
        self._rows = {}
        for row in rows:
            others = {name: value for name, value in row.items() if name not in ("prompt", "solution")}
            self._rows[prompt_id(row["prompt"], row["solution"], others)] = row
        self._policy: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def watch(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        """Say whose pass rates count."""
        self._policy = model, tokenizer

    def draw(self, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        if round or self._policy is None:
            return np.zeros(len(prompts), dtype=np.int64)
        model, tokenizer = self._policy
        rates = Evaluation([self._rows[i] for i in prompts.prompt_ids.tolist()], tokenizer, self.length).pass_rates(
            model
        )
        alive = 1.0 - rates**self.group_size - (1.0 - rates) ** self.group_size
        return np.where(likeliest(alive, self.share), self.group_size, 0)


def likeliest(alive: np.ndarray, share: float) -> np.ndarray:
    """
    The groups with the highest probabilities to be `alive`, until theirs add up to `share` of the sum over all: bool, shape
    `(P,)`. Ties go to the lower index.
    """
    order = np.argsort(-alive, kind="stable")
    before = np.cumsum(alive[order]) - alive[order]  # expected live groups ahead of each
    chosen = np.zeros(len(alive), dtype=bool)
    chosen[order[before < share * alive.sum()]] = True
    return chosen
