"""The comparison of TRL's own tests, on a test file of its form that needs neither a checkout nor a network."""

import sys

import pytest

from launches import fork
from trl_own.__main__ import main
from trl_own.stand_ins import ADDED, own_id, prepare, tokenizer, with_own_ids


TESTS = """\
import pytest
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from .testing_utils import require_jmespath

MODEL = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"


class TestBoth:
    @require_jmespath
    @pytest.mark.parametrize("ids, text", [([40, 1513, 151645], "I don"), ([151657, 40, 151658], "<tool_call>I</tool_call>")])
    def test_reads_tokens_of_qwen(self, ids, text):
        assert AutoTokenizer.from_pretrained(MODEL).decode(ids, skip_special_tokens=True) == text

    def test_trains(self, tmp_path):
        from datasets import Dataset

        settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 3, "max_steps": 1}
        args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)
        data = Dataset.from_dict({"prompt": ["one", "two"]})
        lengths = lambda completions, **kwargs: [float(len(text)) for text in completions]
        trainer = GRPOTrainer(MODEL, lengths, args=args, train_dataset=data)
        trainer.train()
        assert trainer.state.global_step == 1

    def test_fails(self):
        assert GRPOTrainer is None, "neither"

    @pytest.mark.skip(reason="no GPU")
    def test_is_skipped(self):
        pass
"""
THEIRS = "\n    def test_is_theirs(self):\n        assert GRPOTrainer.__module__.startswith('trl'), 'not of TRL'\n"
OURS = "\n    def test_is_ours(self):\n        assert 'LZE' in GRPOTrainer.__name__ + GRPOConfig.__name__\n"
UTILITIES = """\
import pytest
from trl.import_utils import is_jmespath_available, is_removed_available

assert not is_removed_available()
require_jmespath = pytest.mark.skipif(not is_jmespath_available(), reason="test requires jmespath")
"""


def compare(arguments):
    sys.exit(main(arguments))


def compared(tmp_path, tests, name, *options):
    """Exit code and output of a comparison by some tests."""
    folder = tmp_path / name / "tests"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "testing_utils.py").write_text(UTILITIES)
    (folder / "test_grpo_trainer.py").write_text(tests)
    log = tmp_path / f"{name}.log"
    arguments = [str(folder.parent), "--folder", str(tmp_path / "folder"), *options]
    process = fork(log, {"HF_HUB_OFFLINE": "1"}, compare, arguments)
    process.join(timeout=300)
    return process.exitcode, log.read_text()


def test_the_table_says_which_trainer_passes_what(tmp_path):
    code, log = compared(tmp_path, TESTS + THEIRS + OURS, "worse")
    for line in (
        "   3 passed with both",
        "   1 passed with TRL only",
        "   1 passed with ours only",
        "   1 failed with both",
        "   1 skipped with both",
        "passed with TRL only: TestBoth::test_is_theirs\n     AssertionError: not of TRL",
        "passed with ours only: TestBoth::test_is_ours",
        "failed with both: TestBoth::test_fails\n     AssertionError: neither",
        "skipped with both: 1 for Skipped: no GPU",
    ):
        assert line in log, log
    assert code == 1
    code, log = compared(tmp_path, TESTS, "equal", "-k", "fails or skipped")
    assert code == 0 and "   0 passed with TRL only" in log, log


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"it has no tests/test_grpo_trainer.py. Make one by `git clone"):
        prepare(tmp_path, tmp_path)


def test_ids_of_qwen_become_those_of_the_stand_ins():
    encoder = tokenizer()
    call = [151657, 198, 4913, 606, 788, 330, 927, 411, 497, 330, 16370, 788, 5212, 1318, 788]
    call += [330, 6023, 95642, 151658]
    text = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call>'
    assert encoder.decode([own_id(number) for number in call]) == text
    assert encoder.decode(encoder(text)["input_ids"]) == text
    assert [own_id(248_044 + i) for i in range(len(ADDED))] == encoder.convert_tokens_to_ids(ADDED)
    ours = f"x = [40, {encoder.eos_token_id}]; y = 151645; [0.5, 3]"
    assert with_own_ids("x = [40, 151645]; y = 151645; [0.5, 3]") == ours
