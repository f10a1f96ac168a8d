"""
GRPO on sums of reasoning-gym with a calculator as a tool; groups without a gradient cost no update.

    pip install -e '.[app,gym]'
    python examples/calculator_tool.py --model Qwen/Qwen3-0.6B --max_steps 100

The model has to have a chat template with tools, as TRL asks for, or to write ChatML.
"""

import ast
import operator

import tools

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.rewards import reasoning_gym_reward


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
LONGEST = 200
SYSTEM_PROMPT = "Calculate by the tool, then answer with the number only."
QUESTION = "State the final answer to the following arithmetic problem: {} ="
SHOTS = [
    [
        {"role": "user", "content": QUESTION.format(problem)},
        {"role": "assistant", "content": tools.written("calculate", expression=problem)},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    for problem, answer in [
        ("23 + 41 - 5", "59"),
        ("95 - 27 + 10", "78"),
        ("51 + 88 - 60", "79"),
        ("64 - 40 - 12", "12"),
    ]
]


def calculate(expression: str) -> str:
    """
    Calculate an expression of numbers, + - * / and parentheses.

    Args:
        expression: The expression, such as "(3 + 4) * 2".

    Returns:
        The result.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, and {LONGEST} are allowed")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):g}"


def _value(node: ast.AST) -> float:
    """The value of a part of an expression. Nothing but numbers and the operators above is evaluated."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(operand=operand, op=op) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
    raise ValueError("an expression has numbers, + - * / and parentheses only")


def make_trainer(script: tools.Script, args: LZEGRPOConfig) -> LZEGRPOTrainer:
    """The trainer."""
    return LZEGRPOTrainer(
        model=script.model,
        reward_funcs=reasoning_gym_reward,
        args=args,
        train_dataset=tools.prompts(script.problems, SYSTEM_PROMPT, SHOTS[: script.shots]),
        processing_class=tools.tokenizer(script.model),
        tools=[calculate],
    )


if __name__ == "__main__":
    sums = "reasoning_gym:chain_sum?size=2000&min_terms=3&max_terms=5&min_digits=2"
    tools.train(make_trainer, problems=sums, output_dir="runs/calculator-tool")
