"""
`lze-trl self-instruct`: a file of problems that a model has written, and whose answers it agrees on neither too little nor too much.

All that is asked is kept in a journal beside the file. What the command does depends on its settings and on the answers alone, so
that a killed one goes on by doing the same again with the answers it has: nothing is asked twice.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..data import PromptStyle
from ..evaluation.engines import Engine, Output, Request
from ..evaluation.run import check_settings
from ..evaluation.samples import Sample, SampleFile
from ..evaluation.settings import Decoding
from ..evaluation.tasks import Problem
from ..rewards import MajorityReward
from .generator import Admitted, Intake, Writer, id_in_words, text_id, told
from .settings import InstructError


ABSTAINED = {
    "few_votes": "too few answers",
    "low_share": "answers disagree",
    "high_share": "answers agree",
    "margin": "no clear winner",
}
"""Reasons of the vote, by the majority reward's names of them."""


def abstention(metrics: dict[str, float]) -> str | None:
    """Why the majority reward abstained, by its metrics of a group; `None` if it did not."""
    return next((why for name, why in ABSTAINED.items() if metrics[f"abstained_{name}"]), None)


class Journal:
    """Answers that were given, on the disk, and those that are asked for now."""

    def __init__(self, path: Path):
        self._file, self._known = SampleFile(path), SampleFile(path).read()

    def __enter__(self) -> "Journal":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object):
        self._file.__exit__(*error)

    def ask(self, engine: Engine, requests: list[Request], decoding: Decoding) -> Iterator[tuple[Request, Output]]:
        """Answers to requests: those that are known, and then those of the engine. None is needed again."""
        missing = []
        for request in requests:
            sample = self._known.pop((request.problem.id, request.sample), None)
            if sample is None:
                missing.append(request)
            else:
                yield request, Output(sample.completion, sample.tokens, sample.truncated)
        for request, output in engine.generate(missing, decoding) if missing else ():
            self._file.write(Sample.of(request, output, None, ""))
            yield request, output


@dataclass(frozen=True)
class Gate:
    """The difficulty gate: what a majority of `votes` answers must be like for a problem to be worth training on."""

    majority: MajorityReward
    style: PromptStyle  # how prompts are written around problems
    decoding: Decoding
    votes: int = 16

    def __post_init__(self):
        majority = self.majority
        if not majority.can_count(self.votes):
            raise InstructError(
                f"No problem can pass a vote of {self.votes} answers with `majority_bounds: {list(majority.bounds)}`, "
                f"`majority_margin: {majority.margin}` and `majority_min_valid: {majority.min_valid}`. Ask for more answers "
                "(16 were published), or widen them."
            )

    def requests(self, text: str) -> list[Request]:
        """What is asked about a problem."""
        problem = Problem(id_in_words(text_id(text)), self.style.around(text), None)
        return [Request(problem, i) for i in range(self.votes)]

    def judge(self, outputs: Iterable[Output]) -> tuple[str | None, dict[str, Any]]:
        """The reason to reject a problem, `None` if there is none, and what is told of the vote."""
        given = list(outputs)
        ballots = self.majority.read([output.text for output in given], [output.truncated for output in given])
        verdict = self.majority.settle(ballots)
        winner = next((b.vote for b, r in zip(ballots, verdict.rewards, strict=True) if r == 1.0), None)
        told = {"share": verdict.metrics["winner_share"], "valid": 1.0 - verdict.metrics["no_vote_share"]}
        return abstention(verdict.metrics), told | {"majority_answer": winner}


