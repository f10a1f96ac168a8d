"""What users do with TRL's trainer besides its arguments: overrides, callbacks, other data, objects that they keep hold of."""

import math

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer


def make(directory, cls=LZEGRPOTrainer, **settings):
    own = {"model": tiny.save(directory / "model")} if settings.get("beta") else {}
    return tiny.make(directory, cls, **{"strategy": "exact", "trainer": own} | settings)


# ---- Overrides ----

HOOKS = (
    *("_generate", "_generate_single_turn", "_calculate_rewards", "_compute_loss", "compute_loss", "log"),
    *("_get_train_sampler", "get_train_dataloader", "_prepare_inputs", "training_step"),
    *("_get_per_token_logps_and_entropies", "_save_checkpoint", "_set_signature_columns_if_needed"),
)


def noting(base, called):
    """A class whose methods note that they are called, and do what they did."""

    def override(name):
        def method(self, *args, **kwargs):
            called.add(name)
            return getattr(super(noting_class, self), name)(*args, **kwargs)

        return method

    noting_class = type("Noting", (base,), {name: override(name) for name in HOOKS})
    return noting_class


@pytest.mark.parametrize(("strategy", "mixin"), [("exact", None), ("gate", None), ("exact", 0), ("exact", 1)])
def test_overrides_are_called(tmp_path, strategy, mixin):
    called = set()
    cls, expected = noting(LZEGRPOTrainer, called), set(HOOKS)
    if mixin is not None:  # on either side
        bases = [LZEGRPOTrainer, noting(GRPOTrainer, called)]
        cls = type("Mixed", tuple(bases if mixin else bases[::-1]), {})
        expected -= {"_prepare_inputs"}  # which hands out the packed rows, and is ours
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "remove_unused_columns": True}
    make(tmp_path, cls, strategy=strategy, beta=0.1, **settings).train()
    assert called >= expected


UNCALLED = {"_generate_and_score_completions": lambda self, inputs: {}}


@pytest.mark.parametrize(
    "cls",
    [
        type("Zeroed", (LZEGRPOTrainer,), UNCALLED),
        type("Mine", (type("Zeroed", (), UNCALLED), LZEGRPOTrainer), {}),
        type("Mine", (LZEGRPOTrainer, type("Zeroed", (GRPOTrainer,), UNCALLED)), {}),
    ],
    ids=["subclass", "mixin", "last mixin"],
)
def test_an_override_that_would_not_be_called_is_refused(tmp_path, cls):
    with pytest.raises(TypeError, match=r"`Zeroed._generate_and_score_completions` would never .*`_compute_loss`"):
        make(tmp_path, cls)
    trainer = make(tmp_path)
    trainer.get_train_dataloader = list
    with pytest.raises(TypeError, match=r"`trainer.get_train_dataloader = …` would be ignored"):
        trainer.train()


