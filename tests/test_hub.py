"""Pushing a run and opening it again, against a local endpoint that speaks the Hub's protocol."""

import base64
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import hub as hub_server
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from hub import Handler, commit
from lze_trl import hub, remote
from lze_trl.checkpoint import STATE_NAME, save
from lze_trl.record import MissingTelemetryError, TelemetryWriter, open_run


class WritableHandler(Handler):
    """Takes commits as well, as `create_repo`, `upload_file` and `upload_folder` make them."""

    def do_POST(self):  # noqa: N802 - a name that the standard library asks for
        path = self.path.partition("?")[0]
        if path.endswith("/paths-info/main"):
            return self.do_GET()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/validate-yaml":
            return self.reply_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked.get('organization') or 'me'}/{asked['name']}"
            folder = self.server.folder / repository
            folder.mkdir(parents=True, exist_ok=True)
            self.server.repositories[repository] = folder
            # How it is made the first time; older clients send `private`
            is_private = asked.get("visibility") == "private" or asked.get("private") is True
            vars(self.server).setdefault("private", {}).setdefault(repository, is_private)
            kind = "datasets/" if asked.get("type") == "dataset" else ""
            url = f"http://{self.headers['Host']}/{kind}{repository}"
            return self.reply_json({"url": url, "id": repository})
        repository = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            asked = json.loads(body)
            # Of .gitignore, what this package writes: folders at the root
            left_out = tuple(line.removeprefix("/") for line in asked.get("gitIgnore", "").splitlines())
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "regular",
                    "shouldIgnore": bool(left_out) and file["path"].startswith(left_out),
                }
                for file in asked["files"]
            ]
            return self.reply_json({"files": files})
        root = self.server.repositories[repository]
        for line in body.decode().splitlines():
            entry = json.loads(line)
            file = root / entry["value"].get("path", "")
            if entry["key"] == "file":
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(entry["value"]["content"]))
            elif entry["key"] == "deletedFile":
                file.unlink()
        self.server.tokens.add(self.headers.get("Authorization"))
        url = f"http://{self.headers['Host']}/datasets/{repository}/commit/{commit(root)}"
        return self.reply_json({"commitUrl": url, "commitOid": commit(root), "success": True})


@contextmanager
def serve(folder):
    with hub_server.serve({}, WritableHandler) as server:
        server.folder, server.tokens = folder, set()
        yield server


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "my-run"
    training = SyntheticTraining(num_prompts=20, groups_per_batch=5)
    record_synthetic_run(directory, training, generations=4)
    tensors = {f"state.{name}": array for name, array in training._state.state_dict().items()}
    save(directory, STATE_NAME, tensors, {"ledger": {}, "global_step": 4})
    (directory / "optimizer.pt").write_text("not to be uploaded")
    return directory


