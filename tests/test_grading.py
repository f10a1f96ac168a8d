"""What a gold answer may be, what is too large to compute, and what is compared as text. Most cases are in `answers.jsonl`."""

import pytest

from lze_trl.rewards import accuracy_reward
from lze_trl.rewards.grading import gold_text, read_answer, read_gold
from lze_trl.rewards.math_verify_fixes import rewrite


def score(gold, completion):
    return accuracy_reward([completion], [gold])[0]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (27.0, "27"),
        (27, "27.0"),
        (-0.5, "-0.5"),
        (1e-7, "0.0000001"),
        ([34.0], "34"),
        ("1234", "1\u202f234"),
        ("48/2=24>>24 clips.\n#### 24", "24"),
        ("He pays 1,000 and 234 more.\n#### 1,234\n", "1234"),
        (r"First $\boxed{15}$, so the sum is $\fbox{\frac{3}{4}}$.", "0.75"),
        (r"The final answer is $\frac13$", r"\frac{1}{3}"),
        ("#### Step 1\nAdd.\n#### Conclusion\nThe answer is 27.", "27"),
    ],
)
def test_gold_answers_are_numbers_and_worked_solutions_too(gold, answer):
    assert score(gold, rf"\boxed{{{answer}}}") == 1.0


# math-verify would compute these until a limit, and a group without one of its scores is lost
HUGE = (
    r"""
    10!! | ((10!)!)! | 10000000! | 9^{9^{9}} | 9^9^9^9 | 10^{-10^{10}} | \binom{10^8}{5000000} | {10^8 \choose 5000000}
    \gcd((10!)!, 5) | \prod_{k=1}^{10^7} k | \Gamma(10^{10}) | (9^{9^9}, 1)
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.mark.parametrize("number", [*map(str.strip, HUGE), "(" * 60 + "1" + ")" * 60, "1+" * 2000 + "1"])
def test_numbers_too_large_to_compute_are_wrong_at_once(number):
    assert score("5x+1", rf"\boxed{{{number}}}") == 0.0
    assert score(number, rf"\boxed{{{number}}}") == 1.0


@pytest.mark.parametrize("text", ["(1,234)", r"(1,\,234)", "11:45 p.m.", "The 60th caller", "2\\pi r", "x + t"])
def test_what_is_not_rewritten(text):
    assert rewrite(text) == text


def test_an_answer_without_a_value_equals_only_the_same_text():
    gold = r"\triangle ABC \sim \triangle DEF"
    assert read_gold(gold).expressions == ()
    assert score(gold, rf"\boxed{{{gold}}}") == 1.0
    assert score(gold, r"\boxed{\triangle ABC}") == 0.0
    assert read_answer(r"So \boxed{1\,234 \text{ km}}").text == "1234"  # what was read


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27.0, "27"),
        (-0.5, "-0.5"),
        (1e-7, "0.0000001"),
        (34, "34"),
        ([34.0], "34"),
        (" 315", "315"),
        ([None], None),
        ([], None),
    ],
)
def test_gold_text(value, text):
    assert gold_text(value) == text
