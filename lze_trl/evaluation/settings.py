"""How completions of an evaluation are decoded, and the settings that papers published."""

from dataclasses import asdict, dataclass, field
from typing import Any


class EvaluationError(ValueError):
    """An evaluation that cannot be run or continued; the message says what to do."""


@dataclass(frozen=True)
class Decoding:
    """
    What decides the text of a completion, besides the model and the problem.

    Attributes:
        temperature (`float`): 0 for the likeliest token each time.
        top_p (`float`): Share of the probability that tokens are sampled from.
        top_k (`int`): Number of tokens that are sampled from; 0 for all.
        max_tokens (`int`): Most tokens of a completion.
        stop (`tuple[str, ...]`): Texts that end a completion, and are left out of it.
        seed (`int`): Seed; each sample of each problem has one of its own that is made from it.
        chat (`bool`): Whether prompts are messages in the model's chat template; otherwise, plain text.
        system_prompt (`str`, *optional*): System prompt.
        prompt_suffix (`str`, *optional*): Text after each problem. Defaults to the task's own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int = 0
    chat: bool = True
    system_prompt: str | None = None
    prompt_suffix: str | None = None

    def __post_init__(self):
        for name, allowed, is_allowed in (
            ("temperature", "at least 0", self.temperature >= 0),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("top_k", "at least 0, which is all tokens", self.top_k >= 0),
            ("max_tokens", "at least 1", self.max_tokens >= 1),
        ):
            if not is_allowed:
                raise EvaluationError(f"`{name}` must be {allowed}, got {vars(self)[name]}.")
        if self.system_prompt is not None and not self.chat:
            raise EvaluationError(
                "`system_prompt` needs a chat: plain-text prompts have no roles. Leave one of them out."
            )

    def as_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return asdict(self) | {"stop": list(self.stop)}


@dataclass(frozen=True)
class Preset:
    """Published settings: the tasks, samples of each problem, how they are decoded, and where that is written."""

    source: str
    tasks: tuple[str, ...]
    samples: int = 1
    decoding: dict[str, Any] = field(default_factory=dict)  # what differs from the defaults of `Decoding`


_SERL_TASKS = ("math_500", "math_hard", "asdiv", "college_math", "tabmwp")
_SERL = {"chat": False, "prompt_suffix": "\n", "stop": ("\n\n\n",)}

PRESETS = {
    "lze": Preset(
        "arXiv 2605.17003, code Stellaris167/LZE: verl's validation, greedy, with the response length of Qwen2.5-Math",
        ("gsm8k", "math_500", "amc23", "aime25"),
        decoding={
            "max_tokens": 4096,
            "prompt_suffix": " Reason step by step and put your final answer in \\boxed{}.",
        },
    ),
    "serl": Preset(
        "arXiv 2505.20347, code wantbook-book/SeRL: greedy, without a chat template", _SERL_TASKS, decoding=_SERL
    ),
    "serl_maj": Preset(
        "arXiv 2505.20347, code wantbook-book/SeRL: majority of 16",
        _SERL_TASKS,
        samples=16,
        decoding=_SERL | {"temperature": 1.0, "top_p": 0.95},
    ),
    "reinforce_ada": Preset(
        "arXiv 2510.04996, code RLHFlow/Reinforce-Ada: average of 32",
        ("math_500", "minerva", "olympiadbench", "aime24", "aime25", "amc23"),
        samples=32,
        decoding={
            "temperature": 1.0,
            "max_tokens": 4096,
            "system_prompt": "Please reason step by step, and put your final answer within \\boxed{}.",
            "prompt_suffix": " Let's think step by step and output the final answer within \\boxed{}.",
        },
    ),
}
