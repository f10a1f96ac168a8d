"""
A generation batch: one table, from the plan to the micro-batches.

Dimensions used everywhere: P prompts (groups), G generations of a prompt, B = sum of the group sizes (completions),
C completion tokens, W processes, F reward functions. NumPy arrays hold the *global* batch: they are the same on every process.
"""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np


if TYPE_CHECKING:  # the app reads batches without what trains
    from accelerate import Accelerator


class Table:
    """Columns with one entry each, read as attributes: arrays that agree in their first dimension."""

    def __init__(self, **columns: np.ndarray):
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Every column must have the same length, got {lengths}.")
        vars(self).update(columns)

    def __len__(self) -> int:
        return len(next(iter(vars(self).values()), ()))

    def __getattr__(self, name: str) -> np.ndarray:
        raise AttributeError(f"There is no column `{name}`. There are {', '.join(vars(self)) or 'none'}.")

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def take(self, indices: np.ndarray) -> Self:
        """Return some of the entries, in the order of the indices, or those where a mask holds."""
        return type(self)(**{name: column[indices] for name, column in vars(self).items()})

    def with_columns(self, **columns: np.ndarray) -> Self:
        """Return the table with further columns; a column of the same name is replaced."""
        return type(self)(**vars(self) | columns)


class Prompts(Table):
    """
    Knowledge about prompts before they are rolled out, every array of shape `(P,)`.

    Attributes:
        prompt_ids (int64): Content hash of the prompt.
        visits (int64): Visits so far.
        pass_rates (float64): Posterior mean of the pass rate; 0.5 for a prompt that was never visited, or the mean of its parents.
        strength (float64): Completions that the posterior rests on; 0 for a prompt that was never visited.
        difficulty (float64): Initial-difficulty anchor D; 1 for a prompt that was never visited.
        streak (int64): s after s solved visits in a row, −s after s visits in a row with equal rewards that are not
            solved, 0 after a visit that had a gradient, and for a prompt that was never visited.
        alive (float64): Probability that the next group of the prompt, of `num_generations` completions, is alive; that of
            the population for a prompt that was never visited.
        pruned (bool): The prompt has had `pruning_streak` solved visits in a row, and was solved ever since.
        alive_given_first (float64, *optional*): Probability that the group under way is alive in the end, given its first
            completion. Defaults to NaN: no completion was drawn yet.
        alive_needed (float64, *optional*): What `alive`, or once completions are drawn `alive_given_first`, has to be at least for the
            next completions to yield more live groups each than others do. Defaults to 0; −∞ as long as
            a gate's guard has every group drawn whole.
        random_draw (float64, *optional*): A random number in [0, 1) that the prompt keeps through the rounds of a batch. Defaults to 1.
        start_probability (float64, *optional*): Probability with which the prompt was begun, if it was. Defaults to 1.
        expected_totals (float64, *optional*): What a gate expected of earlier batches, decayed sums, see [`Gate.expected`], `(P, 4)`. Defaults to 0.
    """

    def __init__(self, prompt_ids: np.ndarray, **columns: np.ndarray):
        defaults = {"alive_given_first": np.nan, "alive_needed": 0.0}
        defaults |= {"random_draw": 1.0, "start_probability": 1.0}
        filled = {name: np.full(len(prompt_ids), value) for name, value in defaults.items()}
        filled["expected_totals"] = np.broadcast_to(0.0, (len(prompt_ids), 4))  # without memory of its own
        super().__init__(prompt_ids=prompt_ids, **(filled | columns))


