"""Evaluation on tasks during a training, which goes on as without."""

import json
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

import tiny
from launches import by_accelerate, on_two_cpus, run_to_end
from lze_trl.app.views import evaluations
from lze_trl.evaluation.run import read_samples
from lze_trl.job.cli import main
from lze_trl.job.parts import load_data, make_evaluation, make_evaluations, make_instruction
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import run
from lze_trl.record import open_run
from lze_trl.record.evaluations import read_results


TESTS = Path(__file__).resolve().parent
COMMON = ["--no_chat", "--max_tokens", "5"]


@pytest.fixture
def job(tmp_path):
    """Write a recipe for a tiny model and return its path; keywords override its keys."""
    own = tiny.job(tmp_path, train=12, sums=7) | {"per_device_eval_batch_size": 4, "learning_rate": 1e-2}
    own |= {"eval_tasks": [str(tmp_path / "sums.jsonl")], "eval_tasks_steps": 2, "eval_tasks_samples": 3}
    return lambda name="run", **keys: tiny.recipe(tmp_path, **own | {"output_dir": str(tmp_path / name)} | keys)


def train(path):
    return run(*parse_recipe(["--config", path]))


def samples(folder: Path):
    return read_samples(folder / "sums.jsonl")


@pytest.mark.parametrize(
    ("rewards", "weights", "passes", "scored_by"),
    [
        (["majority"], None, None, "accuracy_reward"),
        (["recipes.self_play.MarkedMajority"], None, None, "accuracy_reward"),
        ([], None, None, "accuracy_reward"),  # of an environment
        (["tiny.of_a_class", "tiny.partly"], None, "even_length_reward", "even_length_reward"),
        (["tiny.of_a_class", "tiny.partly"], [0.1, 1.0], None, "even_length_reward"),
        (["soft_overlong", "tiny.partly"], None, None, "even_length_reward"),
        (["tiny.partly", "exact_match"], [1.0, 0.5], None, "exact_match_reward"),
    ],
)
def test_the_reward_of_right_answers_scores(job, monkeypatch, rewards, weights, passes, scored_by):
    monkeypatch.setattr(tiny, "partly", partial(tiny.even_length_reward), raising=False)
    monkeypatch.setattr(tiny, "of_a_class", Mock(spec=["__call__"]), raising=False)
    path = job(reward_funcs=rewards, reward_weights=weights, pass_reward=passes)
    script_args, args, _ = parse_recipe(["--config", path])
    assert make_evaluation(script_args, args, script_args.eval_tasks).settings["reward"] == scored_by


def test_files_are_read_by_the_columns_of_the_recipe_and_none_is_trained_on(job, tmp_path, caplog):
    (tmp_path / "own.jsonl").write_text('{"prompt": "5+5", "answer": "old", "verified": 10}\n')
    own = [str(tmp_path / "own.jsonl")]
    path = job(datasets=own, eval_tasks=own, dataset_answer_column="verified", conversational=False)
    script_args, args, _ = parse_recipe(["--config", path])
    tasks, _ = make_evaluations(script_args, args, load_data(script_args, args)[0])
    assert [problem.gold for problem in tasks.tasks["own"]] == ["10"]
    assert "1 of the 1 problems of `eval_tasks` are trained on as well, such as '5+5'" in caplog.text


@pytest.mark.parametrize("top_k", [-1, 0, 5])
def test_samples_are_drawn_as_in_training(job, top_k):
    script_args, args, _ = parse_recipe(["--config", job(top_k=top_k)])
    assert make_evaluation(script_args, args, script_args.eval_tasks, samples=2).decoding.top_k == max(top_k, 0)


def test_a_set_may_be_evaluated_and_the_probe(job, tmp_path):
    script_args, args, _ = parse_recipe(["--config", job(probe_datasets=[str(tmp_path / "sums.jsonl")])])
    assert len(make_instruction(script_args, args).seeds.references) == 7


def test_training_goes_on_as_without_and_finds_what_the_command_finds(job, tmp_path):
    train(job())
    train(job("without", eval_tasks=[]))
    output, folder = tmp_path / "run", tmp_path / "run" / "evaluations"
    trained, plain = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "without"))
    assert trained == plain
    found = read_results(output)
    assert list(found) == ["step-000000", "step-000002", "step-000004"]
    assert all(len(samples(folder / name)) == 7 * 3 for name in found)
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    logged = {logs["step"]: logs["tasks/sums/avg@3"] for logs in log if "tasks/sums/avg@3" in logs}
    assert logged == {int(name[-6:]): found[name]["tasks"]["sums"]["metrics"]["avg@3"][0] for name in found}
    assert len(set(logged.values())) > 1  # of shares of even lengths, so the policy has moved
    with closing(open_run(output)) as recorded:
        shown = evaluations(recorded)
    for text in ((output / "README.md").read_text(), shown):  # the first and the last
        assert "step-000000" in text and "step-000004" in text and "avg@3" in text
        assert "step-000002" not in text
    flags = ["--prompt_suffix", "", "--seed", "7", "--samples", "3", "--reward", "tiny.even_length_reward"]
    main(["eval", str(output / "checkpoint-2"), "--tasks", str(tmp_path / "sums.jsonl"), *COMMON, *flags])
    assert samples(folder / "checkpoint-2") == samples(folder / "step-000002")


def test_a_resumed_run_keeps_its_evaluations_and_a_new_one_does_not(job, tmp_path):
    train(job(max_steps=2))
    folder = tmp_path / "run" / "evaluations"
    first = (folder / "step-000002" / "sums.jsonl").stat().st_mtime_ns
    shutil.copytree(folder / "step-000002", folder / "step-000003")  # of steps that the checkpoint does not have
    train(job(resume_from_checkpoint="auto"))
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000", "step-000002", "step-000004"]
    assert (folder / "step-000002" / "sums.jsonl").stat().st_mtime_ns == first
    (folder / "step-foo").mkdir()  # not ours
    train(job(max_steps=1, resume_from_checkpoint="false", eval_tasks_steps=5))
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000", "step-000001", "step-foo"]
    main(["eval", str(tmp_path / "run"), "--tasks", str(tmp_path / "sums.jsonl"), *COMMON])
    train(job(max_steps=1, resume_from_checkpoint="false", eval_tasks=[]))
    assert [path.name for path in folder.iterdir()] == ["step-foo"]
    assert "## Evaluations" not in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "zero3", "fsdp2"])
def test_two_processes_find_what_one_finds(job, tmp_path, way):
    common = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 6}
    run_to_end(
        [*by_accelerate(tmp_path, on_two_cpus(way)), "-m", "lze_trl.job.train", "--config", job("two", **common)],
        env={"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},  # for the reward
    )
    train(job("one", **common | {"per_device_train_batch_size": 12}))
    for name in ("step-000000", "step-000001"):
        one, two = (samples(tmp_path / run / "evaluations" / name) for run in ("one", "two"))
        assert one == two
