"""Pushing a run and opening it again, against a local endpoint that speaks the Hub's protocol."""

import base64
import json
import sys
import threading
from fnmatch import fnmatch
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from launches import run_to_end
from lze_trl import hub, remote
from lze_trl.record import Meta, MissingTelemetryError, TelemetryWriter


TESTS = Path(__file__).resolve().parent


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it makes, writes and reads repositories: folders of `server.folder`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        is_api = parts[0] == "api"
        root, rest = self.server.folder.joinpath(*parts[1 + is_api : 3 + is_api]), parts[3 + is_api :]
        if not root.is_dir():
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if is_api and rest[:1] == ["tree"]:
            return self.reply_json(entries(root))
        if is_api:
            files = [{"rfilename": entry["path"]} for entry in entries(root)]
            return self.reply_json({"id": "/".join(parts[2:4]), "sha": commit(root), "siblings": files})
        file = root.joinpath(*rest[2:])
        if not file.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{sha1(file.read_bytes()).hexdigest()}"', "X-Repo-Commit": commit(root)}
        return self.reply(200, file.read_bytes(), headers)

    do_HEAD = do_GET  # noqa: N815 - names that the standard library asks for

    def do_POST(self):
        path, body = self.path.partition("?")[0], self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/validate-yaml":
            return self.reply_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked.get('organization') or 'me'}/{asked['name']}"
            (self.server.folder / repository).mkdir(parents=True, exist_ok=True)
            # How it is made the first time; older clients send `private`
            is_private = asked.get("visibility") == "private" or asked.get("private") is True
            self.server.private.setdefault(repository, is_private)
            kind = "datasets/" if asked.get("type") == "dataset" else ""
            return self.reply_json({"url": f"{self.server.endpoint}/{kind}{repository}", "id": repository})
        root = self.server.folder.joinpath(*path.split("/")[3:5])
        if path.endswith("/paths-info/main"):
            return self.reply_json(
                [entry for entry in entries(root) if entry["path"] in parse_qs(body.decode())["paths"]]
            )
        if path.endswith("/preupload/main"):
            asked = json.loads(body)
            own = root / ".gitignore"  # that of the repository, where none is uploaded
            rules = asked.get("gitIgnore") or (own.read_text() if own.is_file() else "")
            files = [{"path": file["path"], "uploadMode": "regular"} for file in asked["files"]]
            files = [file | {"shouldIgnore": is_ignored(file["path"], rules.splitlines())} for file in files]
            return self.reply_json({"files": files})
        for entry in map(json.loads, body.decode().splitlines()):
            file = root / entry["value"].get("path", "")
            if entry["key"] == "file":
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(entry["value"]["content"]))
            elif entry["key"] == "deletedFile":
                file.unlink()
        self.server.tokens.add(self.headers.get("Authorization"))
        url = f"{self.server.endpoint}/datasets/{'/'.join(root.parts[-2:])}/commit/{commit(root)}"
        return self.reply_json({"commitUrl": url, "commitOid": commit(root), "success": True})

    def reply(self, status: int, content: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reply_json(self, value):
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def log_message(self, *args):
        pass


def is_ignored(path: str, rules: list[str]) -> bool:
    """As git does for the rules that this package writes: those with a slash are of the root, others of every folder."""
    places = {rule: [path, path.split("/")[0]] if rule.startswith("/") else path.split("/") for rule in rules}
    return any(fnmatch(place, rule.strip("/")) for rule, found in places.items() for place in found)


def entries(root: Path) -> list[dict]:
    """Files of a repository, as the Hub lists them."""
    files = {
        file.relative_to(root).as_posix(): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()
    }
    return [
        {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
        for path, content in files.items()
    ]


def commit(root: Path) -> str:
    """Hash of the files of a repository: as on the Hub, another one after every change."""
    return sha1(json.dumps(entries(root)).encode()).hexdigest()


@pytest.fixture
def server(tmp_path):
    """A stand-in for the Hub on 127.0.0.1, with its `folder`, the `tokens` that it was shown, and what is `private`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder, server.tokens, server.private = tmp_path / "server", set(), {}
        server.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "my-run"
    record_synthetic_run(directory, SyntheticTraining(num_prompts=20, groups_per_batch=5), generations=4)
    return directory


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


def test_a_trainer_pushes_model_card_and_telemetry_and_another_starts_from_its_state(tmp_path, server):
    (tmp_path / "push.py").write_text(PUSHING_RUN)
    environment = {
        "HF_ENDPOINT": server.endpoint,  # which the client reads when it is imported, so in a process of its own
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "WANDB_MODE": "disabled",  # transformers prints a line where it is offline
        "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
    }
    result = run_to_end([sys.executable, tmp_path / "push.py", tmp_path / "run"], timeout=240, env=environment)
    assert server.tokens == {"Bearer hf_secret"}
    assert result.stdout.splitlines()[-2:] == ["3", "9 12"]  # three batches of three prompts, and one more
    assert server.private == {"me/model": True, "me/model-run": True}
    model, run = tmp_path / "server/me/model", tmp_path / "server/me/model-run"
    card = (model / "README.md").read_text()
    for part in ("Trained where it learns", "selection_ratio", "- learning: ", "- saved: "):
        assert part in card, part
    assert 'pipeline("text-generation", model="me/model"' in card and "# Model Card for model" in card
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in model.iterdir()}
    # Prompts and completions are where they were asked for, and nowhere else
    assert not (model / "telemetry").exists() and not (model / "report").exists()
    assert (run / "telemetry/meta.json").is_file()
    assert (run / "lze_state.arrays").is_file()
    for file in (tmp_path / "server").rglob("*"):
        assert not file.is_file() or b"hf_secret" not in file.read_bytes(), file


def test_rules_of_the_user_stay(tmp_path):
    new, own = tmp_path / "new" / ".gitignore", tmp_path / ".gitignore"
    hub.keep_private(new.parent)
    rules = new.read_text()
    assert rules.startswith("/telemetry/\n/telemetry.*/\n/report/\n/evaluations/\n/replaced.*/\n/completions/\n")
    own.write_text("*.pt\n/report/")
    for _ in range(2):
        hub.keep_private(tmp_path)
        assert own.read_text() == "*.pt\n/report/\n" + rules.replace("/report/\n", "")


def test_directories_need_no_hub(run_dir):
    assert remote.resolve(str(run_dir)) == run_dir
    with pytest.raises(MissingTelemetryError, match="neither a directory nor a dataset repo"):
        remote.resolve("no/such/folder")


def test_model_card_tells_about_the_run_and_needs_no_app(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "lze_trl.app.report", None)  # as where Gradio is missing
    card = run_dir / "README.md"
    card.write_text("---\nlibrary_name: transformers\n---\n\n# Model card\n", encoding="utf-8")
    hub.extend_model_card(run_dir)
    text = card.read_text(encoding="utf-8")
    assert text.startswith("---\nlibrary_name: transformers\n---\n\n# Model card\n")
    assert "## Trained where it learns" in text and "GRPO on the groups with the most Learn" in text
    for words in ("| `selection_ratio` | `0.4` |", "updates 0.", "\n- wasted: "):
        assert words in text


def test_model_card_without_telemetry_stays_as_it_is(tmp_path, caplog):
    (tmp_path / "README.md").write_text("# Model card\n")
    hub.extend_model_card(tmp_path)
    TelemetryWriter(tmp_path, Meta()).close()
    hub.extend_model_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Model card\n"
