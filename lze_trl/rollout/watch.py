"""Log-probabilities of sampled tokens, watched while transformers generates: it computes them, and reports none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import GenerationMixin


class SamplingWatch(LogitsProcessor):
    """
    Comes last of the logits processors and changes nothing: it sees the scores that each token is sampled from, after
    temperature, top-p and the others, and with the next call which token it was. It never raises: where it cannot follow the
    generation, there are no log-probabilities.
    """

    def __init__(self):
        self._lost = False  # whether generation calls it in a way that cannot be watched
        self._scores: torch.Tensor | None = None  # (n, V), of the last call
        # Tokens of each call but the last, and their log-probabilities, (n,) each
        self._sampled: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._lost or input_ids.ndim != 2 or scores.ndim != 2 or len(input_ids) != len(scores):
            self._lost = True  # continuous batching gives the tokens of all requests in one row
        elif self._scores is not None and self._scores.shape != scores.shape:
            self._lost = True
        else:
            if self._scores is not None:
                self._sampled.append(self._of(self._scores, input_ids[:, -1]))
            self._scores = scores
        return scores

    def begin(self):
        """A new generation begins."""
        self._lost, self._scores, self._sampled = False, None, []

    def token_logprobs(self, completion_ids: list[list[int]]) -> list[list[float]] | None:
        """
        Of each token of the completions that were generated; `None` if others were: by an engine that cannot be watched, or
        in an order of its own.
        """
        count, longest = len(completion_ids), max(map(len, completion_ids), default=0)
        if self._lost or self._scores is None or len(self._scores) != count or not longest:
            return None
        last = [row[-1] if len(row) == longest else 0 for row in completion_ids]
        if not all(0 <= token < self._scores.size(1) for token in last):
            return None
        sampled = [*self._sampled, self._of(self._scores, torch.tensor(last, device=self._scores.device))]
        if longest > len(sampled):
            return None
        tokens, logprobs = (torch.stack(values, dim=1).tolist() for values in zip(*sampled, strict=True))
        rows = list(zip(completion_ids, tokens, logprobs, strict=True))
        if any(sampled[: len(ids)] != ids for ids, sampled, _ in rows):
            return None
        return [values[: len(ids)] for ids, _, values in rows]

    def _of(self, scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that were sampled by these scores, shape `(n,)`, and their log-probabilities."""
        scores = scores.float()
        return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(dim=1)


@contextmanager
def watched(model: Any) -> Iterator[SamplingWatch]:
    """Watch what a model samples, inside of whatever wraps it. No log-probabilities without `GenerationMixin`."""
    watch = SamplingWatch()
    inner: Any = next((module for module in model.modules() if isinstance(module, GenerationMixin)), None)
    if inner is None:
        yield watch
        return
    original = inner._get_logits_processor
    own = vars(inner).get("_get_logits_processor")  # a user may have set it on the object

    def with_watch(*args: Any, **kwargs: Any) -> list:
        watch.begin()
        processors = original(*args, **kwargs)
        processors.append(watch)
        return processors

    inner._get_logits_processor = with_watch
    try:
        yield watch
    finally:
        if own is None:
            del inner._get_logits_processor
        else:
            inner._get_logits_processor = own
