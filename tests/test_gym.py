"""Problems of reasoning-gym: as data, as a reward, in an evaluation."""

from pathlib import Path

import pytest
import yaml


pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS

import recipes
from lze_trl.data import DataError, load_prompts
from lze_trl.data.gym import load_gym
from lze_trl.data.sources import GYM
from lze_trl.evaluation.run import score
from lze_trl.evaluation.settings import Decoding
from lze_trl.evaluation.tasks import find_tasks, load_problems
from lze_trl.job.cli import main
from lze_trl.rewards import accuracy_reward, get_reward, gym, reasoning_gym_reward
from lze_trl.rewards.gym import find_task


def allowed() -> list[str]:
    return sorted(set(DATASETS) - gym._EVALUATING - gym._UNFIT)


@pytest.mark.parametrize("task", allowed())
def test_a_recorded_entry_scores_as_the_packages_own(task):
    recorded = load_gym(f"reasoning_gym:{task}?size=2&seed=3")
    dataset, config = find_task(task)
    own = dataset(config(size=2, seed=3))
    golds = ["nothing" if entry["answer"] is None else str(entry["answer"]) for entry in own]
    for answers in (golds, golds[::-1]):
        expected = [float(own.score_answer(answer, entry)) for answer, entry in zip(answers, own, strict=True)]
        assert reasoning_gym_reward(answers, recorded["reasoning_gym"]) == expected
    assert recorded["problem"] == [entry["question"] for entry in own]


def test_recipes_train_on_no_problem_that_they_evaluate():
    paths = [path for path in recipes.__path__ for path in Path(path).rglob("*.yaml") if GYM in path.read_text()]
    for keys in (yaml.safe_load(path.read_text()) for path in paths):
        held_out = keys.get("eval_tasks") or keys["eval_datasets"]
        trained, evaluated = (
            {p for name in names for p in load_gym(name)["problem"]} for names in (keys["datasets"], held_out)
        )
        assert trained.isdisjoint(evaluated), keys["output_dir"]
    assert len(paths) == 3


def test_a_task_without_gold_answers_is_read():
    assert load_prompts("reasoning_gym:rush_hour?size=2")["solution"] == [None, None]
    assert len(load_problems(find_tasks(["reasoning_gym:rush_hour?size=2"])[0], Decoding())) == 2


def test_the_answer_may_be_tagged_or_boxed_or_all():
    (row,) = load_prompts("reasoning_gym:chain_sum?size=1&min_terms=2&max_terms=2")
    gold, entry = row["solution"], row["reasoning_gym"]
    boxed, tagged = rf"is \boxed{{{gold}}}", f"so <answer>{gold}</answer>."
    texts = [gold, f" {gold}\n", tagged, boxed, "<answer>1</answer>", "no", ""]
    assert reasoning_gym_reward(texts, [entry] * 7) == [1, 1, 1, 1, 0, 0, 0]
    chat = [[{"role": "assistant", "content": gold}]]
    assert get_reward("reasoning_gym")(chat, reasoning_gym=[entry]) == [1.0]
    assert get_reward("reasoning_gym")(chat, reasoning_gym=[None]) == [None]


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("reasoning_gym:chain_sun", r"no task 'chain_sun'. Did you mean 'chain_sum'\? Known are ab, "),
        ("reasoning_gym:chain_sum?min_term=3", "unexpected keyword argument 'min_term'"),
        ("reasoning_gym:chain_sum?size=0", "chain_sum.size=0`: "),
        ("reasoning_gym:n_queens", "runs answers of the model as Python code"),
    ],
)
def test_what_is_wrong_with_a_reference_is_told(reference, told):
    with pytest.raises(DataError, match=told):
        load_prompts(reference)


def test_no_verifier_runs_an_answer(tmp_path):
    mark = tmp_path / "ran"
    attack = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for task in allowed():
        recorded = load_gym(f"reasoning_gym:{task}?size=1")
        texts = [attack, f"[{attack}]", f"<answer>{attack}</answer>"]
        scores = reasoning_gym_reward(texts, [*recorded["reasoning_gym"]] * 3)
        assert all(0.0 <= value <= 1.0 for value in scores), task
        assert not mark.exists(), task


def test_an_evaluation_scores_by_the_verifier(capsys):
    (task,) = find_tasks(["reasoning_gym:word_sorting?size=4"])
    problems = load_problems(task, Decoding())
    assert (task.name, len(problems)) == ("word_sorting_size-4", 4)
    for problem in problems:
        assert score(accuracy_reward, problem, f"<answer>{problem.gold}</answer>")[0] == 1.0
        assert score(accuracy_reward, problem, "<answer>none</answer>")[0] < 1.0
    main(["data", "reasoning_gym:chain_sum?size=20"])
    assert "20" in capsys.readouterr().out
