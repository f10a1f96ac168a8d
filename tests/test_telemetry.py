"""What is recorded is read back: also while it is written, after a crash, and after a resume."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import samples
from benchmarks import stress
from benchmarks.synthetic import SyntheticTraining
from lze_trl.record import GenerationRecord, Meta, MissingTelemetryError, TelemetryError, TelemetryWriter, open_run
from lze_trl.record import reader as telemetry_reader
from lze_trl.record import writer as telemetry_writer
from lze_trl.record.schema import SCHEMA_VERSION, SQL_TYPES, STATUS_FILE, Status
from lze_trl.record.writer import list_parts
from lze_trl.select.energy import score_groups


def make_record(
    generation, outcomes=((1, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)), ids=(11, -22, 33), replayed=(), **changes
):
    """One generation batch of P=3 groups, G=4."""
    outcomes = np.array(outcomes, dtype=np.float64)
    made = samples.rollouts(dict(zip(ids, outcomes.tolist(), strict=True)))
    tokens = {"prompt_tokens": np.full(outcomes.size, 5), "completion_tokens": np.arange(outcomes.size)}
    rollouts = made.with_rows(rewards=2 * made.outcomes, **tokens)
    unknown = np.full(len(outcomes), np.nan)
    groups = score_groups(rollouts, unknown, unknown, np.full(len(outcomes), generation), np.isin(ids, replayed))
    groups = groups.with_columns(cause=np.where(groups.alive, "", np.where(groups.solved, "solved", "hopeless")))
    fields = {
        "step": generation * 2,
        "pass_index": 1,
        "skipped": 7,
        "rewards": np.stack([outcomes.ravel(), np.full(outcomes.size, np.nan)], axis=1),
        "loss_tokens": np.full(outcomes.size, 2),
        "completion": np.array([f"{generation}:{i}" for i in range(outcomes.size)], dtype=object),
        "columns": [{"level": 3}] * len(outcomes),
        "ledger": {"update_flops": 10.0 * (generation + 1), "plain_update_flops": 40.0 * (generation + 1)},
    }
    return samples.record_of(rollouts, groups, generation, **(fields | changes))


def record_run(directory, records, **options):
    writer = TelemetryWriter(directory, Meta({"seed": 3}, ["accuracy_reward", "format_reward"]), **options)
    for record in records:
        writer.record(record)
        writer.record_step(record.step, {"loss": record.generation / 10})
    writer.close()


def test_records_come_back_as_they_were(tmp_path):
    record_run(tmp_path / "telemetry", [make_record(0)])
    run = open_run(tmp_path)
    assert run.meta.settings == {"seed": 3}
    assert run.meta.reward_names == ["accuracy_reward", "format_reward"]
    groups = run.groups()
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
    assert sum(generation.energy_histogram) == 1
    assert run.steps().loc[0, "loss"] == 0.0
    completions = run.completions(11)
    assert completions.completion.tolist() == ["0:0", "0:1", "0:2", "0:3"]
    assert completions.outcome.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("name", ["selected=0.4", "it's [1]"])
def test_the_name_of_the_folder_changes_nothing(tmp_path, name):
    record_run(tmp_path / name / "telemetry", [make_record(0)])
    run = open_run(tmp_path / name)
    assert run.groups().columns.tolist() == list(SQL_TYPES["groups"])
    assert run.groups().selected.tolist() == [False, True, False]


def test_a_batch_of_which_pruning_left_nothing_is_recorded(tmp_path):
    empty = GenerationRecord(1, step=3, ledger={"update_flops": 20.0, "plain_update_flops": 80.0})
    record_run(tmp_path / "telemetry", [make_record(0), empty, make_record(2)])
    generations = open_run(tmp_path).generations()
    assert generations.generation.tolist() == [0, 1, 2]
    assert generations.groups.tolist() == [3, 0, 3]
    assert dict(generations.ledger[1]) == {"update_flops": 20.0, "plain_update_flops": 80.0}
    assert np.isnan(generations.pass_rate[1])


def test_states_of_prompts(tmp_path):
    solved, half, failed, none = (1, 1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 0), (np.nan,) * 4
    records = [
        make_record(0, [solved, solved, solved], pruned=np.array([True, True, True])),
        make_record(1, [half, solved, half], replayed=[11, -22, 33], pruned=np.array([False, True, False])),
        make_record(2, [half, failed, solved], ids=(11, 44, 33)),
        make_record(3, [half, solved, none], ids=(55, 66, 44)),
        make_record(4, [none, solved, half], ids=(55, 66, 77)),
    ]
    record_run(tmp_path / "telemetry", records)
    run = open_run(tmp_path)
    prompts = run.prompts().set_index("prompt_id")
    known = {11: "forgotten", -22: "pruned", 33: "solved", 44: "unscored", 55: "unscored", 66: "solved"}
    assert prompts.state.to_dict() == known | {77: "frontier"}
    assert np.isnan(prompts.pass_rate[55]) and np.isnan(prompts.reward_mean[55])  # nothing of the visit before
    assert run.prompt_counts()["forgotten"] == 1


def test_prompts_are_found_filtered_and_sorted(tmp_path):
    outcomes = [(1, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)]
    prompts = ["a <b>50%_</b> sum", "A product", "100% sure"]
    facts = [{"subject": "géométrie"}, {"solution": r"\frac{1}{2}"}, {"level": 3}]
    record_run(tmp_path / "telemetry", [make_record(0, outcomes, text=prompts, columns=facts)])
    run = open_run(tmp_path)
    assert run.prompts(state="frontier").energy.tolist() == sorted(run.prompts().energy, reverse=True)[:2]
    assert run.prompts(limit=2).prompt_id.tolist() == run.prompts().prompt_id.tolist()[:2]
    assert run.prompts(search="PRODUCT").prompt_id.tolist() == [-22]
    # Wildcards are ordinary characters, and an id is found as well
    assert run.prompts(search="50%_").prompt_id.tolist() == [11]
    assert run.prompts(search="%").shape[0] == 2
    assert run.prompts(search="-22").prompt_id.tolist() == [-22]
    for search in ("GÉOMÉTRIE", r"\frac{1}{2}", '"level": 3'):  # columns as they read
        assert len(run.prompts(search=search)) == 1, search
    assert run.prompt_counts("'; DROP TABLE groups; --")["frontier"] == 0
    assert run.prompts(prompt_id=-22).text.tolist() == ["A product"]
    assert run.prompts(prompt_id=7).empty
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(TelemetryError, match="disabled by configuration"):  # a query reads nothing but the run
        run.sql(f"SELECT * FROM '{secret}'")
    with pytest.raises(ValueError, match="`state` must be one of"):
        run.prompts(state="alive")


def test_resumed_run_hides_what_the_crash_lost(tmp_path):
    directory = tmp_path / "telemetry"
    record_run(directory, [make_record(i) for i in range(6)])
    record_run(directory, [make_record(i, ids=(11, -22, 55)) for i in range(4, 8)], resumed_generation=4)
    record_run(directory, [make_record(i, ids=(11, -22, 66)) for i in range(7, 9)], resumed_generation=7)
    run = open_run(tmp_path)
    assert run.generations().generation.tolist() == list(range(9))
    assert run.groups(55).generation.tolist() == [4, 5, 6]
    assert run.groups(66).generation.tolist() == [7, 8]
    # A prompt keeps its text although it was first seen by an earlier attempt, and occurs once
    assert run.prompts().set_index("prompt_id").text.to_dict()[-22] == "prompt -22"
    assert len(run.sql("SELECT * FROM prompts")) == 5
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
    # 15 s a step; of ten, the fifth has begun at 1060 s
    known = {"steps": 5, "max_steps": 10, "updated": 1060.0}
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


def set_meta(**changes):
    def change(folder):
        path = folder / "meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def cut(pattern, size):
    def change(folder):
        path = next(folder.glob(pattern))
        path.write_bytes(path.read_bytes()[:size])

    return change


@pytest.mark.parametrize(
    ("resumed", "change"), [(None, None), (0, set_meta(schema_version=1)), (0, cut("groups/*", 20))]
)
def test_a_run_keeps_what_it_cannot_continue_aside(tmp_path, caplog, resumed, change):
    record_run(tmp_path, [make_record(i) for i in range(3)])
    if change:
        change(tmp_path / "telemetry")
    before = {path.name: path.read_bytes() for path in (tmp_path / "telemetry").glob("*/*")}
    record_run(tmp_path, [make_record(0, ids=(1, 2, 3))], resumed_generation=resumed)
    assert "telemetry that this run cannot continue" in caplog.text
    assert open_run(tmp_path).groups().prompt_id.tolist() == [1, 2, 3]
    assert {path.name: path.read_bytes() for path in (tmp_path / "telemetry.1").glob("*/*")} == before


def test_a_reader_that_follows_knows_what_one_that_comes_later_knows(tmp_path):
    training = SyntheticTraining(num_prompts=50, groups_per_batch=7, group_size=3)
    writer = TelemetryWriter(tmp_path, training.meta)
    following = None
    for count, record in enumerate(training.generations(20)):
        if count == 10:
            # The run goes on from a checkpoint after its 8th batch
            writer.close()
            writer = TelemetryWriter(tmp_path, training.meta, resumed_generation=8)
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
    states, groups = "SELECT * FROM prompt_states ORDER BY prompt_id", following.groups()
    pd.testing.assert_frame_equal(following.sql(states), open_run(tmp_path).sql(states))
    found, of_prompt = following.sql(states).set_index("prompt_id"), groups.groupby("prompt_id")
    last = of_prompt.last()
    assert found.visits.tolist() == last.visits.tolist()
    assert found.times_selected.tolist() == of_prompt.selected.sum().tolist()
    assert found.energy.tolist() == last.energy.tolist()


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
    writer = TelemetryWriter(tmp_path / "telemetry", Meta())
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


def test_a_resumed_run_drops_rows_that_share_a_file_with_earlier_ones(tmp_path):
    # As where the disk was full when a checkpoint asked for a flush
    writer = TelemetryWriter(tmp_path, Meta(), flush_seconds=60)
    for generation in range(4):
        writer.record(make_record(generation, ids=(generation, 11, 22)))
    writer.close()
    assert len(list_parts(tmp_path / "telemetry" / "groups")) == 1
    record_run(tmp_path, [make_record(2, ids=(3, 11, 22))], resumed_generation=2)
    run = open_run(tmp_path)
    assert run.generations().generation.tolist() == [0, 1, 2]
    assert sorted(run.prompts().prompt_id) == [0, 1, 3, 11, 22]


def test_columns_of_any_name_and_type_are_recorded(tmp_path):
    records = [make_record(generation) for generation in range(3)]
    records[1].prompts["lines"] = np.array([1, 0, 2])
    records[2].prompts["lines"] = np.array(["a", "b", "c"], dtype=object)  # of another type than before
    records[2].rows["turns"] = np.arange(12.0)
    records[2].rows["score"] = np.arange(24).reshape(12, 2)
    record_run(tmp_path, records, flush_seconds=60)
    run = open_run(tmp_path)
    assert run.groups(-22).lines.tolist()[1:] == ["0", "b"]
    completions = run.completions(-22)
    assert completions.turns.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert completions.score.tolist()[0].tolist() == [8, 9]


def spoil(column):
    """Replace a column of the groups by texts."""

    def change(folder):
        path = next(folder.glob("groups/*"))
        table = pq.ParquetFile(path).read()
        texts = pa.array(["<b>"] * len(table))
        pq.write_table(table.set_column(table.column_names.index(column), column, texts), path)

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (shutil.rmtree, MissingTelemetryError, "Nothing has been recorded here yet"),
        (set_meta(schema_version=1), TelemetryError, f"schema 1, .* reads schema {SCHEMA_VERSION}"),
        (cut("meta.json", 40), TelemetryError, "cannot be read"),
        (spoil("visits"), TelemetryError, "cannot be read: .*<b>"),
    ],
)
def test_damage_is_worded(tmp_path, damage, error, message):
    record_run(tmp_path / "telemetry", [make_record(0)])
    damage(tmp_path / "telemetry")
    with pytest.raises(error, match=message):
        open_run(tmp_path).groups()
    with pytest.raises(MissingTelemetryError, match="There is no run at"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match="cannot be read"):
        open_run(tmp_path / "file")


def test_what_cannot_be_recorded_does_not_stop_the_rest(tmp_path, caplog):
    writer = TelemetryWriter(tmp_path / "telemetry", Meta(), flush_seconds=60)
    # Written at once: the records around the bad one, and a prompt that it would have been the first to visit
    writer.record(make_record(0))
    writer.record(make_record(1, ids=(11, 44, 55), text=["too few"]))
    writer.record(make_record(2, ids=(11, 44, 66)))
    writer.record_step(4, {"loss": 0.5, 7: 1.0})
    writer.record_step(5, {"loss": 0.25})
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
    record_run(tmp_path / "telemetry", [make_record(0)])
    page = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    for table, types in SQL_TYPES.items():
        written = pq.read_schema(next((tmp_path / "telemetry" / table).iterdir()))
        assert set(types) <= set(written.names)
        assert [name for name in written.names if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_long_runs_are_measured_at_a_small_size(tmp_path):
    for name, records in (("short", 400), ("long", 2_500)):
        assert stress.main(["make", str(tmp_path / name), "--records", str(records), "--prompts", "130"]) == 0
    results = [stress.measure(tmp_path / name) for name in ("short", "long")]
    # Whole batches of 130 groups: all prompts, in each of them
    assert [result["records"] for result in results] == [520, 2_600]
    assert [result["prompts"] for result in results] == [130, 130]
    timed = {name for name in results[0] if ":" in name}
    assert {"open: overview", "open: prompts", "filter: forgotten", "filter: text"} <= timed
    assert all(result[name] > 0 for result in results for name in (*timed, "peak_megabytes"))
