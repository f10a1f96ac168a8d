"""Two processes draw, choose and train as one does, with every selector and controller."""

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch

import tiny
from case_runs import run_all
from controllers_run import CONTROLLERS, passes
from controllers_run import run as run_case
from launches import on_processes
from lze_trl.config import SELECTORS
from lze_trl.record.reader import open_run
from test_controllers_training import assert_laws, assert_table, drawn_groups, times


SHAPE = {"rows": 12, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "selection_ratio": 0.8}
SETTINGS = SHAPE | {"optim": "sgd", "learning_rate": 0.2}


def launch(directory: Path, processes: int, cases: dict[str, dict]):
    """Run cases on some processes; `directory` gets their records."""
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    on_processes(processes, directory / "log.txt", run_all, run_case, path)


def records(directory: Path, name: str, processes: int) -> list[dict]:
    return [json.loads((directory / f"{name}.{processes}.{rank}.json").read_text()) for rank in range(processes)]


def cases() -> dict[str, dict]:
    """Every controller with a selector or two, in turn."""
    turns = [(name, SELECTORS[(i + turn) % len(SELECTORS)]) for i, name in enumerate(CONTROLLERS) for turn in (0, 3)]
    return {
        f"{controller}-{selector}": SETTINGS
        | CONTROLLERS[controller]
        | {"controller": controller, "selector": selector}
        for controller, selector in turns[::2] + turns[3::4]
    }


# Rounds that two processes cannot share evenly: a few rows more are drawn
UNEVEN = {
    "reinforce_ada_balanced": {"controller_kwargs": {"round_size": 3, "max_rounds": 4}},
    "reinforce_ada_positive": {"controller_kwargs": {"round_size": 1, "max_rounds": 7}},
    "dynamic": {"controller_kwargs": {"max_rounds": 4}, "num_generations": 3, "selection_ratio": 1.0},
}

SAVED = SETTINGS | {
    "controller": "dynamic",
    "selection_ratio": 0.5,
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 5e-2,
}
GUARDED = SETTINGS | {
    "controller": "gate",
    "selector": "zero_variance",
    "num_generations": 3,
    "controller_kwargs": {
        "control": 0.2,
        "explore": 0.2,
        "recheck": 1.0,
    },  # an even number of completions in each round
    "reward": "half_reward",
    "max_steps": 12,
}
TABLE = SETTINGS | {
    "controller": "reinforce_ada_balanced",
    "controller_kwargs": {"round_size": 3, "max_rounds": 4},  # groups that begin on one process and end on the other
    "log_completions": True,
    "num_completions_to_print": 1,
    "telemetry": True,
    "telemetry_completions": "all",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("controllers")
    tiny.save(directory / "model")
    for name, settings in cases().items():
        run_case(directory, name, settings)
    further = {f"uneven-{name}": SETTINGS | settings | {"controller": name} for name, settings in UNEVEN.items()}
    further |= {"table": TABLE, "whole": SAVED, "resumed": SAVED | {"resume": ["whole", "checkpoint-2"]}}
    further["dead"] = SETTINGS | {"controller": "dynamic", "reward": "no_reward", "beta": 0.05}
    run_case(directory, "guarded", GUARDED)
    launch(directory, 2, cases() | further | {"guarded": GUARDED})
    return directory


@pytest.mark.parametrize("case", cases())
def test_two_processes_are_one(runs, case):
    controller = case.split("-")[0]
    one, two = records(runs, case, 1), records(runs, case, 2)
    assert_laws(two, controller, CONTROLLERS[controller])
    assert one[0]["batches"] == two[0]["batches"]
    for first, second in zip(one[0]["rounds"], two[0]["rounds"], strict=True):
        assert {**first, "weights": 0} == {**second, "weights": 0}
    first, second = (torch.load(runs / f"{case}.{world}.pt") for world in (1, 2))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


@pytest.mark.parametrize("controller", UNEVEN)
def test_rounds_that_do_not_divide(runs, controller):
    both = records(runs, f"uneven-{controller}", 2)
    assert_laws(both, controller, UNEVEN[controller])
    counts = [Counter(prompt for prompt, _ in entry["rows"]) for entry in both[0]["rounds"]]
    if controller == "dynamic":  # further prompts come in pairs of groups
        assert [len(given) % 2 for given in counts] == [0] * len(counts)
        assert len(counts) > 3
    else:
        assert any(len(set(given.values())) == 2 for given in counts)


def test_the_guard_of_two_processes_is_that_of_one(runs):
    one, two = records(runs, "guarded", 1), records(runs, "guarded", 2)
    assert one[0]["batches"] == two[0]["batches"] == two[1]["batches"]
    sizes = [[len(entry["rows"]) for entry in record["rounds"]] for record in (one[0], *two)]
    assert sizes[0] == sizes[1] == sizes[2]
    for name in ("lze/guard", "lze/gate_live_kept", "lze/gate_price"):
        told = [entry.get(name) for entry in one[0]["log"]]
        assert told == [entry.get(name) for entry in two[0]["log"]] and told[-1] is not None


def test_two_processes_without_a_signal(runs):
    both = records(runs, "dead", 2)
    for record in both:
        assert record["micro_batches"] == []
        assert record["ledger"]["skipped_updates"] == 3
        # 17 prompts in rounds of 6: the next pass has none that the batch does not hold
        assert [len(entry["rows"]) for entry in record["rounds"]] == [24, 24, 20] * 3


def test_the_table_and_the_telemetry_of_two_processes(runs):
    record, *_ = records(runs, "table", 2)
    run = open_run(runs / "table-2")
    recorded = run.arrow(
        "SELECT completions.generation, text, completion, reward FROM completions JOIN prompts USING (prompt_id) "
        "ORDER BY completions.generation, text, index"
    ).to_pylist()
    tokenizer, drawn = tiny.tokenizer(), drawn_groups(record)
    assert [tuple(row.values()) for row in recorded] == [
        (generation, prompt, tokenizer.decode(completion, skip_special_tokens=True), passes(completion))
        for generation, groups in enumerate(drawn)
        for prompt in sorted(groups)
        for completion in groups[prompt]
    ]
    sizes = run.arrow("SELECT groups.generation, text, size FROM groups JOIN prompts USING (prompt_id)").to_pylist()
    assert {(row["generation"], row["text"]): row["size"] for row in sizes} == {
        (generation, prompt): len(completions)
        for generation, groups in enumerate(drawn)
        for prompt, completions in groups.items()
    }
    for step in range(3):
        table = pd.read_parquet(runs / "table-2" / "completions" / f"completions_{step + 1:05d}.parquet")
        assert_table(table, record, step)


def test_two_processes_resumed(runs):
    for rank in range(2):
        whole, resumed = (records(runs, name, 2)[rank] for name in ("whole", "resumed"))
        assert 0 < len(resumed["batches"]) < len(whole["batches"])
        for name in ("rounds", "batches", "micro_batches"):
            assert resumed[name] == whole[name][-len(resumed[name]) :]
        assert {**resumed["ledger"], **times(whole["ledger"])} == whole["ledger"]
    first, second = (torch.load(runs / f"{name}.2.pt") for name in ("whole", "resumed"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
