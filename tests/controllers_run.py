"""
Watched training runs, for the tests of the rollout controllers; also on several processes, as cases of `case_runs.py`.

Completions are a function of prompt, generation batch and place in the group, over all rounds: what is left to differ between
numbers of processes is what the trainer decides.
"""

import hashlib
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from accelerate.utils import gather_object

import tiny
from case_runs import leave
from lze_trl import LZEGRPOTrainer
from lze_trl.memory.identity import ID_COLUMN


PROMPTS = 17
CONTROLLERS = {
    "uniform": {"controller_kwargs": {"kept": 2}},
    "reinforce_ada_positive": {"controller_kwargs": {"round_size": 2, "max_rounds": 3}},
    "reinforce_ada_balanced": {"controller_kwargs": {"round_size": 4, "max_rounds": 3}},
    "dynamic": {"controller_kwargs": {"max_rounds": 2}},
    "gate": {"num_generations": 3, "controller_kwargs": {"control": 0.0}},
}
"""Settings of every controller for batches of 6 prompts."""


def passes(completion: list[int]) -> float:
    """A completion passes if its first token is a multiple of 4."""
    return float(completion[0] % 4 == 0)


def quarter_reward(completion_ids, **kwargs):
    """Passes about one completion in four."""
    return [passes(completion) for completion in completion_ids]


def half_reward(prompts, completion_ids, **kwargs):
    """Passes two in three completions of every other prompt."""
    odd = [int(prompt[0]) % 2 for prompt in prompts]
    return [float(completion[0] % 3 > 0) * one for completion, one in zip(completion_ids, odd, strict=True)]


def short_reward(prompts, completion_ids, **kwargs):
    """Passes two in three completions of short prompts."""
    return [float(ids[0] % 3 > 0) * (len(prompt) < 9) for ids, prompt in zip(completion_ids, prompts, strict=True)]


def no_reward(completion_ids, **kwargs):
    """Passes nothing."""
    return [0.0] * len(completion_ids)


class FixedTrainer(LZEGRPOTrainer):
    """
    Its completions do not depend on the process that draws them, nor on the model. It notes what it does, in numbers that JSON can
    hold: every round of generation, what each generation batch trains on, the rows of every micro-batch of this process, and the
    size of every forward pass.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rounds, self.batches, self.micro_batches, self.forwards = [], [], [], []
        self.normalisers = {}  # of each generation batch
        self._places = (-1, Counter())
        self.model.register_forward_hook(self._note_forward)
        self._choose, self.generation_step._select = self.generation_step._select, self._select
        dataset = self.passes.dataset
        self.prompts = dict(zip(dataset[ID_COLUMN], dataset["prompt"], strict=True))

    def _note_forward(self, model, args, output):
        if "log_probs" in output:  # not one of generation
            self.forwards.append(len(output.log_probs))

    def _generate(self, prompts):
        output = super()._generate(prompts)
        if self.model.training:
            note = {"generation": self.generation_step.batch_index, "step": self.state.global_step}
            note["weights"] = sum(float(weights.detach().double().sum()) for weights in self.model.parameters())
            count = self.reward_notes.num_rows  # without rows that only even out processes
            note["rows"] = list(zip(gather_object(prompts[:count]), gather_object(output[1][:count]), strict=True))
            self.rounds.append(note)
        return output

    def _select(self, drawn, wanted):
        chosen, generation = self._choose(drawn, wanted), self.generation_step.batch_index
        note = {"generation": generation, "groups": len(drawn.prompts)}
        note["prompts"] = len({prompt for prompt, _ in self.rounds_of(generation)[0]["rows"]})
        note["chosen"] = [self.prompts[prompt_id] for prompt_id in drawn.prompt_ids[chosen].tolist()]
        self.batches.append(note)
        return chosen

    def compute_loss(self, model, inputs, *args, **kwargs):
        rows = []
        for row in range(len(inputs["completion_mask"])):
            prompt, completion = (
                inputs[f"{kind}_ids"][row][inputs[f"{kind}_mask"][row].bool()].tolist()
                for kind in ("prompt", "completion")
            )
            if completion:  # else it only keeps the processes in step
                rows.append([self._tokenizer.decode(prompt), completion, float(inputs["advantages"][row])])
        self.normalisers[self.generation_step.batch_index] = float(inputs["num_items_in_batch"])
        self.micro_batches.append({"generation": self.generation_step.batch_index - 1, "rows": rows})
        return super().compute_loss(model, inputs, *args, **kwargs)

    def rounds_of(self, generation: int) -> list[dict]:
        return [entry for entry in self.rounds if entry["generation"] == generation]

    def record(self) -> dict:
        """All notes, and what the trainer itself has counted."""
        notes = {name: getattr(self, name) for name in ("rounds", "batches", "micro_batches", "forwards")}
        log = [entry for entry in self.state.log_history if "lze/empty_update" in entry]
        return notes | {"ledger": asdict(self.ledger), "log": log}

    def digest(self, prompt: tuple[int, ...], place: int) -> bytes:
        """Numbers for the completion of a prompt at a place in its group."""
        text = self._tokenizer.decode(list(prompt))
        return hashlib.sha256(f"{text}|{place}|{self.generation_step.batch_index}".encode()).digest()

    def complete(self, prompt: tuple[int, ...], place: int) -> list[int]:
        """That completion."""
        digest = self.digest(prompt, place)
        completion = [4 + byte % (len(self._tokenizer) - 4) for byte in digest[1 : 2 + digest[0] % 5]]
        return completion if digest[6] % 2 else [*completion[:4], self._tokenizer.eos_token_id]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._places[0] != self.generation_step.batch_index:
            self._places = (self.generation_step.batch_index, Counter())
        _, places = self._places
        wanted = [tuple(ids) for ids in prompt_ids[: self.reward_notes.num_rows if self.model.training else None]]
        completions = []
        for prompt in gather_object(wanted):
            completions.append(self.complete(prompt, places[prompt]))
            places[prompt] += 1
        begin = sum(gather_object([len(wanted)])[: self.accelerator.process_index])
        own = completions[begin : begin + len(wanted)]
        return own + [[self._tokenizer.eos_token_id] * 5] * (len(prompt_ids) - len(own)), None


def run(directory: Path, name: str, settings: dict):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = settings | {"per_device_train_batch_size": 12 // world}
    count = settings.pop("prompts", PROMPTS)
    resume = settings.pop("resume", None)  # name of a run before this one, and its checkpoint
    trainer = FixedTrainer(
        model=str(directory / "model"),
        reward_funcs=globals()[settings.pop("reward", "quarter_reward")],
        args=tiny.config(directory / f"{name}-{world}", **settings),
        train_dataset=tiny.prompts(count),
    )
    trainer.train(resume_from_checkpoint=resume and str(directory / f"{resume[0]}-{world}" / resume[1]))
    leave(directory, name, trainer, trainer.record())
