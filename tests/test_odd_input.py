"""What a user can type, or a disk can do, ends a command with one line that names it, never with a traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl.app import charts, page, views
from lze_trl.app.report import write_report
from lze_trl.app.runs import RunBook
from lze_trl.job import cli, train
from lze_trl.record import TelemetryError, open_run


# What a file holds, by its name
FILES = {
    "binary": bytes(range(256)),
    "empty": b"",
    "list.yaml": b"- 1\n",
    "text.yaml": b"hello\n",
    "tabs.yaml": b"seed: 1\n\tbf16: true\n",
    "deep.yaml": b"seed: " + b"[" * 5000,
    "alias.yaml": b"seed: *x\n",
    "code.yaml": b"seed: !!python/object/apply:os.system ['x']\n",
    "key.yaml": b"? [a, b]\n: 3\n",
    "unknown.yaml": b"sead: 1\n",
    "dash.yaml": b"max-steps: 1\n",
    "sums.jsonl": b'{"question": "1+1=", "answer": "2"}\n',
    "no.yaml": b"eval_strategy: no\n",
    "profile/manifest.json": b'{"format": "lze_trl profile"}',
    "env.yaml": b"env: 3\n",
    "quote.yaml": b'seed: 1\nhub_token: "canary\n',
    "token.yaml": b"hub_token: [canary]\n",
    "open.yaml": b"seed: [",
    "empty.jsonl": b"",
    "binary.jsonl": bytes(range(256)),
    "other.jsonl": b'{"a": 1}\n',
    "short.parquet": b"PAR1",
    "odd/results.json": b"[]",
    "cut/results.json": b'{"tasks"',
}
TESTS = Path(__file__).resolve().parent
PACKAGE = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
LONG, TRAIN, EVAL = "x" * 300, "train good.yaml", "eval model --tasks train.jsonl"
HTTP = f"{TRAIN} --use_vllm true --vllm_mode http --vllm_server_urls"
# The words of a command, and what the line must name
CASES = [
    ("train", "RECIPE"),
    ("fly", "invalid choice: 'fly'"),
    ("train runs", "`runs`"),
    ("train binary", "`binary`"),
    ("train empty", "`empty`"),
    (f"train {LONG}", "`xxx"),
    *(
        (f"train {name}", f"`{name}`")
        for name in FILES
        if name.endswith(".yaml") and name not in ("unknown.yaml", "env.yaml", "dash.yaml", "no.yaml", "token.yaml")
    ),
    ("train unknown.yaml", "`sead`. Did you mean `seed`"),
    ("train env.yaml", "`env`"),
    ("train token.yaml", "`hub_token` must be"),
    ("train quote.yaml", "line 3: found unexpected end"),
    ("train double.yaml", "`seed` is given twice"),
    ("train good.yaml --nope", "`nope`"),
    ("train good.yaml extra", "`extra`"),
    ("train good.yaml --streak=1", "a setting of `planner_kwargs`"),
    ("train good.yaml --pakcing false", "There is no setting `pakcing`. Did you mean `packing`"),
    ("train good.yaml --accelerate_config x", "There is no accelerate configuration `x`. Use"),
    ("data train.jsonl --limit 0", "argument --limit: must be at least 1, got 0"),
    ("report runs/good --max_steps 3", "unrecognized arguments: --max_steps 3"),
    ("train good.yaml --learning_rate", "--learning_rate"),
    ("train good.yaml --learning_rate fast", "--learning_rate"),
    ("train good.yaml --num_generations four", "--num_generations"),
    *((f"train good.yaml --selection_ratio 2{also}", "`selection_ratio`") for also in ("", " --dry_run")),
    ("forecast good.yaml --selection_ratio 2", "`selection_ratio`"),
    ("train good.yaml --num_generations 1", "`num_generations` must be in [2"),
    *(
        (f"train good.yaml --{name}={value}", f"`{name}`")
        for name, value in (
            *(("num_generations", 0), ("learning_rate", "nan"), ("learning_rate", -1), ("temperature", -1)),
            *(("temperature", "nan"), ("top_p", 1.5), ("top_k", -5), ("min_p", 3), ("per_device_train_batch_size", 0)),
            *(("gradient_accumulation_steps", 0), ("save_steps", "nan"), ("beta", "nan"), ("loss_type", "grpoo")),
        )
    ),
    ("train good.yaml --strategy lzee", "--strategy"),
    ("train good.yaml --optim adamm", "--optim"),
    *((f"train good.yaml --report_to wandbb{also}", "wandbb") for also in ("", " --dry_run")),
    ('train good.yaml --model_init_kwargs {"token":"hf_canary"', "`model_init_kwargs`"),
    ("train good.yaml --model_init_kwargs [1]", "`model_init_kwargs`"),
    ('train good.yaml --model_init_kwargs {"tokken":"hf_canary"}', "'tokken'"),
    ('train good.yaml --self_play {"instruct":"yes"}', "`instruct`"),
    ("train good.yaml --model_name_or_path ./none", "`./none`"),
    ("train good.yaml --model_name_or_path runs", "runs"),
    ("train good.yaml --datasets none.jsonl", "'none.jsonl'"),
    *((f"train good.yaml --datasets {n}.jsonl", f"{n}.jsonl") for n in ("empty", "binary", "other")),
    *((f"train good.yaml --datasets {n}", n) for n in ("short.parquet", "runs")),
    (
        "train good.yaml --hub_telemetry_id me/a+b",
        "`hub_telemetry_id` must be a name on the Hub, such as 'me/run', got 'me/a+b'",
    ),
    ("train good.yaml --output_dir binary", "binary` cannot be the output folder"),
    ("train good.yaml --output_dir binary/below", "binary/below` cannot be the output folder"),
    (f"train good.yaml --output_dir {LONG}", "xxx` cannot be the output folder"),
    ("train good.yaml --output_dir n\udcff", "`output_dir`"),
    ("train good.yaml --resume_from_checkpoint nowhere", "`nowhere`"),
    *((f"train good.yaml --state_from ./none{also}", "`./none`") for also in ("", " --dry_run")),
    ("train good.yaml --output_dir profile", "`profile` is a profile"),
    ("train good.yaml --reward_weights 1 2 --dry_run", "`reward_weights` has 2 numbers for 1"),
    ("train good.yaml --eval_strategy steps --eval_steps 1 --dry_run", "needs `eval_datasets`"),
    ("train good.yaml --metric_for_best_model eval_rewards/accuracyy/mean", "'eval_rewards/accuracyy/mean'"),
    ("train dash.yaml", "There is no setting `max-steps`. Did you mean `max_steps`"),
    ("train no.yaml", "Quote it"),
    ("train good.yaml --reward_funcs nothing", "'nothing'"),
    ("train good.yaml --reward_funcs os.nothing", "'os.nothing'"),
    ("train good.yaml --eval_tasks gsm9k", "'gsm9k'"),
    ("train good.yaml --num_processes two", "--num_processes"),
    ("train good.yaml --num_processes 0 --dry_run", "--num_processes"),
    ("train good.yaml --accelerate_config none", "`none`"),
    ("train good.yaml --accelerate_config open.yaml", "`open.yaml`"),
    ("train good.yaml --accelerate_config list.yaml", "`list.yaml`"),
    ("train good.yaml --accelerate_config binary", "`binary`"),
    ("train good.yaml --accelerate_config empty", "`empty`"),
    (f"{HTTP} http://me:canary@127.0.0.1:99999", "'http://127.0.0.1:99999'"),
    (f"{HTTP} http://me:canary@127.0.0.1:x", "'http://127.0.0.1:x'"),
    (f"{HTTP} http://[::1", "`vllm_server_urls`"),
    (f"{HTTP} 127.0.0.1:8000", "`vllm_server_urls`"),
    ("data train.jsonl --limit x", "--limit"),
    ("data train.jsonl --prompt_column none", "'none'"),
    ("data train.jsonl?split=none", "train.jsonl"),
    ("data http://me:canary@127.0.0.1:9/x.jsonl", "127.0.0.1:9/x.jsonl"),
    ("data n\udcff.jsonl", "n"),
    (f"data {LONG}.jsonl", "xxx"),
    ("app runs/good --port 99999", "--port"),
    ("app runs/good --port -1", "--port"),
    ("report binary", "meta.json"),
    ("report runs", "Nothing has been recorded"),
    ("report runs/bad", "`bad`"),
    ("forecast runs/bad", "`bad`"),
    ("forecast runs/good --seed 1", "--seed"),
    ("forecast good.yaml --num_prompts 1", "`num_prompts`"),
    ("forecast good.yaml --reward r", "`--reward`"),
    ("forecast runs/good --reward r", "`--reward`"),
    ("eval", "--tasks"),
    ("eval runs --tasks train.jsonl", "'runs'"),
    ("eval model --tasks none.jsonl", "'none.jsonl'"),
    (f"{EVAL} --temperature -1", "`temperature`"),
    (f"{EVAL} --temperature nan", "`temperature`"),
    (f"{EVAL} --temperature inf", "`temperature`"),
    (f"{EVAL} --dtype float33", "float33"),
    ("eval model --tasks sums.jsonl --output .", "`sums.jsonl` is no file of samples"),
    ("profile good.yaml --output runs/good", "`runs/good` holds something else"),
    (f"{EVAL} --compare odd", "`odd/results.json`"),
    (f"{EVAL} --compare cut", "`cut/results.json`"),
    (f"{EVAL} --output binary --limit 1 --max_tokens 2 --no_chat", "`binary`"),
    ("eval --tasks train.jsonl --server http://me:canary@127.0.0.1:99999", "'http://127.0.0.1:99999'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a recipe that trains, runs of which one is damaged, and odd files."""
    root = tmp_path_factory.mktemp("odd")
    good = Path(tiny.recipe(root, **tiny.job(root, train=11), max_steps=1, save_strategy="no")).rename(
        root / "good.yaml"
    )
    (root / "double.yaml").write_bytes(good.read_bytes() + b"seed: 3\n")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    for name in ("good", "bad"):
        record(root / "runs" / name)
    next((root / "runs/bad/telemetry/groups").iterdir()).write_bytes(b"PAR1")
    return root


