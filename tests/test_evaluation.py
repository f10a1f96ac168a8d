"""Evaluation on tasks: metrics by hand, samples that depend on neither order nor batch size, the training reward as score."""

import asyncio
import itertools
import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

import agents
import tiny
from lze_trl.evaluation.engines import Output, SampleRequest, TransformersEngine
from lze_trl.evaluation.policy import engine_of
from lze_trl.evaluation.run import Evaluation, read_samples
from lze_trl.evaluation.settings import Decoding, EvaluationError
from lze_trl.evaluation.statistics import estimate, majority, mean_over_tasks, pass_at_k
from lze_trl.evaluation.tasks import Problem, Task, find_tasks, load_problems
from lze_trl.job.cli import main
from lze_trl.record.evaluations import FILE, read_results, table_of
from lze_trl.servers.client import VLLMServer


def problems(count: int = 6) -> list[Problem]:
    return [Problem(f"{number:016x}", f"{number}+{number}=", str(2 * number)) for number in range(count)]


def run(text, folder, tasks=None, samples=1, temperature=None, **kwargs):
    """Evaluate a model that gives each sample a text."""

    def generate(requests, decoding):
        return [(request, Output(text(request), 7, request.sample == 1)) for request in requests]

    temperature = float(samples > 1) if temperature is None else temperature
    decoding = Decoding(temperature=temperature, max_tokens=8, chat=False)
    evaluation = Evaluation(tasks or {"sums": problems()}, decoding, samples, **kwargs)
    return evaluation.run(SimpleNamespace(name="answering", generate=generate), folder, progress=False)


# ---- Thinking that the prompt begins ----

THOUGHT = [r"First \boxed{0}", r"First \boxed{7}</think>\boxed{0}", r"First \boxed{0}</think>\boxed{7}"]


def graded(engine, tmp_path, chat=True):
    """Rewards and answers of three samples whose right answer is 0."""
    prompt = [{"role": "user", "content": "0+0="}] if chat else "0+0=<think>"
    evaluation = Evaluation({"sums": [Problem("0", prompt, "0")]}, Decoding(temperature=1.0, max_tokens=8), 3)
    evaluation.run(engine, tmp_path, progress=False)
    return [(sample.reward, sample.answer) for sample in read_samples(tmp_path / "sums.jsonl")]


def test_a_thought_that_the_chat_template_begins_and_nothing_ends_is_no_answer(tmp_path, monkeypatch):
    tokenizer = tiny.tokenizer(tiny.ALPHABET + "<>")
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    model = tiny.model()
    model.resize_token_embeddings(len(tokenizer))
    engine = TransformersEngine(model, tokenizer, 3, "thinking")
    texts = iter(THOUGHT * 2)
    monkeypatch.setattr(engine, "_read", lambda row, decoding: Output(next(texts), 5, False))
    for chat in (True, False):
        assert graded(engine, tmp_path, chat) == [(0.0, ""), (1.0, "0"), (0.0, "7")]


@pytest.mark.parametrize("mode", ["text", "parsed", "silent"])
def test_servers_say_how_the_chat_template_ends_the_prompt(tmp_path, mode):
    def answer(request):
        if request.url.path == "/tokenize":
            assert json.loads(request.content)["messages"][0]["content"] == "0+0="
            tokens = {"token_strs": ["0+0=", "<th", "ink>", "\u010a"]}
            return httpx2.Response(404) if mode == "silent" else httpx2.Response(200, json=tokens)
        text = next(texts)
        thought, _, rest = text.partition("</think>")
        message = {"content": rest or None, "reasoning": thought} if mode == "parsed" else {"content": text}
        choice = {"message": message, "finish_reason": "stop"}
        return httpx2.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 5}})

    def generate(requests, decoding):
        async def ask():
            async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http:
                return [(one, await server.answer(http, one.problem.prompt, {})) for one in requests]

        return asyncio.run(ask())

    texts, server = iter(THOUGHT), VLLMServer("http://127.0.0.1:1", 5.0)
    found = graded(SimpleNamespace(name="served", generate=generate), tmp_path)
    assert found == [(1.0, "0") if mode == "silent" else (0.0, ""), (1.0, "0"), (0.0, "7")]


