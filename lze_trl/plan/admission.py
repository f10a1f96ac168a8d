"""Who is admitted to a pass over the data: the planner's ranks of the prompts of the training set."""

import numpy as np

from ..arrays import section
from ..memory.index import RowIndex
from ..memory.state import PromptState
from ..seeding import keyed_rng
from .planners import Planner, ask_rank


class Admission:
    """
    Asks the planner, once a pass, and remembers whom the pass leaves out. `prompt_ids`, shape `(N,)`, are those of the rows
    of the training set, each once: prompts that the state knows from a run on other data are no part of a pass.
    """

    def __init__(self, planner: Planner, state: PromptState, prompt_ids: np.ndarray, seed: int):
        self.planner = planner
        self.state = state
        self.seed = seed
        self.pass_index = -1
        self.left_out = np.empty(0, dtype=np.int64)  # ids of the prompts that this pass does not roll out, ascending
        self.renumber(prompt_ids)

    def renumber(self, prompt_ids: np.ndarray):
        """Go on with other rows of the training set."""
        self.prompt_ids = prompt_ids
        self._index = RowIndex(prompt_ids)

    def begin(self, pass_index: int) -> np.ndarray:
        """Begin a pass. Returns the rank of each row of the training set, shape `(N,)`; −inf for one that is left out."""
        known = np.intersect1d(self.state["prompt_ids"], self.prompt_ids, assume_unique=True)
        rng = keyed_rng(self.seed, pass_index, self.planner.purpose)
        answer = ask_rank(self.planner, pass_index, self.state.prompts(known), rng)
        self.pass_index, self.left_out = pass_index, known[answer == -np.inf]
        ranks = np.zeros(len(self.prompt_ids))
        ranks[self.rows_of(known)] = answer
        return ranks

    def keeps(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Whether the pass rolls out each prompt, shape `(n,)`, bool."""
        return ~np.isin(prompt_ids, self.left_out)

    def rows_of(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Rows of prompts in the training set, which must have all of them, shape `(n,)`."""
        rows = self._index.find(prompt_ids)
        missing = rows < 0
        if missing.any():
            raise ValueError(
                f"{missing.sum()} of {len(prompt_ids)} prompts are not in the training set, the first with id "
                f"{prompt_ids[missing][0]}. Resume with the dataset that the run started with, or start a new run with "
                "`state_from`."
            )
        return rows

    def state_dict(self) -> dict[str, np.ndarray]:
        """The pass that has begun, and the planner's own state."""
        own = {"pass_index": np.array([self.pass_index], dtype=np.int64), "left_out": self.left_out.copy()}
        return own | {f"planner.{name}": array for name, array in self.planner.state_dict().items()}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue the pass of a checkpoint."""
        self.pass_index, self.left_out = int(state["pass_index"][0]), state["left_out"]
        self.planner.load_state_dict(section(state, "planner"))
