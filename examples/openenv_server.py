"""
An OpenEnv server on this machine: problems of reasoning-gym, each with two attempts.

    pip install -e '.[gym,openenv]'
    python examples/openenv_server.py 'reasoning_gym:chain_sum?size=500' --port 8010

An episode is a problem: `reset(question=…)` begins it, and each `step` is an attempt, which the verifier of the task scores. Several datasets
may be given, such as one to train on and one to evaluate on.
"""

import argparse
import json
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

from lze_trl.data import load_prompts
from lze_trl.rewards import reasoning_gym_reward


ATTEMPTS = 2
SESSIONS = 4096  # an environment of a training holds one as long as it lives


class Attempt(Action):
    """An answer."""

    text: str


class Told(Observation):
    """What is said to an attempt, whose score is the `reward`; the question at the beginning."""

    text: str


class ReasoningGym(Environment[Attempt, Told, State]):
    """Problems of reasoning-gym, an episode each."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, problems: dict[str, str]):
        super().__init__()
        self.problems = problems  # entries as JSON, by their questions
        self.problem, self.left = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, *, question: str, **kwargs: Any) -> Told:
        """Begin an episode with the problem of this question."""
        if question not in self.problems:
            raise ValueError(f"none of the {len(self.problems)} problems of this server has the question {question!r}")
        self.problem, self.left = self.problems[question], ATTEMPTS
        return Told(text=question)

    def step(self, action: Attempt, timeout_s: float | None = None, **kwargs: Any) -> Told:
        """Score an attempt."""
        if not self.left:
            return Told(text="The episode is over.", done=True, reward=None)
        (reward,) = reasoning_gym_reward([action.text], [self.problem])
        self.left = 0 if reward == 1.0 else self.left - 1
        text = "Right." if reward == 1.0 else f"Wrong, {self.left} attempts are left."
        return Told(text=text, done=not self.left, reward=reward)

    @property
    def state(self) -> State:
        """How many attempts were made."""
        return State(step_count=ATTEMPTS - self.left)


def main():
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("problems", nargs="+", help="such as reasoning_gym:chain_sum?size=500")
    parser.add_argument("--port", type=int, default=8010)
    given = parser.parse_args()
    entries = [entry for reference in given.problems for entry in load_prompts(reference)["reasoning_gym"]]
    problems = {json.loads(entry)["question"]: entry for entry in entries}
    app = create_app(lambda: ReasoningGym(problems), Attempt, Told, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
