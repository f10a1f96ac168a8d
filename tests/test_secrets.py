"""What leaves the machine, and what a run leaves on it: tokens and passwords nowhere, private data only where it was asked for."""

import copy
import json
import pickle
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from launches import run_to_end
from lze_trl import hub
from lze_trl.checkpoint import STATE_NAME, save
from lze_trl.redaction import public, redacted, redacted_word
from test_hub import server  # noqa: F401  # a fixture


TESTS = Path(__file__).resolve().parent
CANARY = "canary-7f3a"  # in every secret
PRIVATE = "private-91bc"  # in what is of the user's data, or what the model wrote
SECRETS = {
    "hub_token": f"hf_{CANARY}",
    "model_init_kwargs": {"token": f"hf_{CANARY}"},
    "gradient_checkpointing_kwargs": {"login": [{"api_key": CANARY, "Password": CANARY}]},
    "vllm_server_base_url": f"http://me:{CANARY}@internal.{PRIVATE}:8000/v1?api_key={CANARY}",
    "vllm_server_urls": [f"https://{CANARY}@10.1.2.3:8000", f"http://me:it's/'\"#?{CANARY}@10.1.2.4:8000"],
}

RUN = """
import json, shutil, sys
from pathlib import Path
import tiny
from datasets import Dataset
from lze_trl.data import PromptStyle
from lze_trl.selfplay.online import Instruction
from lze_trl.selfplay.writer import Seeds

directory, secrets, private = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
rows = {"prompt": [f"{i} {private} " for i in range(11)], "patient_name": [f"Ada {private}"] * 11, "level": [1] * 11}
saves = {"save_strategy": "steps", "save_steps": 1, "hub_strategy": "checkpoint"}
pushes = {"push_to_hub": True, "hub_model_id": "me/model", "hub_telemetry_id": "me/run", **saves}
pushes |= {"hub_telemetry_texts": ["level"], "telemetry_completions": "all", "log_completions": True}
given = {"model": tiny.save(directory / private / "base"), "processing_class": None}
logs = {"report_to": ["tensorboard", "wandb", "trackio"], "project": "lze", "telemetry": True, "summary": True}
trainer = tiny.run(directory / private / "run", trainer=given, dataset=Dataset.from_dict(rows), **secrets, **pushes, **logs)
assert trainer.args.model_init_kwargs["token"] == secrets["hub_token"] == trainer.args.hub_token
trainer.push_to_hub()
print(trainer.args)

# The model that writes problems
write = lambda exemplars, rng: [f"{private} {' '.join(map(str, rng.integers(10**6, size=9)))}" for _ in range(8)]
instruction = Instruction(Seeds(("1+1=", "2+2=")), PromptStyle(conversational=False), write)
plays = {"self_play": {"instruct": True, "examples": 2, "own": 1}, "max_steps": 1, "push_to_hub": True, "telemetry": True, **saves}
plays |= {"hub_model_id": "me/player", "hub_telemetry_id": "me/play", "hub_token": secrets["hub_token"]}
tiny.run(directory / private / "play", trainer={"instruction": instruction}, **plays).push_to_hub()

# Everything around the model is damaged, and the model is uploaded nevertheless
run = directory / private / "run"
sorted((run / "telemetry/groups").glob("*"))[0].write_bytes(b"PAR1")
results = {"tasks": {"a_$1_b_$2": {"metrics": {"avg@1": [0.5, None, None]}, "problems": 1, "truncated": 0.0, "mean_tokens": 1.0}}}
for name, content in (("step-000001", json.dumps(results | {"mean": None})), ("odd", "[]"), ("odder", "{")):
    (run / "evaluations" / name).mkdir(parents=True)
    (run / "evaluations" / name / "results.json").write_text(content)
(run / "lze_state.arrays").write_bytes(b"")
shutil.rmtree(Path(sys.argv[4], "me/model"))
Path(sys.argv[4], "me/model").mkdir()
trainer.push_to_hub()
"""


