"""Training with completions from real vLLM servers."""

import json
import threading
import time
from pathlib import Path

import httpx2
import pytest
import torch
from real_vllm import RealServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import play_run
import tiny
from launches import by_accelerate, on_two_cpus, run_to_end
from lze_trl import LZEGRPOTrainer
from lze_trl.evaluation.servers import ServerEngine
from process_run import RecordingSelector


SCRIPT = Path(__file__).with_name("training_run.py")
# Where decoding is greedy, the completions of a group are equal and its gradient is zero: this moves the weights
DECAY = {"optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.2}


def train_on_two_processes(directory: Path, way: str, runs: dict[str, dict]) -> dict[str, list[dict]]:
    """Run `training_run.py` and return what each process has left of each run."""
    directory.mkdir(exist_ok=True)
    (directory / "settings.json").write_text(json.dumps(runs))
    run_to_end([*by_accelerate(directory, on_two_cpus(way)), SCRIPT, directory], env={"DS_ACCELERATOR": "cpu"})
    return {name: [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(2)] for name in runs}


@pytest.fixture(scope="module")
def zero3_runs(session_servers, models, tmp_path_factory):
    """20 steps with a server, then a few greedy ones with the server and with in-process generation."""
    directory = tmp_path_factory.mktemp("zero3")
    session_servers["first"].ensure()
    common = {
        "model": str(models["untied"]),
        "urls": [session_servers["first"].url],
        "reward": "digit",
        "per_device_train_batch_size": 32,
        "learning_rate": 3e-3,
        "optim": "adamw_torch",
    }
    greedy = common | {"reward": "place", "max_steps": 5, **DECAY}
    return directory, train_on_two_processes(
        directory,
        "zero3",
        {
            "sampled": common | {"max_steps": 20},
            "greedy": greedy | {"generation_kwargs": {"temperature": 0.0}},
            "greedy-in-process": greedy | {"urls": None, "generation_kwargs": {"do_sample": False}},
        },
    )


def test_twenty_steps_under_zero3(zero3_runs):
    first, second = zero3_runs[1]["sampled"]
    assert first["steps"] == 20
    # Both ranks decide alike, at every step
    assert first["choices"] == second["choices"]
    # The servers compute with the trainer's weights after every sync, and there was one for every step
    differences = [difference for _, *of_servers in first["differences"] for difference in of_servers]
    assert len(differences) == 20
    assert max(largest for _, largest in differences) < 1e-3
    assert all(mean <= largest for mean, largest in differences)
    assert len({version for version, *_ in first["differences"]}) == 20
    # The model learns from the chosen groups alone, and what it has learned is pruned
    early, late = first["pass_rates"][:4], first["pass_rates"][-4:]
    assert sum(late) / 4 > sum(early) / 4 + 0.2
    assert first["trained"] < 0.45
    assert first["pruned"] > 0


def test_in_process_generation_chooses_alike_under_zero3(zero3_runs, models):
    over_http, in_process = zero3_runs[1]["greedy"], zero3_runs[1]["greedy-in-process"]
    for rank in range(2):
        assert in_process[rank]["wrapped"] == over_http[rank]["wrapped"] == "DeepSpeedEngine"
        assert in_process[rank]["differences"] == [] and len(over_http[rank]["differences"]) == 5
        # The same texts, and from them the same choices: prompts, energies and chosen groups of every step
        assert over_http[rank]["completions"] == in_process[rank]["completions"]
        assert over_http[rank]["choices"] == in_process[rank]["choices"] == over_http[0]["choices"]
        assert over_http[rank]["pruned"] == in_process[rank]["pruned"]
    # Not for want of a difference: there are several texts and energies, and some groups are chosen and some are not
    assert len({text for batch in over_http[0]["completions"] for text in batch}) > 3
    assert len({energy for _, energies, _ in over_http[0]["choices"] for energy in energies}) > 3
    assert all(0 < len(chosen) < len(energies) for _, energies, chosen in over_http[0]["choices"])
    # The updates are the same, too
    http, process, start = (
        load_file(path / "model.safetensors")
        for path in (
            zero3_runs[0] / "greedy" / "model",
            zero3_runs[0] / "greedy-in-process" / "model",
            models["untied"],
        )
    )
    assert max(float((http[name] - process[name]).abs().max()) for name in start) < 1e-3
    assert max(float((http[name] - start[name]).abs().max()) for name in start) > 1e-2


def test_the_exported_model_serves(zero3_runs, tmp_path):
    directory = zero3_runs[0] / "sampled"
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    prompt = tokenizer("12+3=", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].size(1) :]
    with RealServer(directory / "model", tmp_path / "exported.log") as server:
        answer = httpx2.post(
            f"{server.url}/v1/completions",
            json={
                "model": str(directory / "model"),
                "prompt": prompt["input_ids"][0].tolist(),
                "max_tokens": 6,
                "temperature": 0.0,
                "return_token_ids": True,
            },
            timeout=120,
            trust_env=False,
        )
    given = answer.json()["choices"][0]["token_ids"]
    assert given == [token for token in expected.tolist() if token != tokenizer.pad_token_id]


