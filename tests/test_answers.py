"""
Reading answers, on a set of right and wrong ones: no wrong answer is paid, in whatever words it comes, and votes agree with rewards.

`answers.jsonl` has a line of templates, in which `G` stands for a gold answer and `O` for another one, and then cases of single gold
answers, each with completions that give it and completions that do not.
"""

import json
import re
from pathlib import Path

import pytest

from lze_trl.rewards import MajorityReward, accuracy_reward, exact_match_reward, grading, math_verify_fixes
from lze_trl.rewards.majority import read_vote, same_answer


PRODUCT, *CASES = map(json.loads, Path(__file__).with_name("answers.jsonl").read_text(encoding="utf-8").splitlines())


def filled(kind, gold, other):
    return [re.sub("[GO]", lambda hole: {"G": gold, "O": other}[hole[0]], text) for text in PRODUCT[kind]]


SET = [
    *CASES,
    *(
        {"gold": gold, "right": filled("right", gold, other), "wrong": filled("wrong", gold, other)}
        for gold, other in PRODUCT["golds"]
    ),
]


SLOW = {r"\boxed{(x+1)^{9999}}"}  # takes too long, so it has no score


def scores(gold, completions):
    return dict(zip(completions, accuracy_reward(completions, [gold] * len(completions)), strict=True))


@pytest.mark.parametrize("case", SET, ids=lambda case: case["gold"])
def test_no_wrong_answer_is_paid(case):
    found = scores(case["gold"], case["wrong"])
    assert [text for text, score in found.items() if score != 0.0 and not (score is None and text in SLOW)] == []


def test_right_answers_are_paid_and_the_set_has_enough_of_both():
    missed = {text for case in SET for text, score in scores(case["gold"], case["right"]).items() if score != 1.0}
    right, wrong = (sum(len(case[kind]) for case in SET) for kind in ("right", "wrong"))
    assert min(right, wrong) >= 0.4 * (right + wrong) >= 200
    assert missed == set()


@pytest.mark.parametrize("case", SET, ids=lambda case: case["gold"])
def test_votes_are_grouped_as_rewards_are_given(case):
    votes = {text: read_vote(text, truncated=False) for text in case["right"] + case["wrong"]}
    graded = scores(case["gold"], [text for text, vote in votes.items() if vote is not None])
    unlike = [
        text
        for text, score in graded.items()
        if score is not None and same_answer(votes[text], case["gold"]) != bool(score)
    ]
    assert unlike == []


# For each rewrite, an answer that its example equals, and one that it does not
REWRITTEN = {
    "1\u200b2": ("12", "2"),
    "3½": ("3.5", "1.5"),
    "x²+y³": ("x^2+y^3", "x^2+y^2"),
    "52₈": ("52_8", "528"),
    "１２": ("12", "1"),
    "–3": ("-3", "3"),
    "2√3": (r"2\sqrt{3}", r"\sqrt{6}"),
    "5 €": ("5", "50"),
    "4.5·10^3": ("4500", "450"),
    "(1,∞)": (r"(1,\infty)", r"[1,\infty)"),
    "x∈(1,2)": ("(1,2)", "[1,2)"),
    "**7**": ("7", "49"),
    r"\textcolor{red}{12}": ("12", "12red"),
    r"\color{red}12": ("12", "2"),
    r"\large 12": ("12", "2"),
    r"\left ( 1,2 \right )": ("(1,2)", "(2,1)"),
    r"12\\": ("12", r"(1,2)"),
    r"\text{6 cm}": ("6", "5"),
    r"\textbf{(B)}\ 27": ("B", "C"),
    r"-\mathbf{\frac12}": ("-0.5", "0.5"),
    r"\text{Answer: }6": ("6", "-6"),
    "2 3/4": ("2.75", "1.5"),
    r"\frac\pi2": (r"\pi/2", r"\frac{2}{\pi}"),
    r"0.1\overline{6}": (r"\frac16", "0.16"),
    r"\varnothing": (r"\emptyset", "0"),
    "(101)_2": ("101_2", "101_3"),
    r"20\,\%": (r"20\%", "2"),
    "90°": ("90", "9"),
    "25 °C": ("25", "C"),
    r"\sin 30^\circ": (r"\frac12", r"\sin 30"),
    r"\approx 17.10": ("17.1", "17"),
    r"1\,234": ("1234", "234"),
    r"5\text{ million}": ("5000000", "5"),
    "4.5e33": (r"4.5 \times 10^{33}", "4.5"),
    "3i-2j": (r"3\mathbf{i}-2\mathbf{j}", "3i+2j"),
}


def test_every_rewrite_has_its_examples():
    assert [example for _, _, example in math_verify_fixes.REWRITES] == [*REWRITTEN]


@pytest.mark.parametrize("example", REWRITTEN)
def test_a_rewrite_is_needed_and_makes_no_other_answer_right(example, monkeypatch):
    completion, (gold, other) = rf"\boxed{{{example}}}", REWRITTEN[example]
    assert accuracy_reward([completion] * 2, [gold, other]) == [1.0, 0.0]
    others = [entry for entry in math_verify_fixes.REWRITES if entry[2] != example]
    monkeypatch.setattr(math_verify_fixes, "REWRITES", others)
    grading._read_plain.cache_clear()
    try:
        assert accuracy_reward([completion], [gold]) == [0.0]
    finally:
        grading._read_plain.cache_clear()


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}. I marked it with \boxed as asked.", "5"),
        (r"\boxed{5} and \boxed{}", "5"),
        (r"\boxed{5} \boxed{\text{ }} \fbox{\square} \boxed{\text{your answer}}", "5"),
        (r"\boxed{?}", "?"),  # nothing else is there
        (r"\boxed{5} and \boxed{6", None),  # cut off
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed as asked", None),
        (r"\boxedanswer{5}", None),
        (r"$\boxed 4$ hours", "4"),
    ],
)
def test_the_last_box_that_holds_an_answer_counts(text, box):
    assert grading.last_boxed(text) == box
    assert read_vote(text, truncated=False) == (None if box in ("4", "?") else box)  # votes are in braces


def test_any_of_several_gold_answers_is_right():
    golds = [["5", "6"], ["5", "6"], [None, 7.0], ("1/2", "50"), [], [None]]
    boxes = [r"\boxed{6}", r"\boxed{5,6}", r"\boxed{7}", r"\boxed{0.5}", r"\boxed{5}", r"\boxed{5}"]
    assert accuracy_reward(boxes, golds) == [1.0, 0.0, 1.0, 1.0, None, None]
    assert exact_match_reward(["6", "5,6", "7", "0.5"], golds[:4]) == [1.0, 0.0, 1.0, 0.0]
    reward = MajorityReward(bounds=(0, 1), margin=1)
    assert reward.score_group(reward.read(boxes[:2], [False] * 2, golds[:2])).rewards == [1.0, 0.0]
