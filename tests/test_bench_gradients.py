"""The gradients of groups are exact, and so are the rank correlations with them."""

import json

import pytest
import torch
from transformers import TrainerCallback

import tiny
from benchmarks import addition, gradients, tasks
from benchmarks.group_gradients import Sample, draw, policy_gradient


SMALL = addition.WarmStart(steps=2, batch_size=8, hidden_size=16, intermediate_size=32, num_layers=1)
ROWS = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a, b in ((12, 3), (1, 1), (40, 9))]


def small_model():
    torch.manual_seed(0)
    tokenizer = addition.build_tokenizer()
    return addition.build_model(tokenizer, SMALL), tokenizer


class FirstStep(TrainerCallback):
    """The gradient that the optimizer of a training gets at its first step, and the rows that it comes from."""

    def __init__(self, trainer):
        self.batches, self.gradient, self.weights = [], None, None
        compute_loss = trainer.compute_loss

        def spy(model, inputs, *args, **kwargs):
            self.batches.append(dict(inputs))
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = spy
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradient = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}

    def sample(self, tokenizer, reward) -> Sample:
        prompts, prompt_mask, completions, mask = (
            torch.cat([batch[name] for batch in self.batches])
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        )
        _, group = prompts.unique(dim=0, return_inverse=True)
        rewards = torch.tensor(reward(completions=tokenizer.batch_decode(completions, skip_special_tokens=True)))
        ids, attended = torch.cat([prompts, completions], dim=1), torch.cat([prompt_mask, mask], dim=1)
        return Sample(input_ids=ids, attention_mask=attended, completion_mask=mask, group=group, rewards=rewards)


def test_group_gradients_sum_to_the_gradient_of_trls_loss(tmp_path):
    own = {"selector": "all", "pruning": "none", "packing": False, "loss_type": "dapo", "scale_rewards": "none"}
    own |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "max_steps": 1}
    own["max_completion_length"] = 24  # some completions end before
    trainer = tiny.make(tmp_path, dataset=tiny.prompts(7), **own)
    first = FirstStep(trainer)
    trainer.train()
    sample, model = first.sample(tiny.tokenizer(), tiny.even_length_reward), tiny.model()
    model.load_state_dict(first.weights)
    assert (len(sample.group), len(sample.group.unique())) == (12, 3)

    groups = [sample.of_group(group) for group in range(3)]
    tokens = [int(group.completion_mask.sum()) for group in groups]
    parts = [count / sum(tokens) * policy_gradient(model, own) for count, own in zip(tokens, groups, strict=True)]
    assert len(set(tokens)) > 1
    assert sum(float(part.norm()) > 0 for part in parts) >= 2
    torch.testing.assert_close(sum(parts), first.gradient, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(policy_gradient(model, sample), first.gradient, rtol=1e-4, atol=1e-7)


def test_a_dead_group_has_exactly_no_gradient():
    rewards = [0.0] * 5 + [1.0] * 5 + [0.0, 1.0] * 2 + [0.0]
    model, tokenizer = small_model()
    sample = draw(model, tokenizer, ROWS, 5, 4, lambda completions, solution: rewards, 3)
    for dead in (0, 1):
        assert policy_gradient(model, sample.of_group(dead)).abs().max() == 0.0
    assert policy_gradient(model, sample.of_group(2)).abs().max() > 0.0


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "ADDITION_DIR", tmp_path / "warm-start")
    monkeypatch.setattr(addition, "WarmStart", lambda: SMALL)
    flags = ["--group_sizes", "4", "--seeds", "7", "--steps", "4", "--probes", "3", "--prompts", "9"]
    gradients.main([*flags, "--output", str(tmp_path / "out")])
    (run,) = (tmp_path / "out").glob("G4-seed7-*.json")
    records = json.loads(run.read_text())["records"]
    assert [record["step"] for record in records] == [0, 2, 4]
    # The memory of the probes: the anchor is that of the first visit
    assert records[0]["difficulty"] == records[2]["difficulty"]
    assert (tmp_path / "out" / "results.md").read_text().startswith("Trainings on every group: 1, of 4 steps")
    assert (tmp_path / "out" / "energy-gradients.png").is_file()
    assert json.loads((tmp_path / "out" / "correlations.json").read_text())
    written = run.stat().st_mtime_ns
    gradients.main([*flags, "--output", str(tmp_path / "out")])
    assert run.stat().st_mtime_ns == written
