"""What is recorded is read back: also while it is written, after a crash, and after a resume."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import samples
from benchmarks import stress
from benchmarks.synthetic import SyntheticTraining
from lze_trl.record import GenerationRecord, Meta, MissingTelemetryError, TelemetryError, TelemetryWriter, open_run
from lze_trl.record import reader as telemetry_reader
from lze_trl.record import writer as telemetry_writer
from lze_trl.record.schema import FORMAT, SCHEMA_VERSION, SQL_TYPES, STATUS_FILE, Status
from lze_trl.record.tables import prompt_columns, row_columns
from lze_trl.record.writer import list_parts
from lze_trl.select.energy import score_groups


def make_record(
    generation, outcomes=((1, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)), ids=(11, -22, 33), replayed=(), **changes
):
    """A batch of P=3 groups, G=4, of which the live ones are trained on. `changes` are of prompts, rows or other fields."""
    outcomes = np.array(outcomes, dtype=np.float64)
    made = samples.rollouts(dict(zip(ids, outcomes.tolist(), strict=True)))
    tokens = {"completion_tokens": np.arange(outcomes.size), "loss_tokens": np.full(outcomes.size, 2)}
    rewards = np.stack([made.outcomes, np.full(outcomes.size, np.nan)], axis=1)
    rollouts = made.with_rows(rewards=2 * made.outcomes, rewards_per_func=rewards, **tokens)
    unknown = np.full(len(outcomes), np.nan)
    groups = score_groups(rollouts, unknown, unknown, np.full(len(outcomes), generation), np.isin(ids, replayed))
    groups = groups.with_columns(cause=np.where(groups.alive, "", np.where(groups.solved, "solved", "hopeless")))
    prompts = prompt_columns(groups, selected=groups.alive, pruned=np.zeros(len(groups), dtype=bool))
    prompts |= {"text": [f"prompt {id}" for id in ids], "columns": [{"level": 3}] * len(groups)}
    rows = row_columns(rollouts) | {"completion": [f"{generation}:{i}" for i in range(outcomes.size)]}
    for columns in (prompts, rows):
        columns |= {name: np.array(changes.pop(name, values)) for name, values in columns.items()}
    ledger = {"update_flops": 10.0 * (generation + 1), "plain_update_flops": 40.0 * (generation + 1)}
    fields = {"step": generation * 2, "pass_index": 1, "skipped": 7, "ledger": ledger}
    return GenerationRecord(generation, prompts=prompts, rows=rows, **(fields | changes))


META = Meta({"seed": 3}, ["accuracy_reward", "format_reward"])


def record_run(directory, records, meta=META, **options):
    """The run that is recorded."""
    writer = TelemetryWriter(directory, meta, **options)
    for record in records:
        writer.record(record)
        writer.record_step(record.step, {"loss": record.generation / 10})
    writer.close()
    return open_run(directory)


def test_records_come_back_as_they_were(tmp_path):
    folder = tmp_path / "selected=0.4" / "it's [1]" / "telemetry"
    folder.mkdir(parents=True)
    (folder / "checkpoint-5").touch()
    run = record_run(folder, [make_record(0)])
    assert {path.name for path in folder.iterdir()} == {"checkpoint-5", "telemetry"}  # an `output_dir` of this name
    assert run.meta.settings == {"seed": 3}
    assert run.meta.reward_names == ["accuracy_reward", "format_reward"]
    groups = run.groups()
    assert groups.columns.tolist() == list(SQL_TYPES["groups"])
    # p = 1/2: D = 1/2, u = 1, m = 0, E = 1/2; all pass and all fail: E = 0
    assert groups.prompt_id.tolist() == [-22, 11, 33]
    assert groups.loss_tokens.tolist() == [8, 8, 8]
    assert groups.pass_rate.tolist() == [1.0, 0.5, 0.0]
    assert groups.energy.tolist() == [0.0, 0.5, 0.0]
    assert groups.difficulty.tolist() == pytest.approx([0.05, 0.5, 1.0])
    assert groups.dead.tolist() == [True, False, True]
    assert groups.selected.tolist() == [False, True, False]
    assert groups.completion_tokens.tolist() == [4 + 5 + 6 + 7, 0 + 1 + 2 + 3, 8 + 9 + 10 + 11]
    assert groups.rewards[1].tolist() == pytest.approx([0.5, np.nan], nan_ok=True)
    generation = run.generations().iloc[0]
    assert (generation.groups, generation.rows, generation.selected, generation.dead) == (3, 12, 1, 2)
    assert generation.skipped == 7
    assert run.steps().loc[0, "loss"] == 0.0
    completions = run.completions(11)
    assert completions.completion.tolist() == ["0:0", "0:1", "0:2", "0:3"]
    assert completions.outcome.tolist() == [1, 1, 0, 0]


def test_a_batch_of_which_pruning_left_nothing_is_recorded(tmp_path):
    empty = GenerationRecord(1, step=3, ledger={"update_flops": 20.0, "plain_update_flops": 80.0})
    generations = record_run(tmp_path, [make_record(0), empty, make_record(2)]).generations()
    assert generations.generation.tolist() == [0, 1, 2]
    assert generations.groups.tolist() == [3, 0, 3]
    assert dict(generations.ledger[1]) == {"update_flops": 20.0, "plain_update_flops": 80.0}
    assert np.isnan(generations.pass_rate[1])


def test_states_of_prompts(tmp_path):
    solved, half, failed, none = (1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 0), (np.nan,) * 4
    records = [
        make_record(0, [solved, solved, solved], pruned=[True, True, True]),
        make_record(1, [half, solved, half], replayed=[11, -22, 33], pruned=[False, True, False]),
        make_record(2, [half, failed, solved], ids=(11, 44, 33)),
        make_record(3, [half, solved, none], ids=(55, 66, 44)),
        make_record(4, [none, solved, half], ids=(55, 66, 77)),
    ]
    run = record_run(tmp_path, records)
    prompts = run.prompts().set_index("prompt_id")
    known = {11: "forgotten", -22: "pruned", 33: "solved", 44: "unscored", 55: "unscored", 66: "solved"}
    assert prompts.state.to_dict() == known | {77: "frontier"}
    assert np.isnan(prompts.pass_rate[55]) and np.isnan(prompts.reward_mean[55])  # nothing of the visit before
    assert run.prompt_counts()["forgotten"] == 1


def test_prompts_are_found_filtered_and_sorted(tmp_path):
    outcomes = [(1, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)]
    prompts = ["a <b>50%_</b> sum", "A product", "100% sure"]
    facts = [{"subject": "géométrie"}, {"solution": r"\frac{1}{2}"}, {"level": 3}]
    run = record_run(tmp_path, [make_record(0, outcomes, text=prompts, columns=facts)])
    assert run.prompts(state="frontier").energy.tolist() == sorted(run.prompts().energy, reverse=True)[:2]
    assert run.prompts(limit=2).prompt_id.tolist() == run.prompts().prompt_id.tolist()[:2]
    assert run.prompts(search="PRODUCT").prompt_id.tolist() == [-22]
    # Wildcards are ordinary characters, and an id is found as well
    assert run.prompts(search="50%_").prompt_id.tolist() == [11]
    assert run.prompts(search="%").shape[0] == 2
    assert run.prompts(search="-22").prompt_id.tolist() == [-22]
    words = " ".join(reversed(run.prompts(prompt_id=-22)["text"].iloc[0].split()))
    assert run.prompts(search=words).prompt_id.tolist() == [-22]  # in any order
    for search in ("GÉOMÉTRIE", r"\frac{1}{2}", '"level": 3'):  # columns as they read
        assert len(run.prompts(search=search)) == 1, search
    assert run.prompt_counts("'; DROP TABLE groups; --")["frontier"] == 0
    assert run.prompts(prompt_id=-22).text.tolist() == ["A product"]
    assert run.prompts(prompt_id=7).empty
    assert len(open_run(tmp_path).sql("FROM Prompt_States")) == 3
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(TelemetryError, match="disabled by configuration"):  # a query reads nothing but the run
        run.sql(f"SELECT * FROM '{secret}'")
    with pytest.raises(ValueError, match="`state` must be one of"):
        run.prompts(state="alive")


def test_resumed_run_hides_what_the_crash_lost(tmp_path):
    # In one file, as where the disk was full when a checkpoint asked for a flush
    lost = [make_record(i, ids=(11, -22, 33 if i < 4 else 44)) for i in range(6)]
    record_run(tmp_path, lost, flush_seconds=60)
    assert len(list_parts(tmp_path / "telemetry" / "groups")) == 1
    record_run(tmp_path, [make_record(i, ids=(11, -22, 55)) for i in range(4, 8)], resumed_generation=4)
    run = record_run(tmp_path, [make_record(i, ids=(11, -22, 66)) for i in range(7, 9)], resumed_generation=7)
    assert run.generations().generation.tolist() == list(range(9))
    assert run.groups(55).generation.tolist() == [4, 5, 6]
    assert run.groups(66).generation.tolist() == [7, 8]
    # A prompt keeps its text although it was first seen by an earlier attempt, and occurs once
    assert run.prompts().set_index("prompt_id").text.to_dict()[-22] == "prompt -22"
    assert sorted(run.sql("SELECT * FROM prompts").prompt_id) == [-22, 11, 33, 55, 66]
    assert run.steps()["loss"].tolist() == [i / 10 for i in range(9)]


def test_status_of_a_run(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(telemetry_writer, "RENEWED_SECONDS", 0.05)
    writer = TelemetryWriter(tmp_path, Meta(), flush_seconds=0.01)
    for generation in range(3):
        clock[0] = 1000.0 + 30 * generation
        writer.record(make_record(generation, max_steps=10))
        writer.flush()
    wait_for(lambda: Status.read(tmp_path / "telemetry").time == 1060.0)
    monkeypatch.setattr(telemetry_writer, "RENEWED_SECONDS", 1000.0)
    clock[0] = 1065.0
    run = open_run(tmp_path)
    known = {"steps": 5, "max_steps": 10, "updated": 1060.0}  # 15 s a step; of ten, the fifth has begun at 1060 s
    assert run.status() == known | {"state": "running", "seconds_left": 15.0 * 6 - 5.0}
    clock[0] = 1125.0  # a minute without a sign of life
    assert run.status() == known | {"state": "crashed", "seconds_left": None}
    writer.close()
    assert run.status() == known | {"state": "finished", "seconds_left": None}
    (tmp_path / "telemetry" / STATUS_FILE).write_text("{")
    assert run.status() == known | {"max_steps": None, "state": "unknown", "seconds_left": None}


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


OLD = json.dumps({"format": FORMAT, "schema_version": 1})


@pytest.mark.parametrize(("file", "content"), [("", ""), ("meta.json", OLD), ("groups/*", "PAR1"), ("prompts/*", "P")])
def test_a_run_keeps_what_it_cannot_continue_aside(tmp_path, caplog, file, content):
    record_run(tmp_path, [make_record(i) for i in range(3)])
    if file:
        next((tmp_path / "telemetry").glob(file)).write_text(content)
    before = {path.name: path.read_bytes() for path in (tmp_path / "telemetry").glob("*/*")}
    run = record_run(tmp_path, [make_record(0, ids=(1, 2, 3))], resumed_generation=0 if file else None)
    assert "telemetry that this run cannot continue" in caplog.text
    assert run.groups().prompt_id.tolist() == [1, 2, 3]
    assert {path.name: path.read_bytes() for path in (tmp_path / "telemetry.1").glob("*/*")} == before


def test_a_reader_that_follows_knows_what_one_that_comes_later_knows(tmp_path):
    training = SyntheticTraining(num_prompts=50, groups_per_batch=7, group_size=3)
    writer, following = TelemetryWriter(tmp_path, training.meta), None
    for count, record in enumerate(training.generations(20)):
        if count == 10:
            writer.close()
            writer = TelemetryWriter(tmp_path, training.meta, resumed_generation=8)  # from a checkpoint after its 8th
        writer.record(record if count < 10 else replace(record, generation=count - 2))
        writer.flush()
        following = following or open_run(tmp_path)
        following.refresh()
        following.prompt_counts()
    writer.close()
    # As a killed write leaves it
    (tmp_path / "telemetry" / "groups" / ".00000002-3.parquet.1.tmp").write_bytes(b"PAR1")
    assert len(following.groups().generation.unique()) == 18
    assert len(list_parts(tmp_path / "telemetry" / "groups")) == 18  # one a flush
    states, of_prompt = "SELECT * FROM prompt_states ORDER BY prompt_id", following.groups().groupby("prompt_id")
    found = following.sql(states)
    pd.testing.assert_frame_equal(found, open_run(tmp_path).sql(states))
    assert found.times_selected.tolist() == of_prompt.selected.sum().tolist()
    for name in ("visits", "energy"):
        assert found[name].tolist() == of_prompt[name].last().tolist()


def test_a_long_run_writes_less_often(tmp_path, monkeypatch):
    writer = TelemetryWriter(tmp_path, Meta(), flush_seconds=0.01)
    writer.record(make_record(0))
    wait_for(lambda: list_parts(tmp_path / "telemetry" / "groups"))
    monkeypatch.setattr(telemetry_writer, "_PAUSE_SHARE", 1e4)
    for generation in range(1, 30):
        writer.record(make_record(generation))
        time.sleep(0.01)
    assert len(list_parts(tmp_path / "telemetry" / "groups")) <= 2
    writer.close()
    assert len(open_run(tmp_path).generations()) == 30


@pytest.mark.parametrize("table", list(SQL_TYPES))
def test_no_generation_is_seen_without_its_groups(tmp_path, monkeypatch, table):
    writer = TelemetryWriter(tmp_path, Meta())
    writer.record(make_record(0))
    writer.flush()
    pending = [table]

    def list_and_record(folder):
        if folder.name in pending:  # while the files are listed, another generation batch is written
            pending.clear()
            writer.record(make_record(1, ids=(44, 55, 66)))
            writer.flush()
        return list_parts(folder)

    monkeypatch.setattr(telemetry_reader, "list_parts", list_and_record)
    run = open_run(tmp_path)
    generations = len(run.generations())
    assert len(run.groups()) >= 3 * generations
    assert len(run.sql("SELECT * FROM prompts")) >= 3 * generations
    assert len(run.sql("SELECT * FROM completions")) >= 12 * generations
    writer.close()


def test_columns_of_any_name_and_type_are_recorded(tmp_path):
    records = [make_record(generation) for generation in range(3)]
    records[1].prompts["lines"] = np.array([1, 0, 2])
    records[2].prompts["lines"] = np.array(["a", "b", "c"], dtype=object)  # of another type than before
    records[2].rows["turns"] = np.arange(12.0)
    records[2].rows["score"] = np.arange(24).reshape(12, 2)
    run = record_run(tmp_path, records, flush_seconds=60)
    assert run.groups(-22).lines.tolist()[1:] == ["0", "b"]
    completions = run.completions(-22)
    assert completions.turns.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert completions.score.tolist()[0].tolist() == [8, 9]


def spoil(groups):
    """Texts in place of numbers."""
    pd.read_parquet(groups).assign(visits="<b>").to_parquet(groups)


def alter(meta, **values):
    meta.write_text(json.dumps(json.loads(meta.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "damage", "error", "message"),
    [
        ("", shutil.rmtree, MissingTelemetryError, "Nothing has been recorded here yet"),
        ("meta.json", lambda m: m.write_text(OLD), TelemetryError, f"schema 1, .* reads schema {SCHEMA_VERSION}"),
        ("meta.json", lambda meta: meta.write_text("{"), TelemetryError, "cannot be read"),
        ("meta.json", lambda meta: alter(meta, known={"seed": 3}), TelemetryError, "cannot be read"),
        ("meta.json", lambda meta: alter(meta, reward_names=7), TelemetryError, "cannot be read"),
        ("groups/*", spoil, TelemetryError, "cannot be read: .*<b>"),
    ],
)
def test_damage_is_worded(tmp_path, file, damage, error, message):
    record_run(tmp_path, [make_record(0)])
    damage(next((tmp_path / "telemetry").glob(file)) if file else tmp_path / "telemetry")
    with pytest.raises(error, match=message):
        open_run(tmp_path).groups()
    with pytest.raises(MissingTelemetryError, match="There is no run at"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match="cannot be read"):
        open_run(tmp_path / "file")


def test_what_cannot_be_recorded_does_not_stop_the_rest(tmp_path, caplog):
    writer = TelemetryWriter(tmp_path, Meta(), flush_seconds=60)
    # Written at once: the records around the bad one, and a prompt that it would have been the first to visit
    writer.record(make_record(0))
    writer.record(make_record(1, ids=(11, 44, 55), text=["too few"]))
    writer.record(make_record(2, ids=(11, 44, 66)))
    writer.record_step(4, {"loss": 0.5, 7: 1.0})
    writer.record_step(5, {"loss": np.float32(0.25)})
    writer.close()
    assert "Generation batch 1 could not be recorded" in caplog.text
    assert "A log of step 4 could not be recorded" in caplog.text
    run = open_run(tmp_path)
    assert run.generations().generation.tolist() == [0, 2]
    assert run.groups().groupby("generation").size().tolist() == [3, 3]
    assert run.prompts().set_index("prompt_id").text[44] == "prompt 44"
    assert run.steps()["loss"].to_dict() == {5: 0.25}


def test_a_full_disk_delays_and_writes_nothing_twice(tmp_path, caplog, monkeypatch):
    write, fails = telemetry_writer.write_part, iter([False, True, True, True, False, True])

    def full_disk(part, rows):
        if part.parent.name == "generations" and next(fails, False):
            raise OSError("No space left on device")
        write(part, rows)

    monkeypatch.setattr(telemetry_writer, "write_part", full_disk)
    writer = TelemetryWriter(tmp_path, Meta(), flush_seconds=60)
    for generation in range(6):
        writer.record(make_record(generation))
        writer.flush()
    writer.close()
    assert caplog.text.count("failed, it is tried again") == 1 and "lost" not in caplog.text
    run = open_run(tmp_path)
    assert run.groups(11).generation.tolist() == run.generations().generation.tolist() == list(range(6))
    assert len(run.sql("SELECT * FROM prompts")) == 3


def test_parts_have_the_documented_columns(tmp_path):
    record_run(tmp_path, [make_record(0)])
    page = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    for table, types in SQL_TYPES.items():
        written = pq.read_schema(next((tmp_path / "telemetry" / table).iterdir()))
        assert set(types) <= set(written.names)
        assert [name for name in written.names if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_long_runs_are_measured_at_a_small_size(tmp_path):
    assert stress.main(["make", str(tmp_path), "--records", "400", "--prompts", "130"]) == 0
    result = stress.measure(tmp_path)
    # Whole batches of 130 groups: all prompts, in each of them
    assert (result["records"], result["prompts"]) == (520, 130)
    timed = {name for name in result if ":" in name}
    assert {"open: overview", "open: prompts", "filter: forgotten", "filter: text"} <= timed
    assert all(result[name] > 0 for name in (*timed, "peak_megabytes"))
