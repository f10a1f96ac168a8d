"""
What the votes of a model are worth, from files of samples: those of `lze-trl eval --samples 16`.

python -m benchmarks.votes FILE [FILE ...] [--reward recipes.self_play.MarkedMajority]

For each file: how many answers there are, how often the winner has how many votes, what the published bounds let pass and, where there are
gold answers, how many labels are right. Where the most frequent answers tie there is no label.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lze_trl.evaluation.run import Sample, read_samples
from lze_trl.rewards import MajorityReward, get_reward

from .tables import table


_WORDS = {
    "few_votes": "too few answers",
    "low_share": "answers disagree",
    "high_share": "answers agree",
    "margin": "no clear winner",
}


class Vote(NamedTuple):
    """A problem's samples: how many, how many answered, the winner's votes (0 where there is no label), and what they are worth."""

    samples: int
    valid: int
    winner: int
    right: float | None  # None where nothing can tell
    accuracy: float | None  # of the single samples
    rejected: str | None  # by the published bounds


def count(file: Path, reward: type[MajorityReward]) -> dict[str, Vote]:
    """The vote of each problem of a file, by the problem's id."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in read_samples(file):
        groups[sample.id].append(sample)
    return {name: _vote(samples, reward) for name, samples in groups.items()}


def _vote(samples: list[Sample], reward: Any) -> Vote:
    any_winner = reward(bounds=(0.0, 1.0), margin=1, min_valid=0.0, labelled="none")
    golds = [sample.gold for sample in samples]
    ballots = any_winner.read([s.completion for s in samples], [s.truncated for s in samples], solution=golds)
    verdict, published = any_winner.settle(ballots), reward(labelled="none").settle(ballots)
    n, abstained = len(samples), verdict.metrics["abstained"]
    scored = [sample.reward for sample in samples if sample.reward is not None and sample.gold is not None]
    return Vote(
        samples=n,
        valid=sum(ballot.vote is not None for ballot in ballots),
        winner=0 if abstained else round(verdict.metrics["winner_share"] * n),
        right=verdict.metrics.get("label_precision"),
        accuracy=sum(scored) / len(scored) if scored else None,
        rejected=_why(published.metrics),
    )


def _why(metrics: dict[str, float]) -> str | None:
    """Why the majority reward abstained, in words; `None` if it did not."""
    return next((words for name, words in _WORDS.items() if metrics[f"abstained_{name}"]), None)


def markdown(votes: Sequence[Vote]) -> str:
    """A table by votes of the winner, and one by what the published bounds say."""
    n = max(vote.samples for vote in votes)
    by_winner = [
        [
            f"{k} of {n}" if k else "none: a tie, or no answer",
            *_row([vote for vote in votes if vote.winner == k], len(votes)),
        ]
        for k in range(n + 1)
        if any(vote.winner == k for vote in votes)
    ]
    reasons = Counter(vote.rejected for vote in votes)
    gate = [
        [why or "passed", *_row([vote for vote in votes if vote.rejected == why], len(votes))]
        for why, _ in reasons.most_common()
    ]
    header = ["problems", "of all", "labels that are right"]
    valid = sum(vote.valid for vote in votes) / sum(vote.samples for vote in votes)
    known = [vote.accuracy for vote in votes if vote.accuracy is not None]
    about = f"{len(votes):,} problems with {n} votes each; {valid:.1%} of the votes have an answer"
    about += f", {sum(known) / len(known):.1%} are right." if known else "."
    return "\n\n".join(
        [about, table(["votes of the winner", *header], by_winner), table(["by the published bounds", *header], gate)]
    )


def _row(votes: Sequence[Vote], total: int) -> list[str]:
    known = [vote.right for vote in votes if vote.right is not None]
    right = f"{sum(known):.0f} of {len(known)}, {sum(known) / len(known):.0%}" if known else "–"
    return [f"{len(votes):,}", f"{len(votes) / total:.0%}", right]


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m benchmarks.votes`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.votes", description=__doc__.split("\n")[1])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="samples, as JSON lines")
    parser.add_argument(
        "--reward", default="recipes.self_play.MarkedMajority", help="import path; default: %(default)s"
    )
    namespace = parser.parse_args(arguments)
    reward: Any = get_reward(namespace.reward)
    for file in namespace.files:
        votes = list(count(file, reward).values())
        if not votes:
            sys.exit(f"error: `{file}` holds no samples.")
        sys.stdout.write(f"## {file}\n\n{markdown(votes)}\n\n")


if __name__ == "__main__":
    main()
