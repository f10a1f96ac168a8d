"""Two or three processes draw, choose and train as one does, with every selector and controller."""

import pandas as pd
import pytest

import tiny
from controllers_run import CONTROLLERS, passes
from controllers_run import run as run_case
from launches import gap, launch, records
from lze_trl.config import SELECTORS
from lze_trl.record.reader import open_run
from test_controllers_training import assert_laws, drawn_groups, times


SETTINGS = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "selection_ratio": 0.8}
SETTINGS |= {"optim": "sgd", "learning_rate": 0.2}
CASES = {
    controller: SETTINGS | own | {"controller": controller, "selector": selector}
    for (controller, own), selector in zip(CONTROLLERS.items(), SELECTORS, strict=True)
}

# Rounds that two or three processes cannot share evenly
UNEVEN = {
    "reinforce_ada_balanced": {"controller_kwargs": {"round_size": 5, "max_rounds": 4}},
    "reinforce_ada_positive": {"controller_kwargs": {"round_size": 1, "max_rounds": 7}},
    "dynamic": {"controller_kwargs": {"max_rounds": 4}, "num_generations": 3, "selection_ratio": 1.0},
    "gate": {"controller_kwargs": {"control": 0.0}},
    "gate of two": {"controller_kwargs": {"control": 0.0}, "num_generations": 6},  # fewer rows than three processes
}
for held in ("signal", "completions"):
    UNEVEN[f"gate holding {held}"] = {"controller_kwargs": {"control": 0.0, "hold": held}, "reward": "half_reward"}
SMALL = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_steps": 9}
UNEVEN = {
    name: SETTINGS
    | own
    | {"controller": name.split()[0], "loss_normalizer": "all"}
    | (SMALL if "gate" in name else {})
    for name, own in UNEVEN.items()
}
EVEN = [
    ("dynamic", 3),
    ("gate", 3),
    ("gate of two", 2),
    ("gate holding signal", 3),
    ("gate holding completions", 3),
]  # rounds that happen to divide

SAVED = SETTINGS | {"controller": "dynamic", "selection_ratio": 0.5, "optim": "adamw_torch", "learning_rate": 5e-2}
SAVED |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
HOLDING = SAVED | {"controller": "gate", "controller_kwargs": {"hold": "completions"}, "reward": "half_reward"}
LATER = SAVED | {"controller": "uniform", "pruning": "none", "max_steps": 7, "save_steps": 3}  # within the second pass
GUARDED = SETTINGS | {"controller": "gate", "selector": "zero_variance", "reward": "half_reward", "max_steps": 12}
# An even number of completions in each round
GUARDED |= {"num_generations": 3, "controller_kwargs": {"control": 0.2, "explore": 0.2, "recheck": 1.0}}
# Prompts whose length says that they are hopeless
UNSEEN = GUARDED | {"prompts": 240, "reward": "short_reward", "controller_kwargs": {"control": 0.0}, "max_steps": 14}
UNSEEN |= {"gradient_accumulation_steps": 6, "steps_per_generation": 6}
UNSEEN |= {"strategy": "gate", "window": 2, "save_strategy": "steps", "save_steps": 5}
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
    cases = CASES | {"guarded": GUARDED, "unseen": UNSEEN}
    cases["unseen resumed"] = UNSEEN | {"resume": ["unseen", "checkpoint-5"]}
    for name, settings in cases.items():
        run_case(directory, name, settings)
    uneven = {f"uneven-{name}": settings for name, settings in UNEVEN.items()}
    for name, settings in uneven.items():
        run_case(directory, name, settings)
    launch(directory, 3, run_case, uneven)
    cases |= uneven
    cases |= {"table": TABLE, "whole": SAVED, "resumed": SAVED | {"resume": ["whole", "checkpoint-2"]}}
    cases |= {"holding": HOLDING, "holding resumed": HOLDING | {"resume": ["holding", "checkpoint-2"]}}
    cases |= {"later": LATER, "later resumed": LATER | {"resume": ["later", "checkpoint-3"]}}
    cases["dead"] = SETTINGS | {"controller": "dynamic", "reward": "no_reward", "beta": 0.05}
    launch(directory, 2, run_case, cases)
    return directory


