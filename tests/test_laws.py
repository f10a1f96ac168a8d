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
from transformers.trainer_jit_checkpoint import CheckpointManager
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer


LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo"]

# rows per micro-batch b, accumulation A, micro-steps per generation S, iterations I
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
    rows, accumulation, per_generation, iterations = SHAPES[name]
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_iterations": iterations,
        "max_steps": 5,
    }


def make(trainer_class, directory, dataset=None, lora=None, rewards=tiny.even_length_reward, **kwargs):
    # SGD: Adam would blow rounding errors of vanishing gradients up to full steps
    kwargs = {"optim": "sgd", "learning_rate": 0.5} | kwargs
    set_seed(0)  # TRL before 1.15 draws a new adapter from whatever random numbers come next
    return trainer_class(
        model=tiny.save(directory / "model-0"),
        reward_funcs=rewards,
        args=tiny.config(directory, **kwargs),
        train_dataset=tiny.prompts(17) if dataset is None else dataset,
        peft_config=lora,
    )


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
    memories = [
        trainer.prompt_state.state_dict() | trainer.prompt_state.foresight.model.state_dict() for trainer in (a, b)
    ]
    for name, values in memories[0].items():
        np.testing.assert_array_equal(values, memories[1][name])
    assert a.prompt_state.foresight.model.weights.any()
    counts = [name for name in vars(a.ledger) if not name.endswith("seconds")]
    assert {name: getattr(a.ledger, name) for name in counts} == {name: getattr(b.ledger, name) for name in counts}


def moved(trainer) -> float:
    start = dict(tiny.model().named_parameters())
    return max(float((parameter - start[name]).detach().abs().max()) for name, parameter in weights(trainer).items())


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


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "use_bias_correction_kl": False, "scale_rewards": "batch", "gradient_checkpointing": True},
        {"top_entropy_quantile": 0.5, "scale_rewards": "none", "optim": "adamw_torch", "learning_rate": 1e-3},
        {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5, "shuffle_dataset": False},
        {"mask_truncated_completions": True},
    ],
    ids=str,
)
def test_everything_selected_is_trl_with_every_option(tmp_path, settings):
    settings = shape("two optimizer steps a batch") | PLAIN | settings
    ours = train(LZEGRPOTrainer, tmp_path / "ours", **settings)
    theirs = train(GRPOTrainer, tmp_path / "theirs", **settings)
    assert moved(theirs) > 0
    assert distance(ours, theirs) == 0.0


def lora(dropout: float = 0.0) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)


def adapters_moved(trainer) -> float:
    """Largest weight of the second factors of the adapters, which are zero in the beginning."""
    return max(float(weight.abs().max()) for name, weight in weights(trainer).items() if "lora_B" in name)


# With dropout, a batch used once: else TRL shuffles it after old log-probabilities, which draw random numbers too, and it is
# shuffled before them here
@pytest.mark.parametrize(("shape_name", "dropout"), [("neither divides", 0.0), ("two batches an optimizer step", 0.2)])
def test_everything_selected_is_trl_with_lora(tmp_path, shape_name, dropout):
    # beta > 0: the reference is the model without its adapters
    settings = {"beta": 0.1, "learning_rate": 5.0} | shape(shape_name)
    ours = train(LZEGRPOTrainer, tmp_path / "ours", lora=lora(dropout), **PLAIN, **settings)
    theirs = train(GRPOTrainer, tmp_path / "theirs", lora=lora(dropout), **settings)
    assert adapters_moved(theirs) > 1e-3
    assert distance(ours, theirs) == 0.0


