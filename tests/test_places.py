"""Groups are whole and prompts count once, whatever a data set is made of and however many processes there are."""

import itertools

import numpy as np
import pytest

import data_run
import tiny
from launches import launch, records


SHAPES = {  # rows of a process: no multiple of the group size of 4
    "shards": {"shards": 4},
    "in_order": {"shards": 2, "shuffle_dataset": False},
    "set": {},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for processes in (1, 2):
        sizes = {"per_device_train_batch_size": 12 // processes, "per_device_eval_batch_size": 8 // processes}
        launch(directory, processes, data_run.run, {name: own | sizes for name, own in SHAPES.items()})
    return directory


@pytest.mark.parametrize("name", SHAPES)
def test_no_group_holds_two_prompts_and_processes_are_one(runs, name):
    (one,) = records(runs, name, 1)
    two = records(runs, name, 2)
    batches = [first + second for first, second in zip(*(rank["seen"] for rank in two), strict=True)]
    assert batches == one["seen"]
    for batch in batches:
        assert all(len(set(batch[i : i + 4])) == 1 for i in range(0, len(batch), 4))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["set", "stream"])
def test_every_prompt_counts_once_in_an_evaluation(runs, kind, processes):
    """Sets whose last batch is not full, or that are smaller than a batch, and one that is neither; rewards that are not always there."""
    for rank, size in itertools.product(records(runs, "set", processes), data_run.SETS):
        values = np.arange(data_run.SETS[size]) ** 2.0
        means = rank["means"][f"{size}_{kind}"]
        assert means["eval_rewards/value/mean"] == pytest.approx(values.mean())
        lengths = np.array([[1, 1 + len(text) % 3] for text in tiny.prompts(len(values))["prompt"]])
        scored = lengths[values % 3 != 1]
        assert means["eval_rewards/seldom/mean"] == pytest.approx(scored.mean())
        assert means["eval_frac_reward_zero_std"] == pytest.approx(
            1.0 - np.mean((lengths[:, 0] != lengths[:, 1]) & (values % 3 != 1))
        )
        if processes == 1:
            assert means["eval_completions/mean_length"] == pytest.approx(lengths.mean())