@dataclass
class Batch:
    """
    A generation batch. Every property of a prompt or a completion is a column; a new column needs no change elsewhere.

    Row columns can be read as attributes of the batch: `batch.rewards` is `batch.rows.rewards`.

    Attributes:
        prompts ([`Table`]): One entry a prompt, on every process. From the start `prompt_ids`; once the batch is drawn and scored
            those of [`~lze_trl.select.energy.score_groups`].
        rows ([`Table`]): One entry a completion, on every process, sorted by `group`: see [`Batch.of`]. `owner` is the process
            that holds the row, `place` where it stands there among its rows.
        held (`dict[str, list | torch.Tensor]`): One entry for each completion that this process holds: tokens, masks, texts,
            dataset rows, whatever the engine, TRL or a `rollout_func` has given it.
        facts (`dict[str, Any]`): Properties of the batch as a whole.
        layout ([`~lze_trl.pack.layout.Layout`], *optional*): Which rows are computed when and where, once that is decided.
    """

    prompts: Table
    rows: Table
    held: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    layout: Any = None

    @classmethod
    def of(
        cls,
        prompt_ids: np.ndarray,
        group: np.ndarray,
        outcomes: np.ndarray,
        rewards: np.ndarray,
        prompt_tokens: np.ndarray,
        completion_tokens: np.ndarray,
        **columns: np.ndarray,
    ) -> "Batch":
        """
        Make a batch of scored completions of all processes.

        Args:
            prompt_ids (int64, `(P,)`): Content hash of each group's prompt.
            group (int64, `(B,)`): Group of each completion, in `[0, P)`. Groups may differ in size.
            outcomes (float64, `(B,)`): Outcome in `[0, 1]`: 1 for a pass and 0 for a fail, or the reward scaled from the range of
                the latest rounds. NaN for a completion without one.
            rewards (float64, `(B,)`): Weighted total reward. NaN if no reward function scored the completion.
            prompt_tokens, completion_tokens (int64, `(B,)`): Lengths.
            columns: Further row columns. Defaults: `scores`, what outcomes are scaled from, are the outcomes; `signals`, what TRL's
                advantages compare within a group, are the rewards; `logprobs`, the log-probability of each completion when it was
                sampled, summed over the sampled tokens, are NaN (not reported).
        """
        defaults = {"scores": outcomes, "signals": rewards, "logprobs": np.full(len(group), np.nan)}
        lengths = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        rows = Table(group=group, outcomes=outcomes, rewards=rewards, **lengths, **(defaults | columns))
        if wrong := {name: c.shape for name, c in vars(rows).items() if name in defaults and c.ndim != 1}:
            raise ValueError(f"These columns must have one dimension, got {wrong}.")
        return cls(Table(prompt_ids=prompt_ids), rows)

    @classmethod
    def empty(cls, prompt_ids: np.ndarray) -> "Batch":
        """Make a batch of prompts, shape `(P,)`, without completions."""
        none, unscored = np.empty(0, dtype=np.int64), np.empty(0)
        return cls.of(prompt_ids, none, unscored, unscored, none, none)

    def __getattr__(self, name: str) -> np.ndarray:
        if name in ("rows", "prompts") or name.startswith("__"):  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.rows, name)

    @property
    def prompt_ids(self) -> np.ndarray:
        """Id of each group's prompt, shape `(P,)`."""
        return self.prompts.prompt_ids

    @property
    def num_groups(self) -> int:
        """P, the number of groups."""
        return len(self.prompts)

    @property
    def num_rows(self) -> int:
        """B, the number of completions."""
        return len(self.rows)

    @property
    def sizes(self) -> np.ndarray:
        """Completions of each group, shape `(P,)`."""
        return np.bincount(self.group, minlength=self.num_groups)

    @property
    def first_rows(self) -> np.ndarray:
        """The first row of each group that has rows, by group."""
        return np.unique(self.group, return_index=True)[1]

    @property
    def alive(self) -> np.ndarray:
        """Groups with a gradient, those whose signals differ; shape `(P,)`, bool."""
        return differ(self.signals, self.group, self.num_groups)

    @property
    def represented_rows(self) -> np.ndarray:
        """Rows of a full batch that each row stands for, `(B,)`, if every group had as many as the largest."""
        sizes = self.sizes
        weights = self.prompts.weights if "weights" in self.prompts else np.ones(len(sizes))
        return weights[self.group] * sizes.max(initial=0) / sizes[self.group]

    def with_rows(self, **columns: np.ndarray) -> "Batch":
        """Return the batch with further or other row columns."""
        return replace(self, rows=self.rows.with_columns(**columns))

    def with_prompts(self, **columns: np.ndarray) -> "Batch":
        """Return the batch with further or other prompt columns."""
        return replace(self, prompts=self.prompts.with_columns(**columns))

    def take(self, rows: np.ndarray) -> "Batch":
        """Return a batch of some rows, in the order given. What processes hold stays where it is."""
        return replace(self, rows=self.rows.take(rows))

    def without_empty_groups(self) -> "Batch":
        """Return the batch without prompts that have no completions."""
        drawn, group = np.unique(self.group, return_inverse=True)
        return replace(self.with_rows(group=group), prompts=self.prompts.take(drawn))

    @staticmethod
    def join(parts: list["Batch"], prompts: Table) -> "Batch":
        """Join the rounds of a batch, sorting the rows by group; `prompts` has all groups. A held column that a round lacks is `None` there."""
        sizes = [part.num_rows for part in parts]
        held = [len(next(iter(part.held.values()), ())) for part in parts]  # as many on every process
        rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0].rows)}
        rows["place"] = rows["place"] + np.repeat(np.cumsum(held) - held, sizes)
        columns: dict[str, list] = {name: [] for part in parts for name in part.held}
        for part, count in zip(parts, held, strict=True):
            for name, values in columns.items():
                values += part.held.get(name, [None] * count)
        joined = Batch(prompts, Table(**rows), columns)
        return joined.take(np.argsort(joined.group, kind="stable"))

    def gathered(self, values: list[Any]) -> list[Any]:
        """Gather values of all rows, in the batch's order, from each process's values for the rows that it holds."""
        from accelerate.utils import gather_object

        of_processes = gather_object([values])
        return [of_processes[owner][place] for owner, place in zip(self.owner, self.place, strict=True)]

    def gathered_on_main(
        self, rows: np.ndarray, value: Callable[[int], Any], accelerator: "Accelerator"
    ) -> dict[int, Any]:
        """Gather values of some rows, made from their places where they are held, on the main process, by row."""
        mine = rows[self.owner[rows] == accelerator.process_index]
        values = {int(row): value(int(self.place[row])) for row in mine}
        gathered: list[Any] | None = [values]
        if accelerator.num_processes > 1:
            import torch

            gathered = [None] * accelerator.num_processes if accelerator.is_main_process else None
            torch.distributed.gather_object(values, gathered)
        if gathered is None:
            return {}
        found = ChainMap(*gathered)
        return {row: found[row] for row in rows.tolist()}

    def moved(self, layout: Any, accelerator: "Accelerator") -> "Batch":
        """Move rows to the processes that compute them: `held` has `layout.rows_of(rank)`, and names them in `row`."""
        rank, world = accelerator.process_index, accelerator.num_processes
        wanted = layout.rows_of(rank)
        owner, place = self.owner.tolist(), self.place.tolist()
        arrived: dict[int, dict[str, Any]] = {}
        if world > 1:
            from accelerate.utils import gather_object

            # What moves follows from the layout, which all processes know
            moving = [row for p in range(world) for row in layout.rows_of(p).tolist() if owner[row] != p]
            mine = [row for row in moving if owner[row] == rank]
            sent = {row: {name: values[place[row]] for name, values in self.held.items()} for row in mine}
            arrived = dict(ChainMap(*gather_object([sent]))) if moving else {}
        rows = [
            {name: values[place[row]] for name, values in self.held.items()} if owner[row] == rank else arrived[row]
            for row in wanted.tolist()
        ]
        names = dict.fromkeys([*self.held, *(name for row in rows for name in row)])  # another process may have more
        held: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        return replace(self, held=held | {"row": wanted}, layout=layout)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, what this process holds of them, and their layout: arrays, and lists of what JSON can express."""
        import torch

        state: dict[str, Any] = {f"rows.{name}": column for name, column in vars(self.rows).items()}
        for name, values in self.held.items():
            if isinstance(values, list) and values and isinstance(values[0], torch.Tensor):  # of a row's images
                state[f"sizes.{name}"] = np.array([len(value) for value in values])
                values = torch.cat(values)
            if isinstance(values, torch.Tensor):
                values = (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()  # NumPy lacks it
                state[f"tensors.{name}"] = np.ascontiguousarray(values)
            else:
                state[f"held.{name}"] = values
        return state | {f"layout.{name}": value for name, value in self.layout.state_dict().items()}

    @classmethod
    def from_state(
        cls, state: dict[str, Any], make_layout: Callable[[dict[str, Any]], Any], device: Any = "cpu"
    ) -> "Batch":
        """Restore the batch of a checkpoint; `make_layout` restores its layout from the saved state."""
        import torch

        tensors = {name: torch.from_numpy(array).to(device) for name, array in section(state, "tensors").items()}
        split = {name: list(tensors[name].split(sizes.tolist())) for name, sizes in section(state, "sizes").items()}
        held = section(state, "held") | tensors | split
        return cls(Table(), Table(**section(state, "rows")), held, layout=make_layout(section(state, "layout")))


def differ(values: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Tell whether the values of each group differ, shape `(P,)`, bool; NaN is left out."""
    # Compared, because the variance of equal values may be a sum of rounding errors
    lowest, highest = extremes(values, group, num_groups)
    return highest > lowest


