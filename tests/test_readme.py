"""The example of the README runs as it is printed."""

import re
from pathlib import Path

import tiny
from lze_trl import LZEGRPOTrainer


README = Path(__file__).parents[1] / "README.md"


BLOCKS = re.findall(r"```python\n(.+?)```", README.read_text(), re.S)


def test_the_script_of_the_readme_trains_and_ends_with_a_report(tmp_path, monkeypatch, capsys):
    (script,) = [block for block in BLOCKS if "HuggingFaceTB/SmolLM2-135M-Instruct" in block]
    monkeypatch.chdir(tmp_path)
    tiny.save("model")
    exec(script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "model").replace("max_steps=10", "max_steps=2"), {})
    shown = capsys.readouterr().out
    assert "No group had a gradient; the model did not change." in shown  # a random model solves no sum
    assert (tmp_path / "runs/sums/report/report.html").is_file()


def test_the_own_selector_of_the_readme(tmp_path):
    (example,) = [block for block in BLOCKS if "class Frontier" in block]
    names = {}
    exec(example, names)
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=tiny.config(tmp_path, selection_ratio=0.34),
        train_dataset=tiny.prompts(11),
        processing_class=tiny.tokenizer(),
        selector=names["Frontier"](),
    )
    trainer.train()
    assert trainer.ledger.groups_trained == 3
