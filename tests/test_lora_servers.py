"""LoRA by vLLM servers: the adapter alone gives what merged weights give, and goes wherever a server can have it."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model

import nodes_run
import tiny
from fake_vllm import Reply, http_settings
from launches import by_accelerate, gap, on_processes, on_two_cpus, run_to_end
from lze_trl.record import open_run
from lze_trl.servers.client import ServerError, ServerMismatchError
from lze_trl.servers.generation import HTTPGeneration
from policy_vllm import PolicyVLLM


ROOT = Path(__file__).parents[1]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def serve(request, monkeypatch):
    monkeypatch.setattr("lze_trl.servers.pool._FIRST_PAUSE", 0.02)

    def start(**kwargs):
        server = PolicyVLLM(tiny.model(), **{"lora": 8} | kwargs)
        request.addfinalizer(server.stop)
        return server

    return start


def train(directory, servers, sync, overlap="none", **lora):
    """Six updates of an adapter; what it ends with, and all completions."""
    texts = set()

    def reward(completions, **kwargs):
        texts.update(completions)
        return tiny.even_length_reward(completions)

    own = nodes_run.served(directory, *(server.url for server in servers))
    own["vllm_server_kwargs"] = {"sync": sync, "sync_dir": str(directory / "sync")}
    own |= {"controller_kwargs": {"control": 0.0}, "max_steps": 6, "learning_rate": 0.05, "overlap": overlap}
    own["lr_scheduler_type"] = "constant"
    given = {"peft_config": LoraConfig(**LORA | lora), "eval_dataset": tiny.prompts(3)}
    trainer = tiny.make(directory / "run", reward_funcs=reward, dataset=tiny.prompts(12), trainer=given, **own)
    trainer.train()
    trainer.evaluate()
    weights = {name: p.detach().numpy() for name, p in trainer.model.named_parameters()}
    ledger = {name: value for name, value in trainer.savings().items() if "seconds" not in name}
    return weights, ledger, open_run(trainer.args.output_dir).groups(), texts


def assert_alike(one, other):
    """Up to rounding, which merges and adds in another order."""
    assert one[3] == other[3]
    assert one[1] == pytest.approx(other[1])
    pd.testing.assert_frame_equal(one[2], other[2], rtol=1e-3, atol=1e-4)
    assert one[0].keys() == other[0].keys()
    for name, weights in one[0].items():
        np.testing.assert_allclose(weights, other[0][name], atol=1e-4, err_msg=name)


def versions(server):
    return [int(name.rpartition("-")[2]) for name, *_ in server.asked if name != "fake"]


SCALED = {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "lora"), [("none", {}), ("one_step", SCALED)])
def test_an_adapter_alone_trains_as_merged_weights_do(serve, tmp_path, overlap, lora):
    merging, adding, restarting = serve(), serve(), [serve(restart_every=7), serve(restart_every=5)]
    merged = train(tmp_path / "merged", [merging], "merged", overlap, **lora)
    assert_alike(train(tmp_path / "adapter", [adding], None, overlap, **lora), merged)
    assert_alike(train(tmp_path / "restarted", restarting, "adapter", overlap, **lora), merged)
    assert merging.requests["/v1/load_lora_adapter"] == 0 < merging.requests["/collective_rpc"]
    assert adding.requests["/collective_rpc"] == 0 and len(set(versions(adding))) > 3
    # Old ones are unloaded, none is asked for after a newer one, and the two requests of a group go to one
    assert len(adding.adapters) == 1 and versions(adding) == sorted(versions(adding))
    asked = pd.DataFrame(adding.asked, columns=["name", "prompt", "count"])
    assert set(asked.groupby(["name", "prompt"])["count"].sum()) <= {1, 4, 5, 8}


def adapter_alone(directory, url, size):
    """Train an adapter with a server, as one process of a run."""
    nodes_run.main(directory, url, 3, **adapter_settings(directory, size))


def adapter_settings(directory, size) -> dict:
    servers = {"sync": "adapter", "sync_dir": str(directory / "sync")}
    settings = {"lora": LORA, "vllm_server_kwargs": servers, "strategy": "exact", "generation_batch_size": 24}
    return settings | {"per_device_train_batch_size": size, "save_strategy": "no"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_two_processes_send_the_adapter_that_one_sends(serve, tmp_path, way):
    one, two = serve(), serve()
    single, directory = tmp_path / "one", tmp_path / "two"
    adapter_alone(single, one.url, 24)
    if way == "ddp":
        on_processes(2, tmp_path / "log.txt", adapter_alone, directory, two.url, 12)
    else:
        command = [*by_accelerate(tmp_path, on_two_cpus(way)), nodes_run.__file__, directory, two.url, "3"]
        settings = json.dumps(adapter_settings(directory, 12))
        run_to_end([*command, settings], env={"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)})
    assert gap(single / "weights.pt", directory / "weights.pt") < 1e-5
    for server in (one, two):
        assert server.requests["/collective_rpc"] == 0 and len(server.adapters) == 1
    # One process talks to the server, and sends the adapter as often as a single one does
    assert two.requests == one.requests and one.requests["/v1/load_lora_adapter"] > 1
    assert versions(two) == versions(one)


def connect(directory, accelerator, server, sync, config, prepare=lambda model: None):
    """Generation by a server for a LoRA model that differs from its base model."""
    torch.manual_seed(3)
    model = get_peft_model(tiny.model(), LoraConfig(**LORA | {"init_lora_weights": False} | config))
    prepare(model)
    kwargs = {"sync": sync, "sync_dir": str(directory / "sync")}
    settings = {"vllm_server_kwargs": kwargs, "max_completion_length": 5, "vllm_server_timeout": 5.0}
    return HTTPGeneration(model, accelerator, tiny.tokenizer(), http_settings([server.url], **settings))


def with_another(model):
    model.add_adapter("other", LoraConfig(**LORA))
    model.base_model.set_adapter(["default", "other"])


def nothing(model):
    pass


NOT_ALONE = {
    "no options": ({"lora": 0}, {}, nothing, r"takes no adapter of rank 4 \(`--max-lora-rank`\)"),
    "rank": ({"lora": 8}, {"rank_pattern": {"q_proj": 16}}, nothing, "takes no adapter of rank 16"),
    "modules": ({}, {"modules_to_save": ["lm_head"]}, nothing, r"'base_model.model.lm_head' \(ModulesToSave"),
    "two": ({}, {}, with_another, "2 adapters are active"),
    "norm": ({}, {}, lambda model: model.get_base_model().model.norm.requires_grad_(True), r"'.*norm\.weight' is trained beside the LoRA adapter"),
    "target": ({"faults": [400]}, {}, nothing, "could not load the weights in .*answered 400.*fault 400 on"),
    "another base": ({}, {}, lambda model: model.get_base_model().model.norm.weight.data.add_(0.5), r"Without an adapter, the log-probs of .* differ from the trainer's by"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "config", "prepare", "why"), NOT_ALONE.values(), ids=NOT_ALONE)
def test_what_a_server_cannot_hold_goes_merged_and_is_told(
    serve, accelerator, tmp_path, caplog, options, config, prepare, why
):
    faults = options.pop("faults", [])
    server = serve(**options)
    server.faults["/v1/load_lora_adapter"] = faults * 2
    generation = connect(tmp_path, accelerator, server, None, config, prepare)
    for _ in range(2):
        generation.sync_weights()
        assert len(generation.generate_groups([[5, 6]], [2])[0]) == 2
    (told,) = [record.getMessage() for record in caplog.records if "A weight sync sends" in record.message]
    assert re.search(rf"sends 0\.\d\d MB: whole weights, because .*{why}", told)
    assert server.requests["/collective_rpc"] == 2 and {name for name, *_ in server.asked} == {"fake"}
    server.stop()
    server.start()  # with its own weights again
    words = rf"`sync: adapter` .* not possible: .*{why}.*`--enable-lora` and .*=1"
    with pytest.raises(ServerMismatchError, match=words):
        connect(tmp_path, accelerator, server, "adapter", config, prepare).sync_weights()


def test_a_base_model_that_changes_later_is_sent(serve, accelerator, tmp_path, caplog):
    server = serve()
    generation = connect(tmp_path, accelerator, server, None, {})
    generation.sync_weights()
    generation.model.get_base_model().model.norm.weight.data += 1e-3
    generation.sync_weights()
    assert "because the weights of its base model have changed" in caplog.text
    assert torch.equal(server.policies["fake"].model.norm.weight, generation.model.get_base_model().model.norm.weight)


def test_a_server_that_has_lost_the_adapter_gets_it_again_before_it_completes(serve, accelerator, tmp_path):
    server = serve()
    generation = connect(tmp_path, accelerator, server, "adapter", {})

    def completed():
        generation.load_state_dict({})
        return [completion.token_ids for completion in generation.generate_groups([[5, 6]], [6])[0]]

    generation.sync_weights()
    wanted, loads = completed(), server.loads
    server.adapters.clear()  # by whoever else can reach it
    assert completed() == wanted and server.loads == loads + 1
    server.stop()
    server.start()
    assert completed() == wanted and server.loads == 1


def test_a_request_for_an_older_adapter_fails(serve, accelerator, tmp_path):
    server = serve()
    generation = connect(tmp_path, accelerator, server, "adapter", {})
    generation.sync_weights()
    (late,) = generation._requests_of([[5, 6]], [2], "train/0")
    generation.sync_weights()
    with pytest.raises(ServerError, match=r"failed 5 times.*404: .*does not exist"):
        list(generation.pool.stream([late]))
    assert len(list((tmp_path / "sync").glob("*/*"))) == 2  # a request under way may need its own


def test_evaluations_ask_for_the_adapter(serve, accelerator, tmp_path):
    server = serve()
    generation = connect(tmp_path, accelerator, server, "adapter", {})
    generation.sync_weights()
    answer = {"choices": [{"text": "2", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    server.always = lambda path, body: (
        Reply(body=json.dumps(answer).encode()) if "n" not in body and "prompt" in body else None
    )
    ((_, output),) = generation.pool.stream([lambda http, one: one.answer(http, "1+1=", {"max_tokens": 2})])
    assert output.text == "2" and server.asked[-1][0] in server.adapters


@pytest.mark.parametrize(("rate", "said"), [(1e-8, True), (1e-4, False)])
def test_what_bfloat16_swallows_is_logged_and_told(serve, tmp_path, rate, said):
    server = serve(dtype=torch.bfloat16)
    own = nodes_run.served(tmp_path, server.url) | {"strategy": "exact", "max_steps": 12, "learning_rate": rate}
    model = tiny.model()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()  # as in a trained model: any step changes a 0
    given = {"dataset": tiny.prompts(12), "trainer": {"model": model}}
    trainer = tiny.run(tmp_path / "run", lr_scheduler_type="constant", **given, **own)
    shares = tiny.history(trainer, "lze/weights_changed")
    assert len(shares) >= 10 and (np.mean(shares) < 1e-3) == said
    lines = trainer.generation_step.advice.lines(ended=True)
    assert ("bfloat16" in lines) == said
    if said:
        assert re.search(r"Only 0\.0\d% of the weights moved .* bfloat16.*`learning_rate`.*float32", lines["bfloat16"])