def extremes(values: np.ndarray, group: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the lowest and highest value of each group, NaN left out, shape `(P,)` each; ∞ and −∞ for a group without values."""
    known = ~np.isnan(values)
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group[known], values[known])
    np.maximum.at(highest, group[known], values[known])
    return lowest, highest


def section(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    """Select the entries whose keys begin with `name.`, and remove that from the keys."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def group_mean(values: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Average the values of each group, shape `(P,)`; NaN is left out, and a group without values has NaN."""
    scored = ~np.isnan(values)
    counts = np.bincount(group[scored], minlength=num_groups)
    sums = np.bincount(group[scored], weights=values[scored], minlength=num_groups)
    return np.divide(sums, counts, out=np.full(num_groups, np.nan), where=counts > 0)


def places(group: np.ndarray) -> np.ndarray:
    """Count, from 0, the place of each row among the rows of its group, shape `(B,)`. Any small integers can be the groups."""
    by_group = np.argsort(group, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(group))])
    found = np.empty(len(group), dtype=np.int64)
    found[by_group] = np.arange(len(group)) - first[group[by_group]]
    return found


def group_variance(values: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Compute the variance of each group's values, shape `(P,)`, as [`group_mean`] takes means; 0 for a group of one value."""
    return group_mean((values - group_mean(values, group, num_groups)[group]) ** 2, group, num_groups)