@pytest.mark.parametrize(
    ("dtype", "shape_name"), [("float32", "neither divides"), ("bfloat16", "two optimizer steps a batch")]
)
def test_everything_selected_is_trl_in_bfloat16(tmp_path, dtype, shape_name):
    # Weights of `dtype`, computed with in bfloat16
    settings = {"bf16": True, "beta": 0.1, "model_init_kwargs": {"dtype": dtype}} | shape(shape_name)
    ours = train(LZEGRPOTrainer, tmp_path / "ours", **PLAIN, **settings)
    theirs = train(GRPOTrainer, tmp_path / "theirs", **settings)
    assert {str(weight.dtype) for weight in weights(ours).values()} == {f"torch.{dtype}"}
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) == 0.0


class Scaled:
    """Mixin for a trainer with PyTorch's gradient scaler, which accelerate uses for `fp16` on an accelerator only."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


@pytest.mark.parametrize("packing", [True, False])
def test_with_a_gradient_scaler_steps_without_a_live_group_are_those_of_trl(tmp_path, packing):
    # Adam goes on by its momentum at such steps, with TRL's class too
    settings = {"fp16": True, "optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 8, "num_generations": 2}
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "scale_rewards": "none"}
    classes = [type(cls.__name__, (Scaled, cls), {}) for cls in (GRPOTrainer, LZEGRPOTrainer)]
    theirs, ours = (train(cls, tmp_path / cls.__name__, packing=packing, **settings, **shape) for cls in classes)
    dead = [entry["lze/dead_share"] for entry in ours.state.log_history if "lze/dead_share" in entry]
    assert {0.0, 1.0} == set(dead)
    assert distance(theirs, ours) < 1e-6


@pytest.mark.parametrize("streamed", [True, False])
def test_everything_selected_is_trl_where_rows_repeat(tmp_path, streamed):
    rows = tiny.prompts(9).select([0, 0, 0, 1, 2, 1, 3, 4, 5, 6, 7, 8])
    settings = shape("two optimizer steps a batch") | {"beta": 0.1, "shuffle_dataset": not streamed}
    settings["dataset"] = rows.to_iterable_dataset() if streamed else rows
    ours = train(LZEGRPOTrainer, tmp_path / "ours", deduplicate=False, **PLAIN, **settings)
    theirs = train(GRPOTrainer, tmp_path / "theirs", **settings)
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) == 0.0


@pytest.mark.parametrize(("loss_type", "shape_name", "packing"), pairwise(2, [True, False]))
def test_the_default_strategy_is_the_full_batch(tmp_path, loss_type, shape_name, packing):
    selection = {"strategy": "exact", "packing": packing}
    ours = train(LZEGRPOTrainer, tmp_path, loss_type=loss_type, **selection, **shape(shape_name))
    assert 0 < ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert distance(ours, plain(loss_type, shape_name)) < 1e-5


@pytest.mark.parametrize(
    ("loss_type", "shape_name", "normalizer", "bonus"), pairwise(1, ["selected", "all"], list(BONUSES))
)
def test_packing_changes_nothing(tmp_path, loss_type, shape_name, normalizer, bonus):
    settings = {"loss_type": loss_type, "loss_normalizer": normalizer, "selection_ratio": 0.5, "pruning": "none"}
    settings |= {"beta": 0.05} | BONUSES[bonus] | shape(shape_name)
    on, off = (
        train(LZEGRPOTrainer, tmp_path / str(packing), packing=packing, **settings) for packing in (True, False)
    )
    assert moved(on) > 1e-3
    assert distance(on, off) < 1e-5
    assert on.entropy_coef == off.entropy_coef
    assert on._last_world_entropy == pytest.approx(off._last_world_entropy, abs=1e-5)


SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("shape_name", "settings"),
    [
        ("iterated", {"loss_type": "grpo", "beta": 0.05}),
        ("two batches an optimizer step", {"loss_type": "dapo", "mask_truncated_completions": True} | STATIC),
        ("neither divides", {"loss_type": "dr_grpo"} | SEQUENCE),
        ("iterated", {"loss_type": "cispo", "epsilon_high": 1.0005} | STATIC),
        ("neither divides", {"loss_type": "cispo", "epsilon_high": 1.0005} | SEQUENCE),
        ("two batches an optimizer step", {"loss_type": "vespo", "beta": 0.05}),
    ],
    ids=str,
)
def test_packing_changes_neither_weights_nor_logs(tmp_path, shape_name, settings):
    settings = {"epsilon": 5e-4, "pruning": "none", "selection_ratio": 0.7, "top_k": 0} | settings | shape(shape_name)
    settings |= {"loss_normalizer": "all"} if shape_name == "iterated" else {}
    runs = [train(LZEGRPOTrainer, tmp_path / str(packing), packing=packing, **settings) for packing in (False, True)]
    assert moved(runs[0]) > 1e-3
    assert distance(*runs) < 1e-5
    names = ("entropy", "kl", "policy_loss", "clip_ratio/", "cispo_clip_ratio", "vespo/")
    off, on = ([entry for entry in run.state.log_history if "entropy" in entry] for run in runs)
    logged = {name for name in off[0] if name.startswith(names)}
    for mine, expected in zip(on, off, strict=True):
        assert {name: mine[name] for name in logged} == pytest.approx(
            {name: expected[name] for name in logged}, abs=2e-4
        )
    clipped = {name for name in logged if "clip" in name and any(entry[name] for entry in off)}
    assert clipped or settings["num_iterations"] == 1


RESUMED = {
    "between batches": shape("accumulated"),
    "in the middle of a batch": shape("two optimizer steps a batch"),
    "between iterations": shape("iterated"),
    "neither divides": shape("neither divides"),
}


def whole_and_resumed(directory, again=None, **settings):
    """A run, and one that goes on from its checkpoint after 5 steps, `again` with other settings: the trainers of both."""
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "selection_ratio": 0.7} | settings
    whole = train(LZEGRPOTrainer, directory, **settings)
    resumed = make(LZEGRPOTrainer, directory, **settings | (again or {}))
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-5"))
    assert resumed.state.global_step == whole.state.global_step == settings["max_steps"]
    assert (adapters_moved if "lora" in settings else moved)(whole) > 1e-3
    return whole, resumed


ADAM = {"optim": "adamw_torch", "learning_rate": 5e-2, "beta": 0.05, "planner_kwargs": {"streak": 1}}


@pytest.mark.parametrize(
    ("moment", "pruning"),
    [*zip(RESUMED, ["none", "skip", "refill", "skip"], strict=True), ("neither divides", "refill")],
)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, moment, pruning):
    # Three epochs of 5 batches, so that replays and a new permutation fall behind the resume
    settings = RESUMED[moment] | ADAM | ADAPTIVE | {"max_steps": 14, "pruning": pruning, "selection_ratio": 0.4}
    whole, resumed = whole_and_resumed(tmp_path, **settings)
    assert_same(whole, resumed)
    assert resumed.entropy_coef == whole.entropy_coef > 0.1


@pytest.mark.skipif(
    Version(version("trl")) < Version("1.15") and Version(version("transformers")) < Version("5.20"),
    reason="plain TRL divides the loss by the accumulation twice there, so that the size of a step depends on it",
)
def test_a_resume_may_share_out_an_optimizer_step_in_another_way(tmp_path):
    # 24 completions a step: 2 micro-steps of 12 until step 5, then 8 of 3. 10 micro-steps are no multiple of 8
    coarse, fine = (
        {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 24 // rows} for rows in (12, 3)
    )
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


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1}])
def test_a_run_that_is_resumed_at_its_end_stays_as_it_is(tmp_path, caplog, length):
    # 17 prompts, 3 a batch: 5 steps an epoch
    settings = {"save_strategy": "steps", "save_steps": 1, **length}
    whole = train(LZEGRPOTrainer, tmp_path, **settings)
    resumed = make(LZEGRPOTrainer, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == (3 if length == {"max_steps": 3} else 5)
    assert_same(whole, resumed)
    assert moved(whole) > 1e-3


def test_resumed_with_lora_is_uninterrupted(tmp_path):
    assert_same(*whole_and_resumed(tmp_path, lora=lora(dropout=0.2), **RESUMED["neither divides"] | ADAM))


def test_resumed_on_a_stream_is_uninterrupted(tmp_path):
    # One pass: in a later one, the trainer of transformers, which does not know where a stream ends, resumes at its start
    rows = tiny.prompts(20).select([0, 0, 0, *range(20), 1, 2, 1]).to_iterable_dataset()
    own = RESUMED["in the middle of a batch"] | {"pruning": "none"}
    assert_same(*whole_and_resumed(tmp_path, dataset=rows, **own))


@pytest.mark.parametrize(
    ("shape_name", "packing"), [("two batches an optimizer step", True), ("neither divides", False)]
)
def test_a_batch_without_signal_moves_nothing(tmp_path, shape_name, packing):
    dead = {"rewards": lambda completions, **kwargs: [1.0] * len(completions), "weight_decay": 0.1}
    trainer = train(LZEGRPOTrainer, tmp_path, packing=packing, optim="adamw_torch", **dead, **shape(shape_name))
    assert moved(trainer) == 0.0
    assert trainer.ledger.skipped_updates == trainer.state.global_step == 5
    log = trainer.state.log_history
    assert [entry["lze/skipped_update"] for entry in log if "lze/skipped_update" in entry] == [1.0] * 5
    assert {entry["reward"] for entry in log if "reward" in entry} == {1.0}


def interrupted(trainer_class, at: int, where: str):
    """A trainer that is interrupted once, at a micro-step: before it, in its rewards, or in its loss."""

    class Interrupted(trainer_class):
        over, micro_steps = False, 0

        def interrupt(self, place):
            if place == where and self.micro_steps >= at and not self.over and self.model.training:
                self.over = True
                raise KeyboardInterrupt

        def training_step(self, *args, **kwargs):
            self.interrupt("before")
            loss = super().training_step(*args, **kwargs)
            self.micro_steps += 1
            return loss

        def _calculate_rewards(self, *args, **kwargs):
            self.interrupt("rewards")
            return super()._calculate_rewards(*args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            self.interrupt("loss")
            return super().compute_loss(*args, **kwargs)

    return Interrupted


@pytest.mark.parametrize(
    ("shape_name", "at", "where", "like_trl"),
    [
        ("one step", 1, "loss", True),
        ("accumulated", 2, "rewards", True),
        (
            "neither divides",
            4,
            "before",
            False,
        ),  # TRL goes on in the middle of the generation batch, and here it is given up
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


def test_the_same_trainer_goes_on_from_a_checkpoint(tmp_path):
    settings = shape("two optimizer steps a batch") | {"max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    whole = train(LZEGRPOTrainer, tmp_path / "whole", save_total_limit=None, **settings)
    # The next generation batch is begun, and the checkpoint lies in the middle of the one before
    trainer = make(interrupted(LZEGRPOTrainer, 6, "before"), tmp_path / "run", save_total_limit=None, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert trainer.generation_step.generation == whole.generation_step.generation
    assert distance(trainer, whole) == 0.0


class Terminated(TrainerCallback):
    """Gets a SIGTERM, as of a scheduler that takes the machine away, in the middle of an optimizer step."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_resumed_after_a_sigterm_is_uninterrupted_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(
        CheckpointManager, "__init__", functools.partialmethod(CheckpointManager.__init__, kill_wait=0)
    )
    settings = shape("two optimizer steps a batch") | {"max_steps": 8, "enable_jit_checkpoint": True}
    whole = train(LZEGRPOTrainer, tmp_path / "whole", **settings)
    stopped = make(LZEGRPOTrainer, tmp_path / "run", **settings)
    stopped.add_callback(Terminated())
    stopped.train()
    assert 4 < stopped.state.global_step < 8
    resumed = make(LZEGRPOTrainer, tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert distance(whole, resumed) == 0.0
