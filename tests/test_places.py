"""Groups are whole and prompts count once, whatever a data set is made of and however many processes there are."""

import itertools
import os

import numpy as np
import pytest
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from trl import GRPOTrainer

import data_run
import tiny
from launches import gap, launch, on_processes, records
from lze_trl import LZEGRPOTrainer
from test_drop_in import seen_prompts


SHAPES = {  # rows of a process: no multiple of the group size of 4
    "shards": {"shards": 4},
    "in_order": {"shards": 2, "shuffle_dataset": False},
    "set": {},
}
SAVED = {"shards": 3, "max_steps": 9, "save_strategy": "steps", "save_steps": 7}  # in the second pass, of five batches
SHAPES |= {"whole": SAVED, "resumed": SAVED | {"resume": "whole-{}/checkpoint-7"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for processes in (1, 2):
        sizes = {"per_device_train_batch_size": 12 // processes, "per_device_eval_batch_size": 8 // processes}
        launch(directory, processes, data_run.run, {name: own | sizes for name, own in SHAPES.items()})
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_no_group_holds_two_prompts_and_processes_are_one(runs, name):
    (one,) = records(runs, name, 1)
    two = records(runs, name, 2)
    batches = [first + second for first, second in zip(*(rank["seen"] for rank in two), strict=True)]
    assert batches == one["seen"]
    for batch in batches:
        assert all(len(set(batch[i : i + 4])) == 1 for i in range(0, len(batch), 4))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_goes_on_where_its_second_pass_was_left(runs, processes):
    for whole, resumed in zip(*(records(runs, name, processes) for name in ("whole", "resumed")), strict=True):
        assert resumed["seen"] == whole["seen"][7:]
    assert gap(*(runs / f"{name}.{processes}.pt" for name in ("whole", "resumed"))) == 0.0


@pytest.mark.slow
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
        live = np.mean((lengths[:, 0] != lengths[:, 1]) & (values % 3 != 1))
        assert means["eval_frac_reward_zero_std"] == pytest.approx(1.0 - live)
        if processes == 1:
            assert means["eval_completions/mean_length"] == pytest.approx(lengths.mean())


class Torn(LZEGRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return [row for row in range(11) for _ in range(3)]


def test_a_group_of_two_prompts_is_refused_before_it_is_rolled_out(tmp_path):
    trainer = tiny.make(tmp_path, Torn, strategy="exact")
    trainer._generate = lambda prompts: pytest.fail("rolled out")
    with pytest.raises(ValueError, match="Group 0 of a generation batch holds completions of two prompts"):
        trainer.train()


def split_before(directory):
    """A process of a run over a stream that was split by processes before."""
    rank = int(os.environ["RANK"])
    stream = split_dataset_by_node(tiny.prompts(32).to_iterable_dataset(2), rank, 2)
    trainer = tiny.make(directory, strategy="exact", dataset=stream, per_device_train_batch_size=6)
    with pytest.raises(ValueError, match=r"holds completions of two prompts.*`split_dataset_by_node`"):
        trainer.train()


def test_a_stream_that_was_split_already_is_refused(tmp_path):
    on_processes(2, tmp_path / "log", split_before, tmp_path)


def test_a_stream_goes_on_behind_the_rows_that_other_batches_have_taken(tmp_path):
    shape = {"strategy": "exact", "dataset": tiny.prompts(20).to_iterable_dataset(3), "generation_batch_size": 24}
    saved = shape | {"save_strategy": "steps", "save_steps": 4, "per_device_train_batch_size": 12}
    whole = seen_prompts(tiny.make(tmp_path, **saved, max_steps=4))  # 2 batches of 6 prompts, two steps each
    smaller = saved | {"generation_batch_size": 12, "max_steps": 7, "gradient_accumulation_steps": 1}
    resumed = tiny.make(tmp_path, **smaller)
    train, resumed.train = resumed.train, lambda: train(resume_from_checkpoint=True)
    rest = seen_prompts(resumed)
    assert [len(batch) for batch in whole + rest] == [6, 6, 3, 3, 3]
    passed = [prompt for batch in whole + rest[:2] for prompt in batch]
    assert len(set(passed)) == 18  # of the first pass, whose last two rows are too few; the second one begins
    assert set(rest[2]) & set(passed)


def test_a_stream_that_comes_once_is_told(tmp_path, caplog):
    rows = iter(tiny.prompts(40).to_list() * 2)
    stream = IterableDataset.from_generator(lambda: (next(rows) for _ in range(12)))
    own = {"strategy": "exact", "dataset": stream, "save_strategy": "steps", "save_steps": 2, "shuffle_dataset": False}
    tiny.run(tmp_path, **own, max_steps=2)
    assert "The stream gives other rows" not in caplog.text
    tiny.make(tmp_path, **own, max_steps=3).train(resume_from_checkpoint=True)
    assert caplog.text.count("The stream gives other rows than when the checkpoint was written: row 6 of pass 1") == 1


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_further_training_begins_with_the_first_pass_as_in_trl(tmp_path, shuffled):
    own = {"max_steps": 5, "shuffle_dataset": shuffled, "strategy": "grpo"}
    ours = tiny.make(tmp_path, **own)
    theirs = tiny.make(tmp_path, GRPOTrainer, **own)
    for data in (None, None, tiny.prompts(16)):
        if data is not None:
            ours.train_dataset = theirs.train_dataset = data
        assert seen_prompts(ours) == seen_prompts(theirs)
