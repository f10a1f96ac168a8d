"""
`make demo-llm`: a real language model learns to write numbers that stand in words, on one core of this machine's CPU.

    python -m benchmarks.demo_llm [--plain] [--output DIR]

SmolLM2-135M-Instruct is made from a package of the index, and trained by `gate` with 64 prompts × 4 on the task `words`, in bfloat16 or float32, whichever
this processor is faster in. Plain GRPO's run with the same model, data and settings is one that is kept in `benchmarks/results/words` or `words_float32`:
what it took in rollouts, updates and FLOPs holds for any machine, seconds do not. With `--plain`, it is made here too, which takes about half an hour.
"""

import argparse
import json
import sys
import timeit
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from recipes import smollm2

from .jobs import RESULT_FILE, Options, has_gpu, plan
from .settings import BenchError, RunSettings, write_json
from .strategies import BASELINE
from .suite import RESULTS_FILE, bench, read_results, ready
from .tasks import CHECKOUT


OUTPUT = CHECKOUT / "runs" / "demo-llm"
KEPT = [CHECKOUT / "benchmarks" / "results" / name / RESULTS_FILE for name in ("words", "words_float32")]
TASK, ARM = "words", "gate_g4"


def faster_in_float32() -> bool:
    """Say whether matrix products in bfloat16 are the slower ones: without AMX, a processor may need twice the time for them."""
    import torch  # when it is to compute

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.ones(shape, dtype=dtype) for shape in ((832, 576), (576, 1536)))
        seconds[dtype] = min(timeit.repeat(lambda pair=(left, right): pair[0] @ pair[1], number=1, repeat=20))
    return seconds[torch.float32] < seconds[torch.bfloat16]


def run(options: Options, plain: bool, console: Console):
    """Train, unless that was done before, and say what came out."""
    if not (smollm2.MODEL_DIR / "config.json").is_file():
        smollm2.make_model(smollm2.MODEL_DIR)
    baseline = next(
        job for job in plan(options, {TASK: ready(TASK, options, console)}) if job.settings.strategy == BASELINE
    )
    lines = [line for path in KEPT for line in path.read_text(encoding="utf-8").splitlines()]
    every = {"eval_every": baseline.settings.eval_every}  # evaluations change nothing of a run
    kept = {RunSettings.from_dict(result["settings"] | every).key: result for result in map(json.loads, lines)}
    if not plain and not baseline.finished and baseline.settings.key in kept:
        baseline.folder.mkdir(parents=True, exist_ok=True)
        write_json(baseline.folder / RESULT_FILE, kept[baseline.settings.key])
    if not baseline.finished:
        why = "" if plain else "Plain GRPO has no kept run with this model, data and settings. "
        console.print(f"{why}It is trained here first: half an hour more.")
    console.print(
        f"The model learns, in {'bfloat16' if options.bfloat16 else 'float32'}, and is evaluated after every third step: up to 15 minutes on an idle core."
    )
    bench(options)
    console.print("\n".join(told(options.output)), soft_wrap=True, markup=False)


def told(output: Path) -> list[str]:
    """Return the accuracy before and after, with 95 % intervals over the held-out prompts, what each run has cost, and what plain GRPO took to the same accuracy."""
    lines = ["Probability of the right answer on held-out numbers, and its 95 % interval:"]
    curves = {result["settings"]["strategy"]: result["curve"] for result in read_results(output)}
    for name in (name for name in (ARM, BASELINE) if name in curves):
        first, last = curves[name][0], curves[name][-1]
        before, after = (
            f"{of['mean']:.3f} ± {1.96 * of['standard_error']:.3f}"
            for of in (point["accuracy"]["held_out"] for point in (first, last))
        )
        lines.append(f"  {name}: {before} before, {after} after {_cost(last)}, {last['rows_trained']:,} trained on")
    if len(lines) == 3:
        goal = curves[ARM][-1]["accuracy"]["held_out"]["mean"]
        reached = next((p for p in curves[BASELINE] if p["accuracy"]["held_out"]["mean"] >= goal), None)
        took = "never had it" if reached is None else f"took {_cost(reached)}"
        lines.append(f"To the accuracy of {ARM}, plain GRPO {took}.")
    return lines


def _cost(point: dict) -> str:
    return f"{point['step']} steps, {point['flops']['total']:.1e} FLOPs and {point['rows_rolled_out']:,} completions"


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.demo_llm`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_llm", description=__doc__.splitlines()[1])
    parser.add_argument("--plain", action="store_true", help="train plain GRPO here, too")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="default: runs/demo-llm")
    given = parser.parse_args(arguments)
    bfloat16 = has_gpu() or not faster_in_float32()
    options = Options(task=TASK, strategies=(ARM,), seeds=(0,), stretch=1.25, bfloat16=bfloat16, output=given.output)
    try:
        run(options, given.plain, Console(highlight=False, soft_wrap=True))
    except (BenchError, smollm2.NoWheelError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