def make_trainer(directory, model, urls, rewards=tiny.digit_reward, callbacks=None, **settings):
    """A trainer on one process; without URLs, its completions come from transformers."""
    over_http = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": urls} if urls else {}
    greedy = {"temperature": 0.0} if urls else {"do_sample": False}
    settings = {"generation_kwargs": greedy, "max_completion_length": 6} | over_http | settings
    return LZEGRPOTrainer(
        model=str(model),
        reward_funcs=rewards,
        args=tiny.config(directory, **settings),
        train_dataset=tiny.prompts(17),
        callbacks=callbacks,
    )


def test_servers_and_transformers_complete_alike(servers, models, tmp_path):
    def run(directory, urls):
        seen = []

        def by_place(completions, **kwargs):
            # Greedy completions of a group are equal, so that only their places can tell them apart
            seen.append(list(completions))
            return [float(i % 4 < 2 or (i // 4) % 3 == 0) for i in range(len(completions))]

        trainer = make_trainer(directory, models["untied"], urls, rewards=by_place, selection_ratio=0.7, **DECAY)
        trainer.generation_step.selector = RecordingSelector(trainer.selector)
        trainer.train()
        return seen, trainer

    ours, over_http = run(tmp_path / "http", [servers["first"].url])
    theirs, in_process = run(tmp_path / "transformers", None)
    assert ours == theirs
    assert len({text for batch in ours for text in batch}) > 3
    assert over_http.selector.choices == in_process.selector.choices
    assert all(len(chosen) > 0 for _, _, chosen in over_http.selector.choices)
    start = load_file(models["untied"] / "model.safetensors")["lm_head.weight"]
    http, process = (trainer.model.lm_head.weight.detach() for trainer in (over_http, in_process))
    assert float((http - process).abs().max()) < 1e-3 and float((http - start).abs().max()) > 1e-2
    assert over_http.ledger.groups_trained == in_process.ledger.groups_trained > 0
    for name, array in over_http.prompt_state.state_dict().items():
        assert (array == in_process.prompt_state.state_dict()[name]).all(), name


def test_a_server_writes_the_problems(servers, models, tmp_path, monkeypatch):
    monkeypatch.setitem(play_run.TEMPLATES, "tagged", play_run.Words())  # any answer is a problem, another one another
    (tmp_path / "model").symlink_to(models["untied"])
    answers, generate = [], ServerEngine.generate

    def watched(engine, requests, decoding):
        for request, output in generate(engine, requests, decoding):
            answers.append((request.sample, decoding.presence_penalty, output.text))
            yield request, output

    monkeypatch.setattr(ServerEngine, "generate", watched)
    over_http = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [servers["first"].url]}
    settings = {"rollout_func": None, "reward_weights": [0.0, 1.0], "self_play": {"presence_penalty": 1.0}}
    trainer = play_run.trainer(tmp_path, tmp_path / "run", **over_http, **settings)
    trainer.train()
    part = trainer.generation_step.instruction
    table = part.pool.rows
    assert (table["visits"].sum(), table["visits"].max()) == (15, 1)
    written = {play_run.Words().read(text, 2, False)[0].text for _, _, text in answers}
    assert set(table["text"]) <= written and len(written) > 10
    assert [sample for sample, *_ in answers].count(0) == part.writer.rounds
    assert len(answers) == 4 * part.writer.rounds and {penalty for _, penalty, _ in answers} == {1.0}
    assert set(trainer.prompt_state["prompt_ids"].tolist()) <= set(part.pool.prompt_ids.tolist())
    # By the policy of the moment, which the servers get once a step, whatever they are asked for
    assert trainer.vllm_generation.version.endswith("-5")
    assert max(d.max for d in trainer.vllm_generation.differences.values()) < 1e-3


class Saboteur(TrainerCallback):
    """Kills a server when a step begins, and starts it again some seconds later."""

    def __init__(self, server: RealServer, step: int, delay: float | None):
        self.server, self.step, self.delay = server, step, delay
        self.thread = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.thread is None:
            self.server.kill()
            self.thread = threading.Thread(target=self._restart)
            self.thread.start()

    def _restart(self):
        if self.delay is not None:
            time.sleep(self.delay)
            self.server.start()


def test_the_only_server_dies_and_returns(servers, models, tmp_path, caplog):
    saboteur = Saboteur(servers["first"], step=2, delay=2.0)
    trainer = make_trainer(
        tmp_path,
        models["untied"],
        [servers["first"].url],
        callbacks=[saboteur],
        generation_kwargs=None,
        max_steps=6,
        vllm_server_kwargs={"recovery_timeout": 240.0},
    )
    with caplog.at_level("INFO", logger="lze_trl"):
        trainer.train()
    saboteur.thread.join()
    assert trainer.state.global_step == 6
    assert trainer.ledger.rows_rolled_out == 6 * 12
    assert max(d.mean for d in trainer.vllm_generation.differences.values()) < 1e-3
    assert servers["first"].url in caplog.text
    assert "returned" in caplog.text or "is back" in caplog.text


def test_one_of_two_servers_dies(servers, models, tmp_path, caplog):
    saboteur = Saboteur(servers["second"], step=2, delay=None)
    urls = [servers["first"].url, servers["second"].url]
    trainer = make_trainer(tmp_path, models["untied"], urls, callbacks=[saboteur], generation_kwargs=None, max_steps=6)
    with caplog.at_level("INFO", logger="lze_trl"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert trainer.ledger.rows_rolled_out == 6 * 12
    assert servers["second"].url in caplog.text
    assert f"The vLLM server {servers['first'].url}" not in caplog.text  # nothing had to wait for it
    assert torch.isfinite(
        torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    ).all()
