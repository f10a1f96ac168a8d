"""The example of the README runs as it is printed."""

import re
from pathlib import Path

import tiny
from lze_trl import LZEGRPOTrainer


README = Path(__file__).parents[1] / "README.md"


def test_the_own_selector_of_the_readme(tmp_path):
    blocks = re.findall(r"```python\n(.+?)```", README.read_text(), re.S)
    (example,) = [block for block in blocks if "class Frontier" in block]
    names = {}
    exec(example.partition("\n\n\nLZEGRPOTrainer")[0], names)
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


def test_every_path_of_the_readme_exists():
    text = README.read_text()
    paths = re.findall(r"\]\(((?!http|#)[^)]+)\)", text) + re.findall(
        r"`((?:tests|recipes|lze_trl|docs)/[\w./-]+)`", text
    )
    missing = [path for path in paths if not (README.parent / path).exists()]
    assert len(paths) > 10
    assert not missing
