"""Replaying a run: what its selector saw is found again in full, and every number of the comparison is what it says."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import samples
import tiny
from benchmarks.replay import groups_of, replay
from benchmarks.replay.__main__ import main
from lze_trl.memory.state import PromptState, StateSettings
from lze_trl.record import TelemetryWriter
from lze_trl.record.tables import tables_of
from lze_trl.seeding import keyed_rng


NAN = float("nan")
SETTINGS = {"seed": 3, "selection_ratio": 0.4, "selector_kwargs.gumbel_scale": 0.0}
# P = 5, G = 4, ids descending: sorted by prompt, as files are, they come in another order. E = D·u:
BATCH = {
    50: [1, 1, 0, 0],  # 1/2 · 1
    40: [1, 0, 0, 0],  # 3/4 · 3/4
    30: [1, 1, 1, 0],  # 1/4 · 3/4
    20: [1, 1, 1, 1],  # dead
    10: [0, 0, 0, 0],  # dead
}


def rollouts_of(outcomes):
    """Prompts of 5 tokens; completions of 1, 2, 3, … tokens."""
    made = samples.rollouts(outcomes)
    tokens = {"prompt_tokens": np.full(made.num_rows, 5), "completion_tokens": np.arange(made.num_rows) + 1}
    return made.with_rows(rewards=2 * made.outcomes, **tokens)


def record_run(directory, batches, chosen, ledger=None, first=0, **settings):
    """
    A run that visited `batches`, the outcomes of each prompt, and trained on the prompts of `chosen`.

    Every batch is flushed by itself.
    """
    state = PromptState()
    writer = TelemetryWriter(
        directory, completions="none", settings=SETTINGS | settings, resumed_generation=first or None
    )
    for generation, (outcomes, ids) in enumerate(zip(batches, chosen, strict=True), start=first):
        rollouts = rollouts_of(outcomes)
        groups = state.visit(rollouts)
        chosen_groups = np.isin(groups.prompt_ids, list(ids))
        writer.record(samples.record_of(rollouts, groups, generation, selected=chosen_groups, ledger=ledger or {}))
        writer.flush()
    writer.close()
    return directory


# ---- What the selector saw ----


VALUES = {"passes": [0.0, 1.0, NAN], "graded": [0.0, 0.1, 0.3, 0.7, 1.0, NAN]}


@given(st.data(), st.sampled_from(list(VALUES)), st.booleans())
def test_groups_are_read_back_as_they_were(data, kind, named):
    group = st.lists(st.sampled_from(VALUES[kind]), min_size=1, max_size=7)
    visits = data.draw(st.lists(st.lists(group, min_size=3, max_size=3), max_size=4))
    state = PromptState(StateSettings(named_outcome=named))
    for generation, outcomes in enumerate(visits):
        rollouts = rollouts_of(dict(enumerate(outcomes)))
        seen = state.visit(rollouts)
        table = tables_of(samples.record_of(rollouts, seen, generation), 0.0, 1.3, set())["groups"]
        read = groups_of({name: table[name].to_numpy() for name in table.column_names}, named)
        for name, values in vars(seen).items():
            np.testing.assert_array_equal(getattr(read, name), values, err_msg=name)
        assert table["scored"].to_pylist() == [int(np.sum(~np.isnan(values))) for values in outcomes]


# ---- The comparison ----


def test_every_number_of_the_comparison(tmp_path):
    # Tokens of the groups: 4·5 + completions: 30, 46, 62, 78, 94; together 310. What the run took, its ledger knows
    ledger = {"update_tokens": 100.0, "plain_rows": 20.0, "plain_tokens": 620.0, "plain_update_flops": 6200.0}
    record_run(tmp_path, [BATCH], [{50, 30}], ledger)
    result = replay(tmp_path, ["energy", "zero_variance", "all"])
    run, energy, zero_variance, everything = result.choices
    assert (result.generations, result.groups, result.live_share) == (1, 5, 0.6)
    assert [choice.name for choice in result.choices] == ["the run", "energy", "zero_variance", "all"]

    assert (run.groups, run.live_share, run.jaccard, run.shared) == (2, 1.0, 1.0, 1.0)
    assert (run.energy, run.pass_rate) == (pytest.approx(0.6875 / 2), 0.625)
    assert (run.update_tokens, run.of_run, run.of_plain) == (100, 1.0, pytest.approx(100 / 620))

    # K = 2: 40 and 50; a random pair shares 2·2/5 = 0.8 groups with the run's
    assert (energy.groups, energy.live_share, energy.energy, energy.pass_rate) == (2, 1.0, 0.53125, 0.375)
    assert (energy.jaccard, energy.shared) == (pytest.approx(1 / 3), 0.5)
    assert (energy.random_jaccard, energy.random_shared) == (pytest.approx(0.8 / 3.2), pytest.approx(0.4))
    assert (energy.update_tokens, energy.update_flops) == (76, 760)
    assert (energy.of_run, energy.of_plain) == (0.76, pytest.approx(76 / 620))

    assert (zero_variance.groups, zero_variance.shared, zero_variance.random_shared) == (3, 1.0, pytest.approx(0.6))
    assert zero_variance.jaccard == pytest.approx(2 / 3)
    assert zero_variance.random_jaccard == pytest.approx(1.2 / 3.8)

    assert (everything.groups, everything.live_share, everything.update_tokens) == (5, 0.6, 310)
    assert everything.jaccard == everything.random_jaccard == pytest.approx(0.4)


def test_overlap_adds_up_over_generation_batches(tmp_path):
    record_run(tmp_path, [BATCH, {7: [1, 0]}, {8: [1, 1]}], [{50, 30}, {7}, set()])
    energy = replay(tmp_path, ["energy"]).choices[1]
    assert (energy.groups, energy.jaccard, energy.shared) == (3, pytest.approx(2 / 4), pytest.approx(2 / 3))
    assert energy.random_jaccard == pytest.approx(1.8 / 4.2)


def random_choice(generation, ids=tuple(BATCH), k=2, seed=3):
    order = keyed_rng(seed, generation, "selection").permutation(len(ids))
    return {ids[index] for index in order[:k]}


def test_groups_have_their_places_and_their_random_numbers(tmp_path):
    record_run(tmp_path, [BATCH] * 6, [random_choice(generation) for generation in range(6)])
    result = replay(tmp_path, ["random"])
    assert result.choices[1].jaccard == 1.0
    assert result.kept is None
    assert replay(tmp_path, ["random"], seed=4).choices[1].jaccard < 1.0


# ---- Selectors, settings, the command ----


def test_the_command_prints_and_writes(tmp_path, capsys):
    record_run(tmp_path / "run", [BATCH] * 2, [{50, 30}] * 2)
    path = tmp_path / "replay.json"
    main([str(tmp_path / "run"), "--selector", "energy", "zero_variance", "--json", str(path)])
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["energy"][1:] == [
        *("4", "100%", "0.531", "0.375", "0.33", "(0.25)", "50%", "(40%)", "152", "–", "82.6%", "–")
    ]
    assert "ρ = 0.4, seed 3" in shown
    content = json.loads(path.read_text())
    assert content["choices"][1]["shared"] == 0.5
    assert content["choices"][1]["update_flops"] is None


# ---- A real training ----


def train(directory, reward=tiny.even_length_reward, **settings):
    settings = {"telemetry": True, "max_steps": 8, "per_device_train_batch_size": 20} | settings
    return tiny.run(directory, reward_funcs=reward, dataset=tiny.prompts(13), **settings)


def mostly_scored(completions, **kwargs):
    return [None if text[:1] in "abcdefgh" else float(len(text) % 2) for text in completions]


@pytest.mark.parametrize(
    "settings",
    [
        {"selector": "variance", "pruning": "skip", "planner_kwargs": {"streak": 1}},
        pytest.param({"num_generations": 5, "reward": mostly_scored}, marks=pytest.mark.slow),
        # Most groups have no completion that ends, and take no place of another
        {"selector": "random", "mask_truncated_completions": True},
        pytest.param({"controller": "dynamic", "selection_ratio": 0.2}, marks=pytest.mark.slow),
        pytest.param(
            {"controller": "reinforce_ada_balanced", "controller_kwargs": {"round_size": 2}}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values() if isinstance(value, str)) or "ramp",
)
def test_the_runs_own_selector_chooses_what_the_run_chose(tmp_path, settings):
    trainer = train(tmp_path, **settings)
    result = replay(tmp_path, [settings.get("selector", "energy")])
    run, again = result.choices
    assert (again.jaccard, again.shared) == (1.0, 1.0)
    assert run.groups > 0
    assert again.random_jaccard < 1.0
    # What the trainer has counted
    savings = trainer.savings()
    assert run.update_tokens == savings["update_tokens"]
    if settings.get("controller") == "reinforce_ada_balanced":
        assert again.update_tokens == pytest.approx(savings["update_tokens"], rel=0.05)
    else:
        assert (again.update_tokens, again.groups) == (savings["update_tokens"], savings["groups_trained"])
        assert again.update_flops == pytest.approx(savings["update_flops"])
        assert again.of_plain == pytest.approx(savings["update_flops"] / savings["plain_update_flops"])
