"""What self-instruction is told."""

from dataclasses import dataclass

from .templates import TEMPLATES


class InstructError(ValueError):
    """Self-instruction that cannot begin or go on; the message says what to do."""


@dataclass(frozen=True)
class InstructSettings:
    """How problems are written, and which are accepted; settings of `self_play`."""

    seed: int = 0
    template: str = "tagged"
    examples: int = 8
    own: int = 2
    requests: int = 16
    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 1024
    presence_penalty: float = 0.0
    overlap: float = 0.7
    max_rounds: int = 16

    def __post_init__(self):
        if self.template not in TEMPLATES:
            raise InstructError(f"`template` of `self_play` must be one of {list(TEMPLATES)}, got {self.template!r}.")
        if self.own > self.examples:
            raise InstructError(
                f"`self_play`: `own={self.own}` is more than all exemplars, `examples={self.examples}`. Lower it."
            )