@pytest.mark.parametrize("controller", CASES)
def test_two_processes_are_one(runs, controller):
    one, two = records(runs, controller, 1), records(runs, controller, 2)
    assert_laws(two, controller, CONTROLLERS[controller])
    assert one[0]["batches"] == two[0]["batches"]
    for first, second in zip(one[0]["rounds"], two[0]["rounds"], strict=True):
        assert {**first, "weights": 0} == {**second, "weights": 0}
    assert gap(runs / f"{controller}.1.pt", runs / f"{controller}.2.pt") < 1e-5


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", UNEVEN)
def test_rounds_that_do_not_divide(runs, case, processes):
    name = f"uneven-{case}"
    (one,), others = records(runs, name, 1), records(runs, name, processes)
    sizes = [len(entry["rows"]) for entry in one["rounds"]]
    assert any(size % processes for size in sizes) != ((case, processes) in EVEN)
    for other in others:
        assert other["batches"] == one["batches"]
        assert [entry["rows"] for entry in other["rounds"]] == [entry["rows"] for entry in one["rounds"]]
        assert other["ledger"] == one["ledger"] | times(other["ledger"])
    for mine, its in zip(others[0]["log"], one["log"], strict=True):
        assert mine.keys() == its.keys()
        told = {n: v for n, v in its.items() if n.startswith(("reward", "completions/", "frac", "lze/"))}
        told = {n: v for n, v in told.items() if "padding" not in n and "vs_plain" not in n}
        assert {n: mine[n] for n in told} == pytest.approx(told, abs=1e-5, nan_ok=True)
    assert gap(runs / f"{name}.1.pt", runs / f"{name}.{processes}.pt") < 1e-5


def test_the_guard_of_two_processes_is_that_of_one(runs):
    (one,), two = records(runs, "guarded", 1), records(runs, "guarded", 2)
    for other in two:
        assert other["batches"] == one["batches"]
        sizes = [[len(entry["rows"]) for entry in record["rounds"]] for record in (one, other)]
        assert sizes[0] == sizes[1]
    for name in ("lze/guard", "lze/gate_live_kept", "lze/gate_price"):
        told = [entry.get(name) for entry in one["log"]]
        assert told == [entry.get(name) for entry in two[0]["log"]] and told[-1] is not None


def test_a_window_of_two_processes_is_that_of_one_and_goes_on_where_it_was(runs):
    (one,), two = records(runs, "unseen", 1), records(runs, "unseen", 2)
    for other in two:
        assert [entry["rows"] for entry in other["rounds"]] == [entry["rows"] for entry in one["rounds"]]
        assert other["batches"] == one["batches"]
    assert 1.0 in [entry.get("lze/unseen_used") for entry in one["log"]]
    assert gap(runs / "unseen.1.pt", runs / "unseen.2.pt") < 1e-5
    for processes in (1, 2):
        whole, rest = (records(runs, name, processes)[0] for name in ("unseen", "unseen resumed"))
        assert 0 < len(rest["batches"]) < len(whole["batches"])
        for name in ("rounds", "batches", "micro_batches"):
            assert rest[name] == whole[name][-len(rest[name]) :]
        assert gap(runs / f"unseen.{processes}.pt", runs / f"unseen resumed.{processes}.pt") == 0.0


def test_two_processes_without_a_signal(runs):
    for record in records(runs, "dead", 2):
        assert {len(entry["rows"]) for entry in record["micro_batches"]} == {0}
        assert record["ledger"]["empty_updates"] == 3
        # 17 prompts in rounds of 6: the next pass has none that the batch does not hold
        assert [len(entry["rows"]) for entry in record["rounds"]] == [24, 24, 20] * 3


def test_the_table_and_the_telemetry_of_two_processes(runs):
    drawn, tokenizer = drawn_groups(records(runs, "table", 2)[0]), tiny.tokenizer()
    # Every completion, in its group and in the order drawn
    expected = [
        (generation, prompt, tokenizer.decode(completion, skip_special_tokens=True), passes(completion), len(group))
        for generation, groups in enumerate(drawn)
        for prompt, group in sorted(groups.items())
        for completion in group
    ]
    recorded = open_run(runs / "table-2").arrow(
        "SELECT generation, text, completion, reward, size FROM completions JOIN groups USING (generation, prompt_id) "
        "JOIN prompts USING (prompt_id) ORDER BY generation, text, index"
    )
    assert [tuple(row.values()) for row in recorded.to_pylist()] == expected
    tables = []
    for generation, file in enumerate(sorted((runs / "table-2" / "completions").iterdir())):
        table = pd.read_parquet(file).sort_values("prompt", kind="stable")
        rows = zip(table["prompt"], table["completion"], table["quarter_reward"], strict=True)
        tables += [(generation, *row) for row in rows]
    assert tables == [row[:-1] for row in expected]


@pytest.mark.parametrize("names", [("whole", "resumed"), ("later", "later resumed"), ("holding", "holding resumed")])
def test_two_processes_resumed(runs, names):
    for rank in range(2):
        whole, resumed = (records(runs, name, 2)[rank] for name in names)
        assert 0 < len(resumed["batches"]) < len(whole["batches"])
        for name in ("rounds", "batches", "micro_batches"):
            assert resumed[name] == whole[name][-len(resumed[name]) :]
        assert {**resumed["ledger"], **times(whole["ledger"])} == whole["ledger"]
    assert gap(*(runs / f"{name}.2.pt" for name in names)) < 1e-6
