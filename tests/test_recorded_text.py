"""Which completions are recorded."""

import numpy as np
import pytest

import tiny
from lze_trl.record import open_run
from lze_trl.record.recorder import recorded_rows
from lze_trl.record.tables import plain_text
from lze_trl.rewards.functions import completion_text


def test_sampled_rows_are_those_of_one_group_by_the_counter():
    group, dead = np.repeat([0, 1, 2], [3, 1, 4]), np.zeros(3)
    rows = [recorded_rows("sampled", generation, group, dead).tolist() for generation in range(20)]
    assert {tuple(found) for found in rows} == {(0, 1, 2), (3,), (4, 5, 6, 7)}
    assert rows == [recorded_rows("sampled", generation, group, dead).tolist() for generation in range(20)]
    assert recorded_rows("all", 0, group, dead).tolist() == list(range(8))
    assert recorded_rows("none", 0, group, dead).tolist() == []


def test_the_groups_of_highest_energy_are_always_recorded():
    group = np.repeat(np.arange(7), [1, 2, 1, 1, 1, 1, 1])
    energies = np.array([0.2, 0.5, 0.0, 0.9, 0.1, 0.5, 0.0])
    found = [recorded_rows("sampled", generation, group, energies).tolist() for generation in range(40)]
    assert all({1, 2, 4, 6} <= set(rows) for rows in found)  # of groups 1, 3 and 5
    assert {tuple(sorted({*rows} - {1, 2, 4, 6})) for rows in found} == {(), (0,), (3,), (5,), (7,)}
    few = np.array([0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0])  # a dead group only where it is drawn
    assert all(4 in (rows := recorded_rows("sampled", i, group, few)) and len(rows) <= 3 for i in range(40))


def test_content_of_any_kind_is_text():
    listed = [{"role": "tool", "content": ["a", 2, {"type": "text", "text": "b"}, {"type": "image"}, {"id": 1}]}]
    assert plain_text(listed) == "a2b[image][{'id': 1}]"
    assert completion_text(listed) == "b"


def test_tool_calls_of_both_forms_are_text():
    call = {"name": "add", "arguments": {"a": 1}}
    for form in (call, {"type": "function", "function": call}):
        assert plain_text([{"role": "assistant", "content": None, "tool_calls": [form]}]) == "add({'a': 1})"


@pytest.mark.parametrize("mode", ["none", "sampled", "all"])
def test_a_training_records_what_it_was_asked_for(tmp_path, mode):
    tiny.run(tmp_path, telemetry=True, telemetry_completions=mode)
    run = open_run(tmp_path)
    assert run.meta.settings["telemetry_completions"] == mode
    rows, group = run.sql("FROM completions"), np.repeat([0, 1, 2], 4)
    for generation, batch in run.sql("FROM groups ORDER BY position").groupby("generation"):
        expected = recorded_rows(mode, generation, group, batch.energy.to_numpy())
        found = rows[rows.generation == generation]
        places = zip(batch.prompt_id.to_numpy()[group[expected]], expected % 4, strict=True)
        assert sorted(zip(found.prompt_id, found["index"], strict=True)) == sorted(places)
    # The reward of each row is that of its text
    assert rows.reward.tolist() == [float(len(text.strip()) % 2 == 0) for text in rows.completion]
