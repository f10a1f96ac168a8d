"""
How good a model is at a task.

Where completions are nothing but the answer, the pass rate of a prompt, sampled at temperature 1, has the expectation
p(answer | prompt): the probability of the answer's tokens and of the end of the text. It is computed, not sampled, so an
evaluation has no noise of its own.

The reward of the training compares tokens as well. By text, an answer with a special token after it, which decoding leaves out,
would be rewarded and not counted here, and a model may come to end its answers so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


_BATCH = 64
_FEW = 128  # prompts that are also reported one by one


@dataclass(frozen=True)
class AnswerBatch:
    """
    Prompts with their gold answers, padded on the right.

    Attributes:
        rows (`np.ndarray` of shape `(n,)`): Place of each row in the evaluation set.
        input_ids (`torch.Tensor` of shape `(n, L)`): Tokens of prompt and answer.
        attention_mask (`torch.Tensor` of shape `(n, L)`): 1 where there is a token.
        targets (`torch.Tensor` of shape `(n, L - 1)`, bool): Whether the token after each position is of the answer.
    """

    rows: np.ndarray
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    targets: torch.Tensor


def answer_ids(tokenizer: PreTrainedTokenizerBase, solutions: Sequence[str], most: int) -> list[list[int]]:
    """Return the tokens of completions that are nothing but the answer: with the end of text, unless the answer has `most` tokens."""
    answers = tokenizer(list(solutions), add_special_tokens=False).input_ids
    return [ids + [tokenizer.eos_token_id] * (len(ids) < most) for ids in answers]


def exact_tokens(tokenizer: PreTrainedTokenizerBase, most: int) -> Callable[..., list[float]]:
    """Make a reward of 1 for completions that have the tokens of the answer, and 0 for others; `most` is their greatest length."""

    def exact_tokens_reward(completion_ids: list[list[int]], solution: list[str], **kwargs: Any) -> list[float]:
        golds = answer_ids(tokenizer, solution, most)
        return [float(list(ids) == gold) for ids, gold in zip(completion_ids, golds, strict=True)]

    return exact_tokens_reward


def answer_probabilities(model: nn.Module, batch: AnswerBatch) -> torch.Tensor:
    """Return the probability of each gold answer and of the end after it, shape `(n,)`; has a gradient unless that is switched off."""
    return _read_answers(model, batch)[0]


def _read_answers(model: nn.Module, batch: AnswerBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the probability of each gold answer, and whether greedy decoding gives it; both of shape `(n,)`.

    What all prompts begin with, such as solved examples, is computed once, and logits only where answers stand.
    """
    ids, mask, targets = (part.to(model.device) for part in (batch.input_ids, batch.attention_mask, batch.targets))
    first = int(targets.any(dim=0).nonzero()[0])  # the first answer begins after this token
    shared = min(int((ids == ids[:1]).all(dim=0).long().cumprod(dim=0).sum()), first)
    cached = {}
    if shared:
        beginning = model(input_ids=ids[:1, :shared], use_cache=True, logits_to_keep=1).past_key_values
        beginning.batch_repeat_interleave(len(ids))
        cached["past_key_values"] = beginning
    kept = torch.arange(first, ids.size(1) - 1, device=ids.device)
    outputs = model(input_ids=ids[:, shared:], attention_mask=mask, logits_to_keep=kept - shared, **cached)
    logits, following, targets = outputs.logits.float(), ids[:, first + 1 :], targets[:, first:]
    logps = logits.log_softmax(dim=-1).gather(-1, following.unsqueeze(-1)).squeeze(-1)  # (n, kept)
    greedy = ((logits.argmax(dim=-1) == following) | ~targets).all(dim=1)
    return (logps * targets).sum(dim=1).exp(), greedy


