"""Which answers are read, and which are equal: the gaps of math-verify, with the cases that show each of them."""

import pytest

from lze_trl.rewards import accuracy_reward
from lze_trl.rewards.grading import gold_text, read_answer, read_gold
from lze_trl.rewards.math_verify_fixes import rewrite


def score(gold, completion):
    return accuracy_reward([completion], [gold])[0]


def pairs(text):
    """Gold answers and answers, one pair a line."""
    return [tuple(part.strip() for part in line.split(" ~ ")) for line in text.strip().splitlines()]


EQUAL = pairs(r"""
    1,234 ~ 1234
    \frac12 ~ 0.5
    5{,}600 ~ 5600
    \$32{,}348 ~ 32348
    (0,5) ~ \left(0, 5\right)
    1,2 ~ 2, 1
    6+9i ~ 9i+6
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ \begin{bmatrix} 1 \\ 2 \end{bmatrix}
    10\% ~ 10
    90^\circ ~ 90
    5 ~ x=5
    C ~ \text{(C)}
    \text{Evelyn} ~ Evelyn
    2x+3=y ~ y=2x+3
    27 ~ 24+3=27
    4090506 ~ \frac{2023!}{2021!}
    5050 ~ \sum_{k=1}^{100} k
    2^{2^n} ~ 2^{2^{n}}
    4.5e33 ~ 4.5 \times 10^{33}
    4.5e3 ~ 4.5·10^3
    1234 ~ 1\,234
    10000 ~ 10,\!000
    90 ~ 90°
    25 ~ 25 °C
    \approx 17.10 ~ 17.10
    3.5 ~ x \approx 3.5
    (1,\infty) ~ (1,∞)
    x\in(1,2) ~ x∈(1,2)
    [-2,1) ~ \left\{x \in \mathbb{R} \mid -2 \le x < 1\right\}
    [-2,1) ~ -2 \le x < 1
    3\mathbf{i}-2\mathbf{j} ~ 3i-2j
    3+4i ~ 3+4\mathrm{i}
    60 ~ 60 \text{ km}/\text{h}
    60 ~ 60 km/h
    7 ~ 7 dollars
    7 ~ 7 people per week
    7 ~ **7**
    5 ~ 5 m
    52_8 ~ 52
    0.6666666667 ~ 0.66666667
    \frac{1}{20!} ~ \frac{1}{2432902008176640000}
    0.0005 ~ 0.05\%
    \frac{1}{300} ~ 0.003333
    12.5 ~ 12.5\%
    -50.0 ~ -50\%
    -1 1/2 ~ -1.5
    3 125/1000 ~ 3.125
    2.75 ~ 2 3/4
    3½ ~ 3.5
    2√3 ~ 2\sqrt{3}
    x²+y³ ~ x^2+y^3
    €5 ~ 5 €
    ab ~ ba
    2024-01-07 ~ 2024-1-7
""")
DIFFERENT = pairs(r"""
    (0,5) ~ 5
    2^{10} ~ 2
    1,2 ~ 1.2
    [0,1) ~ [0,1]
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ 2
    x=5 ~ y=5
    \frac{1}{3} ~ 0.333
    \text{Evelyn} ~ \text{Carla}
    3\mathbf{i}-2\mathbf{j} ~ 3
    20 \mathrm{ft} x 35 \mathrm{ft} ~ 20
    \frac{\mathbf{b}}{9} ~ \frac{\mathbf{a}}{7}
    5\text{ m}\cdot 2^{3} ~ 5
    3+4\mathrm{i} ~ 7
    2ab ~ 2
    10 ~ 10\,000
    235 ~ 1 234
    [-2,1) ~ \{x \mid -2 < x < 1\}
    1.6\times 10^{-19} ~ 6.6\times10^{-34}
    1.6022e-19 ~ 1.6021e-19
    0 ~ 1.6e-19
    x^2+50=0 ~ 1=0
    52_8 ~ 52_{9}
    0.6666666667 ~ 0.6666666567
    \emptyset ~ 1=0
    (-\infty,\infty) ~ 1>0
    5 ~ \frac{0}{0}
    12.5 ~ 125\%
    1 1/2 ~ 1
    ABC ~ BCA
    Paris ~ Pairs
    2024-01-07 ~ 2023-02-05
    2018 ~ 2024-01-05
""")


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_forms_of_one_answer(gold, answer):
    assert score(gold, rf"So it is $\boxed{{{answer}}}$.") == 1.0
    assert score(gold, rf"\boxed{{{gold}}}") == 1.0
    assert score(gold, answer) == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers(gold, answer):
    assert score(gold, rf"So it is $\boxed{{{answer}}}$.") == 0.0
    assert score(gold, answer) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (27.0, "27"),
        (27, "27.0"),
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


