"""Self-instruction during a training: the policy of the moment writes problems whenever few are left to visit."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from scipy.special import softmax

from ..batch import Prompts, Table
from ..data import PromptStyle
from ..evaluation.engines import Engine
from ..memory.identity import columns_of
from ..memory.posterior import expected_energy
from ..memory.state import PromptState
from .generator import Admitted, Generator, Intake, Seeds, Writer, text_id, told
from .pool import PromptPool
from .settings import InstructError, InstructSettings


logger = logging.getLogger(__name__)

EXEMPLAR_TEMPERATURE = 0.2
"""τ of the softmax by which exemplars are drawn, in units of energy."""


@dataclass(frozen=True)
class Instruction:
    """What a training that writes its own problems begins with."""

    seeds: Seeds
    style: PromptStyle  # how prompts are written around problems
    generator: Generator | None = None  # writes problems in place of the policy

    def writer(self, settings: InstructSettings) -> Writer:
        """Who writes problems."""
        return Writer(settings, self.seeds, self.style.conversational, self.generator)

    @classmethod
    def of(cls, dataset: Dataset) -> "Instruction":
        """From the prompts of a training set, as they are: the last message of each is the problem."""
        prompts = [row["prompt"] for row in dataset]
        if isinstance(prompts[0], str):
            return cls(Seeds(tuple(prompts)), PromptStyle(conversational=False))
        system = next((message["content"] for message in prompts[0] if message["role"] == "system"), None)
        return cls(Seeds(tuple(messages[-1]["content"] for messages in prompts)), PromptStyle(system_prompt=system))


class OnlineInstruction:
    """
    Fills a pool of problems. It is a part of the checkpoint: what was accepted once is known for good.

    Args:
        instruction ([`Instruction`]): Seeds, prompts and, perhaps, a generator.
        settings ([`InstructSettings`]): How problems are written, and which are accepted.
        columns (`list[str]`): Columns that reward functions may ask for.
        state ([`~lze_trl.memory.state.PromptState`]): What is known of the problems that were visited.
        accelerator ([`~accelerate.Accelerator`]): The processes. The main one filters, all have the pool.
        chances (`Callable`, *optional*): With which probabilities problems of its own are exemplars. By default all are alike.
    """

    def __init__(
        self,
        instruction: Instruction,
        settings: InstructSettings,
        columns: list[str],
        state: PromptState,
        accelerator: Accelerator,
        chances: Callable[[Prompts], np.ndarray] | None = None,
    ):
        self._seeds, self._settings, self._accelerator = instruction.seeds, settings, accelerator
        self._state, self._chances = state, chances
        self.writer = instruction.writer(settings)
        others = [name for name in columns if name != "prompt"]
        self.pool = PromptPool(instruction.style.around, others)
        self._begin()

    def _begin(self):
        self.intake = Intake(self._seeds, self._settings.overlap)
        self.rounds = 0

    def restock(self, missing: int, generation: int, policy: Callable[[], AbstractContextManager[Engine | None]]):
        """
        Add at least so many problems to the pool, which a generation batch is going to need. All processes call it.

        Raises:
            InstructError: If `max_rounds` rounds in a row give no acceptable problem.
        """
        shared: list[Any] = [None]
        with nullcontext() if self.writer.generator else policy() as engine:
            if self._accelerator.is_main_process:
                shared = [self._written(missing, engine)]
        broadcast_object_list(shared)
        admitted, priors, self.rounds, rejected, barren = shared[0]
        self.intake.rejected = Counter(rejected)
        self.pool.add(admitted, generation, priors)
        if barren == self._settings.max_rounds:
            raise InstructError(
                f"{barren} rounds in a row gave no acceptable problem, with {len(self.pool)} written so far. Rejected: "
                f"{told(self.intake.rejected)}. Use other seeds, a stronger model, or an earlier checkpoint of this one."
            )

    def _written(self, missing: int, engine: Any) -> tuple[list[Admitted], np.ndarray, int, dict[str, int], int]:
        """Problems and their priors, rounds so far, rejections so far by reason, and rounds in a row without a problem."""
        found: list[Admitted] = []
        barren, number, own = 0, self.rounds, self.pool.proved
        ask, known = engine.generate if engine is not None else None, self._state.prompts(self.pool.proved_ids)
        chances = self._chances(known) if self._chances is not None and own else None
        while len(found) < missing and barren < self._settings.max_rounds:
            proposals, unread = self.writer.propose(number, own, ask, chances)
            admitted = self.intake.admit(proposals, unread)
            found, number, barren = found + admitted, number + 1, 0 if admitted else barren + 1
        rates = dict(zip(map(text_id, own), known.pass_rates.tolist(), strict=True))
        return found, inherited(found, rates), number, dict(self.intake.rejected), barren

    def observe(self, groups: Table):
        """Learn from the scored groups of a generation batch."""
        self.pool.observe(groups.prompt_ids, groups.pass_rates, groups.alive)

    def metrics(self) -> dict[str, float]:
        """The pool, and what was rejected so far."""
        table = self.pool.table()
        rejected = {f"instruct_rejected/{why.replace(' ', '_')}": n for why, n in self.intake.rejected.items() if n}
        return {
            "instruct_pool": len(self.pool),
            "instruct_unvisited": int((table["visits"] == 0).sum()),
            "instruct_proved": int(table["alive"].sum()),
            "instruct_overlap": float(np.mean(table["overlap"])),
            "instruct_rounds": self.rounds,
            **rejected,
        }

    def state_dict(self) -> dict[str, Any]:
        """The pool, and counts."""
        return self.pool.state_dict() | {"rounds": self.rounds, "rejected": dict(self.intake.rejected)}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue with the pool of a checkpoint."""
        self.pool.load_state_dict(state)
        self._begin()
        if self._accelerator.is_main_process:
            self.intake.index.add(self.pool.texts)
        self.intake.rejected, self.rounds = Counter(state["rejected"]), state["rounds"]


def inherited(problems: list[Admitted], rates: dict[int, float]) -> np.ndarray:
    """Mean of the pass rates that are expected of the parents of each problem, shape `(n,)`; 0.5 where none is known."""
    own = ([rates[parent] for parent in problem.parents if parent in rates] for problem in problems)
    return np.array([np.mean(found) if found else 0.5 for found in own])


def make_source(
    args: Any,
    instruction: Instruction | None,
    seeds: Dataset,
    state: PromptState,
    accelerator: Accelerator,
) -> OnlineInstruction:
    """What writes the problems to train on; `seeds` is the training set, with what rewards may ask for."""
    by_energy = partial(exemplar_chances, by_share=args.self_play["label_confidence"] == "share")
    chances = by_energy if args.self_play["exemplars"] == "energy" else None
    given, settings = instruction or Instruction.of(seeds), args.make_instruct()
    writes = OnlineInstruction(given, settings, columns_of(seeds), state, accelerator, chances)
    state.priors = writes.pool.priors
    return writes


def exemplar_chances(prompts: Prompts, by_share: bool) -> np.ndarray:
    """
    Softmax of the energy that the next visit of each prompt is expected to have, if wanted times the share of the winner that
    is expected; shape `(P,)`.
    """
    scores = expected_energy(prompts) * (prompts.pass_rates if by_share else 1.0)
    return softmax(scores / EXEMPLAR_TEMPERATURE)
