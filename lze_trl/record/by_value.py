"""What is told of completions by the values of columns of the data, such as their source: rewards, dead groups, completions, tokens."""

from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset

from ..batch import Batch
from ..names import label
from ..rollout.estimates import StoppedGroups, UniformSample


MOST_VALUES = 12
OTHERS = "other_values"
"""Name of all values of a column that have none of their own."""


class ByValue:
    """
    Names the values of some columns, at most [`MOST_VALUES`] of each: the most frequent ones of the training set, or those that come first
    where it cannot be read in advance. The same on every process.
    """

    def __init__(self, columns: Iterable[str], dataset: Any = None):
        self.columns = {name: label(name) for name in columns}
        self.names: dict[str, list[str]] = {column: [] for column in self.columns.values()}
        self.totals: Counter[str] = Counter()  # of the run, by the names of metrics
        self._stopped: defaultdict[str, StoppedGroups] = defaultdict(StoppedGroups)
        if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":  # a transform may make other values
            tables = dataset.with_format("arrow", [*self.columns]).iter(10_000)
            self.named([labels for table in tables for labels in self.labels(table.to_pylist())])

    def labels(self, rows: list[dict[str, Any]]) -> list[list[str]]:
        """Return what the values of each row of the data are called."""
        return [[label(row.get(name)) for name in self.columns] for row in rows]

    def named(self, labels: list[list[str]]) -> dict[str, np.ndarray]:
        """
        Return the values by column, each of shape `(n,)`, of n rows with these labels, the same on every process. Of those that come for the first
        time, the most frequent get a name first.
        """
        found = {}
        for place, (column, names) in enumerate(self.names.items()):
            counts = Counter(own := [row[place] for row in labels])
            new = sorted(sorted(counts.keys() - set(names)), key=counts.__getitem__, reverse=True)
            names += new[: MOST_VALUES - len(names)]
            found[column] = np.array([one if one in names else OTHERS for one in own], dtype=object)
        return found

    def values_of(self, batch: Batch, others: list[dict[str, Any]], rank: int) -> dict[str, np.ndarray]:
        """Return the value of each prompt by column, shape `(P + n,)`: of the groups of a batch, then of n `others`, rows that all processes know."""
        first = batch.first_rows
        own = first[batch.owner[first] == rank]
        labels = self.labels([batch.held["input"][place] for place in batch.place[own]])
        known = ChainMap(*gather_object([dict(zip(own.tolist(), labels, strict=True))]))
        return self.named([known[row] for row in first.tolist()] + self.labels(others))

    def metrics(
        self, batch: Batch, reward_names: list[str], outcomes_of: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[tuple[str, float]]:
        """Yield the metrics of a batch whose facts hold the `values` of its prompts; `outcomes_of` scales mean scores. Adds to the totals."""
        sample, group, finished = batch.facts.get("uniform"), batch.group, batch.facts.get("finished")
        outcomes = batch.prompts.pass_rates[group] if sample is None else batch.outcomes
        if sample is None:
            alive = batch.alive.astype(np.float64)
            sample = UniformSample(np.ones(batch.num_rows), np.empty(0), alive, np.ones(len(alive), dtype=bool))
        names = ["reward", *(f"rewards/{name}/mean" for name in reward_names)]
        for column, values in batch.facts["values"].items():
            for value in dict.fromkeys(values):
                chosen, at = values == value, f"by/{column}/{value}"
                groups = chosen[: batch.num_groups]
                rows, causes = groups[group], batch.prompts.cause[groups]
                self.totals[f"{at}/groups"] += int(groups.sum())
                self.totals[f"{at}/completions"] += int(rows.sum())
                self.totals[f"{at}/tokens"] += int(batch.completion_tokens[rows].sum())
                self.totals.update(f"{at}/dead/{cause}" for cause in causes if cause)
                part = sample.part(group, chosen)
                if finished is not None:  # what became of the stopped groups of other values says nothing of these
                    live = self._stopped[at].observe(batch.alive[groups], finished[groups])
                    part = replace(part, live=np.append(live, part.live[groups.sum() :]))
                yield f"{at}/pass_rate", part.moments(outcomes, outcomes_of(part.remembered))[0]
                yield f"{at}/dead_share", 1.0 - part.live_share
                yield from ((f"{at}/{name}", mean) for name, (mean, _) in zip(names, part.rewards(batch), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return names of values, totals, and what became of stopped groups that chance has completed."""
        stopped = {at: own.state_dict()["stopped"].tolist() for at, own in self._stopped.items()}
        return {"names": self.names, "totals": dict(self.totals), "stopped": stopped}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint; a column that was not asked for then begins anew."""
        self.names |= {column: names for column, names in state["names"].items() if column in self.names}
        self.totals = Counter({at: n for at, n in state["totals"].items() if at.split("/")[1] in self.names})
        for at, seen in state["stopped"].items():
            self._stopped[at].load_state_dict({"stopped": np.array(seen)})
