"""What the trainer sees of generation over HTTP: rows, groups, settings, errors."""

import gc
import inspect
import socket
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

import agents
import nodes_run
import tiny
from fake_vllm import FakeVLLM, http_settings
from lze_trl.servers import sync, weights
from lze_trl.servers.client import RequestRefusedError, ServerMismatchError, VLLMServer
from lze_trl.servers.generation import HTTPGeneration
from policy_vllm import PolicyVLLM, load_weights
from seeded_vllm import SeededVLLM


@pytest.fixture
def fake():
    fake = FakeVLLM(vocab_size=len(tiny.tokenizer()))
    yield fake
    fake.stop()


@pytest.fixture
def connect(fake, accelerator, tmp_path):
    def make(**settings):
        own = {"sync_tolerance": 100.0, "sync_dir": str(tmp_path / "sync")} | settings.pop("vllm_server_kwargs", {})
        defaults = {"vllm_server_timeout": 5.0, "vllm_server_kwargs": own, "max_completion_length": 5}
        settings = http_settings([fake.url], **defaults | settings)
        return HTTPGeneration(tiny.model(), accelerator, tiny.tokenizer(), settings)

    return make


def test_a_model_that_sees_trains_on_texts(tmp_path):
    model, processor = agents.qwen()
    fake = FakeVLLM(vocab_size=len(processor.tokenizer))
    servers = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [fake.url]}
    servers |= {"vllm_server_kwargs": {"sync_tolerance": 100.0, "sync_dir": str(tmp_path / "sync")}}
    given, data = {"model": model, "processing_class": processor}, tiny.prompts(11, conversational=True)
    try:
        trainer = tiny.make(tmp_path / "run", dataset=data, trainer=given, max_steps=1, **servers)
        trainer.train()
    finally:
        fake.stop()
    assert trainer.ledger.rows_rolled_out == 12


def test_rows_come_back_in_their_order(connect, fake):
    generation = connect()
    generation.sync_weights()
    rows = [[5, 6]] * 3 + [[7]] * 3
    prompt_ids, completion_ids, logprobs, _ = generation.generate(rows, None, num_generations=3)
    assert prompt_ids == rows
    assert completion_ids == [[1, 0], [1, 1], [1, 2]] * 2
    assert logprobs == [[[-0.5], [-0.25]]] * 6
    assert sorted(body["prompt"] for body in fake.bodies[-2:]) == [[5, 6], [7]]


def test_settings_reach_the_server(connect, fake):
    settings = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    own = {"stop": ["="], "top_k": 12}
    generation = connect(**settings, top_k=11, vllm_structured_outputs_regex="[0-9]+", generation_kwargs=own)
    generation.sync_weights()
    generation.generate_groups([[5, 6]], [2])
    expected = {"prompt": [5, 6], "n": 2, "max_tokens": 5, "structured_outputs": {"regex": "[0-9]+"}} | settings | own
    expected |= {"model": "fake", "logprobs": 0, "return_token_ids": True, "seed": fake.bodies[-1]["seed"]}
    assert fake.bodies[-1] == expected


def test_every_group_has_a_seed_of_its_own(connect, fake):
    def seeds(generation):
        generation.sync_weights()
        begin = len(fake.bodies)
        for _ in range(2):
            generation.generate_groups([[5], [5, 6], [7]], [1, 1, 1])
        return [{tuple(body["prompt"]): body["seed"] for body in fake.bodies[i : i + 3]} for i in (begin, begin + 3)]

    first = seeds(connect(seed=3))
    assert len({seed for batch in first for seed in batch.values()}) == 6
    assert seeds(connect(seed=3)) == first
    resumed = connect(seed=3)
    resumed.load_state_dict({"train": 1, "eval": 0})
    assert seeds(resumed)[0] == first[1]
    assert resumed.state_dict() == {"train": 3, "eval": 0}
    assert all(0 <= seed < 2**63 for batch in first for seed in batch.values())