# ---- Statistics ----


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_counts_the_subsets_with_a_pass(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "answers", "value"),
    [
        ([1, 0, 1], ["5", "6", "5.0"], 1.0),  # two texts of one answer outvote the other
        ([1, 0, 0], ["5", "6", "7"], 1 / 3),  # a tie is worth the mean over those that win
        ([0, 0, 1], ["", "", "5"], 1.0),  # no answer, no vote
        ([0, 0], ["", ""], 0.0),
        ([0, 1, 1, 1], ["5", "5.0", "5", "6"], 2 / 3),  # a class is worth the mean over its samples
    ],
)
def test_majority_by_equivalence(rewards, answers, value):
    assert majority(rewards, answers) == pytest.approx(value)


def test_the_mean_over_tasks_weighs_tasks_alike():
    found = mean_over_tasks([[1.0] * 90 + [0.0] * 10, [0.0, 1.0]])
    assert found.value == pytest.approx(0.7)
    assert found.low < 0.5
    differences = np.where(np.arange(30) % 2, 0.01, 0.02)  # small, and always in one direction
    assert mean_over_tasks([differences]).low > 0
    assert mean_over_tasks([np.zeros(3)]) == (0.0, None, None)


# ---- Known models ----


def test_a_perfect_model_gets_one_on_every_metric(tmp_path):
    found = run(lambda request: f"It is \\boxed{{{request.problem.gold}}}.", tmp_path, samples=4)["tasks"]["sums"]
    values = {name: value for name, (value, _, _) in found["metrics"].items()}
    assert values == {"avg@4": 1.0, "pass@2": 1.0, "pass@4": 1.0, "maj@4": 1.0}
    assert (found["unscored"], found["truncated"], found["mean_tokens"]) == (0, 0.25, 7.0)


def test_a_constant_model_gets_the_share_of_its_answer(tmp_path):
    golds = ["4", "4.0", "5", "\\frac{8}{2}", "7"]
    tasks = {"mixed": [Problem(f"{i:x}", f"{i}", gold) for i, gold in enumerate(golds)]}
    found = run(lambda request: "#### 4", tmp_path, tasks)
    wilson = binomtest(3, 5).proportion_ci(method="wilson")
    assert found["tasks"]["mixed"]["metrics"] == {"avg@1": pytest.approx([0.6, wilson.low, wilson.high])}
    assert estimate([1.0] * 8).low < 0.7  # eight of eight is not certainty


def test_votes_compare_answers_as_the_reward_majority_does(tmp_path):
    texts = ["\\boxed{\\frac12}", "\\boxed{0.5}", "\\boxed{3}", "\\boxed{3}", "\\boxed{50\\%}"]
    tasks = {"half": [Problem("0", "?", "1/2"), Problem("1", "!", "3")]}
    found = run(lambda request: texts[request.sample], tmp_path, tasks, samples=5)["tasks"]["half"]
    assert found["metrics"]["maj@5"][0] == 0.5  # 1/2 in three forms wins in both problems, and is right in one
    assert found["metrics"]["avg@5"][0] == pytest.approx((3 / 5 + 2 / 5) / 2)


def test_a_gold_that_cannot_be_read_is_neither_right_nor_wrong(tmp_path):
    tasks = {"odd": [Problem("0", "?", "4"), Problem("1", "!", None)]}
    found = run(lambda request: "#### 4", tmp_path, tasks, samples=2)["tasks"]["odd"]
    assert (found["metrics"]["avg@2"][0], found["unscored"]) == (1.0, 2)


