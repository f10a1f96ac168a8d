"""Rollout controllers with completions from a real vLLM server."""

import itertools
from collections import Counter

import pytest

from controllers_run import CONTROLLERS, WatchedTrainer
from lze_trl.config import SELECTORS
from test_controllers_training import assert_laws, make


@pytest.fixture(scope="module")
def server(session_servers):
    session_servers["first"].ensure()
    return session_servers["first"]


def over_http(server) -> dict:
    return {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [server.url]}


def pairs() -> list[tuple[str, str]]:
    """Every controller and every selector at least once."""
    length = max(len(CONTROLLERS), len(SELECTORS))
    names = [list(itertools.islice(itertools.cycle(of), length)) for of in (CONTROLLERS, SELECTORS)]
    return list(zip(*names, strict=True))


@pytest.mark.parametrize(("controller", "selector"), pairs())
def test_selectors_and_controllers(server, models, tmp_path, controller, selector):
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
    generation, sent = trainer.vllm_generation, []
    complete = generation._complete

    def watched(groups):
        counts = Counter()
        for group in groups:
            counts[trainer._tokenizer.decode(group.prompt)] += group.count
        sent.append(counts)
        return complete(groups)

    generation._complete = watched
    trainer.train()
    assert_laws([trainer.record()], controller, settings)
    # Every round got the completions of exactly the active prompts, each with its number
    assert sent == [Counter(prompt for prompt, _ in entry["rows"]) for entry in trainer.rounds]
    assert max(difference.mean for difference in trainer.vllm_generation.differences.values()) < 1e-3
