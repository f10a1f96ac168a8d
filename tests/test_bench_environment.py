"""The benchmark of agents: what is evaluated is what TRL shows the model, and what its model writes is read as a call."""

import pytest

from benchmarks.environment import TwoSums, called, held_out, make_tokenizer, result


def turn(value):
    call = {"type": "function", "function": {"name": "answer", "arguments": {"value": value}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_the_evaluated_text_is_that_of_the_chat_template():
    tokenizer = make_tokenizer()
    for first, second in zip(*[iter(held_out(5, (1, 2, 3)))] * 2, strict=True):
        sums = first["prompt"][2:-2], second["prompt"].rpartition("t:")[2][:-2]
        messages = [{"role": "user", "content": sums[0]}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert shown == first["prompt"]
        messages += [turn(result(sums[0])), {"role": "tool", "name": "answer", "content": sums[1]}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert shown == second["prompt"]
        assert second["solution"] == called(result(sums[1]))
        assert tokenizer.unk_token_id not in tokenizer(second["prompt"] + second["solution"]).input_ids


@pytest.mark.parametrize(
    ("answers", "told", "reward"),
    [
        (["3", "7"], ["3+4", "!"], 1.0),
        (["3", "8"], ["3+4", "?"], 0.0),
        (["4", "7"], ["?", "?"], 0.0),
        (["3", "7", "7"], ["3+4", "!", "?"], 0.0),
        ([], [], 0.0),
    ],
)
def test_an_episode(answers, told, reward):
    environment, before = TwoSums(), TwoSums.steps
    environment.reset("1+2", "3+4")
    assert [environment.answer(answer) for answer in answers] == told
    assert environment.get_reward() == reward and TwoSums.steps == before + len(answers)
