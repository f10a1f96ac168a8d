"""Rollout controllers with completions from a real vLLM server."""

import itertools
import shutil
from collections import Counter

import pytest

from controllers_run import CONTROLLERS, WatchedTrainer
from lze_trl.config import SELECTORS
from test_controllers_processes import SETTINGS, launch, records
from test_controllers_training import assert_laws, make


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
