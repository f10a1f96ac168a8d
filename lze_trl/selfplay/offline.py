"""`lze-trl self-instruct` writes a file of problems on whose answers the model agrees neither too little nor too much."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..data import PromptStyle
from ..evaluation.engines import Engine, Output, Request
from ..evaluation.settings import Decoding
from ..evaluation.tasks import Problem
from ..rewards import MajorityReward
from ..rewards.majority import abstention
from .writer import NewProblem, Writer, id_in_words


@dataclass(frozen=True)
class DifficultyFilter:
    """Accepts a problem if the majority reward does not abstain on `votes` answers to it."""

    majority: MajorityReward
    style: PromptStyle  # how prompts are written around problems
    decoding: Decoding
    votes: int = 16

    def judge(self, outputs: Iterable[Output]) -> tuple[str | None, dict[str, Any]]:
        """The reason to reject a problem or `None`, and the vote as columns of the file."""
        given = list(outputs)
        ballots = self.majority.read([output.text for output in given], [output.truncated for output in given])
        verdict = self.majority.settle(ballots)
        vote = {"share": verdict.metrics["winner_share"], "valid": 1.0 - verdict.metrics["no_vote_share"]}
        return abstention(verdict.metrics), vote | {"majority_answer": verdict.winner}

    def passed(self, problems: list[NewProblem], writer: Writer, engine: Engine) -> list[dict[str, Any]]:
        """Lines of the file for the problems that pass. The others are added to the writer's rejections."""
        asked = [Problem(id_in_words(p.text), self.style.around(p.text), None) for p in problems]
        requests = [Request(problem, i) for problem in asked for i in range(self.votes)]
        answers: dict[str, list[Output]] = {problem.id: [] for problem in asked}
        for request, output in engine.generate(requests, self.decoding) if requests else ():
            answers[request.problem.id].append(output)
        lines = []
        for problem, (name, outputs) in zip(problems, answers.items(), strict=True):
            reason, vote = self.judge(outputs)
            if reason is None:
                line = {"problem": problem.text, "id": name, "parents": problem.parents.split()}
                lines.append(line | {"overlap": problem.overlap, **vote, "round": writer.rounds - 1})
            else:
                writer.rejected[reason] += 1
        return lines


def write_file(
    writer: Writer, difficulty: DifficultyFilter, output: Path, engine: Engine, count: int
) -> Iterator[int]:
    """
    Add problems to a file of JSON lines until it holds `count`, and yield their number at the start and after each round. A killed
    command continues with the round after that of the last line.

    Raises:
        InstructError: If `max_rounds` rounds in a row give no acceptable problem.
    """
    lines = _whole_lines(output)
    own = [line["problem"] for line in lines]
    writer.known.add(own)
    writer.rounds = lines[-1]["round"] + 1 if lines else 0
    yield len(own)
    with output.open("a", encoding="utf-8") as file:
        keep = partial(difficulty.passed, writer=writer, engine=engine)
        for found in writer.write(count - len(own), own, engine.generate, keep=keep):
            for line in found[: count - len(own)]:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                own.append(line["problem"])
            file.flush()
            yield len(own)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file, and remove a last line that is incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        return []
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
    return [json.loads(line) for line in content.decode(errors="ignore").split("\n")[:-1]]
