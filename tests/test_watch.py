"""Log-probabilities that are watched while transformers generates."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LogitsProcessorList
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.rollout.watch import SamplingWatch, watched
from test_laws import distance


PROMPTS = ["1+1=", "20+400=", "3*3="]
END = [1, *range(4, 20)]


def generate(model, seed: int = 3, prompts: list[list[int]] | None = None, **settings) -> list[list[int]]:
    """Completions of left-padded prompts, without what follows their end token."""
    encode = tiny.tokenizer()
    encode.padding_side = "left"
    prompts = prompts or encode(PROMPTS)["input_ids"]
    inputs = encode.pad({"input_ids": prompts}, padding=True, return_tensors="pt")
    own = {"do_sample": True, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": END, "disable_compile": True}
    config = GenerationConfig(**own | {"top_k": 0} | settings)
    torch.manual_seed(seed)
    found = model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].size(1) :].tolist()
    ends = [min([i for i, token in enumerate(row) if token in END], default=len(row) - 1) for row in found]
    return [row[: end + 1] for row, end in zip(found, ends, strict=True)]


def expected(model, completions: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
    """Log-probabilities of all tokens by a forward pass of each whole text."""
    found = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = [*tiny.tokenizer()(prompt)["input_ids"], *completion]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -len(completion) - 1 : -1].float() / temperature
        found.append(logits.log_softmax(dim=1)[range(len(completion)), completion].tolist())
    return found


@pytest.mark.parametrize(("temperature", "adapter"), [(1.3, False), (0.7, True)])
def test_log_probs_are_those_of_a_forward_pass(temperature, adapter):
    model = tiny.model()
    if adapter:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    model.eval()
    plain = generate(model, temperature=temperature)
    state = torch.get_rng_state()
    with watched(model) as watch:
        completions = generate(model, temperature=temperature)
    assert completions == plain
    assert torch.equal(torch.get_rng_state(), state)
    assert len({len(row) for row in completions}) > 1  # some end before others
    logprobs = watch.token_logprobs(completions)
    assert [len(row) for row in logprobs] == [len(row) for row in completions]
    for ours, theirs in zip(logprobs, expected(model, completions, temperature), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_log_probs_are_those_of_the_distribution_that_was_sampled_from():
    model = tiny.model().eval()
    with watched(model) as watch:
        completions = generate(model, top_k=1)
    assert watch.token_logprobs(completions) == [[0.0] * len(row) for row in completions]


def test_each_turn_of_an_agent_is_watched():
    model, tool = tiny.model().eval(), [7, 8, 9]
    ids = tiny.tokenizer()(PROMPTS)["input_ids"]
    with watched(model) as watch:
        first = generate(model)
        again = {0: 6, 2: 1}  # completions that call a tool, and how many tokens of the answer TRL keeps
        second = generate(model, prompts=[ids[i] + first[i] + tool for i in again])
    answers = {i: answer[:kept] for (i, kept), answer in zip(again.items(), second, strict=True)}
    completions = [row + tool + answers[i] if i in again else row for i, row in enumerate(first)]
    masks = [[1] * len(row) + ([0] * 3 + [1] * len(answers[i]) if i in again else []) for i, row in enumerate(first)]
    logprobs = watch.token_logprobs(completions, masks)
    for ours, mask, theirs in zip(logprobs, masks, expected(model, completions), strict=True):
        np.testing.assert_allclose(ours, np.array(theirs)[np.array(mask) == 1], atol=1e-4)
    # An answer that was cut off whole leaves the tool's result
    assert watch.token_logprobs([*completions[:2], first[2] + tool], [*masks[:2], masks[2][:-1]]) is not None
    assert watch.token_logprobs(completions) is None


def test_what_was_not_watched_has_no_log_probs():
    model = tiny.model().eval()
    with watched(model) as watch:
        assert watch.token_logprobs([[5], [6]]) is None  # nothing was generated
        completions = generate(model, seed=5)
        others = completions[::-1], completions[:2], [[*row, 5] for row in completions], [[10**6]] * 3
        assert [watch.token_logprobs(other) for other in others] == [None] * 4
        assert watch.token_logprobs(completions) is not None
        generate(model)
        assert watch.token_logprobs(completions) is None  # it was generated twice, and there is one turn
    assert not {"_get_logits_processor", "generate"} & set(vars(model))
    with watched(torch.nn.Linear(2, 2)) as watch:
        pass
    assert watch.token_logprobs([[5]]) is None


def trained(directory, **settings):
    """A trainer that has trained, and all batches that it has remembered."""
    trainer = tiny.make(directory, **settings)
    seen = tiny.drawn_by(trainer)
    trainer.train()
    assert seen
    return trainer, seen


def test_a_training_is_the_same_whether_it_is_watched(tmp_path, monkeypatch):
    one, watching = trained(tmp_path / "watched", temperature=0.8)
    monkeypatch.setattr(SamplingWatch, "token_logprobs", lambda *_: None)
    other, blind = trained(tmp_path / "blind", temperature=0.8)
    assert distance(one, other) == 0.0
    assert all((rollouts.logprobs < 0).all() for rollouts in watching)
    assert all(np.isnan(rollouts.logprobs).all() for rollouts in blind)


def test_log_probs_of_a_rollout_func_win_over_those_that_were_watched(tmp_path):
    def rollout(prompts, trainer):
        ids = tiny.tokenizer()(prompts)["input_ids"]
        completions = generate(trainer.model, prompts=ids)
        own = [[-0.25] * len(row) for row in completions]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": own}

    _, seen = trained(tmp_path, trainer={"rollout_func": rollout})
    assert all((rollouts.logprobs == -0.25 * rollouts.completion_tokens).all() for rollouts in seen)


def test_a_processor_of_the_user_outlives_every_batch(tmp_path):
    model, seen = tiny.model(), []  # only digits may be sampled, by a method that the user has set on the model object
    digits = torch.tensor(tiny.tokenizer().convert_tokens_to_ids(list("0123456789")))
    original = model._get_logits_processor

    def only_digits(input_ids, scores):
        masked = torch.full_like(scores, -torch.inf)
        masked[:, digits] = scores[:, digits]
        return masked

    def processors(*args, **kwargs):
        return LogitsProcessorList([*original(*args, **kwargs), only_digits])

    def reward(completions, **kwargs):
        seen.append(list(completions))
        return tiny.even_length_reward(completions)

    model._get_logits_processor = processors
    trainer = tiny.run(tmp_path, reward_funcs=reward, trainer={"model": model}, strategy="exact")
    assert len(seen) == 3
    assert all(text.isdigit() for batch in seen for text in batch)
    assert trainer.model._get_logits_processor is processors


@pytest.mark.slow
def test_continuous_batching_generates_as_in_plain_trl(tmp_path):
    def lengths(cls):
        own = {"strategy": "exact", "use_transformers_continuous_batching": True, "max_steps": 1}
        log = tiny.run(tmp_path / cls.__name__, cls=cls, **own).state.log_history[0]
        return [log[f"completions/{name}_length"] for name in ("mean", "min", "max")]

    plain, ours = lengths(GRPOTrainer), lengths(LZEGRPOTrainer)
    assert plain[0] > 2.0
    assert ours == plain


def test_a_watch_never_raises_into_generation():
    # Scores and tokens as continuous batching gives them: those of all requests in one row
    watch, scores = SamplingWatch(), torch.zeros(3, 7)
    watch.begin()
    for tokens in (torch.zeros(5, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)):
        for _ in range(2):
            assert watch(tokens, scores) is scores
    assert watch.token_logprobs([[0], [0], [0]]) is None
