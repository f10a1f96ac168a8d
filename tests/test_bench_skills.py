"""The skills of the benchmark: seeded, true, and no held-out prompt among those to train on."""

import pytest

from benchmarks.skills import HELD_OUT_ROWS, MIXES, TRAIN_ROWS, in_words, make_rows


ANSWERS = {
    "extreme": lambda name, *numbers: str({"max": max, "min": min}[name](map(int, numbers))),
    "count": lambda first, to, last: " ".join(str(i) for i in range(int(first), int(last[:-1]) + 1)),
    "add": lambda left, plus, right: str(int(left) + int(right)),
    "reverse": lambda name, letters: letters[::-1],
}
ANSWERS["long_count"] = ANSWERS["count"]


@pytest.mark.parametrize("task", MIXES)
def test_prompts_are_seeded_and_answers_are_true(task):
    rows = make_rows(task, TRAIN_ROWS, seed=1)
    assert rows == make_rows(task, TRAIN_ROWS, seed=1) != make_rows(task, TRAIN_ROWS, seed=2)
    prompts = {row["prompt"] for row in rows}
    assert len(prompts) == TRAIN_ROWS
    assert prompts.isdisjoint(row["prompt"] for row in make_rows(task, HELD_OUT_ROWS, 2, frozenset(prompts)))
    counts = {skill: sum(row["skill"] == skill for row in rows) for skill in MIXES[task]}
    assert max(counts.values()) - min(counts.values()) <= 1
    for row in rows:
        question = row["prompt"].splitlines()[-1].removesuffix(" =")
        if row["skill"] == "words":
            assert question == in_words(int(row["solution"]))
        else:
            assert row["solution"] == " " + ANSWERS[row["skill"]](*question.split())