def record(run: Path):
    """Record a run of 4 generation batches."""
    record_synthetic_run(run, SyntheticTraining(num_prompts=20, groups_per_batch=5), generations=4)


@pytest.mark.parametrize(("words", "named"), CASES)
def test_one_line_says_what_is_wrong(folder, monkeypatch, capsys, words, named):
    def job(command):  # as accelerate starts it, in this process
        try:
            train.main(command[command.index("--config") :])
        except Exception as error:  # whatever it is, it is a traceback
            pytest.fail(f"{type(error).__name__}: {error}")

    monkeypatch.setattr(cli, "run_accelerate", job)
    monkeypatch.setattr(page, "serve", lambda *arguments: pytest.fail("The app was started."))
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    told = end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 or told.startswith("error: ")
    assert named in told and told.count("\n") < 2 and "Traceback" not in told and "canary" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        ("", 0, "train"),
        ("train double.yaml", 1, "`seed` is given twice"),
        ("app --port x", 2, "--port"),
        ("report runs/bad", 1, "`bad`"),
    ],
)
def test_a_real_command_ends_with_a_status_and_words(folder, words, status, named):
    command, own = [sys.executable, "-m", "lze_trl.job.cli", *words.split()], os.environ | PACKAGE
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=200)
    assert done.returncode == status and named in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_terminal_of_ascii_shows_what_it_can(folder):
    encoding = {"PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", **PACKAGE}
    for words in ("data --help", "forecast runs/good", "train good.yaml --telemetry true", "report runs/good"):
        command = [sys.executable, "-m", "lze_trl.job.cli", *words.split()]
        done = subprocess.run(command, cwd=folder, env=os.environ | encoding, capture_output=True, timeout=300)
        assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr[-3000:]
        done.stdout.decode("ascii")


