"""Pushing a run and opening it again, against a local endpoint that speaks the Hub's protocol."""

import base64
import json
import os
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
from lze_trl.record import Meta, MissingTelemetryError, TelemetryWriter


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


PUSHING_RUN = """
import sys
import tiny
from lze_trl.app.runs import RunBook

repos = {"hub_model_id": "me/model", "hub_telemetry_id": "me/model-run", "hub_token": "hf_secret"}
pushes = {"push_to_hub": True, "hub_private_repo": True, "hub_strategy": "every_save", "save_strategy": "steps"}
trainer = tiny.run(sys.argv[1], telemetry=True, **repos, **pushes)
trainer.push_to_hub()
second = tiny.run(sys.argv[1] + "/second", state_from="me/model-run", max_steps=1)
print(RunBook(["me/model-run"]).open("model-run").summary()["generations"])
print(int(trainer.prompt_state["visits"].sum()), int(second.prompt_state["visits"].sum()))
"""


@pytest.mark.slow
def test_a_trainer_pushes_model_card_and_telemetry_and_another_starts_from_its_state(tmp_path):
    (tmp_path / "push.py").write_text(PUSHING_RUN)
    with serve(tmp_path / "server") as server:
        result = run_against(server, tmp_path, str(tmp_path / "push.py"), str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr[-4000:]
    assert server.tokens == {"Bearer hf_secret"}
    assert result.stdout.splitlines()[-2:] == ["3", "9 12"]  # three batches of three prompts, and one more
    assert server.private == {"me/model": True, "me/model-run": True}
    model, run = tmp_path / "server/me/model", tmp_path / "server/me/model-run"
    card = (model / "README.md").read_text()
    for part in ("Trained where it learns", "selection_ratio", "Savings", "lze_summary.png"):
        assert part in card, part
    assert 'pipeline("text-generation", model="me/model"' in card and "# Model Card for model" in card
    assert "None" not in card
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
    assert remote.resolve(str(run_dir)) == run_dir
    with pytest.raises(MissingTelemetryError, match="neither a directory nor a dataset repo"):
        remote.resolve("no/such/folder")


def test_model_card_tells_about_the_run(run_dir):
    card = run_dir / "README.md"
    card.write_text("---\nlibrary_name: transformers\n---\n\n# Model card\n", encoding="utf-8")
    hub.extend_model_card(run_dir)
    hub.extend_model_card(run_dir)
    text = card.read_text(encoding="utf-8")
    assert text.startswith("---\nlibrary_name: transformers\n---\n\n# Model card\n")
    assert text.count("## Trained where it learns") == 1
    for words in ("| `selection_ratio` | `0.4` |", "updates 0.", hub.PICTURE):
        assert words in text
    assert (run_dir / hub.PICTURE).stat().st_size > 10_000


def test_a_model_card_names_all_data_sets(tmp_path):
    sets = ["me/first", "me/second"]
    (tmp_path / "README.md").write_text(f"made on the [{sets}](https://huggingface.co/datasets/{sets}) dataset.")
    hub.correct_model_card(tmp_path / "README.md", "me/model", None, sets)
    assert (tmp_path / "README.md").read_text() == (
        "made on the [me/first](https://huggingface.co/datasets/me/first), "
        "[me/second](https://huggingface.co/datasets/me/second) datasets."
    )


def test_model_card_without_telemetry_stays_as_it_is(tmp_path, caplog):
    (tmp_path / "README.md").write_text("# Model card\n")
    hub.extend_model_card(tmp_path)
    TelemetryWriter(tmp_path, Meta()).close()
    hub.extend_model_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Model card\n"