def test_one_bad_task_leaves_the_results_of_those_before(tmp_path):
    tasks = {"good": [Problem("0", "?", "4")], "bad": [Problem("1", "!", None)]}
    with pytest.raises(EvaluationError, match="No sample has a score"):
        run(lambda request: "#### 4", tmp_path, tasks)
    assert set(json.loads((tmp_path / FILE).read_text())["tasks"]) == {"good"}


def test_the_score_is_the_training_reward_which_reads_columns_and_may_be_asynchronous(tmp_path):
    async def by_length(prompts, completions, solution, level, log_metric, off, **kwargs):
        log_metric("length", 3.0)
        return [np.float32(len(completions[0][-1]["content"]) == level[0] + off)]

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "{i}+1=", "answer": "2", "level": {i}}}\n' for i in range(4)))
    tasks = {"rows": load_problems(find_tasks([str(path)])[0], Decoding())}

    async def in_a_notebook():
        return run(lambda request: "xyz", tmp_path / "out", tasks, reward=partial(by_length, off=1))

    found = asyncio.run(in_a_notebook())
    assert found["tasks"]["rows"]["metrics"]["avg@1"][0] == 0.25


def test_other_tasks_in_a_folder_are_kept_and_other_settings_replace_them(tmp_path):
    both = run(lambda request: "0", tmp_path, {"one": problems(4), "two": problems(5)})
    assert "mean over tasks" in table_of({"x": both}).to_string()
    assert both["reward_module"] == "lze_trl.rewards.functions"  # other files may have a reward of the same name
    third = run(lambda request: "0", tmp_path, {"three": problems(3)})
    assert list(third["tasks"]) == ["one", "two", "three"]
    assert third["tasks"].items() >= both["tasks"].items()
    three = {"one": problems(4), "two": problems(5), "three": problems(3)}
    assert third["mean"] == run(lambda request: "0", tmp_path / "at once", three)["mean"]
    assert [sample.id for sample in read_samples(tmp_path / "two.jsonl")] == [problem.id for problem in problems(5)]
    assert list(run(lambda request: "0", tmp_path, temperature=1.0)["tasks"]) == ["sums"]


# ---- Transformers ----


def decided_model():
    """A model that does not say the same to everything."""
    model = tiny.model(seed=2).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    return model


def engine(batch_size):
    return TransformersEngine(decided_model(), tiny.tokenizer(), batch_size, "tiny")


def texts(engine, requests, decoding):
    return {(request.problem.id, request.sample): output for request, output in engine.generate(requests, decoding)}


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(max_tokens=9),
        Decoding(temperature=1.0, max_tokens=9),
        Decoding(temperature=0.7, top_p=0.8, top_k=20, max_tokens=9, stop=("7",)),
    ],
)
def test_order_and_batch_size_change_nothing(decoding):
    requests = [
        SampleRequest(Problem(f"{number}", str(number) * (1 + number % 4) + "+1=", "?"), sample)
        for number in range(5)
        for sample in range(3)
    ]
    expected = texts(engine(1), requests, decoding)
    assert len({output.text for output in expected.values()}) > 3
    for batch_size, order in ((4, 1), (15, 1), (2, -1), (15, -1)):
        assert texts(engine(batch_size), requests[::order], decoding) == expected
    if decoding.temperature > 0:
        assert any(expected[str(number), 0] != expected[str(number), 1] for number in range(5))
        other = Decoding(**vars(decoding) | {"seed": 1})
        assert texts(engine(15), requests, other) != expected


def test_greedy_decoding_is_what_generate_does():
    model, tokenizer, decoding = decided_model(), tiny.tokenizer(), Decoding(max_tokens=9)
    (output,) = texts(engine(4), [SampleRequest(Problem("0", "12+3=", "?"), 0)], decoding).values()
    ids = tokenizer("12+3=", return_tensors="pt")["input_ids"]
    row = model.generate(input_ids=ids, do_sample=False, max_new_tokens=9)[0, ids.shape[1] :]
    cut = len(row) == 9 and row[-1] != tokenizer.eos_token_id
    assert output == Output(tokenizer.decode(row, skip_special_tokens=True), len(row), cut)