def run_against(server, directory: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    """Run Python with an endpoint as its Hub, in a process of its own: the client reads its endpoint when imported."""
    environment = {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(directory / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "WANDB_MODE": "disabled",  # transformers prints a line where it is offline
        "PYTHONPATH": os.pathsep.join(
            os.path.abspath(folder) for folder in (os.path.dirname(__file__), *sys.path) if folder
        ),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
def test_pushed_run_is_opened_by_its_name(run_dir, tmp_path):
    with serve(tmp_path / "server") as server:

        def python(code):
            return run_against(server, tmp_path, "-c", code, timeout=120)

        pushed = python(
            f"from lze_trl.hub import push_run; push_run({str(run_dir)!r}, 'me/my-run', token='hf_secret')"
        )
        assert pushed.returncode == 0, pushed.stderr
        assert server.tokens == {"Bearer hf_secret"}
        assert server.private == {"me/my-run": False}
        files = {
            file.relative_to(server.folder / "me/my-run").as_posix()
            for file in (server.folder / "me/my-run").rglob("*")
            if file.is_file()
        }
        assert {"README.md", "telemetry/meta.json", "report/report.html", "lze_state.arrays"} <= files
        assert "optimizer.pt" not in files
        card = (server.folder / "me/my-run/README.md").read_text()
        assert "lze-trl app me/my-run" in card
        assert "hf_secret" not in card

        opened = python("""
from lze_trl.hub import resolve_state; from lze_trl.remote import resolve_run
from lze_trl.record import open_run
print(open_run(resolve_run("me/my-run")).summary()["groups"])
# As the app opens it, and what its first page shows
from lze_trl.app import views
from lze_trl.app.runs import RunBook
book = RunBook(["me/my-run", "me/missing"])
assert book.ids == ["my-run", "missing"]
print(*views.overview(book.open("my-run")).split())
print(views.run_table({"my-run": book.open("my-run")})["run"].item())
state = resolve_state("me/my-run")
print(sorted(path.name for path in state.iterdir()))
try:
    resolve_run("me/missing")
except RuntimeError as error:
    print(error)
""")
        assert opened.returncode == 0, opened.stderr
        groups, overview, compared, state, missing = opened.stdout.splitlines()
        assert int(groups) == open_run(run_dir).summary()["groups"]
        assert f"<small>of {groups}</small>" in overview
        assert compared == "my-run"
        assert "lze_state.json" in state
        assert "`me/missing` is neither a directory nor a dataset repo on the Hub that can be read" in missing


PUSHING_TWICE = """
import shutil
import sys
from pathlib import Path
from lze_trl.checkpoint import find_state, save
from lze_trl.hub import push_run; from lze_trl.hub import resolve_state; from lze_trl.remote import resolve_run
from lze_trl.record import TelemetryWriter, open_run
from test_telemetry import make_record

run, pushed = Path(sys.argv[1]), Path(sys.argv[2])

def train(generations, ids):
    # Each generation is a part of its own before the last merge
    shutil.rmtree(run, ignore_errors=True)
    writer = TelemetryWriter(run)
    for generation in range(generations):
        writer.record(make_record(generation, ids=ids))
        writer.flush()
    writer.close()

def opened():
    book = open_run(resolve_run("me/run"))
    print(sorted(book.groups().prompt_id.unique().tolist()), len(book.generations()))

train(5, ids=(1, 2, 3))
save(run, "lze_state", {}, {"global_step": 10})
push_run(run, "me/run")
opened()
resolve_state("me/run")
train(3, ids=(7, 8, 9))
push_run(run, "me/run")
opened()
print(sorted(path.name for path in pushed.glob("lze_state.*")))
try:
    print(find_state(resolve_state("me/run")))
except FileNotFoundError:
    print("no state")
"""


@pytest.mark.slow
def test_a_run_pushed_again_replaces_the_one_before(tmp_path):
    with serve(tmp_path / "server") as server:
        result = run_against(
            server, tmp_path, "-c", PUSHING_TWICE, str(tmp_path / "run"), str(tmp_path / "server/me/run")
        )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.splitlines() == ["[1, 2, 3] 5", "[7, 8, 9] 3", "[]", "no state"]


@pytest.mark.slow
def test_a_state_that_the_repo_has_no_more_is_not_found(tmp_path):
    finding = (
        "from lze_trl.hub import *; from lze_trl.checkpoint import *; print(find_state(resolve_state('me/run')).name)"
    )
    repo, older = tmp_path / "server/me/run", tmp_path / "server/me/run/checkpoint-20"
    save(repo, STATE_NAME, {}, {"global_step": 10})
    save(older, STATE_NAME, {}, {"global_step": 20})
    (older / "trainer_state.json").write_text('{"global_step": 20}')
    with serve(tmp_path / "server") as server:
        server.repositories["me/run"] = repo
        first = run_against(server, tmp_path, "-c", finding)
        shutil.rmtree(older)
        second = run_against(server, tmp_path, "-c", finding)
    offline = run_against(server, tmp_path, "-c", finding)
    assert first.stdout == "checkpoint-20\n", first.stderr
    assert second.stdout == offline.stdout == "dataset--me--run\n", second.stderr + offline.stderr


STARTING_RUN = """
import sys
import numpy as np
import tiny
from transformers import TrainerCallback
from lze_trl import LZEGRPOTrainer
from lze_trl.hub import push_run

first = LZEGRPOTrainer(
    model=tiny.model(),
    reward_funcs=tiny.even_length_reward,
    args=tiny.config(sys.argv[1] + "/first", telemetry=True),
    train_dataset=tiny.prompts(11),
    processing_class=tiny.tokenizer(),
)
first.train()
push_run(sys.argv[1] + "/first", "me/first", token="hf_secret")
second = LZEGRPOTrainer(
    model=tiny.model(),
    reward_funcs=tiny.even_length_reward,
    args=tiny.config(sys.argv[1] + "/second", state_from="me/first", max_steps=1),
    train_dataset=tiny.prompts(11),
    processing_class=tiny.tokenizer(),
)


class Beginning(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        tensors = second.prompt_state.state_dict()
        for name, array in first.prompt_state.state_dict().items():
            np.testing.assert_array_equal(tensors[name], array, err_msg=name)
        self.visits = int(second.prompt_state["visits"].sum())


beginning = Beginning()
second.add_callback(beginning)
second.train()
print(beginning.visits, int(second.prompt_state["visits"].sum()))
"""


@pytest.mark.slow
def test_a_trainer_starts_from_the_state_of_a_repo(tmp_path):
    (tmp_path / "start.py").write_text(STARTING_RUN)
    with serve(tmp_path / "server") as server:
        result = run_against(server, tmp_path, str(tmp_path / "start.py"), str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    # Three batches of three prompts, and one more
    assert result.stdout.splitlines()[-1] == "9 12"


PUSHING_RUN = """
import sys
import tiny
from lze_trl import LZEGRPOTrainer

trainer = LZEGRPOTrainer(
    model=tiny.model(),
    reward_funcs=tiny.even_length_reward,
    args=tiny.config(
        sys.argv[1],
        telemetry=True,
        push_to_hub=True,
        hub_model_id="me/model",
        hub_telemetry_id="me/model-run",
        hub_token="hf_secret",
        hub_private_repo=True,
        hub_strategy="every_save",
        save_strategy="steps",
    ),
    train_dataset=tiny.prompts(11),
    processing_class=tiny.tokenizer(),
)
trainer.train()
trainer.push_to_hub()
"""


@pytest.mark.slow
def test_a_trainer_pushes_model_card_and_telemetry(tmp_path):
    (tmp_path / "push.py").write_text(PUSHING_RUN)
    with serve(tmp_path / "server") as server:
        result = run_against(server, tmp_path, str(tmp_path / "push.py"), str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr[-4000:]
    assert server.private == {"me/model": True, "me/model-run": True}
    model, run = tmp_path / "server/me/model", tmp_path / "server/me/model-run"
    card = (model / "README.md").read_text()
    for part in ("Trained where it learns", "selection_ratio", "Savings", "lze_summary.png", "Versions"):
        assert part in card, part
    assert 'pipeline("text-generation", model="me/model"' in card and "# Model Card for model" in card
    assert "None" not in card and "time machine" not in card and "prompt = '0+0='" in card
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in model.iterdir()}
    # Prompts and completions are where they were asked for, and nowhere else
    assert not (model / "telemetry").exists() and not (model / "report").exists()
    assert (run / "telemetry/meta.json").is_file()
    assert (run / "lze_state.arrays").is_file()
    for file in (tmp_path / "server").rglob("*"):
        assert not file.is_file() or b"hf_secret" not in file.read_bytes(), file


def test_rules_of_the_user_stay(tmp_path):
    hub.keep_private(tmp_path / "new")
    assert (tmp_path / "new" / ".gitignore").read_text() == "/telemetry/\n/telemetry.*/\n/report/\n/evaluations/\n"
    (tmp_path / ".gitignore").write_text("*.pt\n/report/")
    for _ in range(2):
        hub.keep_private(tmp_path)
        assert (tmp_path / ".gitignore").read_text() == "*.pt\n/report/\n/telemetry/\n/telemetry.*/\n/evaluations/\n"


def test_directories_need_no_hub(run_dir):
    assert remote.resolve_run(run_dir) == run_dir
    assert hub.resolve_state(str(run_dir)) == run_dir
    with pytest.raises(MissingTelemetryError, match="neither a directory nor a dataset repo"):
        remote.resolve_run("no/such/folder")
    with pytest.raises(FileNotFoundError, match="neither a directory nor a model repo"):
        hub.resolve_state("/no/such/folder")


def test_a_repo_without_any_of_the_files_is_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "snapshot_download", lambda *args, **kwargs: str(tmp_path / "nothing"))
    monkeypatch.setattr(remote.constants, "HF_HOME", str(tmp_path))
    (tmp_path / "lze_trl/dataset--me--empty/telemetry").mkdir(parents=True)  # of an earlier download
    assert list(remote.resolve_run("me/empty").iterdir()) == []


def test_a_dataset_without_a_state_does_not_hide_a_model_with_one(run_dir, tmp_path, monkeypatch):
    (tmp_path / "telemetry-only").mkdir()
    folders = {"dataset": tmp_path / "telemetry-only", "model": run_dir}
    monkeypatch.setattr(hub, "download", lambda repo_id, repo_type, patterns: folders[repo_type])
    assert hub.resolve_state("me/model") == run_dir
    folders["dataset"], folders["model"] = folders["model"], folders["dataset"]
    assert hub.resolve_state("me/model") == run_dir


def test_a_model_card_is_written_whole_or_not_at_all(run_dir, monkeypatch):
    def fail(path, content):
        raise OSError("No space left on device")

    (run_dir / "README.md").write_text("# Model card\n")
    hub.extend_model_card(run_dir)  # the picture is there from now on
    (run_dir / "README.md").write_text("# Model card\n")
    before = sorted(run_dir.rglob("*"))
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        hub.extend_model_card(run_dir)
    assert sorted(run_dir.rglob("*")) == before
    assert (run_dir / "README.md").read_text() == "# Model card\n"


def test_model_card_tells_about_the_run(run_dir):
    card = run_dir / "README.md"
    card.write_text("---\nlibrary_name: transformers\n---\n\n# Model card\n", encoding="utf-8")
    hub.extend_model_card(run_dir)
    hub.extend_model_card(run_dir)
    text = card.read_text(encoding="utf-8")
    assert text.startswith("---\nlibrary_name: transformers\n---\n\n# Model card\n")
    assert text.count("## Trained where it learns") == 1
    for words in ("| `selection_ratio` | `0.4` |", "| updates |", "- trl 1.16", hub.PICTURE):
        assert words in text
    assert (run_dir / hub.PICTURE).stat().st_size > 10_000


def test_a_model_card_names_all_data_sets(tmp_path):
    sets = ["me/first", "me/second"]
    (tmp_path / "README.md").write_text(f"made on the [{sets}](https://huggingface.co/datasets/{sets}) dataset.")
    hub.correct_model_card(tmp_path / "README.md", "me/model", None, "1+1=", sets)
    assert (tmp_path / "README.md").read_text() == (
        "made on the [me/first](https://huggingface.co/datasets/me/first), "
        "[me/second](https://huggingface.co/datasets/me/second) datasets."
    )


def test_model_card_without_telemetry_stays_as_it_is(tmp_path, caplog):
    (tmp_path / "README.md").write_text("# Model card\n")
    hub.extend_model_card(tmp_path)
    TelemetryWriter(tmp_path).close()
    hub.extend_model_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Model card\n"
