"""`python -m benchmarks.votes`: what votes are worth, from files of samples."""

import json
from dataclasses import asdict

import pytest

from benchmarks.votes import main
from lze_trl.evaluation.run import Sample


def samples(name, answers, gold=None):
    """One problem's samples; a right one has the reward 1."""
    for i, answer in enumerate(answers):
        text = "no idea" if answer is None else f"{answer}+0={answer}\n#### {answer}"
        reward = None if gold is None else float(answer == gold)
        yield Sample(name, i, reward, answer or "", 9, False, text, gold, "How many?")


@pytest.fixture
def write(tmp_path):
    def write(*groups):
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(asdict(sample)) + "\n" for group in groups for sample in group))
        return [str(path)]

    return write


def test_labels_are_counted_by_votes_and_by_the_bounds(write, capsys):
    main(
        write(
            samples("a", "77777123", "7"),  # right, passes
            samples("b", "55555123", "7"),  # wrong, passes: 5 of 8
            samples("c", "77777777", "7"),  # right, but all agree
            samples("d", "77755512", "7"),  # a tie
            samples("e", ["5", "5", "5", *[None] * 5], "5"),  # right, but most have no answer
        )
    )
    shown = capsys.readouterr().out
    assert "5 problems with 8 votes each; 87.5% of the votes have an answer, 47.5% are right." in shown
    assert [line for line in shown.splitlines() if line.startswith("|") and ":--" not in line] == [
        "| votes of the winner | problems | of all | labels that are right |",
        "| none: a tie, or no answer | 1 | 20% | – |",
        "| 3 of 8 | 1 | 20% | 1 of 1, 100% |",
        "| 5 of 8 | 2 | 40% | 1 of 2, 50% |",
        "| 8 of 8 | 1 | 20% | 1 of 1, 100% |",
        "| by the published bounds | problems | of all | labels that are right |",
        "| passed | 2 | 40% | 1 of 2, 50% |",
        "| answers agree | 1 | 20% | 1 of 1, 100% |",
        "| no clear winner | 1 | 20% | – |",
        "| too few answers | 1 | 20% | 1 of 1, 100% |",
    ]