class Backwards(LZEGRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return [row for row in reversed(range(11)) for _ in range(self.num_generations)]


class Loads(LZEGRPOTrainer):
    def get_train_dataloader(self):
        rows = [row for row in reversed(list(self.train_dataset)) for _ in range(self.num_generations)]
        return self.accelerator.prepare(DataLoader(rows, batch_size=self.args.generation_batch_size, collate_fn=list))

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert len(inputs) == self.args.generation_batch_size and {"prompt", "solution"} <= inputs[0].keys()
        return super().training_step(model, inputs, num_items_in_batch)


def seen_prompts(trainer):
    """Prompts of each batch of a training, in order."""
    batches = []
    generate = trainer._generate

    def noted(prompts):
        batches.append(list(dict.fromkeys(prompts)))
        return generate(prompts)

    trainer._generate = noted
    trainer.train()
    return batches


@pytest.mark.parametrize(("cls", "strategy"), [(Backwards, "gate"), (Backwards, "lze"), (Loads, "gate")])
def test_an_own_sampler_or_loader_orders_the_prompts(tmp_path, caplog, cls, strategy):
    backwards = [row["prompt"] for row in tiny.prompts(11)][::-1]
    own = {"controller_kwargs": {"explore": 0.1}} if strategy == "gate" else {}
    batches = seen_prompts(make(tmp_path, cls, strategy=strategy, max_steps=2, **own))
    assert batches[0] == backwards[:3]
    assert {prompt for batch in batches for prompt in batch} == set(backwards[:6])
    said = {"gate": "so the gate draws no others", "lze": "so `pruning` is off"}
    assert f"orders the prompts, {said[strategy]}" in caplog.text


def test_an_own_sampler_that_would_be_ignored_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`Backwards._get_train_sampler` orders the prompts"):
        make(tmp_path, Backwards, strategy="lze", pruning="refill")


class Redraws(Loads):
    def get_train_dataloader(self):
        rows = [self.train_dataset[i] for i in (4, 4, 7, 2, 2) for _ in range(self.num_generations)]
        return self.accelerator.prepare(DataLoader(rows, batch_size=self.args.generation_batch_size, collate_fn=list))

    training_step = LZEGRPOTrainer.training_step


@pytest.mark.parametrize("strategy", ["exact", "gate"])
def test_an_own_loader_may_repeat_prompts_and_end_with_a_smaller_batch(tmp_path, strategy):
    trainer = make(tmp_path, Redraws, strategy=strategy, max_steps=4)
    batches = seen_prompts(trainer)
    known = trainer.prompt_state["prompt_ids"]
    assert len(set(known.tolist())) == len(known) and trainer.state.global_step == 4
    assert {prompt for batch in batches for prompt in batch} == {f"{i}+{i * i}=" for i in (4, 7, 2)}


def test_rows_of_an_own_loader_must_have_their_ids(tmp_path):
    trainer = make(tmp_path, Loads)
    vars(trainer)["train_dataset"] = tiny.prompts(11)
    with pytest.raises(ValueError, match="data loader lack the column `lze_prompt_id`"):
        trainer.train()


def test_a_loss_can_read_what_was_logged_of_the_batch(tmp_path):
    seen = []

    class Reading(LZEGRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            seen.append((self._metrics["train"]["reward"][-1], self._metrics["train"]["entropy"][-1]))
            return loss

    trainer = make(tmp_path, Reading, selector="all")
    trainer.train()
    logged = zip(tiny.history(trainer, "reward"), tiny.history(trainer, "entropy"), strict=True)
    assert seen == [pytest.approx(pair) for pair in logged]


def test_a_trainer_may_trim_what_is_pickled(tmp_path):
    class Trimmed(LZEGRPOTrainer):
        def __getstate__(self):
            return {"args": self.args}

    trimmed, usual = (tiny.history(tiny.run(tmp_path, cls=cls), "reward") for cls in (Trimmed, LZEGRPOTrainer))
    assert trimmed == usual


def test_the_table_of_completions_is_filled_as_by_trl(tmp_path):
    logs = []
    for cls in (LZEGRPOTrainer, GRPOTrainer):
        trainer = make(tmp_path, cls, strategy="grpo", max_steps=1)
        trainer._logs["mine"] = "kept"
        trainer.train()
        logs.append(trainer._logs)
    assert len(logs[0]["completion"]) == 12
    for name in ("prompt", "completion", "rewards", "advantages", "mine"):
        assert logs[0][name] == logs[1][name]


# ---- Callbacks ----


@pytest.mark.parametrize(("base", "quiet"), [(ProgressCallback, False), (PrinterCallback, True)])
def test_a_users_own_printer_stays(tmp_path, base, quiet):
    own = type("Mine", (base,), {})
    trainer = make(tmp_path, trainer={"callbacks": [own]}, summary=True, disable_tqdm=quiet)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert own in kinds
    assert ProgressCallback not in kinds and PrinterCallback not in kinds


# ---- Data ----


def test_a_transform_may_make_the_prompt(tmp_path):
    def reward(completions, gold, **kwargs):
        assert "lze_prompt_id" not in kwargs and all(gold)
        return tiny.even_length_reward(completions)

    rows = tiny.prompts(11).rename_columns({"prompt": "question", "solution": "final"})
    repeated = Dataset.from_list([*rows, *rows.select(range(2))])
    made = repeated.with_transform(
        lambda batch: {"prompt": [f"{q} ?" for q in batch["question"]], "gold": batch["final"]}
    )
    trainer = make(tmp_path, dataset=made, reward_funcs=reward, strategy="lze")
    assert len(trainer.train_dataset) == 11
    assert all(prompt.endswith("= ?") for batch in seen_prompts(trainer) for prompt in batch)
    again = make(tmp_path / "again", dataset=trainer.train_dataset, reward_funcs=reward)
    assert again.train_dataset[:] == trainer.train_dataset[:]  # a set that has ids already


@pytest.mark.parametrize("strategy", ["exact", "lze"])
def test_rewards_see_the_format_of_the_data_set(tmp_path, strategy):
    def reward(completions, level, **kwargs):
        assert "solution" not in kwargs and all(value.dtype == torch.int64 for value in level)
        return tiny.even_length_reward(completions)

    rows = tiny.prompts(11)
    rows = rows.add_column("level", [*range(len(rows))]).with_format("torch", columns=["prompt", "level"])
    make(tmp_path, dataset=rows, reward_funcs=reward, strategy=strategy).train()
    if strategy == "exact":
        stream = rows.with_format(None).select_columns(["prompt", "level"]).to_iterable_dataset().with_format("torch")
        make(tmp_path / "stream", dataset=stream, reward_funcs=reward, max_steps=1).train()


def test_other_training_data_is_trained_on(tmp_path):
    trainer = tiny.run(tmp_path, strategy="dapo", max_steps=2)
    visited = len(trainer.prompt_state)
    other = tiny.prompts(31).select(range(20, 31))
    trainer.train_dataset = other
    assert trainer.train_dataset["prompt"][:] == other["prompt"][:]
    batches = seen_prompts(trainer)
    assert batches and all(prompt in other["prompt"] for batch in batches for prompt in batch)
    assert len(trainer.prompt_state) > visited  # what is known of the first prompts is kept


def test_data_that_cannot_be_trained_on_is_refused_where_it_is_assigned(tmp_path):
    trainer = make(tmp_path, strategy="lze")
    before = trainer.train_dataset
    for other, error in (
        (tiny.prompts(11).to_iterable_dataset(), "`pruning` would be 'none', and this trainer has 'refill'"),
        (tiny.prompts(2), "has 2 different prompts"),
        (tiny.prompts(11).rename_column("prompt", "question"), "has no `prompt` column"),
        (None, "`train_dataset` is required"),
        (tiny.prompts(11).rename_column("solution", "completions"), r"has the columns \['completions'\], which TRL"),
        (DatasetDict(train=tiny.prompts(11)), r"is a dictionary of the splits \['train'\]\. Pass one of them"),
    ):
        with pytest.raises(ValueError, match=error):
            trainer.train_dataset = other
        assert trainer.train_dataset is before
    trainer.train()


# ---- Objects that users keep hold of ----


class Weighted:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, completions, **kwargs):
        return [self.weight * reward for reward in tiny.even_length_reward(completions)]


class Voting:
    """A reward of whole groups."""

    def read(self, completions, truncated, **columns):
        return [len(text) for text in completions]

    def score_group(self, ballots, final=True):
        raise NotImplementedError


def test_reward_functions_are_the_users_own(tmp_path):
    weighted, voting = Weighted(1.0), Voting()
    given = [weighted, tiny.digit_reward, voting]
    trainer = make(tmp_path, reward_funcs=given)
    assert all(ours is own for ours, own in zip(trainer.reward_funcs, given, strict=True))
    trainer = make(tmp_path, reward_funcs=weighted)
    trainer.reward_funcs[0].weight = 3.0
    trainer.train()
    assert max(tiny.history(trainer, "rewards/Weighted/mean")) > 1.0
    trainer.reward_funcs[0] = lambda completions, **kwargs: [math.nan] * len(completions)
    with pytest.raises(ValueError, match="The reward function 'Weighted' returned nan"):
        trainer.train()


def test_completions_may_have_no_limit(tmp_path):
    lengths = tiny.history(tiny.run(tmp_path, max_steps=2, max_completion_length=None), "completions/max_length")
    assert max(lengths) == 20  # where transformers' `generate` ends


def test_settings_may_be_shared(tmp_path):
    args = tiny.config(tmp_path, strategy="lze")
    before = args.pruning, args.deduplicate

    def make(dataset):
        return LZEGRPOTrainer(tiny.save(tmp_path / "model"), tiny.even_length_reward, args, dataset)

    trainer, streamed = make(tiny.prompts(11)), make(tiny.prompts(11).to_iterable_dataset())
    assert trainer.args is args
    assert (trainer.resolved["pruning"], trainer.resolved["deduplicate"]) == ("refill", True)
    assert (streamed.resolved["pruning"], streamed.resolved["deduplicate"]) == ("none", False)
    assert (args.pruning, args.deduplicate) == before
    twice = {count: Dataset.from_list(tiny.prompts(count).to_list() * 2) for count in (2, 5)}
    assert {count: len(make(data).train_dataset) for count, data in twice.items()} == {2: 4, 5: 5}
    streamed.train()
    trainer.train()
