"""Votes are read from completions only, and classes of equal answers are cliques in an order of their own."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.evaluation.statistics import majority
from lze_trl.rewards import MajorityReward
from lze_trl.rewards.grading import same_answer
from lze_trl.rewards.votes import answer_classes, consensus, read_vote


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        (r"So it is \boxed{42}.", "42"),
        (r"First \boxed{1}, then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> I am not sure.", None),
        (r"\fbox{no solution}", "no solution"),  # that is an answer
        (r"\boxed{\emptyset}", r"\emptyset"),
        (r"\boxed{3", None),
        (r"\boxed{3} and \boxed{4", None),  # the last box is not closed
        (r"\boxed 5", None),
        (r"$\boxed 5$", None),
        (r"\boxed{}", None),
        (r"\boxed{ \; }", None),
        (r"\boxed{?}", None),
        (r"\boxed{\text{Cannot be determined.}}", None),
        (r"\boxed{\text{The value can not be determined}}", None),
        (r"\boxed{\text{Not enough information}}", None),
        (r"\boxed{answer}", None),
        (r"\boxed{\text{your answer here}}", None),
        (r"\boxed{\text{unknown}}", None),
        ("The answer is 7", None),  # neither announced answers nor bare ones nor marks are votes
        ("7", None),
        ("#### 7", None),
        ("", None),
    ],
)
def test_votes_are_closed_boxes(text, vote):
    assert read_vote(text, truncated=False) == vote
    assert read_vote(text, truncated=True) is None


NO_CONTENT = [
    r"\text{ }",
    r"\quad",
    r"\square",
    r"\underline{\hspace{1cm}}",
    r"\frac{\square}{\square}",
    r"\left( \right)",
    r"\begin{pmatrix} \\ \end{pmatrix}",
    "___",
    r"\_\_",
    r"\ldots",
    "N/A",
    r"\text{cannot be found}",
    r"\text{It is not possible to calculate}",
    r"\textbf{your answer here}",
    r"\text{[insert answer]}",
    r"\text{No answer}",
]
ANSWERS = [
    *(
        "0",
        "-3",
        "x",
        "A",
        "na",
        r"\frac{n}{a}",
        r"\pi",
        r"\infty",
        "∞",
        "<",
        r"\ge",
        "x_1",
        r"\text{even}",
        r"7\text{ cm}",
    ),
    *(
        r"\text{none}",
        r"\text{no solution}",
        r"\emptyset",
        "∅",
        r"\varnothing",
        r"\text{undefined}",
        r"\text{does not exist}",
    ),
    *(
        r"\text{impossible}",
        r"\text{infinitely many}",
        r"\text{cannot be factored}",
        r"\text{a solution}",
        r"\triangle ABC",
    ),
]


@pytest.mark.parametrize("box", NO_CONTENT)
def test_a_box_without_an_answer_neither_votes_nor_wins(box):
    assert read_vote(rf"\boxed{{{box}}}", truncated=False) is None
    majority = MajorityReward(min_valid=0.4, num_generations=9, end_token_ids=[0])
    completions = [rf"\boxed{{{text}}}" for text in [box] * 5 + ["8"] * 4]
    assert majority(["?"] * 9, completions, [[0]] * 9) == [0.0] * 5 + [1.0] * 4


@pytest.mark.parametrize("box", ANSWERS)
def test_an_answer_in_words_or_signs_votes(box):
    assert read_vote(rf"\boxed{{{box}}}", truncated=False) == box


def test_equality_is_not_transitive_and_classes_are_cliques():
    # All three equal 5, but x = 5 is not y = 5: the most frequent text is first, and takes the first of the others by text
    assert same_answer("x=5", "5") and same_answer("5", "y=5") and not same_answer("x=5", "y=5")
    assert answer_classes(["y=5", "5", "x=5", "5"], same_answer).tolist() == [1, 0, 0, 0]
    # Without the 5 in the middle nothing joins them
    assert answer_classes(["y=5", "x=5", "y=5"], same_answer).tolist() == [0, 1, 0]


def test_answers_are_equal_in_either_direction():
    for one, other in [("0.5", r"\frac{1}{2}"), ("1,234", "1234"), ("x=5", "5"), (r"50\%", "0.5")]:
        assert same_answer(one, other) and same_answer(other, one)
    for one, other in [("0.5", "5"), ("}", "5"), ("C", "D")]:
        assert not same_answer(one, other) and not same_answer(other, one)
    assert same_answer("}", "}")  # cannot be read


TEXTS = "abcde"
VOTES = st.lists(st.sampled_from([*TEXTS, None]), min_size=1, max_size=12)
RELATIONS = st.sets(st.sampled_from(list(itertools.combinations(TEXTS, 2)))).map(
    lambda pairs: lambda one, other: (min(one, other), max(one, other)) in pairs
)


@given(VOTES, RELATIONS, st.randoms())
def test_classes_of_any_relation(votes, same, random):
    classes = answer_classes(votes, same)
    assert [c == -1 for c in classes] == [vote is None for vote in votes]
    members = {c: sorted({vote for vote, own in zip(votes, classes, strict=True) if own == c}) for c in set(classes)}
    members.pop(-1, None)
    assert sorted(itertools.chain(*members.values())) == sorted(set(votes) - {None})  # equal texts share a class
    for texts in members.values():
        assert all(same(one, other) for one, other in itertools.combinations(texts, 2))
    # By force: of all ways to give each text in turn to a class that it fits, the first
    counts = Counter(vote for vote in votes if vote is not None)
    expected: list[set[str]] = []
    for text in sorted(counts, key=lambda text: (-counts[text], text)):
        fitting = [texts for texts in expected if all(same(text, other) for other in texts)]
        (fitting or [expected.append(set()) or expected[-1]])[0].add(text)
    assert [set(members[c]) for c in sorted(members)] == expected
    order = random.sample(range(len(votes)), len(votes))
    assert answer_classes([votes[i] for i in order], same).tolist() == classes[order].tolist()
    assert majority([1.0] * len(votes), [vote or "" for vote in votes], same).is_tie == (
        len(expected) > 0 and consensus(classes).margin == 0
    )


@given(VOTES)
def test_consensus_by_counting(votes):
    found = consensus(answer_classes(votes, lambda one, other: False))
    counts = [*sorted(Counter(vote for vote in votes if vote is not None).values(), reverse=True), 0, 0]
    assert found.share == counts[0] / len(votes)
    assert found.margin == counts[0] - counts[1]
    assert found.valid == sum(counts) / len(votes)
    assert (found.winner == -1) == (counts[0] == 0)


def test_shares_are_of_all_completions():
    assert consensus(np.array([0, 0, 1, -1])) == (0, 0.5, 1, 0.75)
    assert consensus(np.array([-1, -1])) == (-1, 0.0, 0, 0.0)
    assert consensus(np.array([1, 0, 0, 1])) == (0, 0.5, 0, 1.0)