def test_what_cannot_be_generated_is_refused(connect, fake):
    with pytest.raises(ValueError, match=r"`generation_kwargs` must not hold \['logprobs', 'seed'\]"):
        connect(generation_kwargs={"logprobs": 2, "seed": 3})
    generation = connect()
    generation.sync_weights()
    with pytest.raises(ValueError, match=r"`num_generations=2` times in a row"):
        generation.generate([[5], [5], [6], [7]], None, num_generations=2)
    with pytest.raises(ValueError, match="Images are not supported"):
        generation.generate([[5]], [["an image"]], num_generations=1)
    fake.faults["/v1/completions"] = [400]
    with pytest.raises(RequestRefusedError, match="fault 400 on command"):
        generation.generate([[5]], None, num_generations=1)


def test_where_weights_go_without_a_directory(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Trainer")
    here, elsewhere = (VLLMServer(f"http://{host}:8000", 1.0) for host in ("Trainer", "other"))
    assert sync.shared_directory(None, [here]).is_dir()
    with pytest.raises(ValueError, match=r"`sync_dir` of `vllm_server_kwargs` is required.*not on this host.*other"):
        sync.shared_directory(None, [here, elsewhere])


def test_a_sync_that_fails_stops_the_run(connect, monkeypatch):
    with pytest.raises(ServerMismatchError, match=r"`sync_tolerance` is 0\.001"):
        connect(vllm_server_kwargs={"sync_tolerance": None}).sync_weights()

    monkeypatch.setattr(weights, "save_file", Mock(side_effect=SafetensorError("No space left on device")))
    with pytest.raises(SafetensorError, match="No space left"):
        connect().sync_weights()


def test_the_weights_go_with_the_trainer(connect, tmp_path):
    generation = connect()
    generation.sync_weights()
    del generation
    gc.collect()
    assert list((tmp_path / "sync").iterdir()) == []


def make_trainer(fake, directory, rewards, **settings):
    """A trainer whose completions come from the fake server."""
    http = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [fake.url]}
    http |= {"vllm_server_kwargs": {"sync_dir": str(directory / "sync"), "sync_tolerance": 100.0}}
    return tiny.make(directory / "run", reward_funcs=rewards, dataset=tiny.prompts(20), **http, **settings)


def test_a_resume_after_a_failure_syncs_again(fake, tmp_path):
    loads = []

    def rewards(completions, **kwargs):
        loads.append(fake.loads)
        if len(loads) == 3:
            raise RuntimeError("the judge is away")
        return [float(i % 2) for i in range(len(completions))]

    trainer = make_trainer(fake, tmp_path, rewards, save_strategy="steps", save_steps=1)
    with pytest.raises(RuntimeError, match="the judge is away"):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert loads == [1, 2, 3, 4, 5]  # what it had was of step 2


def test_only_changed_weights_are_synced(fake, tmp_path):
    learned = {1, 3}  # steps in which some completions pass; in the others every group is dead, and nothing is updated
    loads = []

    def rewards(completions, **kwargs):
        loads.append(fake.loads)
        return [float(trainer.state.global_step in learned and i % 2) for i in range(len(completions))]

    trainer = make_trainer(fake, tmp_path, rewards, max_steps=6, optim="sgd")  # no momentum
    trainer.train()
    assert loads == [1, 1, 2, 2, 3, 3]  # the first weights, then those that a step has changed
    assert trainer.ledger.empty_updates == 4


class WatchingVLLM(SeededVLLM):
    """Notes for each request for completions whether the weights that it has loaded are those of the `model`."""

    def __init__(self, model):
        self.model, self.loaded, self.current = model, {}, []
        super().__init__()

    def _outcome(self, path, body, fault):
        if path == "/collective_rpc":
            self.loaded = load_weights(body["kwargs"]["weights_path"])
        return super()._outcome(path, body, fault)

    def _complete(self, body, fault):
        if "prompt_logprobs" not in body:
            weights = self.model.state_dict()
            self.current.append(all(torch.equal(weights[name], tensor) for name, tensor in self.loaded.items()))
        return super()._complete(body, fault)