def texts_below(folder: Path) -> dict[str, str]:
    """What every file says, by its path; of Parquet files, which are compressed, all values."""
    return {
        str(path.relative_to(folder)): str(pq.read_table(path).to_pylist())
        if path.suffix == ".parquet" and path.stat().st_size > 8
        else path.read_bytes().decode(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_no_secret_is_left_anywhere_and_nothing_private_is_pushed(tmp_path, server):  # noqa: F811
    (tmp_path / "job.py").write_text(RUN)
    work = tmp_path / "work"
    environment = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "WANDB_MODE": "offline", "WANDB_DIR": str(work)}
    environment |= {"TRACKIO_DIR": str(work / "trackio"), "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    work.mkdir()
    (tmp_path / "secrets.json").write_text(json.dumps(SECRETS))
    job = [sys.executable, tmp_path / "job.py", work, tmp_path / "secrets.json", PRIVATE, server.folder]
    said = run_to_end(job, timeout=400, env=environment)

    left = {path: text for path, text in texts_below(work).items() if CANARY in text}
    assert not left
    assert CANARY not in said.stdout + said.stderr and "'token': '***'" in said.stdout
    written = texts_below(work / PRIVATE)
    assert all(PRIVATE in written[f"run/{name}"] for name in ("telemetry/meta.json", "training_args.bin"))
    assert PRIVATE in written["play/lze_state.json"] and any(path.startswith("run/completions/") for path in written)

    pushed = texts_below(server.folder)
    assert not {path: text for path, text in pushed.items() if CANARY in text}
    assert not [path for path, text in pushed.items() if PRIVATE in path or PRIVATE in text or str(tmp_path) in text]
    assert {"me/model/model.safetensors", "me/model/README.md", "me/player/last-checkpoint/optimizer.pt"} <= set(
        pushed
    )
    kept = ("completions", "training_args.bin", "lze_rows", "telemetry", "evaluations", "runs", "trainer_state.json")
    assert not [path for path in pushed if path.startswith("me/model/") and path.split("/")[2].startswith(kept)]
    assert not [path for path in pushed if path.startswith("me/player/") and "lze_state" in path]
    facts = [json.loads(row["columns"]) for row in rows(server.folder / "me/run", "prompts")]
    assert facts and all(fact == {"level": 1} for fact in facts)
    completions = rows(server.folder / "me/run", "completions")
    assert completions and all(row["completion"] is None and row["reward"] in (0.0, 1.0) for row in completions)
    assert "me/run/evaluations/step-000001/results.json" in pushed  # what was damaged is left out, and named
    assert "me/run/evaluations/odd/results.json" not in pushed
    for words in ("groups/", "odd/results.json", "odder/results.json", "The prompt state is left out"):
        assert words in said.stderr, words


def rows(run: Path, table: str) -> list[dict]:
    """Rows of a table of the telemetry."""
    return [
        row
        for path in sorted((run / "telemetry" / table).glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def test_texts_that_are_named_are_published(tmp_path):
    record_synthetic_run(tmp_path / "run", SyntheticTraining(num_prompts=20, groups_per_batch=5), generations=4)
    save(tmp_path / "run", STATE_NAME, {}, {"global_step": 4})
    hub._copy_public(tmp_path / "run", tmp_path / "copy", ["prompt"])
    before, after = rows(tmp_path / "run", "prompts"), rows(tmp_path / "copy", "prompts")
    assert [row["text"] for row in after] == [row["text"] for row in before] != [None] * len(before)
    assert {row["completion"] for row in rows(tmp_path / "copy", "completions")} == {None}
    assert (tmp_path / "copy/lze_state.json").is_file()


@pytest.mark.parametrize(
    "name", ["token", "HF_TOKEN", "api_key", "apiKey", "client_secret", "Password", "db_passwd", "Authorization"]
)
def test_a_secret_is_known_by_its_name_at_any_depth(name):
    for deep in ({name: "s"}, {"a": [{name: "s"}]}, {name: {"user": "s"}}, {name: ["s"]}):
        assert "'s'" not in str(redacted(deep)) and "***" in str(redacted(deep))
    assert redacted({name: None, "n": {name: True}}) == {name: None, "n": {name: True}}
    for word in (json.dumps({name: "s3"}), json.dumps([{"a": [{name: "s3"}]}]), f'{{"{name}": s3'):
        assert "s3" not in redacted_word(word, "model_init_kwargs")


def test_what_is_no_secret_stays():
    kept = {
        "max_tokens": 5,
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<think>"],
        "generation_kwargs": {"stop_token": "</s>"},
        "monkey": 1,
        "url": "https://host/a?b=c@d",
        "t": (1, 2),
    }
    assert redacted(kept) == kept
    assert redacted("got 'http://a:b@c@host:1/x?token=t&n=1'") == "got 'http://host:1/x?token=***&n=1'"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/ada/runs/one", "one"),
        ("~/runs/one", "one"),
        ("/home/ada", "…"),
        ("../../ada/base", "…"),
        (r"C:\Users\ada\one", "one"),
        ("file:///data/sets/a.jsonl", "a.jsonl"),
        ("http://node-7.lan:8000/v1", "http://***/v1"),
        ("10.0.0.7:8000", "***"),
        ("config=/etc/lze/a.json,n=1", "config=a.json,n=1"),
        ("me/model", "me/model"),
        ("runs/one", "runs/one"),
        ("0/1", "0/1"),
    ],
)
def test_no_place_of_this_machine_is_public(value, shown):
    assert public([value]) == [shown]
    assert public({"vllm_server_host": "node-7", "model_init_kwargs.token": "x"}) == {
        "vllm_server_host": "***",
        "model_init_kwargs.token": "***",
    }


def test_a_configuration_shows_and_pickles_no_secret_and_keeps_its_own(tmp_path):
    config = tiny.config(tmp_path, **SECRETS)
    for shown in (
        repr(config),
        str(config),
        config.to_json_string(),
        str(config.to_sanitized_dict()),
        repr(vars(pickle.loads(pickle.dumps(config)))),
    ):
        assert CANARY not in shown
    for own in (config, copy.copy(config), copy.deepcopy(config)):
        assert own.hub_token == own.model_init_kwargs["token"] == SECRETS["hub_token"]
        assert own.vllm_server_urls == SECRETS["vllm_server_urls"]


def test_an_adapter_that_is_pushed_names_its_base_model_without_its_folder(tmp_path, monkeypatch, caplog):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "base")), LoraConfig(r=2))
    trainer = tiny.make(tmp_path / "run", trainer={"model": model})
    monkeypatch.setattr(GRPOTrainer, "init_hf_repo", lambda self: None)
    trainer.init_hf_repo()
    trainer.save_model(tmp_path / "run")
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    assert "names the base model `base`" in caplog.text
