"""What the recipes of self-play add to the package: how the votes of their models are read, and a grammar that writes sums.

The demo's model of 0.8 M parameters cannot write problems. Here a grammar does, from the sums that it is shown; everything else is as
with a language model.
"""

import numpy as np

from lze_trl.rewards import MajorityReward
from lze_trl.rewards.functions import completion_text
from lze_trl.rewards.grading import marked_answer


def write_sum(exemplars: list[str], rng: np.random.Generator) -> list[str]:
    """A sum of two-digit numbers: one from the first exemplar, one from the second, each with a new last digit."""
    first, second = (text.rstrip("=").split("+") for text in exemplars[:2])
    a, b = (int(numbers[0]) // 10 * 10 + int(rng.integers(10)) for numbers in (first, second[::-1]))
    return [f"{a}+{b}="]


class PublishedMajority(MajorityReward):
    r"""The majority reward, with the published bounds, for completions that are nothing but the answer, without a `\boxed{}`."""

    def read(self, completions, truncated, **columns):
        """Box each completion, and read it."""
        return super().read([rf"\boxed{{{completion}}}" for completion in completions], truncated, **columns)


class StrictMajority(PublishedMajority):
    """The same, for groups of which at least half agree: wrong answers of this model seldom do."""

    def __init__(self):
        super().__init__(bounds=(0.5, 0.9), margin=4)


def accuracy_reward(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """Whether the sum is right: what the votes are worth can be told here, since a sum is its own label."""
    numbers = [prompt.rstrip("=").split("+") for prompt in prompts]
    return [float(text.strip() == str(int(a) + int(b))) for (a, b), text in zip(numbers, completions, strict=True)]


class MarkedMajority(MajorityReward):
    """The majority reward for completions that mark their answer by `####`."""

    def read(self, completions, truncated, **columns):
        """Box what follows the mark, and read it."""
        answers = [marked_answer(completion_text(completion)) or "" for completion in completions]
        return super().read([rf"\boxed{{{answer}}}" for answer in answers], truncated, **columns)
