"""
The gradient of one group, exactly: sampled completions, the gradient of GRPO's loss on them, and the gradient that it has on
average.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lze_trl.rewards import RewardFunction

from .evaluation import AnswerBatch, answer_probabilities, sample_completions


@dataclass(frozen=True)
class Sample:
    """
    Completions of some prompts, rows in the order of their groups.

    Attributes:
        input_ids (`torch.Tensor` of shape `(B, L + C)`): Prompts, padded on the left, and completions, on the right.
        attention_mask (`torch.Tensor` of shape `(B, L + C)`): 1 where there is a token.
        completion_mask (`torch.Tensor` of shape `(B, C)`): 1 on the tokens of a completion, its end included.
        group (`torch.Tensor` of shape `(B,)`): Group of each row, in `[0, P)`.
        rewards (`torch.Tensor` of shape `(B,)`): Reward of each row.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_mask: torch.Tensor
    group: torch.Tensor
    rewards: torch.Tensor

    def of_group(self, group: int) -> "Sample":
        """Return the rows of one group, as group 0."""
        rows = self.group == group
        return Sample(
            self.input_ids[rows],
            self.attention_mask[rows],
            self.completion_mask[rows],
            torch.zeros_like(self.group[rows]),
            self.rewards[rows],
        )

    def advantages(self) -> torch.Tensor:
        """Reward minus the mean of the group, shape `(B,)`: exactly 0 in a group of passes, or of fails, alone."""
        counts = torch.bincount(self.group)
        means = torch.zeros(len(counts)).index_add(0, self.group, self.rewards) / counts
        return self.rewards - means[self.group]


def draw(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    group_size: int,
    max_completion_length: int,
    reward: RewardFunction,
    seed: int,
) -> Sample:
    """
    Sample completions at temperature 1 and score them. The random numbers of a training around it are left alone.

    Args:
        model (`PreTrainedModel`): The policy.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        rows (`Sequence[dict]`): P prompts with `prompt` and `solution`.
        group_size (`int`): G.
        max_completion_length (`int`): Completions are cut after so many tokens.
        reward (`RewardFunction`): Scores every completion.
        seed (`int`): Seed of the sampling.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mask, input_ids = sample_completions(model, tokenizer, rows, group_size, max_completion_length)
    completions = input_ids[:, mask.size(1) :]
    ended = (completions == tokenizer.eos_token_id).int()
    completion_mask = (ended.cumsum(dim=1) - ended == 0).long()
    prompt_mask = mask.repeat_interleave(group_size, dim=0)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    golds = [row["solution"] for row in rows for _ in range(group_size)]
    return Sample(
        input_ids=input_ids,
        attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
        completion_mask=completion_mask,
        group=torch.arange(len(rows)).repeat_interleave(group_size),
        rewards=torch.tensor(reward(completions=texts, solution=golds), dtype=torch.float32),
    )


def _flat_gradient(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, parameters)])


def policy_gradient(model: nn.Module, sample: Sample) -> torch.Tensor:
    """
    Return the exact gradient of GRPO's loss over all weights, one backward pass over the rows of the sample.

    The loss is that of DAPO at the policy that has sampled the rows, where the ratio is 1 and nothing is clipped:
    −Σ A·log π over all tokens, divided by their number, with A the reward minus the mean of the group.

    Args:
        model (`nn.Module`): The policy.
        sample ([`Sample`]): One group, or several.

    Returns:
        `torch.Tensor` of shape `(N,)`: The gradient, flat.
    """
    width = sample.completion_mask.size(1)
    output = model(input_ids=sample.input_ids, attention_mask=sample.attention_mask, logits_to_keep=width + 1)
    logits = output.logits[:, :-1]  # (B, C, V)
    tokens = sample.input_ids[:, -width:].unsqueeze(-1)
    logps = logits.float().log_softmax(dim=-1).gather(-1, tokens).squeeze(-1)  # (B, C)
    weighted = sample.advantages().unsqueeze(1) * logps * sample.completion_mask
    return _flat_gradient(-weighted.sum() / sample.completion_mask.sum(), model)


def expected_gradient(model: nn.Module, batches: Sequence[AnswerBatch]) -> torch.Tensor:
    """
    Return the exact gradient of −p, the negative expected pass rate, averaged over prompts that one completion alone solves.

    It is what the policy gradient Σ A·∇log π / G of a prompt is on average over rollouts, but for the factor (G − 1)/G
    that the group's own mean as a baseline brings.

    Args:
        model (`nn.Module`): The policy.
        batches (`Sequence[AnswerBatch]`): The prompts with their answers.

    Returns:
        `torch.Tensor` of shape `(N,)`: The gradient, flat.
    """
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    for batch in batches:
        total += _flat_gradient(-answer_probabilities(model, batch).sum(), model)
    return total / sum(len(batch.rows) for batch in batches)
