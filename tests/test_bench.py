"""The benchmark as a whole: what is planned, what is run again, and how it tells what is wrong."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import tiny
from bench_samples import result, settings
from benchmarks import __main__ as command
from benchmarks import jobs, suite, tasks
from benchmarks.jobs import RUNS_DIR, Job, Options, make_options, plan, plan_tuned, plan_tuning
from benchmarks.sections import sort_results
from benchmarks.settings import BenchError, RunSettings
from benchmarks.strategies import QUICK, STRATEGIES, chosen_strategies
from benchmarks.tasks import TASKS, TaskFiles, load, locate, read_rows
from lze_trl.job import demo


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "data"
    tiny.save(folder / "model")
    write_rows(folder / "train.jsonl", [(f"{i}+1=", str(i + 1)) for i in range(7)])
    write_rows(folder / "test.jsonl", [(f"{i}+2=", str(i + 2)) for i in range(9)])
    return TaskFiles(folder / "model", folder / "train.jsonl", folder / "test.jsonl")


def write_rows(path, pairs, answer="answer"):
    path.write_text("".join(json.dumps({"prompt": prompt, answer: gold}) + "\n" for prompt, gold in pairs))


# ---- Names and options ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: chosen_strategies(["lze", "lze_prunned"]),
            "Unknown strategy `lze_prunned`. Did you mean `lze_pruned`?",
        ),
        (lambda: chosen_strategies(["xyz"]), r"Unknown strategy `xyz`\. Known are grpo, all, exact"),
        (lambda: chosen_strategies([]), "No strategy is given"),
        (lambda: tasks.chosen_tasks("adition"), "Unknown task `adition`. Did you mean `addition`?"),
        (lambda: Options(jobs=0), "`--jobs` must be at least 1, got 0"),
        (lambda: Options(seeds=()), "`--seeds` must be one or several different numbers"),
        (lambda: Options(seeds=(1, 1)), "`--seeds` must be one or several different numbers"),
        (lambda: Options(seeds=(1, 101), tune=True), r"must not hold the seeds of the tuning, \[100, 101\]"),
        (lambda: Options(rates=(0.5, 2.0), tune=True), "`--rates` must hold 1"),
        (lambda: Options(model="m", data="d"), "Name it with `--task`"),
        (lambda: locate("calculator", model="m"), "give both or neither"),
        (lambda: locate("calculator", model="m", data="d"), "There is no file `d/train.jsonl`"),
        (lambda: settings(steps=0), "`steps` must be at least 1, got 0"),
        (lambda: settings(stretch=0.5), "`stretch` must be at least 1"),
        (lambda: settings(learning_rate=0.0), "`learning_rate` must be greater than 0"),
        (lambda: RunSettings.from_dict({"task": "addition"}), "written by another version of the benchmark"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(BenchError, match=message):
        call()


def test_the_baseline_is_always_among_the_strategies():
    assert chosen_strategies(["lze", "random", "lze"]) == ["grpo", "random", "lze"]
    assert chosen_strategies(list(STRATEGIES)) == list(STRATEGIES)


def test_quick_changes_defaults_only():
    quick = make_options(quick=True, seeds=[4], steps=None)
    assert (quick.task, quick.strategies, quick.seeds, quick.steps) == ("addition", QUICK, [4], None)
    full = make_options(strategies=None, jobs=2)
    assert (full.task, full.strategies, full.seeds, full.jobs) == ("all", tuple(STRATEGIES), (0, 1, 2), 2)


def test_all_means_the_small_tasks():
    assert tasks.chosen_tasks("all") == ["addition", "calculator"]
    assert tasks.chosen_tasks("word_problems") == ["word_problems"]


# ---- Data ----


def test_held_out_prompts_are_not_trained_on_and_split_once(files):
    pairs = [(f"{i}*7=", str(7 * i)) for i in range(40)] + [("3+1=", "4.00"), ("5*7=", "35")]
    write_rows(files.held_out, pairs)
    parts = {part: load(TASKS["calculator"], files, part) for part in ("test", "validation")}
    test, validation = ([row["prompt"] for row in parts[part].evaluation["held_out"]] for part in parts)
    assert (len(test), len(validation)) == (30, 10)
    assert sorted(test + validation) == sorted({prompt for prompt, _ in pairs} - {"3+1="})
    assert parts["test"].train == read_rows(files.train) == parts["test"].evaluation["train"]
    assert load(TASKS["calculator"], files, "test") == parts["test"]
    with pytest.raises(BenchError, match="Did you mean `test`"):
        load(TASKS["calculator"], files, "tests")


def test_the_addition_task_trains_on_some_of_its_prompts(files):
    write_rows(files.train, [(f"{i}+3=", str(i + 3)) for i in range(600)], answer="solution")
    data = load(TASKS["addition"], files, "test")
    assert [row["prompt"] for row in data.train[:2]] == ["0+3=", "1+3="]
    assert (len(data.train), len(data.evaluation["train"])) == (512, 256)


@pytest.mark.parametrize("task", TASKS)
def test_an_update_follows_each_generation_batch(task):
    training = TASKS[task].training
    rows = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    assert rows == training["generation_batch_size"] == {"calculator": 64 * 8}.get(task, 32 * 8)
    on_gpu = training | TASKS[task].on_gpu
    assert on_gpu["per_device_train_batch_size"] * on_gpu["gradient_accumulation_steps"] == rows


def test_missing_calculator_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "CALCULATOR_DIR", tmp_path / "none")
    monkeypatch.setattr(tasks, "_READY_MADE", tmp_path / "none")
    with pytest.raises(BenchError, match=r"python -m benchmarks\.calculator.*--model DIR --data DIR"):
        locate("calculator")


def test_missing_word_problems_say_how_to_make_them(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "_WORD_PROBLEMS", tmp_path / "none")
    with pytest.raises(BenchError, match=r"python -m recipes\.word_problems.*--model DIR --data DIR"):
        locate("word_problems")


def test_word_problems_are_evaluated_on_some_of_their_prompts(files):
    write_rows(files.held_out, [(f"{i}*7=", str(7 * i)) for i in range(800)])
    write_rows(files.train, [(f"{i}+3=", str(i + 3)) for i in range(600)])
    data = load(TASKS["word_problems"], files, "test")
    assert len(data.train) == 600
    assert {name: len(rows) for name, rows in data.evaluation.items()} == {"held_out": 150, "train": 30}


# ---- Plans ----


def test_key_names_everything_that_a_result_depends_on():
    keys = {
        settings().key,
        settings("lze").key,
        *(
            settings(**change).key
            for change in (
                {"seed": 1},
                {"steps": 41},
                {"learning_rate": 1e-3},
                {"overrides": {"selector": "all"}},
                {"training": TASKS["calculator"].training},
                {"model_hash": "other"},
                {"data_hash": "other"},
                {"held_out": "validation"},
                {"threads": 2},
            )
        ),
    }
    assert len(keys) == 11
    assert settings().key == settings().key
    assert settings("lze", 3, learning_rate=1.0, stretch=2.0, held_out="validation").protocol == settings().protocol
    assert settings(steps=41).protocol != settings().protocol
    assert RunSettings.from_dict(json.loads(json.dumps(vars(settings("dapo"))))) == settings("dapo")


def test_key_does_not_depend_on_where_the_files_lie(files, tmp_path):
    options = Options(task="addition", seeds=(0,), output=tmp_path)
    moved = TaskFiles(tmp_path / "m", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    files.model.rename(moved.model)
    (one, *_) = plan(options, {"addition": TaskFiles(moved.model, files.train, files.held_out)})
    files.train.rename(moved.train)
    files.held_out.rename(moved.held_out)
    (other, *_) = plan(options, {"addition": moved})
    assert one.settings == other.settings
    write_rows(moved.train, [("1+1=", "2")])
    (changed, *_) = plan(options, {"addition": moved})
    assert changed.settings.key != one.settings.key


def test_plan_goes_seed_by_seed_and_begins_with_the_baseline(files, tmp_path):
    options = Options(task="addition", strategies=("lze", "random"), seeds=(3, 1), steps=20, output=tmp_path)
    planned = [job.settings for job in plan(options, {"addition": files})]
    assert [(job.seed, job.strategy) for job in planned] == [
        *((3, strategy) for strategy in ("grpo", "random", "lze")),
        *((1, strategy) for strategy in ("grpo", "random", "lze")),
    ]
    assert {job.strategy: job.max_steps for job in planned} == {"grpo": 20, "random": 30, "lze": 30}
    assert {job.learning_rate for job in planned} == {2e-4}
    assert {job.held_out for job in planned} == {"test"}
    assert len({job.protocol for job in planned}) == 1


def test_plan_of_the_tuning(files, tmp_path):
    options = Options(task="addition", strategies=("lze",), seeds=(0, 1), tune=True, output=tmp_path)
    tuning = plan_tuning(options, {"addition": files})
    assert [(job.settings.strategy, job.settings.learning_rate) for job in tuning] == [
        (strategy, rate) for strategy in ("grpo", "lze") for rate in (1e-4, 2e-4, 4e-4)
    ] * 2
    assert [job.settings.seed for job in tuning] == [100] * 6 + [101] * 6
    assert {(job.settings.held_out, job.settings.stretch) for job in tuning} == {("validation", 1.0)}
    main = plan(options, {"addition": files})
    results = [result([0.1, 0.2], **vars(job.settings)) for job in main]
    for job in tuning:  # the baseline is best at the task's rate, LZE at twice of it
        better = job.settings.learning_rate == (2e-4 if job.settings.strategy == "grpo" else 4e-4)
        results.append(result([0.1, 0.3 if better else 0.2], **vars(job.settings)))
    tuned = plan_tuned(options, {"addition": files}, sort_results(results)[0])
    assert [(job.settings.strategy, job.settings.seed, job.settings.learning_rate) for job in tuned] == [
        ("grpo", 0, 2e-4),
        ("lze", 0, 4e-4),
        ("grpo", 1, 2e-4),
        ("lze", 1, 4e-4),
    ]
    known = {job.settings.key for job in main}
    assert [job.settings.key in known for job in tuned] == [True, False, True, False]


# ---- Runs ----


class FakeProcess:
    """Stands in for the process of a run, and ends at once; but one of them, if any, while something happens."""

    started: list[str]
    failing: set[str]
    at_once: set[int]
    made: list["FakeProcess"]
    interrupted_at: int | None = None
    interruption: Callable

    def __init__(self, command, **kwargs):
        job = json.loads(Path(command[-1]).read_text())
        own = RunSettings.from_dict(job["settings"])
        self.at_once.add(job["at_once"])
        self.running = len(self.made) == self.interrupted_at
        self.told = self.terminated = False
        folder = Path(command[-1]).parent
        assert [path.name for path in sorted(folder.iterdir())] == ["job.json", "log.txt"]
        self.started.append(f"{own.strategy} {own.seed}")
        self.made.append(self)
        if own.strategy in self.failing:
            (folder / "log.txt").write_text("first line\nValueError: it broke\n")
        else:
            (folder / "result.json").write_text(json.dumps(result([0.1, 0.2, 0.3], **vars(own))))

    def poll(self):
        if self.running and not self.told:
            self.told = True
            self.interruption()
        return None if self.running else 0

    def terminate(self):
        self.running, self.terminated = False, True

    def wait(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    process = type("Fake", (FakeProcess,), {"started": [], "failing": set(), "at_once": set(), "made": []})
    monkeypatch.setattr(jobs.subprocess, "Popen", process)
    monkeypatch.setattr(suite, "_POLL_SECONDS", 0.0)
    return process


def planned(files, tmp_path, **changes):
    options = Options(task="addition", strategies=("lze", "random"), seeds=(0,), steps=20, output=tmp_path / "out")
    return plan(replace(options, **changes), {"addition": files})


def quiet():
    return Console(file=io.StringIO(), width=200)


def test_finished_runs_are_skipped_and_half_done_ones_begin_again(files, tmp_path, fake):
    first, second, third = planned(files, tmp_path)
    suite.execute([first], 1, quiet())
    second.folder.mkdir(parents=True)
    (second.folder / "progress.json").write_text('{"step": 10}')
    (second.folder / "result.json.unfinished").write_text("{")
    assert not second.finished and second.share_done() == pytest.approx(10 / 30)
    console = quiet()
    assert suite.execute([first, second, third], 1, console) == []
    assert fake.started == ["grpo 0", "random 0", "lze 0"]
    assert "1 of 3 runs are there already" in console.file.getvalue()
    suite.execute([first, second, third], 2, quiet())
    assert len(fake.started) == 3


def test_a_changed_setting_is_another_run(files, tmp_path, fake):
    suite.execute(planned(files, tmp_path), 2, quiet())
    assert fake.at_once == {2}
    suite.execute(planned(files, tmp_path, steps=30), 1, quiet())
    assert fake.at_once == {1, 2}
    suite.execute(planned(files, tmp_path, seeds=(0, 1)), 1, quiet())
    assert len(fake.started) == 3 + 3 + 3


def test_runs_that_fail_are_told_and_the_others_are_made(files, tmp_path, fake):
    fake.failing = {"random"}
    console = quiet()
    (failed,) = suite.execute(planned(files, tmp_path), 1, console)
    assert failed.settings.strategy == "random" and not failed.finished
    assert fake.started == ["grpo 0", "random 0", "lze 0"]
    assert "random 40 % · seed 0 has failed:\n  first line\n  ValueError: it broke" in console.file.getvalue()


def ctrl_c(process):
    raise KeyboardInterrupt


def sigterm(process):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("interruption", "error"), [(ctrl_c, KeyboardInterrupt), (sigterm, SystemExit)])
def test_interruption_stops_the_runs_and_keeps_what_is_finished(files, tmp_path, fake, interruption, error):
    def handler(number, frame):
        raise AssertionError("SIGTERM has not come to the benchmark.")

    fake.interrupted_at, fake.interruption = 1, interruption
    before = signal.signal(signal.SIGTERM, handler)
    try:
        console = quiet()
        with pytest.raises(error):
            suite.execute(planned(files, tmp_path), 1, console)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert fake.started == ["grpo 0", "random 0"]
    assert [process.terminated for process in fake.made] == [False, True]
    assert "The same command goes on" in console.file.getvalue()


def test_all_tasks_but_those_without_a_warm_start_are_run(files, tmp_path, fake, monkeypatch, capsys):
    def located(task, model, data):
        return files if task == "addition" else locate(task, model, data)

    for name in ("CALCULATOR_DIR", "_READY_MADE"):
        monkeypatch.setattr(tasks, name, tmp_path / "none")
    for name in ("setup_logging", "warm_start"):
        monkeypatch.setattr(demo, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(suite, "locate", located)
    options = Options(strategies=("lze",), seeds=(0,), output=tmp_path / "out")
    with pytest.raises(BenchError, match="The calculator task has no warm start yet"):
        suite.bench(replace(options, task="calculator"))
    assert fake.started == [] and not options.output.exists()
    with pytest.raises(BenchError, match="The calculator task has no warm start yet"):
        suite.bench(options)
    assert fake.started == ["grpo 0", "lze 0"]
    assert "## Two-digit addition" in (options.output / "tables.md").read_text()
    assert "Left out for now: The calculator task has no warm start yet" in capsys.readouterr().out


def test_bench_reports_what_is_there_even_if_runs_fail(files, tmp_path, fake):
    fake.failing = {"lze"}
    options = Options(
        task="calculator",
        strategies=("lze", "random"),
        seeds=(0, 1),
        output=tmp_path / "out",
        model=str(files.model),
        data=str(files.train.parent),
    )
    with pytest.raises(BenchError, match=r"2 runs have failed\. .*the same command tries again"):
        suite.bench(options)
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "## GSM8K calculator expressions" in text and "| random 40 % | 2 |" in text and "LZE" not in text
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 4


def test_bench_without_a_baseline_says_why(files, tmp_path, fake):
    fake.failing = {"grpo"}
    options = Options(task="addition", strategies=("lze",), seeds=(0,), output=tmp_path / "out")
    options = replace(options, model=str(files.model), data=str(files.train.parent))
    with pytest.raises(
        BenchError, match=r"(?s)no finished run of the baseline.*1 runs have failed\. Their logs say why"
    ):
        suite.bench(options)


def test_tuning_comes_after_the_comparison_and_adds_a_table(files, tmp_path, fake):
    options = Options(
        task="addition",
        strategies=("lze",),
        seeds=(0,),
        tune=True,
        output=tmp_path / "out",
        model=str(files.model),
        data=str(files.train.parent),
    )
    suite.bench(options)
    tuning = [f"{strategy} {seed}" for seed in (100, 101) for strategy in ("grpo", "lze") for _ in range(3)]
    # Every rate is as good as any other, so the lowest is taken
    assert fake.started == ["grpo 0", "lze 0", *tuning, "grpo 0", "lze 0"]
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "kept for this alone, on the seeds [100, 101]" in text
    assert "| LZE, 40 % | 1.0e-04 (edge of the grid) | 1 | 20 | 0.200 | 1.00 |" in text
    suite.bench(options)
    assert len(fake.started) == 16


def test_report_from_kept_results(tmp_path):
    results = [result([0.1, 0.2, 0.3]), result([0.1, 0.3, 0.4], "lze", stretch=1.5)]
    results += [result([0.1, 0.2], "lze", overrides={"x": 1}), result([0.1, 0.2], "lze", steps=7)]
    results += [
        result([0.1, 0.3], "lze"),
        result([0.1, 0.3], "lze", learning_rate=1.0),
    ]  # shorter; at a rate of no table
    kept = tmp_path / "results.jsonl"
    kept.write_text("".join(json.dumps(r) + "\n" for r in [*results, results[0]]))
    (section,) = suite.report(tmp_path, quiet())
    assert (tmp_path / f"{section.name}.png").is_file()
    text = (tmp_path / "tables.md").read_text()
    assert "| LZE, 40 % | 1 |" in text
    assert text.endswith(
        "1 run(s) left out: their strategies were defined in another way.\n\n"
        "1 run(s) left out: there is no baseline to compare with.\n"
    )
    assert [json.loads(line) for line in kept.read_text().splitlines()] == results
    suite.report(tmp_path, quiet())
    assert [json.loads(line) for line in kept.read_text().splitlines()] == results
    with pytest.raises(BenchError, match="holds no finished run of the baseline"):
        suite.report(tmp_path / "none", quiet())


def test_kept_results_and_runs_are_reported_together(files, tmp_path, fake):
    suite.execute(planned(files, tmp_path), 1, quiet())
    out = tmp_path / "out"
    first = suite.read_results(out)
    suite.report(out, quiet())
    shutil.rmtree(out / "runs")
    suite.execute(planned(files, tmp_path, strategies=("random",), seeds=(0, 1)), 1, quiet())
    (out / RUNS_DIR / "unfinished").mkdir()
    results = {r["key"]: r for r in suite.read_results(out)}
    assert len(results) == len(suite.read_results(out)) == 3 + 2
    assert {r["key"] for r in first} < results.keys()
    (again,) = (out / RUNS_DIR).glob("addition-grpo-seed0-*/result.json")
    changed = json.loads(again.read_text()) | {"note": "made again"}
    again.write_text(json.dumps(changed))
    assert changed in suite.read_results(out)  # a run counts more than what was kept of it
    suite.report(out, quiet())
    assert "| LZE, 40 % | 1 of 2 |" in (out / "tables.md").read_text()


class TimedJob(Job):
    """A run whose times are given."""

    def __init__(self, strategy, task="addition", wall=None, elapsed=0.0, share=0.0):
        super().__init__(settings(strategy, task=task), None, Path(strategy))
        self.times = wall, elapsed, share

    finished = property(lambda self: self.times[0] is not None)

    def wall_seconds(self):
        return self.times[0]

    def elapsed(self):
        return self.times[1]

    def share_done(self):
        return self.times[2]


def test_time_left():
    done = [TimedJob("lze", wall=60.0), TimedJob("random", wall=120.0)]
    waiting = [TimedJob("lze"), TimedJob("all")]  # one as long as its like, one as the mean of the task: 60 + 90
    assert suite.time_left([*done, *waiting], [], waiting, 1) == "about 2 min left"
    running = [TimedJob("lze", elapsed=15.0)]
    assert suite.time_left([*done, *running], running, [], 1) == "about 45 s left"
    alone = [TimedJob("grpo", elapsed=30.0, share=0.25)]
    assert suite.time_left(alone, alone, [], 1) == "about 2 min left"
    assert suite.time_left([*alone, *waiting], alone, waiting, 1) == "time left not known yet"
    both = [*waiting, *waiting]
    assert suite.time_left([*done, *both], [], both, 2) == "about 2 min left"
    assert suite.time_left(done, [], [], 1) == "done"


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.4, "7 s"), (60.0, "1 min"), (3570.0, "1 h 00 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert suite.duration(seconds) == text


# ---- The command ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "calcualtor"], "error: Unknown task `calcualtor`. Did you mean `calculator`?"),
        (["--seeds", "1", "1"], "error: `--seeds` must be one or several different numbers"),
        (["--report_only", "--output", "no-such-folder"], "error: `no-such-folder` holds no finished run"),
    ],
)
def test_command_errors_have_no_traceback(monkeypatch, arguments, message):
    monkeypatch.setattr(command.os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert str(error.value).startswith(message)


def test_reporting_needs_neither_trl_nor_transformers():
    code = (
        "import sys; from benchmarks import sections, tables, plots, comparison, tasks\n"
        "found = {'trl', 'transformers', 'torch'} & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_small_benchmark_from_end_to_end(files, tmp_path):
    write_rows(files.train, [(f"{i}+1=", str(i % 10)) for i in range(40)])
    write_rows(files.held_out, [(f"{i}+2=", str(i % 10)) for i in range(40)])
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--task",
        "addition",
        "--strategies",
        "lze",
        "--seeds",
        "5",
    ]
    command += ["--steps", "4", "--model", str(files.model), "--data", str(files.train.parent)]
    command += ["--output", str(tmp_path / "out")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs are there already" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {r["settings"]["strategy"] for r in results} == {"grpo", "lze"}
    for one in results:
        steps = [point["step"] for point in one["curve"]]
        assert steps[:2] == [0, 4] and all(point["flops"]["total"] > 0 for point in one["curve"][1:])
        assert one["curve"][1]["rows_rolled_out"] == 4 * 256
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "| GRPO (TRL) | 1 |" in text and "| LZE, 40 % | 1 |" in text
    assert len(list((tmp_path / "out").glob("addition-*.png"))) == 1
