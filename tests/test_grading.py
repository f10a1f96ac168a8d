"""
Answers that graders get wrong: how they are written, what is not an answer, what cannot be computed, what math-verify
calls equal. Each list starts with a defect that was seen, and goes on with other forms of it.
"""

import pytest

from lze_trl.data import load_prompts
from lze_trl.data.audit import audit_prompts
from lze_trl.rewards import accuracy_reward
from lze_trl.rewards.grading import read_answer, read_gold
from lze_trl.rewards.notation import normalise


def score(gold, completion):
    return accuracy_reward([completion], [gold])[0]


# math-verify reads 4.5e33 as 4.5·e·33, 10\,000 as 10·0, 1 234 as 1 + 234, ° and a leading ≈ as text, and knows no sets of
# the form {x | …}; it takes `\text{` up to a closing brace at the end for a unit
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("4.5e33", r"4.5 \times 10^{33}"),
        (r"4.5\times10^{33}", "4.5e33"),
        ("4.5E+33", "4.5 × 10^33"),
        ("4.5e33", r"45 \cdot 10^{32}"),
        ("4.5e33", "4.5 x 10^33"),
        ("1.6e-19", r"1.6\times 10^{-19}"),
        ("1.6e-19", "0.00000000000000000016"),
        ("1234", r"1\,234"),
        ("1234", r"1\ 234"),
        ("1234", "1{,}234"),
        ("1234", "1\u202f234"),
        ("1234", "1~234"),
        ("10000", r"10,\!000"),
        ("1234567", "1 234 567"),
        ("1234.5", r"1\;234.5"),
        ("3.141592653", r"3.141\,592\,653"),
        ("90", "90°"),
        ("90°", "90"),
        ("90", r"90^{\circ}"),
        ("90", "90^°"),
        ("90", r"90\degree"),
        ("90", "90 degrees"),
        ("25", "25 °C"),
        (r"\approx 17.10", "17.10"),
        ("17.1", r"\approx 17.10"),
        ("17.1", "≈ 17.10"),
        ("3.5", r"x \approx 3.5"),
        (r"\{x|-2\leq x < 1\}", "[-2,1)"),
        (r"\{x\|-2\leq x < 1\}", "[-2,1)"),
        ("[-2,1)", r"\left\{x \in \mathbb{R} \mid -2 \le x < 1\right\}"),
        ("[-2,1)", r"-2 \le x < 1"),
        (r"(5,\infty)", r"\{x : x > 5\}"),
        (r"3\mathbf{i}-2\mathbf{j}", "3i-2j"),
        (r"3\mathbf{i}-2\mathbf{j}", r"3\hat{\mathbf{i}}-2\hat{\mathbf{j}}"),
        (r"\frac{\mathbf{a}}{7}", r"\frac{a}{7}"),
        ("3+4i", r"3+4\mathrm{i}"),
        (r"\frac{3}{2} i", "1.5i"),
        ("60", r"60 \text{ km}/\text{h}"),
        ("60", "60 km/h"),
        ("15", r"15\mbox{ cm}^2"),
        ("5 cm", "5"),
        ("5", "5 m"),
        ("5", "5m"),
        ("3t", "3t"),
        ("10!!", "3840"),
        ("52_8", "52_{8}"),
        ("52_8", r"52_{\text{8}}"),
        ("52_8", "52"),
    ],
)
def test_forms_of_one_answer(gold, answer):
    assert score(gold, rf"So it is $\boxed{{{answer}}}$.") == 1.0


# math-verify cuts `\text{…}` and one-letter units out of formulas, and drops the base of a number
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"3\mathbf{i}-2\mathbf{j}", "3"),
        (r"3\vec{i}", "3"),
        (r"3\mathbf{j}", "3i"),
        (r"20 \mathrm{ft} x 35 \mathrm{ft}", "20"),
        (r"20 \text{ ft} \times 35 \text{ ft}", "20"),
        (r"\frac{\mathbf{b}}{9}", r"\frac{\mathbf{a}}{7}"),
        (r"\frac{\text{b}}{9}", r"\frac{\text{a}}{7}"),
        (r"5\text{ m}\cdot 2^{3}", "5"),
        (r"3+4\mathrm{i}", "7"),
        ("3t", "3"),
        ("2ab", "2"),
        ("3 + t", "3"),
        ("0", r"10\,000"),
        ("10", r"10\,000"),
        ("235", "1 234"),
        ("235", r"1\,234"),
        ("52_8", "52_9"),
        ("52_{8}", "52_{9}"),
        ("1011_2", "1011_3"),
        ("[-2,1)", r"\{x \mid -2 < x < 1\}"),
        ("4.5e33", "4.5e34"),
    ],
)
def test_parts_of_an_answer_are_not_the_answer(gold, answer):
    assert score(gold, rf"So it is $\boxed{{{answer}}}$.") == 0.0


