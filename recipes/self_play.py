"""What the recipes of self-play add to the package: how the votes of their models are read, and a grammar that writes sums.

The demo's model of 0.8 M parameters cannot write problems. Here a grammar does, from the sums that it is shown; everything else is as
with a language model.
"""

from functools import cache

import numpy as np

from lze_trl.evaluation.engines import SampleRequest, TransformersEngine
from lze_trl.evaluation.settings import Decoding
from lze_trl.evaluation.tasks import Problem
from lze_trl.rewards import MajorityReward
from lze_trl.rewards.functions import completion_text
from lze_trl.rewards.grading import marked_answer
from lze_trl.selfplay.templates import TEMPLATES, Item

from .smollm2 import base_model


ANSWERS = 16
"""Lists that SmolLM2 goes on with at a time."""


def write_sum(exemplars: list[str], rng: np.random.Generator) -> list[str]:
    """A sum of two-digit numbers: one from the first exemplar, one from the second, each with a new last digit."""
    first, second = (text.rstrip("=").split("+") for text in exemplars[:2])
    a, b = (int(numbers[0]) // 10 * 10 + int(rng.integers(10)) for numbers in (first, second[::-1]))
    return [f"{a}+{b}="]


def write_word_problems(exemplars: list[str], rng: np.random.Generator) -> list[Item]:
    """
    What SmolLM2 without the warm start goes on with after a list of problems. With the warm start, which is what is trained,
    it writes calculations instead.
    """
    template, seed = TEMPLATES["serl"], int(rng.integers(2**31))
    decoding = Decoding(temperature=0.8, top_p=0.95, max_tokens=96, seed=seed, chat=False)
    problem = Problem("write", template.request(exemplars), None)
    requests = [SampleRequest(problem, sample) for sample in range(ANSWERS)]
    answers = [output for _, output in _smollm2().generate(requests, decoding)]
    return [item for answer in answers for item in template.read(answer.text, len(exemplars), answer.truncated)]


@cache
def _smollm2() -> TransformersEngine:
    return TransformersEngine.load(base_model(), ANSWERS)


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
    """The majority reward for completions that mark their answer by `####`, as the warm start of SmolLM2 teaches."""

    def read(self, completions, truncated, **columns):
        """Box what follows the mark, and read it."""
        answers = [marked_answer(completion_text(completion)) or "" for completion in completions]
        return super().read([rf"\boxed{{{answer}}}" for answer in answers], truncated, **columns)