def test_a_terminal_that_is_gone_or_poor_ends_no_training(tmp_path, monkeypatch):
    for stream in (open(tmp_path / "ascii", "w", encoding="ascii"), open("/dev/full", "w", encoding="utf-8")):  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", stream)
        trainer = tiny.run(tmp_path / "run", telemetry=True, summary=True)
        assert trainer.state.global_step == 3
    monkeypatch.undo()
    assert "step     3" in (tmp_path / "ascii").read_text()


@pytest.mark.parametrize("name", [b"q[ab]", b"q*", b"n\xff\xe9", b"a'b", b"x=1"])
def test_a_folder_of_any_name_is_shown(tmp_path, name):
    run = tmp_path / os.fsdecode(name)
    record(run)
    record(tmp_path / "qa")  # which a pattern would match
    shutil.rmtree(tmp_path / "qa/telemetry/groups")
    opened = open_run(run)
    assert opened.summary()["generations"] == 4 and len(opened.prompts()) > 5
    assert "generation batch" in write_report(run).read_text(encoding="utf-8") or write_report(run).is_file()
    book = RunBook([str(tmp_path)])
    assert len(book.ids) == 2 and all(id.encode() for id in book.ids)
    assert all(book.open(id).summary()["generations"] == 4 for id in book.ids)


@pytest.mark.parametrize("damage", ["groups", "generations", "steps", "meta.json", "settings"])
def test_one_damaged_run_beside_good_ones_is_named_and_the_others_are_shown(tmp_path, damage):
    for name in ("good", "bad", "fine"):
        record(tmp_path / name)
    folder = tmp_path / "bad/telemetry"
    if damage == "settings":
        content = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(content | {"settings": ["odd"]}))
    else:
        path = folder / damage if damage == "meta.json" else next((folder / damage).iterdir())
        path.write_bytes(bytes(range(200)))
    with page.gr.Blocks():
        made = page._Page(RunBook([str(tmp_path)]))
    given = {"tab": "Runs", "run": "good", "orders": {}, "words": "", "runs": made.book.ids}
    given |= {"metrics": ["pass_rate", "loss"], "axis": "step", "smoothing": 0.0}
    for tab in ("Runs", "Compare"):
        shown = made._show_runs(given | {"tab": tab})
        assert "bad" in shown[made.standing]
    rows = made._show_runs(given)[made.run_table]
    assert "good" in rows and "fine" in rows and "bad" not in rows
    with pytest.raises(TelemetryError):
        views.run_row(made.book.open("bad"))
    assert charts.comparison({"good": made.book.open("good")}, "step", "pass_rate")[0].data


@pytest.fixture
def served(folder, monkeypatch):
    """The app in this process, not blocked on."""
    monkeypatch.setattr(page.gr.Blocks, "block_thread", lambda app: None)
    app = page.serve([str(folder / "runs/good")], "127.0.0.1", tiny.free_port())
    yield app
    app.close()


def test_the_app_answers_to_its_own_name_and_takes_no_files(served):
    url = served.local_url
    for host, status in (
        ("127.0.0.1:80", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
    ):
        assert httpx2.get(url, headers={"host": host}).status_code == status, host
    told = httpx2.post(f"{url}gradio_api/upload", files={"files": ("a.txt", b"x")})
    assert told.status_code == 413
