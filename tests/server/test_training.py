"""Training with completions from real vLLM servers."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import play_run
import tiny
from launches import by_accelerate, on_two_cpus, records, run_to_end, write
from lze_trl.evaluation.engines import ServerEngine
from process_run import RecordingSelector


SCRIPT = Path(__file__).with_name("training_run.py")
# Where decoding is greedy, the completions of a group are equal and its gradient is zero: this moves the weights
DECAY = {"optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.2}


@pytest.fixture(scope="module")
def sampled(session_servers, models, tmp_path_factory) -> list[dict]:
    """What each of two processes has left of 20 steps with a server."""
    directory = tmp_path_factory.mktemp("zero3")
    session_servers["first"].ensure()
    settings = {"per_device_train_batch_size": 32, "learning_rate": 3e-3, "optim": "adamw_torch", "max_steps": 20}
    settings["adam_beta1"] = 0.0  # without momentum, an empty update leaves the weights as they are
    settings |= {"model": str(models["untied"]), "urls": [session_servers["first"].url]}
    command = [*by_accelerate(directory, on_two_cpus("zero3")), SCRIPT, write(directory, {"sampled": settings})]
    run_to_end(command, env={"DS_ACCELERATOR": "cpu"})
    return records(directory, "sampled", 2)


def test_twenty_steps_under_zero3(sampled):
    first, second = sampled
    assert first["steps"] == 20
    assert first["choices"] == second["choices"]  # both ranks decide alike, at every step
    # The servers compute with the trainer's weights after every sync, and there was one whenever the weights had moved
    differences = [difference for _, *of_servers in first["differences"] for difference in of_servers]
    assert len(differences) == 20
    assert max(differences) < 1e-3
    versions = {version for version, *_ in first["differences"]}
    assert len(versions) + first["empty"] in (20, 21)  # the last step may be one
    # The model learns from the chosen groups alone, and what it has learned is pruned
    early, late = first["pass_rates"][:4], first["pass_rates"][-4:]
    assert sum(late) / 4 > sum(early) / 4 + 0.2
    assert first["trained"] < 0.45
    assert first["pruned"] > 0


def make_trainer(directory, model, urls, rewards, **settings):
    """A trainer on one process; without URLs, its completions come from transformers."""
    over_http = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": urls} if urls else {}
    greedy = {"temperature": 0.0} if urls else {"do_sample": False}
    settings = {"generation_kwargs": greedy, "max_completion_length": 6} | over_http | settings
    given = {"model": str(model), "processing_class": None}
    return tiny.make(directory, reward_funcs=rewards, dataset=tiny.prompts(17), trainer=given, **settings)


def test_servers_and_transformers_complete_alike(servers, models, tmp_path):
    def run(directory, urls):
        seen = []

        def by_place(completions, **kwargs):
            # Greedy completions of a group are equal, so that only their places can tell them apart
            seen.append(list(completions))
            return [float(i % 4 < 2 or (i // 4) % 3 == 0) for i in range(len(completions))]

        trainer = make_trainer(directory, models["untied"], urls, rewards=by_place, selection_ratio=0.7, **DECAY)
        trainer.generation_step.selector = RecordingSelector(trainer.generation_step.selector)
        trainer.train()
        return seen, trainer

    ours, over_http = run(tmp_path / "http", [servers["first"].url])
    theirs, in_process = run(tmp_path / "transformers", None)
    assert ours == theirs
    assert len({text for batch in ours for text in batch}) > 3
    assert over_http.generation_step.selector.choices == in_process.generation_step.selector.choices
    assert all(len(chosen) > 0 for _, _, chosen in over_http.generation_step.selector.choices)
    start = load_file(models["untied"] / "model.safetensors")["lm_head.weight"]
    http, process = (trainer.model.lm_head.weight.detach() for trainer in (over_http, in_process))
    assert float((http - process).abs().max()) < 1e-3 and float((http - start).abs().max()) > 1e-2
    assert over_http.ledger.groups_trained == in_process.ledger.groups_trained > 0
    for name, array in over_http.prompt_state.state_dict().items():
        assert (array == in_process.prompt_state.state_dict()[name]).all(), name


def test_a_server_writes_the_problems(servers, models, tmp_path, monkeypatch):
    play_run.use_words(monkeypatch.setattr)
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
    part = trainer.generation_step.prompt_writer
    table = part.pool.rows
    assert (table["visits"].sum(), table["visits"].max()) == (15, 1)
    written = {play_run.read_problems(text, 2, False)[0].text for _, _, text in answers}
    assert set(table["text"]) <= written and len(written) > 10
    assert [sample for sample, *_ in answers].count(0) == part.writer.rounds
    assert len(answers) == 4 * part.writer.rounds and {penalty for _, penalty, _ in answers} == {1.0}
    assert set(trainer.prompt_state["prompt_ids"].tolist()) <= set(part.pool.prompt_ids.tolist())
    # By the policy of the moment, which the servers get once a step, whatever they are asked for
    assert trainer.vllm_generation.pool.snapshot.version.endswith("-5")
    assert max(server.difference for server in trainer.vllm_generation.pool.servers) < 1e-3
