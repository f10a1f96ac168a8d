"""The trainer takes what TRL's takes, and refuses the rest with a reason."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from trl import GRPOConfig

import tiny
from lze_trl import LZEGRPOTrainer
from test_laws import distance
from tiny import history, make, run


def ones(completions, **kwargs):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    "named", [{"pass_reward": "even_length_reward"}, {"pass_reward": "total", "pass_threshold": 0.5}], ids=str
)
def test_a_pass_can_be_a_reward_of_several_or_the_weighted_total(tmp_path, named):
    trainer = run(tmp_path, reward_funcs=[ones, tiny.even_length_reward], reward_weights=[0.4, 0.2], **named)
    assert history(trainer, "lze/pass_rate") == pytest.approx(history(trainer, "rewards/even_length_reward/mean"))


@pytest.mark.parametrize("scored", [3, 0])
def test_completions_that_nothing_scores_leave_no_trace(tmp_path, scored):
    def picky(completions, **kwargs):
        # The last ones of each group pass, the others are not scored: a pass rate of 1, no signal
        return [1.0 if i % 4 >= 4 - scored else None for i in range(len(completions))]

    trainer = run(tmp_path, reward_funcs=picky, pruning="none")
    assert trainer.ledger.groups_trained == 0
    assert history(trainer, "lze/pass_rate") == [1.0] * 3 if scored else len(trainer.prompt_state) == 0


def test_completions_and_metrics_are_those_of_the_whole_batch(tmp_path):
    trainer = run(tmp_path, log_completions=True, num_completions_to_print=1, selection_ratio=0.3)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 12
    assert (table["even_length_reward"] == [float(len(t.strip()) % 2 == 0) for t in table["completion"]]).all()
    means = table.groupby("prompt")["even_length_reward"].transform("mean")
    assert np.allclose(np.sign(table["advantage"]), np.sign(table["even_length_reward"] - means))
    assert trainer.ledger.rows_trained < trainer.ledger.rows_rolled_out
    for name in ("reward", "rewards/even_length_reward/mean", "completions/mean_length", "frac_reward_zero_std"):
        assert len(history(trainer, name)) == 3
    assert history(trainer, "reward") == pytest.approx(history(trainer, "lze/pass_rate"))


@pytest.mark.parametrize(("pruning", "selector"), [("skip", "energy"), ("refill", "random")])
def test_solved_prompts_cost_no_rollouts(tmp_path, pruning, selector):
    def reward(prompts, completions, **kwargs):
        even = tiny.even_length_reward(completions)
        return [1.0 if len(prompt) < 6 else passed for prompt, passed in zip(prompts, even, strict=True)]

    own = {"dataset": tiny.prompts(12), "pruning": pruning, "selector": selector, "max_steps": 20}
    trainer = run(tmp_path, reward_funcs=reward, **own)
    solved = trainer.prompt_state["pruned"]
    assert solved.sum() >= 6
    visits = trainer.prompt_state["visits"]
    # Two visits prune a prompt; from then on one of them, a tenth rounded up, is re-checked in each pass
    assert visits[solved].mean() < visits[~solved].mean()
    assert trainer.ledger.visits_skipped > 0
    unused = 0 if pruning == "refill" else trainer.ledger.visits_skipped
    assert trainer.ledger.groups_rolled_out + unused == 60


@pytest.mark.parametrize(
    ("how", "setting"), [("state_from", {"reward_range": [0.0, 1.0]}), ("resume", {"pass_threshold": 0.5})]
)
def test_a_setting_wins_over_the_range_of_a_state(tmp_path, how, setting):
    def rewards(scale):
        return lambda completions, **kwargs: [scale * r for r in tiny.even_length_reward(completions)]

    run(tmp_path / "first", reward_funcs=rewards(10.0), save_strategy="steps", save_steps=3)
    start = {"state_from": str(tmp_path / "first")} if how == "state_from" else {}
    args = {"reward_funcs": rewards(1.0), "max_steps": 6, **setting, **start}
    second = make(tmp_path / "second", **args)
    second.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-3") if how == "resume" else None)
    assert history(second, "lze/pass_rate")[-3:] == pytest.approx(history(second, "reward")[-3:])
    assert second.prompt_state["expected"].max() > 1.0  # what is remembered stays


def test_a_run_without_pruning_forgets_what_was_pruned(tmp_path):
    first = run(tmp_path / "first", reward_funcs=ones, planner_kwargs={"streak": 1})
    assert first.prompt_state["pruned"].sum() > 0
    own = {"pruning": "none", "controller": "dynamic", "controller_kwargs": {"max_rounds": 2}}
    second = run(tmp_path / "second", state_from=str(tmp_path / "first"), **own)
    assert second.prompt_state["pruned"].sum() == second.ledger.visits_skipped == 0


def test_prompts_that_fill_a_batch_are_no_visits_skipped(tmp_path):
    # 5 prompts, 3 a batch, all solved at once: one re-check a pass, and two that fill the batch
    own = {"dataset": tiny.prompts(5), "planner_kwargs": {"streak": 1}, "max_steps": 8}
    trainer = run(tmp_path, reward_funcs=ones, **own)
    assert trainer.ledger.groups_rolled_out == 8 * 3
    passes = trainer.passes.stream.pass_index
    assert 0 < trainer.ledger.visits_skipped <= 2 * passes  # of 5 prompts, a batch takes 3


def test_a_filler_has_no_entropy(tmp_path):
    # Two generation batches an optimizer step, the second without a signal: its last micro-step only synchronises
    calls = []

    def rewards(completions, **kwargs):
        calls.append(len(completions))
        return [float(i % 2) if len(calls) % 2 else 1.0 for i in range(len(completions))]

    class Watched(LZEGRPOTrainer):
        synchronised = 0

        def _prepare_inputs(self, inputs):
            prepared = super()._prepare_inputs(inputs)
            self.synchronised += prepared.get("lze_scale") == 0.0
            return prepared

    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "steps_per_generation": 3}
    trainer = run(tmp_path, cls=Watched, reward_funcs=rewards, dataset=tiny.prompts(12), pruning="none", **shape)
    assert trainer.synchronised == 3
    assert all(entropy > 4.0 for entropy in history(trainer, "entropy"))


def test_an_exception_of_a_reward_function_says_its_name(tmp_path):
    def failing(completions, **kwargs):
        raise RuntimeError("the judge is away")

    with pytest.raises(RuntimeError, match="the judge is away") as caught:
        run(tmp_path, reward_funcs=failing)
    assert caught.value.__notes__ == ["Raised by the reward function 'failing'."]


def test_what_cannot_be_is_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"none of the reward functions \['even_length_reward'\]"):
        make(tmp_path, pass_reward="accuracy")
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="must be an `LZEGRPOConfig`, got `GRPOConfig`"):
        LZEGRPOTrainer(tiny.model(), tiny.even_length_reward, args, tiny.prompts(11))


def test_packing_is_on_where_it_is_exact(tmp_path):
    for settings in ({}, {"entropy_coef": 0.1}, {"use_adaptive_entropy": True}, {"beta": 0.1}):
        assert tiny.config(tmp_path, **settings).packing
    assert not tiny.config(tmp_path, top_entropy_quantile=0.5).packing
    assert not tiny.config(tmp_path, packing=False).packing


def test_truncated_groups_take_no_place_of_others(tmp_path):
    # Of each batch one group is trained on, and many have not a single completion that ended
    shape = {"dataset": tiny.prompts(40), "per_device_train_batch_size": 32, "max_steps": 10}
    own = {"max_completion_length": 20, "mask_truncated_completions": True, "selection_ratio": 0.15}
    trainer = run(tmp_path, **shape, **own)
    assert trainer.ledger.groups_trained >= 8
    norms = history(trainer, "grad_norm")
    assert sum(norm == 0.0 for norm in norms) == trainer.ledger.empty_updates


class ScheduleFree(torch.optim.AdamW):
    """As of a schedule-free optimizer: its weights are those to train only after `train()`."""

    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    def step(self, closure=None):
        assert self.training, "Optimizer was not in train mode when step is called."
        return super().step(closure)


def test_a_schedule_free_optimizer_is_told_to_train_before_the_rollouts(tmp_path):
    modes = []

    def watched(completions, **kwargs):
        modes.append(optimizer.training)
        return tiny.even_length_reward(completions)

    model = tiny.model()
    optimizer = ScheduleFree(model.parameters(), lr=1e-2)
    run(tmp_path, reward_funcs=watched, trainer={"model": model, "optimizers": (optimizer, None)})
    assert modes == [True] * 3


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_skipped_prompts_weigh_in_the_loss_over_all_rows_as_dead_groups(tmp_path, loss_type):
    def reward(prompts, completions, solution, **kwargs):
        # Half of the prompts are solved, of the others half of the completions pass
        return [float(int(gold) % 4 != 0 or i % 2) for i, gold in enumerate(solution)]

    own = {"loss_type": loss_type, "loss_normalizer": "all", "selection_ratio": 1.0, "planner_kwargs": {"streak": 1}}
    own |= {"optim": "sgd", "learning_rate": 0.5, "max_steps": 8}  # AdamW would not see how long a gradient is
    own |= {"trainer": {"rollout_func": functools.partial(tiny.fixed_rollouts, length=4)}}
    own |= {"dataset": tiny.prompts(12), "reward_funcs": reward}
    runs = [run(tmp_path / pruning, pruning=pruning, **own) for pruning in ("none", "skip")]
    assert runs[1].ledger.visits_skipped > 4
    assert runs[0].ledger.groups_trained == runs[1].ledger.groups_trained > 4
    assert distance(*runs) < 1e-5


def test_only_rows_that_are_rolled_out_are_read(tmp_path):
    read: list[str] = []
    data = tiny.prompts(11).with_transform(lambda rows: read.extend(rows["prompt"]) or rows)
    shape = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "pruning": "refill"}
    trainer = tiny.make(tmp_path, dataset=data, **shape)
    read.clear()
    trainer.train()
    assert len(read) == 9  # three batches of three prompts


def test_state_carries_over(tmp_path):
    first = run(tmp_path / "first")
    second = make(tmp_path / "second", state_from=str(tmp_path / "first"), max_steps=1)
    second.train()
    before, known = (
        dict(zip(one.prompt_state["prompt_ids"], one.prompt_state["first_pass_rate"], strict=True))
        for one in (first, second)
    )
    assert len(before) > 3  # more than the second run has seen
    assert known.items() >= before.items()


def test_masked_rows_leave_the_clip_ratios_alone(tmp_path):
    # Packing puts truncated rows, which are equally long, into micro-batches of their own
    shape = {"dataset": tiny.prompts(17), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    own = {"max_completion_length": 24, "mask_truncated_completions": True, "num_iterations": 2, "max_steps": 6}
    trainer = run(tmp_path, selector="all", pruning="none", **shape, **own)
    for name in ("clip_ratio/low_min", "clip_ratio/high_max"):
        assert len(history(trainer, name)) == 6
        assert np.isfinite(history(trainer, name)).all()
