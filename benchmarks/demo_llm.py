"""
`make demo-llm`: a real language model learns to write numbers that stand in words, on one core of this machine's CPU.

    python -m benchmarks.demo_llm [--output DIR]

SmolLM2-135M-Instruct is made from a package of the index, and trained by plain TRL and by `strategy: gate`, both here, in float32, with
8 prompts × 8 completions a step, from the same weights and in the same order of prompts (the task `words_small` of the benchmark).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from recipes import smollm2

from .jobs import Options
from .settings import BenchError
from .strategies import BASELINE
from .suite import bench, read_results
from .tasks import CHECKOUT


OUTPUT = CHECKOUT / "runs" / "demo-llm"
TASK, ARM = "words_small", "gate_default"
NAMES = {BASELINE: "plain TRL", ARM: "gate"}


def run(options: Options, console: Console):
    """Train, unless that was done before, and say what came out."""
    if not (smollm2.MODEL_DIR / "config.json").is_file():
        smollm2.make_model(smollm2.MODEL_DIR)
    console.print("The model learns twice, by plain TRL and by `strategy: gate`: ten minutes on an idle core.")
    bench(options)
    console.print("\n".join(told(options.output)), soft_wrap=True, markup=False)


def told(output: Path) -> list[str]:
    """Return the accuracy before and after, with 95 % intervals over the held-out prompts, and what each run has cost."""
    lines = ["Probability of the right answer on held-out numbers, and its 95 % interval:"]
    curves = {result["settings"]["strategy"]: result["curve"] for result in read_results(output)}
    for strategy, name in NAMES.items():
        before, after = (
            f"{of['mean']:.3f} ± {1.96 * of['standard_error']:.3f}"
            for of in (curves[strategy][place]["accuracy"]["held_out"] for place in (0, -1))
        )
        last = curves[strategy][-1]
        cost = f"{last['flops']['total']:.1e} FLOPs, {last['rows_rolled_out']:,} completions, {last['rows_trained']:,} trained on"
        lines.append(f"  {name}: {before} before, {after} after {last['step']} steps, {cost}")
    return [*lines, "One run of each says little: docs/results.md has five seeds."]


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.demo_llm`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_llm", description=__doc__.splitlines()[1])
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="default: runs/demo-llm")
    given = parser.parse_args(arguments)
    options = Options(task=TASK, strategies=(ARM,), seeds=(0,), stretch=1.0, output=given.output)
    try:
        run(options, Console(highlight=False, soft_wrap=True))
    except (BenchError, smollm2.NoWheelError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