@dataclass
class SelfInstruction:
    """
    Has problems written until a file holds as many as are wanted.

    Args:
        writer ([`Writer`]): Who asks for problems.
        gate ([`Gate`]): Who judges them.
        output (`Path`): The file: JSON lines with `problem` and what is known of it.
    """

    writer: Writer
    gate: Gate
    output: Path

    def __post_init__(self):
        self.rejected: Counter[str] = Counter()
        self.rounds = self.accepted = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What the problems depend on besides the model, as JSON gives it back."""
        majority, seeds = self.gate.majority, self.writer.seeds
        return {
            "instruct": asdict(self.writer.settings),
            "seeds": text_id(json.dumps([seeds.problems, seeds.references])),
            "votes": self.gate.votes,
            "style": asdict(self.gate.style),
            "majority": [type(majority).__name__, list(majority.bounds), majority.margin, majority.min_valid],
            "decoding": self.gate.decoding.as_dict(),
        }

    def run(self, engine: Engine, count: int, weights: str | None = None) -> Iterator[int]:
        """
        Write until the file holds `count` problems, or go on where a killed command was. Yields their number after each round.

        Raises:
            InstructError: If `max_rounds` rounds in a row give no acceptable problem.
        """
        folder = self.output.with_name(f"{self.output.name}.journal")
        check_settings(folder, {"model": engine.name, "weights": weights or engine.name, **self.settings})
        intake, barren = Intake(self.writer.seeds, self.writer.settings.overlap), 0
        own: list[str] = []
        self.rejected = intake.rejected
        with ExitStack() as stack:
            written, votes = (stack.enter_context(Journal(folder / f"{name}.jsonl")) for name in ("written", "votes"))
            file = stack.enter_context(_Accepted(self.output))
            while len(own) < count:
                proposals, unread = self.writer.propose(self.rounds, own, _asking(written, engine))
                found = self._judged(intake.admit(proposals, unread), votes, engine)
                for line in found[: count - len(own)]:
                    file.write(line | {"round": self.rounds})
                    own.append(line["problem"])
                self.rounds, self.accepted = self.rounds + 1, len(own)
                barren = 0 if found else barren + 1
                yield len(own)
                if barren == self.writer.settings.max_rounds:
                    raise InstructError(
                        f"{barren} rounds in a row gave no acceptable problem, after {len(own)} of {count}. Rejected so far: "
                        f"{told(self.rejected)}. Use a stronger model, other seeds, or wider `majority_bounds`."
                    )

    def _judged(self, admitted: list[Admitted], votes: Journal, engine: Engine) -> list[dict[str, Any]]:
        """What is written of the problems that pass the gate."""
        requests = {problem.text: self.gate.requests(problem.text) for problem in admitted}
        answers: dict[tuple[str, int], Output] = {
            (request.problem.id, request.sample): output
            for request, output in votes.ask(
                engine, [r for rows in requests.values() for r in rows], self.gate.decoding
            )
        }
        lines = []
        for problem in admitted:
            asked = requests[problem.text]
            reason, vote = self.gate.judge(answers[request.problem.id, request.sample] for request in asked)
            if reason is not None:
                self.rejected[reason] += 1
                continue
            parents = [id_in_words(parent) for parent in problem.parents]
            lines.append(
                {"problem": problem.text, "id": asked[0].problem.id, "parents": parents, "overlap": problem.overlap}
                | vote
            )
        return lines


def _asking(journal: Journal, engine: Engine) -> Any:
    return lambda requests, decoding: journal.ask(engine, requests, decoding)


class _Accepted:
    """The file of the problems. Lines that it holds already are not written again."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "_Accepted":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]  # the last line may have been cut off with its writer
        self._before = whole.decode().split("\n")[:-1]
        self._file = self.path.open("r+" if content else "w", encoding="utf-8")
        self._file.truncate(len(whole))
        self._file.seek(len(whole))
        self._written = 0
        return self

    def __exit__(self, *error: object):
        self._file.close()

    def write(self, line: dict[str, Any]):
        """Add a problem; it is there even if this process is killed at once."""
        text = json.dumps(line, ensure_ascii=False)
        if self._written < len(self._before) and text != self._before[self._written]:
            raise InstructError(
                f"`{self.path}` holds other problems than its journal in line {self._written + 1}. Give another `--output`, or "
                "remove that file."
            )
        if self._written >= len(self._before):
            self._file.write(text + "\n")
            self._file.flush()
        self._written += 1
