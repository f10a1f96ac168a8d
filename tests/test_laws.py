"""The exactness laws: what must hold whatever the loss, the shape of the batch, or the moment of a crash."""

import functools
import os
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig
from transformers import TrainerCallback, set_seed
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer


LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo"]

# Rows per micro-batch, accumulation, micro-steps per generation, iterations
SHAPES = {
    "one step": (12, 1, 1, 1),
    "accumulated": (6, 2, 2, 1),
    "two optimizer steps a batch": (4, 2, 4, 1),
    "two batches an optimizer step": (4, 6, 3, 1),
    "iterated": (6, 2, 2, 2),
    "neither divides": (4, 2, 3, 2),
}
PLAIN = {"strategy": "grpo"}
STATIC = {"entropy_coef": 0.3}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.1, "entropy_target": 10.0}
BONUSES = {"": {}, "static bonus": STATIC, "adaptive bonus": ADAPTIVE}


def pairwise(turns: int, *others: list) -> list[tuple]:
    """Every loss type with one or two shapes, each shape with a loss type at least, and the values of others in turn."""
    shapes, cases = list(SHAPES), []
    for index, loss_type in enumerate(LOSS_TYPES):
        for turn in range(turns):
            place = (index if turns == 1 else turn) + index // 6
            further = [values[(place if len(values) == 2 else index) % len(values)] for values in others]
            cases.append((loss_type, shapes[(index + 3 * turn) % 6], *further))
    return cases


def shape(name: str) -> dict:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    return dict(zip(names, SHAPES[name], strict=True)) | {"max_steps": 5}


def make(trainer_class, directory, dataset=None, lora=None, rewards=tiny.even_length_reward, **kwargs):
    # SGD: Adam would blow rounding errors of vanishing gradients up to full steps
    kwargs = {"optim": "sgd", "learning_rate": 0.5} | kwargs
    set_seed(0)  # TRL before 1.15 draws a new adapter from whatever random numbers come next
    given = {"model": tiny.save(directory / "model-0"), "peft_config": lora}
    return tiny.make(directory, trainer_class, rewards, dataset or tiny.prompts(17), given, **kwargs)


def train(trainer_class, directory, **kwargs):
    trainer = make(trainer_class, directory, **kwargs)
    trainer.train()
    return trainer


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def distance(a, b) -> float:
    first, second = weights(a), weights(b)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def assert_same(a, b):
    """The same weights, memory and counts, bit for bit."""
    assert distance(a, b) == 0.0
    known = [one.prompt_state.state_dict() | one.prompt_state.foresight.model.state_dict() for one in (a, b)]
    np.testing.assert_equal(*known)
    assert a.prompt_state.foresight.model.weights.any()
    counts = [{n: v for n, v in vars(one.ledger).items() if not n.endswith("seconds")} for one in (a, b)]
    assert counts[0] == counts[1]


def moved(trainer) -> float:
    """The largest change of a weight; the second factors of adapters are zero in the beginning."""
    start, now = dict(tiny.model().named_parameters()), weights(trainer)
    changes = {name: weight - start[name] if name in start else weight for name, weight in now.items()}
    names = [name for name in now if "lora_B" in name] or list(now)
    return max(float(changes[name].detach().abs().max()) for name in names)


@functools.cache
def plain(loss_type: str, shape_name: str, beta: float = 0.0, bonus: str = "") -> GRPOTrainer:
    """A run of TRL's own trainer."""
    settings = {"loss_type": loss_type, "beta": beta} | BONUSES[bonus] | shape(shape_name)
    with tempfile.TemporaryDirectory() as directory:
        theirs = train(GRPOTrainer, Path(directory), **settings)
    assert moved(theirs) > 1e-3
    return theirs


@pytest.mark.parametrize(("loss_type", "shape_name", "packing", "bonus"), pairwise(2, [False, True], list(BONUSES)))
def test_everything_selected_is_trl(tmp_path, loss_type, shape_name, packing, bonus):
    settings = {"packing": packing, "loss_type": loss_type, "beta": 0.05} | BONUSES[bonus] | shape(shape_name)
    ours, theirs = train(LZEGRPOTrainer, tmp_path, **PLAIN, **settings), plain(loss_type, shape_name, 0.05, bonus)
    gap = distance(ours, theirs)
    assert gap < 1e-5 if packing else gap == 0.0  # bit for bit
    for mine, trl in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        assert mine["loss"] == pytest.approx(trl["loss"], abs=2e-4)  # rounded to four digits
        if bonus:
            assert mine["entropy_coef"] == trl["entropy_coef"]
            assert mine["policy_loss"] == pytest.approx(trl["policy_loss"], abs=1e-4)


