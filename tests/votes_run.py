r"""
Training runs whose completions box a digit, for the tests of the majority reward, by the cases of `case_runs.py`.

Completions are a function of prompt, generation batch and place in the group, over all rounds and processes.
"""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import torch

import tiny
from case_runs import leave
from controllers_run import FixedTrainer
from lze_trl.rewards import MajorityReward
from lze_trl.rollout.controllers import RolloutController


BOX, CLOSE = r"\boxed{", "}"


def tokenizer():
    """That of the tiny model, with one token for each part of a box."""
    own = tiny.tokenizer()
    own.add_tokens([BOX, CLOSE])
    return own


def save(directory) -> str:
    """Save a tiny model that can box, and return where."""
    shutil.rmtree(directory, ignore_errors=True)
    model = tiny.model()
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer()))
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def answer(prompt: tuple[int, ...], place: int, turn: int) -> tuple[str, str]:
    """
    What a completion boxes, a digit, and how it ends: `""`, or `"open"` and `"cut"` for one without a vote. Prompts differ in how
    much their completions agree.
    """
    agreed = hashlib.sha256(f"{prompt}|{turn}".encode()).digest()
    own = hashlib.sha256(f"{prompt}|{place}|{turn}".encode()).digest()
    digit = agreed[0] % 10 if own[0] < 60 + 40 * (agreed[1] % 5) else own[1] % 10
    return str(digit), ("open", "cut", "", "", "", "", "", "", "", "")[own[2] % 10]


def completion(encode, prompt: tuple[int, ...], place: int, turn: int) -> list[int]:
    """The tokens of a completion: `\\boxed{7}` and an end, a box that is not closed, or no end."""
    digit, ending = answer(prompt, place, turn)
    box, close, end = (encode.convert_tokens_to_ids(token) for token in (BOX, CLOSE, encode.eos_token))
    number = encode.convert_tokens_to_ids(digit)
    return {"open": [box, number, end], "cut": [box, number, close]}.get(ending, [box, number, close, end])


def boxed_rollouts(prompts, trainer):
    """A `rollout_func` for groups of one size."""
    encode, first = trainer.processing_class, trainer.accelerator.process_index * len(prompts)
    ids, size, turn = encode(prompts)["input_ids"], trainer.num_generations, trainer.state.global_step
    completions = [completion(encode, tuple(row), (first + i) % size, turn) for i, row in enumerate(ids)]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0] * len(c) for c in completions]}


class InRounds(RolloutController):
    """Completions in rounds, of each of which `sizes` says what every other prompt gets, and the prompts between."""

    def __init__(self, sizes):
        self.sizes = sizes

    def draw(self, round, prompts, drawn, rng):
        given = self.sizes[round] if round < len(self.sizes) else [0, 0]
        return np.resize(np.array(given, dtype=np.int64), len(prompts))


class VotingTrainer(FixedTrainer):
    """Notes the rewards of every group, and what is remembered of its prompt."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups = []
        self._remember, self.generation_step._remember = self.generation_step._remember, self._note_groups

    def complete(self, prompt, place):
        return completion(self._tokenizer, prompt, place, self.generation_step.batch_index)

    def _note_groups(self, drawn):
        result, step = self._remember(drawn), self.generation_step
        visits = step.state.prompts(drawn.prompt_ids).visits.tolist()
        for g, prompt_id in enumerate(drawn.prompt_ids.tolist()):
            rewards = drawn.rewards_per_func[drawn.group == g, 0].tolist()
            note = {"generation": step.batch_index, "prompt": self.prompts[prompt_id], "visits": visits[g]}
            note |= {"rewards": [None if np.isnan(reward) else reward for reward in rewards]}
            self.groups.append(note | {"alive": bool(drawn.alive[g])})
        return result

    def record(self) -> dict:
        return super().record() | {"groups": self.groups}


def parity_reward(completions, **kwargs):
    """Passes odd digits: a reward to monitor."""
    return [float(text.strip(BOX + CLOSE)[-1] in "13579") for text in completions]


def make(directory: Path, model: Path, cls=VotingTrainer, majority=None, trainer=None, **settings):
    """A trainer by the majority reward, with another one beside it that does not count; see `tiny.make`."""
    given = {"model": str(model), "processing_class": None} | (trainer or {})
    rewards, data = [majority or MajorityReward(), parity_reward], tiny.prompts(11).remove_columns("solution")
    return tiny.make(directory, cls, rewards, data, given, reward_weights=[1.0, 0.0], **settings)


def train(directory: Path, name: str, settings: dict) -> VotingTrainer:
    world, settings = int(os.environ.get("WORLD_SIZE", "1")), dict(settings)
    settings["per_device_train_batch_size"] = settings.pop("rows") // world
    majority, sizes = MajorityReward(**settings.pop("majority", {})), settings.pop("sizes", None)
    own = {"controller": InRounds(sizes)} if sizes else {}
    trainer = make(directory / f"{name}-{world}", directory / "model", majority=majority, trainer=own, **settings)
    trainer.train()
    return trainer


def run(directory: Path, name: str, settings: dict):
    trainer = train(directory, name, settings)
    leave(directory, name, trainer, trainer.record())
