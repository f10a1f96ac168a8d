"""The samples of a task: a file with one JSON line each, to which a killed evaluation can add the rest."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from .engines import Output, SampleRequest


@dataclass(frozen=True)
class Sample:
    """A scored completion."""

    id: str  # of the problem
    sample: int  # which of the problem's samples, from 0
    reward: float | None  # of the training reward; None if it cannot score the completion
    answer: str  # that was read; empty if there is none
    tokens: int  # the end token included
    truncated: bool  # whether the limit cut it off
    completion: str
    gold: str | None
    prompt: str | list[dict[str, str]]

    @classmethod
    def of(cls, request: SampleRequest, output: Output, reward: float | None, answer: str) -> "Sample":
        """The sample of a request."""
        problem = request.problem
        scored = (reward, answer, output.tokens, output.truncated, output.text)
        return cls(problem.id, request.sample, *scored, problem.gold, problem.prompt)


class SampleFile:
    """Samples of one task on the disk; the file need not exist."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[tuple[str, int], Sample]:
        """All whole lines, by problem and number of the sample."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else []
        samples = [Sample(**json.loads(line)) for line in lines]
        return {(sample.id, sample.sample): sample for sample in samples}

    def __enter__(self) -> "SampleFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():  # without a last line that was cut off with its writer
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object):
        self._file.close()

    def write(self, sample: Sample):
        """Add a sample; it is there even if this process is killed at once."""
        self._file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
        self._file.flush()