SEQUENCE = {"importance_sampling_level": "sequence"}
REPEATED = tiny.prompts(9).select([0, 0, 0, 1, 2, 1, 3, 4, 5, 6, 7, 8])
ADAPTER = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
DROPOUT = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
OPTIONS = {
    "estimate of KL": {"use_bias_correction_kl": False, "scale_rewards": "batch", "gradient_checkpointing": True},
    "entropy": {"top_entropy_quantile": 0.5, "scale_rewards": "none", "optim": "adamw_torch", "learning_rate": 1e-3},
    "sequence": SEQUENCE | {"off_policy_mask_threshold": 0.5, "shuffle_dataset": False, "beta": 0.0},
    "truncated": {"mask_truncated_completions": True, "beta": 0.0},
    "adapter": {"lora": ADAPTER, "learning_rate": 5.0} | shape("neither divides"),
    # A batch used once: else TRL shuffles it after old log-probabilities, which draw random numbers too, and it is shuffled before
    # them here
    "dropout": {"lora": DROPOUT, "learning_rate": 5.0} | shape("two batches an optimizer step"),
    "bf16": {"bf16": True, "model_init_kwargs": {"dtype": "float32"}} | shape("neither divides"),
    "bf16 weights": {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}},
    "repeated rows": {"dataset": REPEATED},
    "stream": {"dataset": REPEATED.to_iterable_dataset(3), "remove_unused_columns": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_everything_selected_is_trl_with_every_option(tmp_path, name):
    settings = PLAIN | {"beta": 0.1} | shape("two optimizer steps a batch") | OPTIONS[name]
    ours, theirs = (train(cls, tmp_path / cls.__name__, **settings) for cls in (LZEGRPOTrainer, GRPOTrainer))
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) == 0.0
    assert {weight.dtype for weight in weights(ours).values()} == {weight.dtype for weight in weights(theirs).values()}