# math-verify rounds to six decimals, and drops differences below 1e-15
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"1.6\times 10^{-19}", r"6.6\times10^{-34}"),
        (r"\frac{1}{21!}", r"\frac{1}{20!}"),
        ("6.6e-34", "6.7e-34"),
        ("1.6022e-19", "1.6021e-19"),
        ("1.6e-19", "0"),
        ("0", "1.6e-19"),
        ("2^{-60}", "2^{-50}"),
        ("10^{-500}", "10^{-400}"),
        ("x=1.6e-19", "x=6.6e-34"),
        ("(1.6e-19, 1)", "(6.6e-34, 1)"),
        (r"\{1.6e-19, 1\}", r"\{6.6e-34, 1\}"),
        (r"\begin{pmatrix} 1.6e-19 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 6.6e-34 \\ 1 \end{pmatrix}"),
        (r"1.6\times10^{-19} x", r"6.6\times10^{-34} x"),
        ("0.6666666667", "0.6666666567"),
    ],
)
def test_small_differences_and_small_numbers(gold, answer):
    assert score(gold, rf"\boxed{{{answer}}}") == 0.0
    assert score(gold, rf"\boxed{{{gold}}}") == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{20!}", r"\frac{1}{2432902008176640000}"),
        ("0.0005", r"5\times10^{-4}"),
        ("0.0005", r"0.05\%"),
        (r"\frac{1}{300}", "0.003333"),
        (r"\frac13", "0.333333"),
        ("0.6666666667", "0.66666667"),
        ("0", r"\sqrt{2}-\sqrt{2}"),
        (r"e^{-20}", r"\frac{1}{e^{20}}"),
    ],
)
def test_small_numbers_that_are_equal(gold, answer):
    assert score(gold, rf"\boxed{{{answer}}}") == 1.0


# math-verify compares lists of solutions, and empty lists are equal
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+50=0", "1=0"),
        ("x^2+50=0", "x^2+1=0"),
        ("x^2+1=0", "y^2+1=0"),
        ("x^2+y^2=-5", "x^2+y^2=-1"),
        ("e^x=-2", "e^x=-1"),
        ("x=x", "0=0"),
        ("2=2", "1=1"),
        (r"\emptyset", "1=0"),
        (r"(-\infty,\infty)", "1>0"),
        ("x^2<-5", "x^2<-1"),
        (r"\frac{2}{0}", r"\frac{1}{0}"),
        ("5", r"\frac{0}{0}"),
    ],
)
def test_results_that_say_nothing_are_not_equal(gold, answer):
    assert score(gold, rf"\boxed{{{answer}}}") == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+50=0", "x^2+50=0"),
        ("x^2+50=0", "2x^2+100=0"),
        ("2x+3=y", "y=2x+3"),
        ("x+y=3", "2x+2y=6"),
        ("27", "24+3=27"),
    ],
)
def test_equations_that_are_equal(gold, answer):
    assert score(gold, rf"\boxed{{{answer}}}") == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("x\n<answer>4</answer>", 1.0),
        ("x\n<answer>\n4\n</answer>", 1.0),
        ("<think>5</think><answer>The answer is 4.</answer>", 1.0),
        (r"<think>5</think><answer>\boxed{4}</answer>", 1.0),
        ("x\n<answer>4", 1.0),  # generation stopped at the tag
        (r"\boxed{4} <answer>5</answer>", 0.0),
        ("Write it as <answer></answer>. The answer is 4.", 1.0),
        ("<think>try \\boxed{3}</think>\nThe answer is 4.", 1.0),
        ("<think>try \\boxed{3}</think>4", 1.0),
        (r"try \boxed{3}</think> \boxed{4}", 1.0),  # a template that opens the thinking itself
        (r"<think>\boxed{4}", 0.0),
        (r"<think>\boxed{4}</think>", 0.0),
        (r"\boxed{4}</think>", 0.0),
        ("<think>The answer is 4.</think> I am not sure.", 0.0),
        (r"\boxed{4} <think>or \boxed{5}", 1.0),
    ],
)
def test_tags_say_where_the_answer_is(completion, expected):
    assert score("4", completion) == expected


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("B", "x\nAnswer: B"),
        ("B", "x\nAnswer: (B)"),
        ("B", "x\n**Answer:** B"),
        ("B", "x\n**Answer**: B."),
        ("B", "The answer is B."),
        ("B", "The correct answer is (B) 27."),
        ("27", "The correct answer is (B) 27."),
        ("18", "x\nA: 18"),
        ("18", "Q: How many?\nA: $18."),
        ("18", "x\nAns: 18"),
        ("27", "Final Answer: The final answer is $27$. I hope it is correct."),
        ("27", "### Final Answer\n27"),
        ("27", "**Final answer**\n\n\\[\n27\n\\]"),
        ("0.5", "x\nAnswer: \\(\\frac{1}{2}\\)"),
        ("0.5", "The answer is \\frac{1}{2}, as above."),
        ("0.5", r"The answer is $\frac12$ or 0.5."),
        ("27", r"The answer is $27\text{ cm}$."),
        ("5, 7", "The answer is $x=5$ and $x=7$."),
        ("27", "The answer is 24 + 3 = 27"),
        ("27", "The answer is 27 miles from City A."),
        ("27", "The answer is that he has 27 apples."),
        ("5x", "The answer is 5x apples."),
        ("B", "The answer is B, since 5 > 4."),
        ("B", "The answer is B, since $x = 5$."),
        ("27", "The answer is 27, since $x = 5$."),
        ("5", "The answer is that $x = 5$."),
        ("18", "So the answer is $18 per day."),
        ("3.14", "The answer is 3.14."),
        ("1234", r"The answer is 1\,234."),
        ("5", "The answer, then, is 5"),
        ("5", "It is not hard to see that the answer is 5."),
        ("5", "Is the answer 7? No. The answer is 5."),
        ("Paris", "x\nThe answer is Paris."),
    ],
)
def test_announced_answers(gold, completion):
    assert score(gold, completion) == 1.0


