"""Rollout controllers with completions from a real vLLM server."""

import itertools
import shutil
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from controllers_run import CONTROLLERS, WatchedTrainer
from lze_trl.config import SELECTORS
from test_controllers_processes import SETTINGS, launch, records
from test_controllers_training import assert_laws, make
from test_surplus import WAITING, OfEveryAge, SnapshotTrainer, half_reward, logprobs


@pytest.fixture(scope="module")
def server(session_servers):
    session_servers["first"].ensure()
    return session_servers["first"]


def over_http(server) -> dict:
    return {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [server.url]}


def pairs(processes: int) -> list[tuple[str, str]]:
    """
    Controllers and selectors for a number of processes. One process and two together have every pair; each of them has every
    controller with every other selector, and every selector with every other controller.
    """
    found = itertools.product(enumerate(CONTROLLERS), enumerate(SELECTORS))
    return [(controller, selector) for (i, controller), (j, selector) in found if (i + j + processes) % 2 == 0]


@pytest.mark.parametrize(("controller", "selector"), pairs(1))
def test_every_selector_with_every_controller(server, models, tmp_path, controller, selector):
    settings = CONTROLLERS[controller]
    trainer = make(
        tmp_path,
        model=str(models["untied"]),
        cls=WatchedTrainer,
        controller=controller,
        selector=selector,
        selection_ratio=0.8,
        **over_http(server),
        **settings,
    )
    pool, sent = trainer.vllm_generation.pool, []
    complete = pool.complete

    def watched(groups):
        counts = Counter()
        for group in groups:
            counts[trainer._tokenizer.decode(group.prompt)] += group.count
        sent.append(counts)
        return complete(groups)

    pool.complete = watched
    trainer.train()
    assert_laws([trainer.record()], controller, settings)
    # In every round exactly the active prompts were sent, each with its number
    assert sent == [Counter(prompt for prompt, _ in entry["rows"]) for entry in trainer.rounds]
    assert max(difference.mean for difference in trainer.vllm_generation.differences.values()) < 1e-3


def test_two_processes(server, models, tmp_path):
    shutil.copytree(models["untied"], tmp_path / "model")
    cases = {
        f"{controller}-{selector}": SETTINGS
        | CONTROLLERS[controller]
        | {"controller": controller, "selector": selector, "urls": [server.url]}
        for controller, selector in pairs(2)
    }
    launch(tmp_path, 2, cases)
    for name, settings in cases.items():
        assert_laws(records(tmp_path, name, 2), settings["controller"], CONTROLLERS[settings["controller"]])


@pytest.mark.parametrize("corrected", [True, False])
def test_surplus_weighs_by_the_policy_that_sampled_it(server, models, tmp_path, corrected):
    """By the correction for what the server samples, where it is on, and else by its log-probabilities."""
    trainer = make(
        tmp_path,
        model=str(models["untied"]),
        cls=SnapshotTrainer,
        rewards=half_reward,
        surplus_max_age=2,
        optim="sgd",
        learning_rate=0.05,
        trainer={"selector": OfEveryAge()},
        vllm_importance_sampling_correction=corrected,
        vllm_importance_sampling_mode="token_truncate",
        **WAITING | {"selection_ratio": 0.5},
        **over_http(server),
    )
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(models["untied"])
    born, largest = trainer.born(), {0: 0.0, 1: 0.0, 2: 0.0}
    for generation, inputs, weights in trainer.seen:
        now = logprobs(weights, inputs, model=model)
        for row in range(len(now)):
            mask = inputs["completion_mask"][row].bool()
            prompt = trainer._tokenizer.decode(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()])
            age = generation - born[prompt, tuple(inputs["completion_ids"][row][mask].tolist())]
            then = logprobs(trainer.sampled[generation - age], inputs, model=model)[row][mask]
            ratio = (now[row][mask] - then).exp()
            if corrected:
                given = inputs["importance_sampling_ratio"][row][mask]
            elif "old_per_token_logps" in inputs:
                given = (now[row][mask] - inputs["old_per_token_logps"][row][mask]).exp()
            else:
                given = torch.ones_like(ratio)
            torch.testing.assert_close(given, ratio.clamp(max=3.0) if corrected else ratio, rtol=0, atol=5e-3)
            largest[age] = max(largest[age], float((ratio - 1.0).abs().max()))
    assert largest[0] < 1e-5 and largest[1] > 0.05 and largest[2] > 0.05