def test_samples_follow_the_model():
    problem, decoding, count = Problem("0", "1+1=", "?"), Decoding(temperature=1.0, max_tokens=1), 3000
    drawn = texts(engine(500), [SampleRequest(problem, number) for number in range(count)], decoding)
    tokenizer, model = tiny.tokenizer(), decided_model()
    likely = model(**tokenizer("1+1=", return_tensors="pt")).logits[0, -1].detach().softmax(-1)
    tokens = [token for token in likely.topk(5).indices.tolist() if token not in tokenizer.all_special_ids]
    assert len(tokens) > 2
    for token in tokens:
        share = np.mean([output.text == tokenizer.decode([token]) for output in drawn.values()])
        assert abs(share - likely[token].item()) < 4 * math.sqrt(likely[token].item() / count)


def test_stop_texts_end_completions_and_are_left_out():
    requests = [SampleRequest(problem, 0) for problem in problems()]
    free = texts(engine(6), requests, Decoding(max_tokens=9))
    stop = next(output.text[3] for output in free.values() if len(output.text) > 4)
    for key, output in texts(engine(6), requests, Decoding(max_tokens=9, stop=(stop,))).items():
        assert output.text == free[key].text.partition(stop)[0]
        assert output.truncated == (free[key].truncated and stop not in free[key].text)
    across = Decoding(max_tokens=9, stop=tuple({f"={output.text[:1]}" for output in free.values() if output.text}))
    assert texts(engine(6), requests, across) == free  # none begins in the prompt


def test_a_policy_that_sees_images_is_asked_in_text():
    model, processor = agents.llava()
    args = SimpleNamespace(use_vllm=False, gradient_checkpointing_kwargs=None, ds3_gather_for_generation=True)
    vars(args).update(per_device_eval_batch_size=2, output_dir="run")
    given = {"args": args, "model": model, "model_wrapped": model, "processing_class": processor}
    with engine_of(SimpleNamespace(accelerator=Accelerator(cpu=True), **given))() as policy:
        requests = [SampleRequest(Problem("0", [{"role": "user", "content": "a b"}], "1"), 0)]
        assert len(texts(policy, requests, Decoding(max_tokens=4))) == 1


def test_no_pickle_is_read(tmp_path):
    tiny.save(tmp_path)
    torch.save(tiny.model().state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EvaluationError, match="safetensors"):
        TransformersEngine.load(str(tmp_path), 1)


def test_settings_of_the_model_do_not_decide():
    plain, strange = engine(4), engine(4)
    strange.model.generation_config.repetition_penalty = 5.0
    strange.model.generation_config.do_sample = True
    requests = [SampleRequest(problem, 0) for problem in problems()]
    assert texts(plain, requests, Decoding(max_tokens=9)) == texts(strange, requests, Decoding(max_tokens=9))
    assert strange.model.generation_config.repetition_penalty == 5.0


# ---- Tasks ----


