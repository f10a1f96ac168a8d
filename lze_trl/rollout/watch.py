"""Log-probabilities of sampled tokens, watched while transformers generates: it computes them, and reports none."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import GenerationMixin


_WATCHED = ("_get_logits_processor", "generate")


class SamplingWatch(LogitsProcessor):
    """
    Comes last of the logits processors and changes nothing: it sees the scores that each token is sampled from, after
    temperature, top-p and the others, and with the next call which token it was. It never raises: where it cannot follow the
    generation, there are no log-probabilities.
    """

    def __init__(self):
        self._turns: list[list[tuple[list[int], list[float]]] | None] = []  # of each generation, by row; `None`: lost
        self._lost = False  # whether generation calls it in a way that cannot be watched
        self._scores: torch.Tensor | None = None  # (n, V), of the last call
        # Tokens of each call but the last, and their log-probabilities, (n,) each
        self._sampled: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        of_rows = input_ids.ndim == scores.ndim == 2 and len(input_ids) == len(scores)
        if self._lost or not of_rows or (self._scores is not None and self._scores.shape != scores.shape):
            self._lost = True  # continuous batching gives the tokens of all requests in one row
        else:
            if self._scores is not None:
                self._sampled.append(self._with_logprobs(self._scores, input_ids[:, -1]))
            self._scores = scores
        return scores

    def begin(self):
        self._lost, self._scores, self._sampled = False, None, []

    def end(self, sequences: torch.Tensor):
        """End a generation, with these tokens, shape `(n, length)`."""
        turn = None
        if not self._lost and self._scores is not None and len(self._scores) == len(sequences):
            sampled = [*self._sampled, self._with_logprobs(self._scores, sequences[:, -1])]
            tokens, logprobs = (torch.stack(values, dim=1).tolist() for values in zip(*sampled, strict=True))
            turn = list(zip(tokens, logprobs, strict=True))
        self._turns.append(turn)
        self.begin()

    def token_logprobs(
        self, completion_ids: list[list[int]], masks: list[list[int]] | None = None
    ) -> list[list[float]] | None:
        """Return the log-probability of each generated token, with 1 in its mask; `None` if others were watched."""
        masks = masks or [[1] * len(ids) for ids in completion_ids]
        turns = [_generated_turns(ids, mask) for ids, mask in zip(completion_ids, masks, strict=True)]
        if max(map(len, turns), default=0) != len(self._turns):
            return None
        found: list[list[float]] = [[] for _ in turns]
        for number, watched in enumerate(self._turns):
            rows = [row for row, of_row in enumerate(turns) if len(of_row) > number]
            if watched is None or len(watched) != len(rows):
                return None
            for row, (tokens, logprobs) in zip(rows, watched, strict=True):
                ids = turns[row][number]
                if tokens[: len(ids)] != ids:
                    return None
                found[row] += logprobs[: len(ids)]
        return found

    def _with_logprobs(self, scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens that were sampled by these scores, shape `(n,)`, and their log-probabilities."""
        scores = scores.float()
        return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(dim=1)


def _generated_turns(ids: list[int], mask: list[int]) -> list[list[int]]:
    """Return the tokens that the model generated, before, between and after the results of tools."""
    turns: list[list[int]] = [[]]
    for generated, run in groupby(zip(ids, mask, strict=True), key=lambda token: bool(token[1])):
        if generated:
            turns[-1].extend(token for token, _ in run)
        else:
            turns.append([])
    return turns


@contextmanager
def watched(model: Any) -> Iterator[SamplingWatch]:
    """Watch what a model samples, inside of whatever wraps it. No log-probabilities without `GenerationMixin`."""
    watch = SamplingWatch()
    inner: Any = next((module for module in model.modules() if isinstance(module, GenerationMixin)), None)
    if inner is None:
        yield watch
        return
    processors, generate = inner._get_logits_processor, inner.generate
    # A user may have set them on the object
    own = {name: vars(inner)[name] for name in _WATCHED if name in vars(inner)}

    def with_watch(*args: Any, **kwargs: Any) -> list:
        watch.begin()
        found = processors(*args, **kwargs)
        found.append(watch)
        return found

    def watched_generate(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        watch.end(getattr(found, "sequences", found))
        return found

    vars(inner).update(zip(_WATCHED, (with_watch, watched_generate), strict=True))
    try:
        yield watch
    finally:
        for name in _WATCHED:
            del vars(inner)[name]
        vars(inner).update(own)