MARKED = [
    ("4", "x\n<answer>\n4\n</answer>"),
    ("4", "<think>5</think><answer>The answer is 4.</answer>"),
    ("4", "x\n<answer>4"),  # generation stopped at the tag
    ("4", "Write it as <answer></answer>. The answer is 4."),
    ("4", "<think>try \\boxed{3}</think>\nThe answer is 4."),
    ("4", r"try \boxed{3}</think> \boxed{4}"),  # a template that opens the thinking itself
    ("4", r"\boxed{4} <think>or \boxed{5}"),
    ("4", "The first part is 5.\n#### \\frac{8}{2}"),
    ("4", "#### Step 1\nAdd.\n\n#### Conclusion\nThe final answer is 4."),
    ("4", "#### 5\n#### 4 \nThat is all, and there is no more to say of the sheep in the field of Ann."),
    ("4", r"First \boxed{5}, and then \fbox{4}."),
    ("4", r"$\boxed 4$ hours"),
    ("4", r"\boxed  {4}"),
]
ANNOUNCED = [
    ("B", "x\n**Answer:** B"),
    ("B", "The correct answer is (B) 27."),
    ("B", "The answer is B, since 5 > 4."),
    ("18", "Q: How many?\nA: $18."),
    ("18", "So the answer is $18 per day."),
    ("27", "Final Answer: The final answer is $27$. I hope it is correct."),
    ("27", "### Final Answer\n27"),
    ("27", "**Final answer**\n\n\\[\n27\n\\]"),
    ("27", r"The answer is $27\text{ cm}$."),
    ("27", "The answer is 24 + 3 = 27"),
    ("27", "The answer is 27, since $x = 5$."),
    ("0.5", "The answer is \\frac{1}{2}, as above."),
    ("5x", "The answer is 5x apples."),
    ("5", "It is not hard to see that the answer is 5."),
    ("5", "Is the answer 7? No. The answer is 5."),
    ("Paris", "x\nThe answer is Paris."),
]
OTHER = [
    ("4", r"\boxed{4} <answer>5</answer>"),
    ("4", r"<think>\boxed{4}"),
    ("4", "#### Step 4\nAdd 2 and 2."),
    ("4", "Work: 4\n####"),
    ("4", "The answer is 4.\n#### 5"),
    ("4", r"First \boxed{4}, and then \boxed{5}."),
    ("4", "There are 2 and 2 more, which makes 4 in all, as is easily seen."),
    ("4", r"It is \boxed{4"),
    ("4", r"It is \boxed{}"),
    ("4", ""),
]
# math-verify takes any number within fifty characters after "answer"
GUESSED = [
    ("12", "I do not know the answer, maybe 12 or so"),
    ("12", "The answer is not 12."),
    ("12", "The answer is maybe 12"),
    ("12", "The answer is 12 or 13"),
    ("12", "The answer lies somewhere near 12"),
    ("12", "A: 12\nB: 13"),
    ("12", "Answer: 13, not 12"),
]


@pytest.mark.parametrize(("gold", "completion"), MARKED + ANNOUNCED + OTHER + GUESSED)
def test_where_a_completion_has_its_answer(gold, completion):
    expected = float((gold, completion) in MARKED + ANNOUNCED)
    assert score(gold, completion) == expected
    assert score(gold, [{"role": "assistant", "content": completion}]) == expected


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