@pytest.mark.parametrize(
    ("kind", "asks"), [("math", "your final answer"), ("choice", "the letter"), ("mixed", "of options, the letter")]
)
def test_a_task_asks_for_what_its_kind_needs(tmp_path, kind, asks):
    row = {"question": "2+2?", "options": ["3", "4"], "answer": "B"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    (problem,) = load_problems(Task("own", str(tmp_path / "own.jsonl"), kind), Decoding(chat=False))
    assert re.fullmatch(rf"2\+2\?\nA. 3\nB. 4\nPlease reason .*{asks}.*", problem.prompt)
    assert problem.gold == "B"


def test_tasks_are_given_by_name_or_address(tmp_path):
    names = ["gsm8k", "some/where/sums.jsonl", "some/where/test.jsonl", "me/own?split=test", "reasoning_gym:ab?size=3"]
    names += ["me/own?config=hard&split=train[:10]", "a/set.v1.jsonl.gz"]
    called = [task.name for task in find_tasks(names)]
    assert called == ["gsm8k", "sums", "where_test", "own", "ab_size-3", "own_hard_train-10", "set.v1"]
    with pytest.raises(EvaluationError, match=r"Unknown task 'gsm8'. Did you mean 'gsm8k'"):
        find_tasks(["gsm8"])
    with pytest.raises(EvaluationError, match="given twice"):
        find_tasks(["gsm8k", "gsm8k"])
    with pytest.raises(EvaluationError, match=r"Task 'lost'.*There is no file"):
        load_problems(find_tasks([str(tmp_path / "lost.jsonl")])[0], Decoding())


# ---- The command ----


@pytest.fixture
def sums(tmp_path) -> str:
    tiny.prompts(8).to_json(tmp_path / "sums.jsonl")
    return str(tmp_path / "sums.jsonl")


def test_the_command_evaluates_and_compares(tmp_path, sums, capsys):
    one, other = (tiny.save(tmp_path / f"run-{seed}" / "checkpoint-2", seed=seed) for seed in (0, 1))
    folders = [tmp_path / f"run-{seed}" / "evaluations" / "checkpoint-2" for seed in (0, 1)]
    flags = ["--tasks", sums, "--max_tokens", "5", "--no_chat", "--samples", "2"]
    main(["eval", other, *flags, "--seed", "5"])
    main(["eval", one, *flags, "--compare", str(folders[1])])
    assert "paired by problem" in capsys.readouterr().out
    assert all(len(read_samples(folder / "sums.jsonl")) == 16 for folder in folders)
    ((name, results),) = read_results(tmp_path / "run-0").items()
    value = 100 * results["tasks"]["sums"]["metrics"]["avg@2"][0]
    assert re.search(rf"checkpoint-2 +sums +8 +avg@2 +{value:.1f}", table_of({name: results}).to_string(index=False))
    with pytest.raises(SystemExit, match=r"would be replaced by this evaluation"):
        main(["eval", one, *flags, "--compare", str(folders[0])])
    flags = ["eval", "none", "--tasks", sums, "--max_tokens", "6", "--reward", "exact_match", "--compare"]
    with pytest.raises(SystemExit, match=r"samples: 2 there, 1 now; reward: 'accuracy.*; max_tokens: 5 there, 6 now"):
        main([*flags, str(folders[1])])  # before the model is loaded
    with pytest.raises(SystemExit, match=r"takes the folder of an evaluation"):
        main([*flags, one])
    more = shutil.copy(sums, tmp_path / "more.jsonl")
    with pytest.raises(SystemExit, match=r"has no results of the tasks \['more'\]"):
        main(f"eval none --tasks {sums} {more} --max_tokens 5 --no_chat --compare {folders[1]}".split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["m"], "Nothing to evaluate"),
        (["m", "--tasks", "SUMS", "--samples", "2", "--temperature", "0"], "all the same"),
        (["m", "--tasks", "gsm8k", "--stop", ""], "`stop` must be texts that are not empty"),
        (["m", "--tasks", "gsm8k", "--top_p", "2"], r"`top_p` must be in \(0, 1\], got 2.0"),
        (["m", "--tasks", "gsm8k", "--no_chat", "--system_prompt", "x"], "needs a chat"),
        (["/none", "--tasks", "SUMS"], "There is no model folder `/none`"),
        (["--server", "localhost:8000", "--tasks", "SUMS"], "base URL.*got 'localhost:8000'"),
        (["m", "--tasks", "SUMS", "--reward", "acuracy"], "Unknown reward function 'acuracy'.*'accuracy'"),
        (["m", "--tasks", "SUMS", "--reward", "majority"], "judges groups, not completions"),
    ],
)
def test_wrong_flags_say_what_to_do(flags, message, sums):
    with pytest.raises(SystemExit, match=message):
        main(["eval", *(sums if flag == "SUMS" else flag for flag in flags)])
