"""
GRPO of an agent whose environment is an OpenEnv server; groups without a gradient cost no update.

    pip install -e '.[app,gym,openenv]'
    python examples/openenv_server.py 'reasoning_gym:chain_sum?size=500' &
    python examples/openenv_agent.py --model Qwen/Qwen3-0.6B --problems 'reasoning_gym:chain_sum?size=500'

The server has to have the problems of `--problems`; `OPENENV_URL` says where it is.
"""

import json
import os

import tools
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer


SYSTEM_PROMPT = "Answer by the tool."
QUESTION = "State the final answer to the following arithmetic problem: {} ="
SHOTS = [
    [
        {"role": "user", "content": QUESTION.format(problem)},
        {"role": "assistant", "content": tools.written("answer", text=answer)},
        {"role": "tool", "content": "Right."},
    ]
    for problem, answer in [("3 + 4", "7"), ("9 - 2", "7"), ("5 + 8", "13"), ("6 - 4", "2")]
]


class Problem:
    """A problem of the server, and the attempts at it."""

    def __init__(self):
        self._client = GenericEnvClient(base_url=os.environ.get("OPENENV_URL", "http://127.0.0.1:8010"))

    def reset(self, reasoning_gym: str, **row):
        """Begin an episode with the problem of this row."""
        self._last: StepResult = self._client.reset(question=json.loads(reasoning_gym)["question"])
        self._reward = 0.0

    def answer(self, text: str) -> str:
        """
        Answer the question.

        Args:
            text: The answer alone.

        Returns:
            Whether it is right, and how many attempts are left.
        """
        if self._last.done:
            raise ValueError("The episode is over.")
        self._last = self._client.step({"text": str(text)})
        self._reward = self._last.reward
        return self._last.observation["text"]

    def get_reward(self) -> float:
        """What the server's verifier gave the last attempt."""
        return self._reward


def make_trainer(script: tools.Script, args: LZEGRPOConfig) -> LZEGRPOTrainer:
    """The trainer."""
    return LZEGRPOTrainer(
        model=script.model,
        args=args,
        train_dataset=tools.prompts(script.problems, SYSTEM_PROMPT, SHOTS[: script.shots]),
        processing_class=tools.tokenizer(script.model),
        environment_factory=Problem,
    )


if __name__ == "__main__":
    tools.train(make_trainer, problems="reasoning_gym:chain_sum?size=500", output_dir="runs/openenv")
