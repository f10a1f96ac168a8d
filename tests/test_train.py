"""The main job: from a recipe to a trained model, its accuracy and its summary; and what it says when it cannot."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import tiny
from launches import run_to_end
from lze_trl import LZEGRPOTrainer
from lze_trl.job import RecipeError, cli
from lze_trl.job.dry_run import most_completions
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import build_trainer, main, run, starting_point
from lze_trl.record import open_run


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def job(tmp_path):
    """Write a recipe for a tiny model and return its path; keywords override its keys."""
    own = tiny.job(tmp_path, train=12, held_out=4) | {
        "eval_datasets": [str(tmp_path / "held_out.jsonl")],
        "reward_funcs": ["tiny.even_length_reward", "accuracy"],
        "reward_weights": [1.0, 0.5],
        "per_device_eval_batch_size": 6,
        "learning_rate": 1e-3,
    }
    return lambda **keys: tiny.recipe(tmp_path, **own | keys)


def train(recipe):
    return run(*parse_recipe(["--config", recipe]))


def test_recipe_to_summary(job, capsys, tmp_path):
    result = train(job(conversational=True, system_prompt="Add."))
    assert result["rows_rolled_out"] == 4 * 12
    assert 0 < result["rows_trained"] < result["rows_rolled_out"]
    assert 0 < result["update_flops"] < result["plain_update_flops"]

    shown = capsys.readouterr().out
    for text in ("learning: ", "wasted: ", "held-out accuracy", "model:", "report:"):
        assert text in shown
    assert shown.count("saved: ") == 1
    run_dir = tmp_path / "run"
    log = json.loads((run_dir / "trainer_state.json").read_text())["log_history"]
    accuracy = [logs["eval_rewards/accuracy_reward/mean"] for logs in log if "eval_reward" in logs]
    assert accuracy == [result["accuracy_before"], result["accuracy_after"]]
    assert all((run_dir / name).is_file() for name in ("model.safetensors", "lze_state.arrays", "tokenizer.json"))
    # A server takes every file of this kind for weights of the model
    assert {path.name for path in run_dir.rglob("*.safetensors")} == {"model.safetensors"}
    assert (run_dir / "report" / "report.html").is_file()
    assert "GRPO with data selection by `strategy: exact`" in (run_dir / "README.md").read_text()


@pytest.mark.parametrize("stopped_at", ["evaluate", "push_to_hub"])
def test_a_run_that_was_stopped_after_its_last_step_is_finished(job, tmp_path, monkeypatch, stopped_at):
    def upload(self, commit_message="End of training", **kwargs):
        uploads.append(commit_message)

    uploads = []
    monkeypatch.setattr(LZEGRPOTrainer, "push_to_hub", upload)
    monkeypatch.setattr(LZEGRPOTrainer, "init_hf_repo", lambda self, **kwargs: setattr(self, "push_in_progress", None))
    keys = {"max_steps": 2, "push_to_hub": True, "hub_strategy": "end", "hub_model_id": "me/model"}
    keys["resume_from_checkpoint"] = "auto"
    whole = train(job(output_dir=str(tmp_path / "whole"), **keys))
    recipe = job(**keys)
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        before = getattr(LZEGRPOTrainer, stopped_at)

        def during(self, *args, **kwargs):
            if self.is_in_train:
                return before(self, *args, **kwargs)
            raise KeyboardInterrupt

        stopped.setattr(LZEGRPOTrainer, stopped_at, during)
        train(recipe)
    finished, again = train(recipe), train(recipe)  # once more, where there is nothing left to do
    for name in ("accuracy_before", "accuracy_after", "rows_rolled_out", "rows_trained", "update_tokens"):
        assert again[name] == finished[name] == whole[name]
    assert uploads == ["End of training"] * 3
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert all((first[name] == second[name]).all() for name in first)


def test_a_report_or_an_upload_that_fails_costs_nothing_else(job, monkeypatch, caplog, capsys, tmp_path):
    monkeypatch.setattr("lze_trl.app.report.write_report", Mock(side_effect=ValueError("no")))
    monkeypatch.setattr(LZEGRPOTrainer, "push_to_hub", Mock(side_effect=OSError("403 Forbidden")))
    made = {"push_in_progress": None, "hub_model_id": "me/model"}
    monkeypatch.setattr(LZEGRPOTrainer, "init_hf_repo", lambda self, **kwargs: vars(self).update(made))
    told = r"saved in `.*run`, but was not uploaded: 403 Forbidden\. Upload it with `hf upload me/model .*run`"
    with pytest.raises(RecipeError, match=told):
        train(job(max_steps=1, push_to_hub=True, hub_strategy="end", hub_model_id="me/model"))
    assert "try again with `lze-trl report" in caplog.text and "wasted: " in capsys.readouterr().out
    assert open_run(tmp_path / "run").status()["state"] == "finished"
    assert (tmp_path / "run" / "trainer_state.json").is_file()


def test_resume_points(job, tmp_path, caplog):
    def point(**keys):
        return starting_point(*parse_recipe(["--config", job(**keys)])[:2])

    assert point() is point(resume_from_checkpoint=False) is None
    assert point(resume_from_checkpoint="auto") is point(resume_from_checkpoint=True) is None  # a new run
    result = train(job(max_steps=2, eval_datasets=[]))
    assert result["accuracy_before"] is result["accuracy_after"] is None
    assert point() is None
    path = str(tmp_path / "run" / "checkpoint-2")
    assert point(resume_from_checkpoint="auto") == point(resume_from_checkpoint=path) == path
    with pytest.raises(ValueError, match="`nowhere` is no complete checkpoint"):
        point(resume_from_checkpoint="nowhere")
    # From the beginning, and shorter: what is resumed next is this run, not the longer one
    train(job(max_steps=1, eval_datasets=[]))
    assert "holds an earlier run, which this one replaces" in caplog.text
    assert point(resume_from_checkpoint="auto") == str(tmp_path / "run" / "checkpoint-1")
    assert (tmp_path / "run" / "replaced.1" / "checkpoint-2" / "lze_state.json").is_file()
    # A run that cannot begin sets nothing aside, and one may begin with the state of the run that it replaces
    with pytest.raises(SystemExit, match="`nowhere` is neither"):
        main(["--config", job(max_steps=1, state_from="nowhere")])
    assert point(resume_from_checkpoint="auto") == str(tmp_path / "run" / "checkpoint-1")
    train(job(max_steps=1, eval_datasets=[], state_from=str(tmp_path / "run" / "checkpoint-1")))
    assert (tmp_path / "run" / "replaced.2" / "checkpoint-1").is_dir()


def test_peft_recipe(job):
    recipe = job(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"])
    trainer = build_trainer(*parse_recipe([recipe]))
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert trained and all("lora" in name for name in trained)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"datasets": []}, "`datasets` names no training set"),
        ({"model_name_or_path": None}, "`model_name_or_path` is not set"),
        ({"probe_datasets": ["gsm8"]}, "Unknown task 'gsm8'"),
        ({"reward_funcs": ["acuracy"]}, "Unknown reward function 'acuracy'. Did you mean 'accuracy'"),
        ({"per_device_train_batch_size": 52}, "12 different prompts, and a generation batch takes 13"),
        # The others leave no room in the context
        ({"prompt_suffix": "1" * 59, "per_device_train_batch_size": 20}, "4 different prompts, and .* takes 5"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_the_run_and_the_dry_run(job, keys, message):
    recipe = job(**keys)
    with pytest.raises(SystemExit, match=f"^error: .*{message}") as error:
        main(["--config", recipe])
    with pytest.raises(SystemExit) as dry:
        cli.main(["train", recipe, "--dry_run"])
    assert dry.value.code == error.value.code


def test_flags_wherever_they_stand_are_kept_from_trackers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--hub_token", "a secret", "--config", "none.yaml"])
    with pytest.raises(SystemExit, match=r"no recipe `none\.yaml`"):
        main()
    assert sys.argv == ["train"]


def lze_trl_train(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """What the command of this checkout does; recipes name reward functions of the tests."""
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return run_to_end([sys.executable, "-m", "lze_trl.job.cli", "train", *arguments], timeout=300, env=env)


def test_the_command_launches_without_noise(job, tmp_path):
    # Without a default configuration of accelerate
    done = lze_trl_train(job(eval_datasets=[]), "--max_steps", "1", HF_HOME=str(tmp_path / "home"))
    assert "not passed to `accelerate launch`" not in done.stderr
    assert "%|" not in done.stdout + done.stderr  # nor bars, where there is no terminal
    assert re.search(r"^step +1  reward", done.stdout, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_cpu", "zero3_cpu"])
def test_the_command_trains_on_two_processes(job, tmp_path, name):
    flags = "--accelerate_config", name, "--main_process_port", str(tiny.free_port()), "--max_steps", "2"
    done = lze_trl_train(job(per_device_train_batch_size=6), *flags)
    for beginning in ("learning: ", "wasted: ", "saved: "):  # by the main process alone
        assert sum(line.startswith(beginning) for line in done.stdout.splitlines()) == 1
    assert len(re.findall(r"^step +\d+  held-out reward", done.stdout, re.M)) == 2
    run_dir = tmp_path / "run"
    log = json.loads((run_dir / "trainer_state.json").read_text())["log_history"]
    assert [logs["step"] for logs in log if "eval_rewards/even_length_reward/mean" in logs] == [0, 2]
    ledger = json.loads((run_dir / "lze_state.json").read_text())["parts"]["ledger"]
    assert ledger["rows_rolled_out"] == 2 * 12  # of both processes
    assert 0 < ledger["rows_trained"] < 2 * 12
    before, after = (load_file(folder / "model.safetensors") for folder in (run_dir.parent / "model", run_dir))
    assert set(before) == set(after)  # whole, not the shards of one process
    assert any(not torch.equal(before[weight], after[weight]) for weight in before)


def dry_run(capsys, *arguments):
    """What `--dry_run` shows, by label."""
    cli.main(["train", *arguments, "--dry_run"])
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"strategy": "exact"}, (12, 12)),
        ({"strategy": "lze"}, (12, 4)),  # one group of three
        ({"strategy": "gate"}, (12, 12)),
        ({"controller_kwargs": {"kept": 2}, "selector": "all"}, (12, 6)),
        ({"strategy": "reinforce_ada", "controller_kwargs": {"max_rounds": 2}}, (48, 12)),
    ],
)
def test_the_bound_is_that_of_the_strategy(tmp_path, settings, most):
    args = tiny.config(tmp_path, **settings)
    assert most_completions(args, args.make_controller()) == most


def test_a_dry_run_says_what_the_run_then_does(job, capsys, tmp_path):
    keys = {"num_train_epochs": 1.5, "max_steps": -1, "per_device_train_batch_size": 4, "steps_per_generation": 5}
    recipe = job(strategy="grpo", **keys)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "1+" * 50, "solution": "50"}) + "\n")
    before = set(tmp_path.rglob("*"))
    shown = dry_run(capsys, recipe)
    assert shown["prompts"] == "13 of 13 rows are different"
    assert shown["strategy"] == "grpo: selector all, controller uniform, pruning none"  # no ratio, which it ignores
    assert shown["rewards"] == "even_length_reward × 1, accuracy_reward × 0.5"
    assert shown["generation"] == "by transformers"
    assert shown["started"].startswith("nothing")
    assert shown["too long"].startswith("Left out 1 of 13 prompts of the training set")
    assert set(tmp_path.rglob("*")) == before
    trainer = build_trainer(*parse_recipe([recipe]))
    trainer.train()
    assert shown["optimizer steps"] == str(trainer.state.global_step)
    drawn, trained = trainer.ledger.rows_rolled_out, trainer.ledger.rows_trained
    assert shown["completions"] == f"at most {drawn} drawn and {trained} trained on; by plain GRPO {drawn}"
    assert float(shown["passes over the data"]) == pytest.approx(drawn / 4 / 12, abs=0.01)
    assert shown["completions a generation batch"] == str(trainer.args.generation_batch_size)
    assert shown["prompts a generation batch"] == str(trainer.args.generation_batch_size // 4)
    assert shown["held-out prompts"] == "4"


def test_a_dry_run_counts_prompts_loads_no_model_and_needs_neither_server_nor_accelerator(job, capsys, tmp_path):
    keys = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": ["http://127.0.0.1:9"]}
    keys |= {"use_cpu": False, "bf16": True, "tf32": True}  # as on the login node of a cluster
    keys |= {"model_name_or_path": "nowhere/nothing", "per_device_train_batch_size": 4}
    recipe = job(eval_tasks=[str(tmp_path / "held_out.jsonl")], **keys)
    rows = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows + "".join(rows.splitlines(keepends=True)[:5]))
    shown = dry_run(capsys, recipe, "--strategy", "dapo", "--accelerate_config", "ddp_cpu")
    assert shown["prompts"] == "12 of 17 rows are different"
    assert shown["strategy"].startswith("dapo: selector zero_variance of 1, controller dynamic")
    assert shown["generation"] == "by vLLM servers over HTTP: http://127.0.0.1:9"
    # Four steps of two groups, in ten rounds
    assert shown["completions"] == "at most 320 drawn and 32 trained on; by plain GRPO 32"
    assert shown["passes over the data"].startswith("at least ")
    assert shown["evaluation tasks"] == "held_out (4 problems)"
    assert (shown["processes"], shown["completions a generation batch"]) == ("2", "8")
    shown = dry_run(capsys, recipe, "--accelerate_config", "zero3", "--num_processes", "3")
    assert (shown["processes"], shown["completions a generation batch"]) == ("3", "12")