def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    samples: int,
    max_completion_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Sample completions at temperature 1.

    Args:
        model (`PreTrainedModel`): The policy.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        rows (`Sequence[dict]`): P prompts with `prompt`.
        samples (`int`): G, completions of each.
        max_completion_length (`int`): C, tokens after which completions are cut.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Attention mask of the prompts, `(P, L)`, padded on the left; prompts with
        completions, `(P·G, L + C)`.
    """
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    prompts = prompts.to(model.device)
    tokens = model.generate(
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=max_completion_length,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return prompts.attention_mask, tokens


class Evaluation:
    """
    An evaluation set, ready for the model.

    Args:
        rows (`Sequence[dict]`): Prompts with `prompt` and `solution`.
        tokenizer (`PreTrainedTokenizerBase`): Has one token for each character of an answer, so that there is one way only
            to write it.
        max_completion_length (`int`): Completions are cut after so many tokens.
    """

    def __init__(self, rows: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, max_completion_length: int):
        self.rows = list(rows)
        self.tokenizer = tokenizer
        self.max_completion_length = max_completion_length
        self.batches = self._batches()

    def _batches(self) -> list[AnswerBatch]:
        prompts = self.tokenizer([row["prompt"] for row in self.rows]).input_ids
        answers = answer_ids(self.tokenizer, [row["solution"] for row in self.rows], self.max_completion_length)
        possible = [i for i, ids in enumerate(answers) if len(ids) <= self.max_completion_length]
        tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        possible.sort(key=lambda i: len(tokens[i]))
        batches = []
        for start in range(0, len(possible), _BATCH):
            chosen = possible[start : start + _BATCH]
            width = len(tokens[chosen[-1]])
            input_ids = torch.full((len(chosen), width), self.tokenizer.pad_token_id)
            mask, targets = torch.zeros_like(input_ids), torch.zeros(len(chosen), width - 1, dtype=torch.bool)
            for place, i in enumerate(chosen):
                input_ids[place, : len(tokens[i])] = torch.tensor(tokens[i])
                mask[place, : len(tokens[i])] = 1
                targets[place, len(prompts[i]) - 1 : len(tokens[i]) - 1] = True
            batches.append(AnswerBatch(np.array(chosen), input_ids, mask, targets))
        return batches

    def pass_rates(self, model: nn.Module) -> np.ndarray:
        """Return the expected pass rate of each prompt at temperature 1, shape `(n,)`."""
        return self._read(model)[0]

    @torch.no_grad()
    def _read(self, model: nn.Module) -> np.ndarray:
        """Return the expected pass rates and greedy passes, shape `(2, n)`."""
        found = np.zeros((2, len(self.rows)))
        for batch in self.batches:
            found[:, batch.rows] = [values.cpu().numpy() for values in _read_answers(model, batch)]
        return found

    def accuracy(self, model: nn.Module) -> dict[str, Any]:
        """
        Return the expected accuracy: the mean of the expected pass rates.

        Returns:
            `dict[str, Any]`: `mean`, and `standard_error`, with which it stands for other prompts of the same kind: for
            these prompts it is exact. `greedy`: accuracy of greedy answers. `prompts`: that of each prompt, if they are few.
        """
        rates, greedy = self._read(model)
        error = float(rates.std(ddof=1) / np.sqrt(len(rates)))
        one_by_one = {"prompts": rates.round(3).tolist()} if len(rates) <= _FEW else {}
        return {"mean": float(rates.mean()), "standard_error": error, "greedy": float(greedy.mean()), **one_by_one}

    @torch.no_grad()
    def sampled(self, model: PreTrainedModel, samples: int, seed: int) -> dict[str, float]:
        """
        Return the accuracy of sampled completions by the reward of the training: a check of [`Evaluation.accuracy`].

        The random numbers of the training are left alone.

        Args:
            model (`PreTrainedModel`): The model.
            samples (`int`): Completions of each prompt, at least 2.
            seed (`int`): Seed of the sampling.

        Returns:
            `dict[str, float]`: `mean`, and `standard_error`, the noise of the sampling.
        """
        passes = np.zeros(len(self.rows))
        golds = [row["solution"] for row in self.rows]
        reward = exact_tokens(self.tokenizer, self.max_completion_length)
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for start in range(0, len(self.rows), _BATCH):
                part = slice(start, start + _BATCH)
                mask, tokens = sample_completions(
                    model, self.tokenizer, self.rows[part], samples, self.max_completion_length
                )
                drawn = self._up_to_the_end(tokens[:, mask.size(1) :])
                scores = reward(drawn, np.repeat(golds[part], samples).tolist())
                passes[part] = np.array(scores).reshape(-1, samples).sum(axis=1)
        rates = passes / samples
        noise = (rates * (1.0 - rates)).sum() / (samples - 1)
        return {"mean": float(rates.mean()), "standard_error": float(np.sqrt(noise) / len(rates))}

    def _up_to_the_end(self, tokens: torch.Tensor) -> list[list[int]]:
        """Return the tokens of completions `(n, C)` up to the end of the text, if there is one."""
        end = self.tokenizer.eos_token_id
        return [row[: row.index(end) + 1] if end in row else row for row in tokens.tolist()]
