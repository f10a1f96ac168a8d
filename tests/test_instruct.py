"""Self-instruction, its pure parts: what is read from answers, what is refused and why, and what is too similar."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lze_trl.selfplay.filters import MAX_WORDS, REASONS, reason_to_reject
from lze_trl.selfplay.overlap import OverlapIndex
from lze_trl.selfplay.templates import Item, read_problems, request_text
from lze_trl.selfplay.writer import KNOWN, UNREAD, InstructError, Seeds, Writer, id_in_words
from lze_trl.servers.client import Output
from lze_trl.settings import SelfPlaySettings


def read(text, truncated=False):
    """The complete problems of an answer to a request with 8 exemplars."""
    return [item.text for item in read_problems(text, 8, truncated) if item.complete]


# ---- The numbered list ----


def test_a_request_ends_with_the_open_number():
    request = request_text(["What is\n2 + 3?", "Find $x$."])
    assert request == "Come up with a series of questions:\n1. What is 2 + 3?\n2. Find $x$.\n3."


TRAIN = "A train leaves at 3. It goes 40 miles in 2 hours. How fast is it?"


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (f"What is 2?\n10. {TRAIN}", ["What is 2?", TRAIN]),  # begins with the open item
        (f"9. What is 2?\n10. {TRAIN}", ["What is 2?", TRAIN]),
        (f"**9.** What is 2?\n**10.** {TRAIN}", ["What is 2?", TRAIN]),
        # Only numbers that continue the count begin items
        ("I list:\n1. 4 cows\n2. 7\nSum?\n10. What is 3?", ["I list: 1. 4 cows 2. 7 Sum?", "What is 3?"]),
        # Drafts of the thinking are no problems
        ("<think>\nWhat is 1?\n10. What is 7?\n</think>\nWhat is 2?", ["What is 2?"]),
        # Closing words are no part of a problem
        ("What is 2?\n\nAnswer: 5\n10. What is 4?\n\nI hope these help!", ["What is 2?", "What is 4?"]),
    ],
)
def test_problems_of_an_answer(text, items):
    assert read(text) == items


def test_an_item_that_was_cut_off_is_not_complete():
    text = "What is 2 + 3?\n10. Tom has 5 apples and gives"
    assert read(text, truncated=True) == ["What is 2 + 3?"]
    assert [item.text for item in read_problems(text, 8, True)][-1] == "Tom has 5 apples and gives"


line = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), min_size=1).map(
    lambda text: " ".join(text.split())
)


@settings(max_examples=200)
@given(st.lists(line.filter(lambda text: re.match(r"\w", text) and not re.match(r"\d+[.)]", text)), min_size=1))
def test_a_numbered_answer_gives_back_any_lines(texts):
    answer = "\n".join(f"{i}. {text}" for i, text in enumerate(texts, 9))
    assert read(answer) == texts


# ---- Filters ----

REJECTED = [
    ("figure", "In the diagram, $AB = 3$ and $BC = 4$. Find $AC$."),
    ("program", "Write a Python program that adds two numbers."),
    ("too short", "Why?"),
    ("too long", "What is the sum of " + "1 and " * MAX_WORDS + "2?"),
    ("first character", "- What is the sum of 3 and 4?"),
    ("language", "这是一个数学问题, 三加四是多少 3 + 4?"),
    ("holds a solution", "What is 3 + 4? Answer: 7"),
    ("proof", "Verify that 12 is even and show that 13 is odd."),
    ("several questions", "How far does it go in 2 hours? It goes 40 miles in one. When does it stop?"),
    ("several questions", "Let $x = 3$. (a) Find $2x$. (b) Find $3x$."),
    ("no question", "The sun is warm and yellow today."),
    ("unfinished", "What is the value of $x if x is 3?"),
    ("unfinished", "If $x = 3$, what is the value of $3 \\cdot x"),
    ("unfinished", "Tom has $5 and gives $2 of them to"),
]
ACCEPTED = [
    "How many ways are there to draw 2 cards from 52?",  # published: refused by a word each
    "Factor $t^2-49$.",
    "Write a function $f$ with $f(0) = 1$ and $f(1) = 3$ that is linear.",
    "Verify that 12 is even and find its half.",  # has an answer, too
    "Let $n = 3$. Show that $n$ is odd. What is $n^2$?",
    "Weng earns $12 an hour for babysitting. How much does she earn in 50 minutes?",
    "A pen costs $.50 and a car costs $5k. How much are $x$ pens and a car, if $x = 3$ and the tax is $20/hour?",
]


@pytest.mark.parametrize(("reason", "text"), REJECTED + [(None, text) for text in ACCEPTED])
def test_only_a_text_that_is_no_problem_is_rejected(reason, text):
    assert reason_to_reject(Item(text, True)) == reason


def test_every_reason_is_tested_and_a_cut_off_text_is_rejected():
    assert {reason for reason, _ in REJECTED} == set(REASONS)
    assert reason_to_reject(Item("What is 3 + 4?", False)) == "unfinished"


# ---- Overlap ----


def lcs(one, other):
    """Length of the longest common subsequence, by the textbook."""
    table = np.zeros((len(one) + 1, len(other) + 1), dtype=int)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


@given(st.lists(st.sampled_from("abcd"), min_size=1), st.lists(st.sampled_from("abcd"), min_size=1))
def test_similarity_is_rouge_l(one, other):
    (found,) = OverlapIndex([" ".join(one)]).nearest([" ".join(other)])  # F1 of precision and recall
    assert found == pytest.approx(2 * lcs(one, other) / (len(one) + len(other)), abs=1e-12)


def test_the_nearest_is_found_in_every_part_of_the_index(monkeypatch):
    monkeypatch.setattr("lze_trl.selfplay.overlap._MAX_CELLS", 6)
    texts = [f"word{i} word{i + 1} word{i + 2} end" for i in range(20)]
    index = OverlapIndex(texts[:13])
    index.add(texts[13:])
    assert index.nearest([texts[17], "nothing else", texts[0]]).tolist() == [1.0, 0.0, 1.0]
    assert OverlapIndex().nearest(["one"]).tolist() == [0.0]
    assert OverlapIndex(["one"]).nearest([]).shape == (0,)


# ---- The writer ----

PLAIN = tuple(f"What is {name} times {i} plus {i * i}, if {name} is {i + 1}?" for i, name in enumerate("abcdefghij"))
SEEDS = Seeds(("What is the sum of 3 and 4 apples?",), ("How many legs have 7 spiders in a box?",))


ONE = SelfPlaySettings(examples=1, own=0, requests=1)


def admitted(writer, *texts):
    """What a writer admits of these problems of a model."""
    answer = "\n".join(f"{i}. {text}" for i, text in enumerate(texts, 2))
    return writer.round([], lambda requests, decoding: [(request, Output(answer, 9, False)) for request in requests])


def test_nothing_that_resembles_what_is_known_is_admitted():
    writer = Writer(ONE, SEEDS)
    seeds, evaluated = "What is the sum of 5 and 4 apples?", "How many legs have 9 spiders in a box?"
    new, repeated = (f"Tom runs {i} miles in {i}0 minutes. How far does he run in an hour?" for i in (3, 4))
    (first,) = admitted(writer, seeds, evaluated, new, repeated, "Why?")
    assert first.text == new
    assert first.parents == id_in_words(SEEDS.problems[0])
    assert +writer.rejected == {KNOWN: 3, "too short": 1}
    # Published: a problem that was used is forgotten. Here it is known for good
    assert admitted(writer, repeated) == []
    assert admitted(writer) == []
    assert +writer.rejected == {KNOWN: 4, "too short": 1, UNREAD: 1}


def test_the_parents_of_a_problem_are_what_its_request_showed():
    shown = {}

    def ask(requests, decoding):
        assert len({request.seed(decoding) for request in requests}) == 3
        for request in reversed(requests):  # answers arrive in any order
            shown[request.sample] = [text for text in PLAIN if text in request.problem.prompt[-1]["content"]]
            words = " ".join(f"{'xyz'[request.sample]}{letter}" for letter in "abcdefgh")
            yield request, Output(f"How many {words} are there?", 9, False)

    found = Writer(SelfPlaySettings(examples=2, own=0, requests=3), Seeds(PLAIN)).write(3, [], ask)
    assert [problem.text[9:11] for problem in found] == ["xa", "ya", "za"]
    for place, problem in enumerate(found):
        assert sorted(problem.parents.split()) == sorted(map(id_in_words, shown[place]))


def test_seeds_that_cannot_be_used_are_refused():
    with pytest.raises(InstructError, match=r"shows 8 .* 1 of 2 seeds can be shown \(1 figure\)"):
        Writer(SelfPlaySettings(), Seeds(("What is 2 + 3?", "In the diagram, find the length of $AB$.")))


def shown_of(own, requests, rounds=0):
    """The exemplars of every request of a round."""
    shown, settings = [], SelfPlaySettings(examples=4, own=2, requests=requests)
    writer = Writer(settings, Seeds(PLAIN), seed=3, generator=lambda texts, rng: shown.append(texts) or [])
    writer.rounds = rounds
    writer.round(own, None)
    return shown


def test_exemplars_are_own_and_seeds_and_the_same_for_the_same_key():
    own = ["How many own problems are there?", "How many more own problems are there?"]
    shown = shown_of(own, 6, rounds=5)
    assert all(sum(text in own for text in texts) == 2 and len(set(texts)) == 4 for texts in shown)
    assert shown == shown_of(own, 6, rounds=5) != shown_of(own, 6, rounds=6)
    assert [sum(text in own for text in texts) for texts in shown_of(own[:1], 3)] == [1] * 3  # as far as there are any


def test_texts_of_a_generator_pass_no_filters():
    writer = Writer(ONE, Seeds(PLAIN), generator=lambda shown, rng: ["Three and five apples.", "  "])
    assert [problem.text for problem in writer.round([], None)] == ["Three and five apples."]
    assert +writer.rejected == {}
    (problem,) = Writer(ONE, Seeds(PLAIN), generator=lambda shown, rng: "A single text.").round([], None)
    assert problem.text == "A single text."