class Overwrites(TrainerCallback):
    """Replaces the weights in two ways that no step is part of."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            model.load_state_dict(tiny.model(seed=5).state_dict())

    def on_evaluate(self, args, state, control, model, **kwargs):
        model.lm_head.weight.data += 1e-7  # PyTorch counts no change of it


def test_servers_generate_with_the_weights_as_they_are_whatever_has_changed_them(tmp_path):
    model = tiny.model()
    server = WatchingVLLM(model)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": False}
    own = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.1}
    given = {"model": model, "eval_dataset": tiny.prompts(3), "callbacks": [Overwrites()]}
    settings = best | own | nodes_run.served(tmp_path, server.url) | {"max_steps": 4, "per_device_eval_batch_size": 4}
    try:
        trainer = tiny.make(tmp_path / "run", dataset=tiny.prompts(12), trainer=given, **settings)
        trainer.train()
        asked = len(server.current)
        trainer.evaluate()
        trainer.model.load_state_dict(tiny.model(seed=6).state_dict())
        trainer.evaluate()
        loads = server.loads
        trainer.evaluate()
    finally:
        server.stop()
    assert trainer.state.best_model_checkpoint is not None
    assert 0 < asked < len(server.current)
    assert server.current == [True] * len(server.current)
    assert server.loads == loads + 1  # the callback has changed them after each evaluation


def synced(directory, accelerator, dtype, deaf, rate, steps, peft=None, lora=0) -> int:
    """Steps of Adam's size until a server is refused."""
    model = tiny.model()
    server = PolicyVLLM(model, dtype, deaf, lora=lora)
    model = model if peft is None else get_peft_model(model, peft)
    own = {"vllm_server_kwargs": {"sync_dir": str(directory)}, "max_completion_length": 5}
    own["bf16"] = dtype == torch.bfloat16
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    try:
        generation = HTTPGeneration(model, accelerator, tiny.tokenizer(), http_settings([server.url], **own))
        for step in range(steps):
            try:
                generation.sync_weights()
            except ServerMismatchError as error:
                assert "that it has loaded new weights" in str(error)
                return step
            model(torch.arange(4, 44)[None], labels=torch.arange(4, 44)[None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        server.stop()
    return steps


ADAPTER = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=4)


@pytest.mark.parametrize(
    ("dtype", "rate", "peft", "lora"),
    [
        (torch.float32, 1e-5, None, 0),
        (torch.float32, 1e-6, None, 0),
        (torch.float32, 1e-4, ADAPTER, 0),
        (torch.bfloat16, 1e-5, None, 0),
        (torch.bfloat16, 1e-4, ADAPTER, 0),
        (torch.float32, 3e-3, ADAPTER, 2),
        (torch.bfloat16, 2e-2, ADAPTER, 2),
    ],
)
def test_a_server_that_ignores_weights_is_refused_within_a_few_syncs(dtype, rate, peft, lora, accelerator, tmp_path):
    assert synced(tmp_path, accelerator, dtype, True, rate, 9, peft, lora) <= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 1e-12, 1e-8, 1e-5])
@pytest.mark.parametrize("peft", [None, ADAPTER])
def test_a_server_that_loads_weights_is_never_refused_however_little_they_change(
    dtype, rate, peft, accelerator, tmp_path
):
    assert synced(tmp_path, accelerator, dtype, False, rate, 7, peft, lora=2) == 7


def test_tied_weights_that_adapters_part_are_refused_before_a_server_is_asked(accelerator):
    settings = http_settings(["http://127.0.0.1:9"], max_completion_length=5)
    for own in (
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"]},
    ):
        model = get_peft_model(tiny.model(tied=True), LoraConfig(**{"target_modules": ["q_proj"]} | own))
        with pytest.raises(ValueError, match=r"ties 'lm_head.weight' to 'model.embed_tokens.weight'.*Leave both out"):
            HTTPGeneration(model, accelerator, tiny.tokenizer(), settings)


def test_a_forecast_leaves_the_seeds_of_the_training(fake, tmp_path):
    rewards = tiny.even_length_reward
    trainer = make_trainer(fake, tmp_path, rewards, overlap="one_step")
    trainer.state.max_steps = 9  # as after a training that was stopped
    assert len(trainer.forecast(4).sample) == 4
    assert trainer.vllm_generation.state_dict() == {"train": 0, "eval": 0}
    assert trainer.vllm_generation._loop is None


@pytest.mark.parametrize("name", ["sync_weights", "generate"])
def test_has_the_methods_that_trl_calls(name):
    theirs = inspect.signature(getattr(VLLMGeneration, name))
    assert list(inspect.signature(getattr(HTTPGeneration, name)).parameters) == list(theirs.parameters)