class Scaled:
    """Mixin for a trainer with PyTorch's gradient scaler, which accelerate uses for `fp16` on an accelerator only."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


@pytest.mark.parametrize(("mixins", "packing"), [((Scaled,), True), ((), True), ((), False)])
def test_steps_without_a_live_group_are_those_of_trl(tmp_path, mixins, packing):
    # Adam goes on by its momentum at such steps, with TRL's class too
    settings = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 8, "num_generations": 2}
    settings |= {"fp16": bool(mixins), "weight_decay": 0.1, "strategy": "exact", "scale_rewards": "none"}
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    classes = [type(cls.__name__, (*mixins, cls), {}) for cls in (GRPOTrainer, LZEGRPOTrainer)]
    theirs, ours = (train(cls, tmp_path / cls.__name__, packing=packing, **settings, **shape) for cls in classes)
    assert set(tiny.history(ours, "lze/dead_share")) == {0.0, 1.0}
    assert distance(theirs, ours) < 1e-6


@pytest.mark.parametrize(("loss_type", "shape_name", "packing"), pairwise(2, [True, False]))
def test_the_default_strategy_is_the_full_batch(tmp_path, loss_type, shape_name, packing):
    selection = {"strategy": "exact", "packing": packing}
    ours = train(LZEGRPOTrainer, tmp_path, loss_type=loss_type, **selection, **shape(shape_name))
    assert 0 < ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert distance(ours, plain(loss_type, shape_name)) < 1e-5


def test_rows_without_a_loss_token_are_left_out_of_the_update(tmp_path):
    settings = shape("one step") | {"strategy": "exact", "mask_truncated_completions": True, "dataset": REPEATED}
    ours, theirs = (train(cls, tmp_path / cls.__name__, **settings) for cls in (LZEGRPOTrainer, GRPOTrainer))
    assert moved(theirs) > 1e-3 > 1e-5 > distance(ours, theirs)
    ended = sum(12 * (1.0 - share) for share in tiny.history(ours, "completions/clipped_ratio"))
    assert 0 < ours.ledger.rows_trained < round(ended) < ours.ledger.rows_rolled_out == 60


CLIPPED = {"epsilon": 5e-4, "selection_ratio": 0.7, "top_k": 0}
PACKED = [
    *(
        (shape_name, {"loss_type": loss_type, "loss_normalizer": normalizer, "beta": 0.05} | BONUSES[bonus])
        for loss_type, shape_name, normalizer, bonus in pairwise(1, ["selected", "all"], list(BONUSES))
    ),
    ("iterated", CLIPPED | {"loss_type": "grpo", "beta": 0.05, "loss_normalizer": "all"}),
    ("two batches an optimizer step", CLIPPED | {"loss_type": "dapo", "mask_truncated_completions": True} | STATIC),
    ("neither divides", CLIPPED | {"loss_type": "dr_grpo"} | SEQUENCE),
    ("iterated", CLIPPED | {"loss_type": "cispo", "epsilon_high": 1.0005, "loss_normalizer": "all"} | STATIC),
    ("neither divides", CLIPPED | {"loss_type": "cispo", "epsilon_high": 1.0005} | SEQUENCE),
    ("two batches an optimizer step", CLIPPED | {"loss_type": "vespo", "beta": 0.05}),
]


@pytest.mark.parametrize(("shape_name", "settings"), PACKED, ids=str)
def test_packing_changes_neither_weights_nor_logs(tmp_path, shape_name, settings):
    settings = {"selection_ratio": 0.5, "pruning": "none"} | settings | shape(shape_name)
    runs = [train(LZEGRPOTrainer, tmp_path / str(packing), packing=packing, **settings) for packing in (False, True)]
    assert moved(runs[0]) > 1e-3
    assert distance(*runs) < 1e-5
    assert runs[0].entropy_coef == runs[1].entropy_coef
    assert runs[0]._last_world_entropy == pytest.approx(runs[1]._last_world_entropy, abs=1e-5)
    names = ("entropy", "kl", "policy_loss", "clip_ratio/", "cispo_clip_ratio", "vespo/")
    off, on = ([entry for entry in run.state.log_history if "entropy" in entry] for run in runs)
    logged = {name for name in off[0] if name.startswith(names)}
    for mine, expected in zip(on, off, strict=True):
        for name in logged:
            assert mine[name] == pytest.approx(expected[name], abs=2e-4), name
    clipped = {name for name in logged if "clip" in name and any(entry[name] for entry in off)}
    assert clipped or "epsilon" not in settings or settings["num_iterations"] == 1


def whole_and_resumed(directory, again=None, **settings):
    """A run, and one that goes on from its checkpoint after 5 steps, `again` with other settings: the trainers of both."""
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "selection_ratio": 0.7} | settings
    whole = train(LZEGRPOTrainer, directory, **settings)
    resumed = make(LZEGRPOTrainer, directory, **settings | (again or {}))
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-5"))
    assert resumed.state.global_step == whole.state.global_step
    assert moved(whole) > 1e-3
    return whole, resumed


ADAM = {"optim": "adamw_torch", "learning_rate": 5e-2, "beta": 0.05, "planner_kwargs": {"streak": 1}}
STREAM = tiny.prompts(20).select([0, 0, 0, *range(20), 1, 2, 1]).to_iterable_dataset()


@pytest.mark.parametrize(
    ("shape_name", "own"),
    [
        ("accumulated", {"pruning": "none"}),
        ("two optimizer steps a batch", {"pruning": "skip"}),
        ("iterated", {"pruning": "refill"}),
        ("neither divides", {"pruning": "skip"}),
        ("neither divides", {"pruning": "refill", "lora": DROPOUT}),
        ("two optimizer steps a batch", {"pruning": "none", "dataset": STREAM}),
        # In the second pass and the third, shuffled, in the middle of a batch and after one
        ("two optimizer steps a batch", {"pruning": "none", "dataset": tiny.prompts(8).to_iterable_dataset(3)}),
        ("accumulated", {"pruning": "none", "dataset": tiny.prompts(7).to_iterable_dataset(2)}),
    ],
)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, shape_name, own):
    # Three epochs of 5 batches, so that replays and a new permutation fall behind the resume
    settings = shape(shape_name) | ADAM | ADAPTIVE | {"max_steps": 14, "selection_ratio": 0.4} | own
    whole, resumed = whole_and_resumed(tmp_path, **settings)
    assert_same(whole, resumed)
    assert resumed.entropy_coef == whole.entropy_coef > 0.1


@pytest.mark.skipif(
    Version(version("trl")) < Version("1.15") and Version(version("transformers")) < Version("5.20"),
    reason="plain TRL divides the loss by the accumulation twice there, so that the size of a step depends on it",
)
def test_a_resume_may_share_out_an_optimizer_step_in_another_way(tmp_path):
    # 24 completions a step: 2 micro-steps of 12 until step 5, then 8 of 3. 10 micro-steps are no multiple of 8
    coarse = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}
    fine = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 8}
    whole, resumed = whole_and_resumed(tmp_path, packing=False, again=fine, **coarse)
    assert resumed.generation_step.micro_step == 8 * 3
    assert distance(whole, resumed) < 1e-5


@pytest.mark.parametrize("name", ["steps_per_generation", "num_iterations"])
def test_rollouts_in_use_are_shared_out_as_before(tmp_path, name):
    settings = shape("two optimizer steps a batch") | {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    train(LZEGRPOTrainer, tmp_path, **settings)
    other = make(LZEGRPOTrainer, tmp_path, **settings | {"max_steps": 2, name: 1 if name != "num_iterations" else 2})
    with pytest.raises(ValueError, match=rf"middle of a generation batch with `{name}=\d`, and this run has \d\."):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("length", [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 1}])
def test_a_run_that_is_resumed_at_its_end_stays_as_it_is(tmp_path, length):
    whole, resumed = whole_and_resumed(tmp_path, **length)  # 17 prompts, 3 a batch: 5 steps an epoch
    assert whole.state.global_step == 5
    assert_same(whole, resumed)


@pytest.mark.parametrize(
    ("shape_name", "packing"), [("two batches an optimizer step", True), ("neither divides", False)]
)
def test_without_a_signal_weights_only_decay(tmp_path, shape_name, packing):
    dead = {"rewards": lambda completions, **kwargs: [1.0] * len(completions), "weight_decay": 0.1}
    settings = dead | shape(shape_name) | {"packing": packing, "optim": "adamw_torch", "learning_rate": 1e-2}
    theirs = train(GRPOTrainer, tmp_path / "theirs", **settings)
    trainer = train(LZEGRPOTrainer, tmp_path, **settings, **ADAPTIVE)  # adds and learns nothing here
    assert moved(theirs) > 0.0 == distance(trainer, theirs) == trainer.entropy_coef
    assert trainer.ledger.empty_updates == trainer.state.global_step == 5
    assert tiny.history(trainer, "lze/empty_update") == [1.0] * 5
    assert set(tiny.history(trainer, "reward")) == {1.0}


def interrupted(trainer_class, at: int, where: str):
    """A trainer that is interrupted once, from a micro-step on, when it calls a method of its."""

    class Counting(trainer_class):
        over, micro_steps = False, 0

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.micro_steps += 1
            return loss

    def interrupt(self, *args, **kwargs):
        if self.micro_steps >= at and not self.over and self.model.training:
            self.over = True
            raise KeyboardInterrupt
        return getattr(super(once, self), where)(*args, **kwargs)

    once = type("Interrupted", (Counting,), {where: interrupt})
    return once


@pytest.mark.parametrize(
    ("shape_name", "at", "where", "like_trl"),
    [
        ("one step", 1, "compute_loss", True),
        ("accumulated", 2, "_calculate_rewards", True),
        # TRL goes on in the middle of the generation batch, and here it is given up
        ("neither divides", 4, "training_step", False),
    ],
)
def test_after_an_interruption_the_next_training_begins_with_a_batch_of_its_own(
    tmp_path, shape_name, at, where, like_trl
):
    def run(cls, **settings):
        trainer = make(interrupted(cls, at, where), tmp_path / cls.__name__, **settings, **shape(shape_name))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        assert trainer.state.global_step == 5
        assert moved(trainer) > 1e-3
        return trainer

    ours = run(LZEGRPOTrainer, strategy="exact")
    assert not like_trl or distance(ours, run(GRPOTrainer)) < 1e-5


def computed_twice(trainer_class):
    def compute_loss(self, *args, **kwargs):
        super(twice, self).compute_loss(*args, **kwargs)
        return super(twice, self).compute_loss(*args, **kwargs)

    twice = type("Twice", (trainer_class,), {"compute_loss": compute_loss})
    return twice


def test_a_class_of_the_user_may_compute_its_loss_twice(tmp_path, caplog):
    settings = {"loss_type": "bnpo"} | shape("accumulated")
    ours = train(computed_twice(LZEGRPOTrainer), tmp_path / "ours", strategy="exact", **settings)
    theirs = train(computed_twice(GRPOTrainer), tmp_path / "theirs", **settings)
    assert distance(ours, theirs) < 1e-5 < moved(ours)
    assert "`Twice.compute_loss` sees the rows that are trained on" in caplog.text


def test_the_same_trainer_goes_on_from_a_checkpoint(tmp_path):
    settings = shape("two optimizer steps a batch") | {"max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    whole = train(LZEGRPOTrainer, tmp_path / "whole", save_total_limit=None, **settings)
    # The next generation batch is begun, and the checkpoint lies in the middle of the one before
    cls = interrupted(LZEGRPOTrainer, 6, "training_step")
    trainer = make(cls, tmp_path / "run", save_total_limit=None, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert trainer.generation_step.batch_index == whole.generation_step.batch_index
    assert distance(trainer, whole) == 0.0


class Terminated(TrainerCallback):
    """Gets a SIGTERM, as of a scheduler that takes the machine away, in the middle of an optimizer step."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_resumed_after_a_sigterm_is_uninterrupted_bit_for_bit(tmp_path):
    settings = shape("two optimizer steps a batch") | {"max_steps": 8, "enable_jit_checkpoint": True}
    whole = train(LZEGRPOTrainer, tmp_path / "whole", **settings)
    stopped = make(LZEGRPOTrainer, tmp_path / "run", **settings)
    stopped.add_callback(Terminated())
    with pytest.raises(SystemExit, match="143"):
        stopped.train()
    assert stopped.state.global_step == 5
    resumed = make(LZEGRPOTrainer, tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert distance(whole, resumed) == 0.0
