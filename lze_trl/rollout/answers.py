"""What engines say of their completions beside the tokens: whether a limit cut one off, and why there is none."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .episodes import failures


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Word:
    """What is known of one completion."""

    truncated: bool
    failure: str | None = None  # why there is no completion
    empty: bool = False  # its one token was not generated


class Answers:
    """
    The one place that says which completions are truncated. The engine's word decides where there is one, and else whether the last
    token is one of `ends`. TRL passes on tokens alone, so a completion is recognised by the tokens of its prompt and its own.

    The token `pad` stands for a completion of no tokens, which TRL does not expect. The loss does not cover it. If vLLM gives no word
    and completions may `stop` at a text, those with fewer than `limit` tokens are not truncated.
    """

    def __init__(self, ends: Sequence[int], pad: int, limit: int = 0):
        self.ends, self.pad, self.limit = ends, pad, limit
        self.words: list[Word] = []  # of the latest completions
        self._noted: dict[tuple[int, ...], Word] = {}  # what differs from what the last token says

    def forget(self):
        """Another call of an engine begins."""
        self._noted.clear()

    def note(self, prompt: Sequence[int], completion: Sequence[int], truncated: bool, failure: str | None = None):
        """Enter an engine's word."""
        word = Word(truncated, failure)
        if word != self._by_tokens(completion):
            self._noted[*prompt, *completion] = word

    def fill(self, prompts: list, completions: list, logprobs: list | None, one: Any = 0.0):
        """Let one token stand for each completion of no tokens, and `one` for its log-prob; in place."""
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if len(completion) == 0:
                completions[i] = [self.pad]
                self._noted[*prompt, self.pad] = Word(truncated=False, empty=True)
                if logprobs is not None:
                    logprobs[i] = [one]

    def see(self, prompts: list[list[int]], completions: list[list[int]]):
        """Look up the completions that are scored next."""
        pairs = zip(prompts, completions, strict=True)
        found = [self._noted.get((*prompt, *own)) if self._noted else None for prompt, own in pairs]
        self.words = [word or self._by_tokens(own) for word, own in zip(found, completions, strict=True)]

    def _by_tokens(self, completion: Sequence[int]) -> Word:
        return Word(not len(completion) < self.limit and (len(completion) == 0 or completion[-1] not in self.ends))

    @property
    def truncated(self) -> list[bool]:
        """Whether each completion is truncated."""
        return [word.truncated for word in self.words]

    def reasons(self, environments: Sequence[Any] | None) -> list[str | None]:
        """Why each completion has failed: its environment, or every server; empty if none can have failed."""
        of_episodes = failures(environments)
        if not any(word.failure for word in self.words):
            return of_episodes
        return [
            word.failure or reason
            for word, reason in zip(self.words, of_episodes or [None] * len(self.words), strict=True)
        ]

    def warn(self, prompt_ids: Sequence[int], prompts: Sequence[Any]):
        """Say which prompts no server has completed, from their ids and texts."""
        failed = {
            id: (str(text)[:80], word.failure)
            for id, text, word in zip(prompt_ids, prompts, self.words, strict=True)
            if word.failure
        }
        for id, (text, failure) in failed.items():
            logger.warning(
                "The completions of the prompt %r (id %d) are left out, with the reward None, for no server has completed it: %s",
                *(text, id, failure),
            )

    def covered(self, completions: list[list[int]], masks: list[list[int]] | None) -> list[list[int]] | None:
        """Loss masks in which no token is 1 that stands for a completion; `None` if every token is covered."""
        if not any(word.empty or word.failure for word in self.words):
            return masks
        masks = masks or [[1] * len(ids) for ids in completions]
        return [
            [0] * len(ids) if word.empty or word.failure else mask
            for word, ids, mask in zip(self.words, completions, masks, strict=True)
        ]