# math-verify takes any number within fifty characters after "answer"
@pytest.mark.parametrize(
    "completion",
    [
        "I do not know the answer, maybe 12 or so",
        "I don't know the answer, maybe 12",
        "I am not sure what the answer is: 12",
        "I don't think that the answer is 12.",
        "I do not have an answer for these 12 apples",
        "The answer is not 12.",
        "The answer might not be 12.",
        "The answer is unknown, maybe 12",
        "The answer is maybe 12",
        "The answer is 12 or 13",
        "The answer is between 11 and 12",
        "The answer lies somewhere near 12",
        "Let me check whether the answer is 12 here",
        "maybe 12",
        "A: 12\nB: 13",
        "Answer: 13, not 12",
    ],
)
def test_a_guess_is_not_an_answer(completion):
    assert score("12", completion) == 0.0


def test_an_article_is_not_option_a():
    assert score("A", "The answer is a bit tricky.") == 0.0


# math-verify would compute these until its timeout, and a group without one of its scores is lost
@pytest.mark.parametrize(
    "number",
    [
        "10!!",
        "10!!!",
        "(10!)!",
        "((10!)!)!",
        "10000000!",
        "9^{9^{9}}",
        "9^9^9^9",
        "10^{100000000}",
        "10^{-10^{10}}",
        "1.5^{9^{9}}",
        r"\frac{1}{9^{9^{9}}}",
        r"\left(\frac{3}{2}\right)^{10^{9}}",
        r"\binom{10^8}{5000000}",
        r"\binom{100000000}{5000000}",
        r"{10^8 \choose 5000000}",
        r"\gcd((10!)!, 5)",
        r"\prod_{k=1}^{10^7} k",
        r"\sum_{k=1}^{10^7} \frac{1}{k}",
        r"\Gamma(10^{10})",
        r"\cosh(10^{20})",
        r"\lfloor 9^{9^9} \rfloor",
        r"9^{9^9} \mod 7",
        "(9^{9^9}, 1)",
        "x = 9^{9^9}",
        "x^{9^{9^9}}",
        "(" * 60 + "1" + ")" * 60,
        "1+" * 2000 + "1",
    ],
)
@pytest.mark.parametrize("gold", ["5", "5x+1"])
def test_numbers_too_large_to_compute_are_wrong_at_once(number, gold):
    read_gold(gold)
    assert score(gold, rf"\boxed{{{number}}}") == 0.0
    assert score(number, rf"\boxed{{{number}}}") == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1024", "2^{10}"),
        ("1267650600228229401496703205376", "2^{100}"),
        ("3628800", "10!"),
        (r"\binom{10}{3}", "120"),
        (r"2^{2^{10}}", "4^{512}"),
        ("4090506", r"\frac{2023!}{2021!}"),
        ("5050", r"\sum_{k=1}^{100} k"),
        ("2^{2^n}", "2^{2^{n}}"),
    ],
)
def test_large_numbers_are_computed(gold, answer):
    assert score(gold, rf"\boxed{{{answer}}}") == 1.0


def test_the_audit_reads_what_it_calls_sound(tmp_path):
    path = tmp_path / "physics.jsonl"
    path.write_text('{"problem": "How heavy?", "answer": "4.5e33"}\n')
    dataset = load_prompts(str(path))
    counts = audit_prompts(dataset).counts
    assert [counts[name] for name in ("rows", "value", "none", "unread", "unequal")] == [1, 1, 0, 0, 0]
    (expression,) = read_gold(dataset["solution"][0]).expressions
    assert float(expression) == pytest.approx(4.5e33)


@pytest.mark.parametrize(
    "text", ["(1,234)", r"(1,\,234)", "3 125/1000", "11:45 p.m.", "The 60th caller", "2\\pi r", "x + t"]
)
def test_what_is_not_rewritten(text):
    assert normalise(text) == text


def test_the_text_of_an_answer_is_what_was_read():
    assert read_answer(r"So \boxed{1\,234 \text{ km}}").text == "1234"
