"""Keeps what engines report of completions beside their tokens: whether a limit cut one off, and why one is missing."""

import logging
from collections.abc import Sequence
from typing import Any

from ..memory.identity import ID_COLUMN
from .episodes import failures


logger = logging.getLogger(__name__)

SURPLUS = "surplus"
"""Why a completion is left out that only evens out processes."""


class Answers:
    """
    The one place that decides which completions are truncated: by what the engine reports, or else by whether the last
    token is one of `ends`; below `limit` tokens none is. A completion is recognised by the tokens of its prompt and its
    own. The token `pad` stands for a completion of no tokens, which TRL does not expect; the loss does not cover it.
    """

    def __init__(self, ends: Sequence[int], pad: int, limit: int = 0):
        self.ends, self.pad, self.limit = ends, pad, limit
        self.truncated: list[bool] = []  # of the completions that are scored next
        self.prompts: list[list[int]] = []  # tokens of their prompts
        self._failed: list[str | None] = []  # why each has no tokens of its own: "" for an empty one
        self._seen: list[list[int]] = []
        self._noted: dict[tuple[int, ...], tuple[bool, str | None]] = {}  # where it is not what the last token shows

    def forget(self):
        """Forget what was noted: another call of an engine begins."""
        self._noted.clear()

    def note(self, prompt: Sequence[int], completion: Sequence[int], truncated: bool, failure: str | None = None):
        """Note what an engine reports: whether a completion is truncated, and why it is missing."""
        if (truncated, failure) != (self._is_cut(completion), None):
            self._noted[*prompt, *completion] = truncated, failure

    def fill(self, prompts: Sequence[list[int]], completions: list, logprobs: list | None, one: Any = 0.0):
        """Let one token stand for each completion of no tokens, and `one` for its log-prob, in place."""
        for i, prompt in enumerate(prompts):
            if len(completions[i]) == 0:
                completions[i] = [self.pad]
                self.note(prompt, [self.pad], False, "")
                if logprobs is not None:
                    logprobs[i] = [one]

    def look_up(self, completions: list[list[int]], prompts: list[list[int]] | None = None, surplus: int = 0):
        """Look up the completions that are scored next; the last `surplus` ones only even out processes."""
        if prompts is not None or completions != self._seen:
            self.prompts = prompts or [[]] * len(completions)
            pairs = zip(self.prompts, completions, strict=True)
            reports = [self._noted.get((*prompt, *own), (self._is_cut(own), None)) for prompt, own in pairs]
            self.truncated, self._failed = [cut for cut, _ in reports], [failure for _, failure in reports]
            self._failed[len(reports) - surplus :] = [SURPLUS] * surplus
            self._seen = completions

    def _is_cut(self, completion: Sequence[int]) -> bool:
        return len(completion) >= self.limit and (len(completion) == 0 or completion[-1] not in self.ends)

    def reasons(self, environments: Sequence[Any] | None) -> list[str | None]:
        """Return why each completion is left out: it has failed, or is surplus; else `None`."""
        of_episodes = failures(environments) or [None] * len(self._failed)
        return [failure or reason for failure, reason in zip(self._failed, of_episodes, strict=True)]

    def covered(self, completions: list[list[int]], masks: list[list[int]] | None) -> list[list[int]] | None:
        """Return loss masks without the tokens that stand for a completion; `None` if every token is covered."""
        if not any(failure is not None for failure in self._failed):
            return masks
        rows = zip(self._failed, completions, masks or [[1] * len(ids) for ids in completions], strict=True)
        return [mask if failure is None else [0] * len(ids) for failure, ids, mask in rows]

    def warn(self, rows: Sequence[dict[str, Any]], prompts: Sequence[Any]):
        """Warn which prompts no server has completed, by their texts and, of training sets, their ids."""
        message = (
            "No server completes the prompt %r%s, and others are completed. It is left out, with the reward None: %s"
        )
        failed = {}
        for failure, row, prompt in zip(self._failed, rows, prompts, strict=True):
            if failure and failure != SURPLUS:
                failed[str(prompt)[:80], f" (id {row[ID_COLUMN]})" if ID_COLUMN in row else ""] = failure
        for shown, failure in failed.items():
            logger.warning(message, *shown, failure)
