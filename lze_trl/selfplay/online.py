"""Self-instruction during a training: the current policy writes problems when few unvisited ones are left."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset

from ..batch import Table
from ..data import PromptStyle
from ..evaluation.engines import Sampler
from ..memory.identity import columns_of
from ..settings import SelfPlaySettings
from .pool import PromptPool
from .writer import Generator, InstructError, Seeds, Writer


@dataclass(frozen=True)
class Instruction:
    """What a training that writes its own problems begins with."""

    seeds: Seeds
    style: PromptStyle  # how prompts are written around problems
    generator: Generator | None = None  # writes problems in place of the policy

    def writer(self, args: Any) -> Writer:
        """Make the writer with the settings of a [`LZEGRPOConfig`]."""
        settings = SelfPlaySettings(**args.self_play)
        return Writer(settings, self.seeds, args.seed, self.style.conversational, self.generator)

    @classmethod
    def of(cls, dataset: Dataset) -> "Instruction":
        """Take the last message of each prompt of a training set as a problem."""
        prompts = [row["prompt"] for row in dataset]
        if isinstance(prompts[0], str):
            return cls(Seeds(tuple(prompts)), PromptStyle(conversational=False))
        system = next((message["content"] for message in prompts[0] if message["role"] == "system"), None)
        return cls(Seeds(tuple(messages[-1]["content"] for messages in prompts)), PromptStyle(system_prompt=system))


class OnlineInstruction:
    """
    Fills a pool with problems of the policy, or of an instruction's generator. Without an [`Instruction`], the prompts of `dataset` are
    the seeds. The pool is saved in checkpoints, so no problem is accepted twice in a run. Every process has it; the main one filters.
    """

    def __init__(self, args: Any, instruction: Instruction | None, dataset: Dataset, accelerator: Accelerator):
        self._args, self._accelerator = args, accelerator
        self._instruction = instruction or Instruction.of(dataset)
        self.writer = self._instruction.writer(args)
        columns = [name for name in columns_of(dataset) if name != "prompt"]
        self.pool = PromptPool(self._instruction.style.around, columns)

    def restock(self, missing: int, generation: int, policy: Callable[[], AbstractContextManager[Sampler | None]]):
        """
        Add at least `missing` problems to the pool. All processes call it, and raise an [`InstructError`] if `max_rounds` rounds in a
        row give no acceptable problem.
        """
        shared: list[Any] = [None]
        with nullcontext() if self.writer.generator else policy() as engine:
            if self._accelerator.is_main_process:
                own_problems = self.pool.rows["text"][self.pool.rows["alive"]].tolist()
                try:
                    new = self.writer.write(missing, own_problems, engine.generate if engine else None)
                    shared = [(new, self.writer.rounds, self.writer.rejected)]
                except InstructError as error:
                    shared = [error]
        broadcast_object_list(shared)
        if isinstance(shared[0], InstructError):
            raise shared[0]
        problems, self.writer.rounds, self.writer.rejected = shared[0]
        self.pool.add(problems, generation)

    def observe(self, groups: Table):
        """Record which problems of a generation batch had a gradient."""
        self.pool.observe(groups.prompt_ids, groups.alive)

    def metrics(self) -> dict[str, float]:
        """Return size and state of the pool, and the rejections so far by reason."""
        rows = self.pool.rows
        rejected = {f"instruct_rejected/{why.replace(' ', '_')}": n for why, n in self.writer.rejected.items() if n}
        return {
            "instruct_pool": len(rows),
            "instruct_unvisited": int((rows["visits"] == 0).sum()),
            "instruct_proved": int(rows["alive"].sum()),
            "instruct_overlap": float(rows["overlap"].mean()),
            "instruct_rounds": self.writer.rounds,
            **rejected,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the pool and the writer's counts, for a checkpoint."""
        return self.pool.state_dict() | {"rounds": self.writer.rounds, "rejected": dict(self.writer.rejected)}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue with the pool of a checkpoint."""
        self.pool.load_state_dict(state)
        self.writer = self._instruction.writer(self._args)
        self.writer.rounds, self.writer.rejected = state["rounds"], Counter(state["rejected"])
        if self._accelerator.is_main_process:
            self.writer.known.add(self.pool.rows["text"])
