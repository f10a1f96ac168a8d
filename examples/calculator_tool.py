"""
GRPO on sums of reasoning-gym with a calculator as a tool; groups without a gradient cost no update.

    pip install -e '.[app,gym]'
    python examples/calculator_tool.py --model Qwen/Qwen3-0.6B --max_steps 100

The model has to have a chat template with tools, as TRL asks for.
"""

import argparse
import ast
import operator

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.data import load_prompts
from lze_trl.rewards import reasoning_gym_reward


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
LONGEST = 200


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


def make_trainer(model: str, problems: str, **settings) -> LZEGRPOTrainer:
    """The trainer, for problems such as `reasoning_gym:chain_sum?size=500`."""
    return LZEGRPOTrainer(
        model=model,
        reward_funcs=reasoning_gym_reward,
        args=LZEGRPOConfig(**settings),
        train_dataset=load_prompts(problems, prompt_suffix=" Use the tool, and answer with the number only."),
        tools=[calculate],
    )


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--problems", default="reasoning_gym:chain_sum?size=2000&min_terms=3&max_terms=5&min_digits=2")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--output_dir", default="runs/calculator-tool")
    given = vars(parser.parse_args())
    settings = {"num_generations": 8, "generation_batch_size": 128, "max_completion_length": 512}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 32, "telemetry": True}
    make_trainer(given.pop("model"), given.pop("problems"), **settings, **given).train()


if __name__ == "__main__":
    main()
