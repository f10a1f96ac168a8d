"""The demo with a language model: what it tells of the runs, and what plain GRPO's kept run is for."""

import json

import pytest
from rich.console import Console

from benchmarks import demo_llm
from benchmarks.jobs import Options, plan
from benchmarks.strategies import BASELINE
from benchmarks.tasks import TaskFiles


@pytest.mark.parametrize("known", [True, False])
def test_plain_grpos_kept_run_is_used_if_it_has_this_model_data_and_settings(tmp_path, monkeypatch, known):
    files = TaskFiles(*(tmp_path / name for name in ("model", "train.jsonl", "test.jsonl")))
    files.model.mkdir()
    (files.model / "config.json").write_text("{}")
    for path in (files.train, files.held_out):
        path.write_text('{"prompt": "a", "solution": "b"}\n')
    options = Options(task="words", strategies=("gate_g4",), seeds=(0,), output=tmp_path / "out")
    (baseline,) = (job for job in plan(options, {"words": files}) if job.settings.strategy == BASELINE)
    own = vars(baseline.settings) | {"eval_every": 1}  # it was evaluated more often
    kept = json.loads(demo_llm.KEPT[0].read_text().splitlines()[0]) | ({"settings": own} if known else {})
    (tmp_path / "kept.jsonl").write_text(json.dumps(kept) + "\n")
    monkeypatch.setattr(demo_llm, "KEPT", [tmp_path / "kept.jsonl"])
    monkeypatch.setattr(demo_llm.smollm2, "MODEL_DIR", files.model)
    monkeypatch.setattr(demo_llm, "ready", lambda *given: files)
    monkeypatch.setattr(demo_llm, "bench", lambda options: baseline.folder.mkdir(parents=True, exist_ok=True))
    demo_llm.run(options, plain=False, console=Console(quiet=True))
    assert baseline.finished == known
