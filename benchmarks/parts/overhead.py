"""What this package does besides TRL's work, on two processes: milliseconds of each part of a step."""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM

from lze_trl.batch import Batch
from lze_trl.config import LZEGRPOConfig
from lze_trl.engine import sequence_logprobs
from lze_trl.memory.identity import ID_COLUMN
from lze_trl.memory.state import PromptState
from lze_trl.pack.layout import Geometry, Layout, pack
from lze_trl.pack.weights import weights_of_chosen
from lze_trl.record.ledger import Ledger, TokenCost
from lze_trl.record.recorder import Recorder
from lze_trl.record.tables import batch_metrics, prompt_columns, row_columns
from lze_trl.rollout.controllers import Gate
from lze_trl.rollout.rounds import gathered_columns
from lze_trl.seeding import keyed_rng
from lze_trl.select.selectors import EnergySelector, choose, quota
from lze_trl.step import RECORDED_ONLY

from ..comparison import Spread
from ..settings import write_json
from ..tables import table
from .shared import circumstances, launch, measured_on, shown, verdict
from .state import distinct_ids


PROCESSES, SHARE, TARGET = 2, 0.4, 0.01
_PROMPTS, _IN_TURN, _PROMPT_TOKENS, _CHARACTERS = 100_000, 2_048, 200, 4
_VOCABULARY = 32_768
_FLOPS_PER_TOKEN, _FLOPS_PER_SECOND = 6 * 0.5e9, 4e14
PARTS = {
    "gather": "telling all processes the results",
    "foresight": "forecasts of foresight and of the gate",
    "state": "scoring groups, learning from them and remembering prompts",
    "selection": "selection",
    "packing": "packing",
    "redistribution": "redistribution of the chosen rows",
    "telemetry": "metrics and telemetry",
}
"""Parts of a step, and what they are called."""


class Worker:
    """
    One of the processes. Every method is one part of a step, on what the parts before have left.

    Args:
        groups (`int`): P.
        group_size (`int`): G.
        tokens (`int`): Mean length of a completion; they are half as long to half longer.
        directory (`Path`): For the telemetry.
    """

    def __init__(self, groups: int, group_size: int, tokens: int, directory: Path):
        # Before the accelerator, whose settings it changes
        args = LZEGRPOConfig(output_dir=str(directory), use_cpu=True, bf16=False, report_to="none")
        self.accelerator = Accelerator(cpu=True)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.size = groups * group_size
        self.group = np.repeat(np.arange(groups), group_size)
        self.rng = np.random.default_rng(0)  # the same on every process
        self.ids = distinct_ids(_PROMPTS, self.rng)
        self.prompt_state = PromptState(capacity=_PROMPTS)
        rows = self.size // self.world
        own = np.random.default_rng(self.rank)

        def token_ids(lengths: np.ndarray) -> list[list[int]]:
            return [own.integers(0, _VOCABULARY, size=length).tolist() for length in lengths]

        lengths = own.integers(tokens // 2, tokens + tokens // 2, size=rows, endpoint=True)
        self.held = {
            "prompt_ids": token_ids(np.full(rows, _PROMPT_TOKENS)),
            "completion_ids": token_ids(lengths),
            "logprobs": [(-own.random(length)).tolist() for length in lengths],
            "completion": ["x" * (_CHARACTERS * tokens)] * rows,
        }
        steps = rows // 8
        self.geometry = Geometry(self.world, steps, steps, micro_batch_rows=8)
        self.selector, self.gate, self.generation = EnergySelector(), Gate(group_size), 0
        self.recorder = Recorder(args, {}, ["reward"], lambda: Ledger().summary(TokenCost(1.0, 3.0)), self.accelerator)

    def draw(self):
        """Make prompts and outcomes of the next batch; not measured."""
        chance = np.repeat(self.rng.random(self.group[-1] + 1), np.bincount(self.group))
        self.outcomes = (self.rng.random(self.size) < chance).astype(np.float64)
        ids = self.rng.choice(self.ids[:_IN_TURN], self.group[-1] + 1, replace=False)[self.group]
        mine = slice(self.rank * self.size // self.world, (self.rank + 1) * self.size // self.world)
        self.inputs = [{"prompt": f"prompt {id}", ID_COLUMN: int(id)} for id in ids[mine]]

    def gather(self):
        """Sum log-probabilities, and gather lengths and ids once."""
        held = self.held | {"input": self.inputs, "prompt": [row["prompt"] for row in self.inputs]}
        lengths = np.array([len(ids) for ids in held["completion_ids"]])
        numbers = {
            ID_COLUMN: np.array([row[ID_COLUMN] for row in self.inputs]),
            "prompt_tokens": np.array([len(ids) for ids in held["prompt_ids"]]),
            "completion_tokens": lengths,
            "loss_tokens": lengths,
            "logprobs": sequence_logprobs(held["logprobs"], None, len(lengths)),
        }
        columns = gathered_columns(numbers, self.accelerator)
        prompt_ids = np.zeros(self.group[-1] + 1, dtype=np.int64)
        prompt_ids[self.group] = columns.pop(ID_COLUMN)
        owner, place = np.divmod(np.arange(self.size), len(lengths))
        scored = Batch.of(
            prompt_ids,
            self.group,
            self.outcomes,
            self.outcomes,
            **columns,
            rewards_per_func=self.outcomes[:, np.newaxis],
            owner=owner,
            place=place,
        )
        self.scored = replace(scored, held=held)

    def foresight(self):
        """Compute what is expected of each group before and after its first completion, and whether the gate goes on with it."""
        whole, rng = self.scored, keyed_rng(0, self.generation, "rollouts")
        first = np.unique(whole.group, return_index=True)[1]
        drawn = whole.take(first)
        for round in (0, 1):
            prompts = self.prompt_state.prompts(whole.prompt_ids, drawn if round else None)
            self.gate.probabilities(round, prompts, drawn)
            self.gate.draw(round, prompts, drawn, rng)

    def state(self):
        """Pass rates and energies. The models learn from every group, the most that there can be."""
        self.groups = self.prompt_state.score_and_store(self.scored, np.ones(self.scored.num_groups))
        self.scored = self.scored.with_prompts(**vars(self.groups))

    def selection(self):
        """Select the groups to train on."""
        k = quota(SHARE, len(self.groups))
        rng = keyed_rng(0, self.generation, "selection")
        self.chosen_groups = choose(self.selector, self.groups, k, rng)
        self.chosen = np.flatnonzero(self.chosen_groups[self.group])

    def packing(self):
        """Decide where each chosen row is computed."""
        chosen = self.scored.take(self.chosen)
        self.lengths = chosen.prompt_tokens, chosen.completion_tokens
        rng = keyed_rng(0, self.generation, "steps")
        weights = weights_of_chosen(chosen.loss_tokens, np.ones(len(self.chosen)), self.geometry, rng)
        self.layout: Layout = pack(*self.lengths, weights.chunk, self.geometry, chosen.owner)

    def redistribution(self):
        """Send chosen rows to the processes that compute them."""
        held = {name: values for name, values in self.scored.held.items() if name not in RECORDED_ONLY}
        replace(self.scored.take(self.chosen), held=held).moved(self.layout, self.accelerator)

    def telemetry(self):
        """Make the metrics for the log, and a record for the background thread."""
        batch_metrics(self.groups, self.chosen_groups)
        pruned = self.prompt_state.pruned(self.groups.prompt_ids)
        prompts = prompt_columns(self.groups, selected=self.chosen_groups, pruned=pruned)
        rows = row_columns(self.scored)
        self.recorder.record(prompts, rows, self.scored, self.generation, step=0)

    def step(self) -> dict[str, float]:
        """Return the seconds of each part, of the slowest process, and of the background thread's work."""
        self.draw()
        seconds = {}
        for name in PARTS:
            self.accelerator.wait_for_everyone()
            begin = time.perf_counter()
            getattr(self, name)()
            seconds[name] = time.perf_counter() - begin
        begin = time.perf_counter()
        self.recorder.flush()
        seconds["background"] = time.perf_counter() - begin
        self.generation += 1
        slowest = self.accelerator.gather(torch.tensor([list(seconds.values())], dtype=torch.float64)).amax(dim=0)
        return dict(zip(seconds, slowest.tolist(), strict=True))


def smallest_update(tokens: int) -> dict[str, float]:
    """Return the seconds of forward and backward for one row with the smallest sensible model, and its weights."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1_024,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2 * (tokens + _PROMPT_TOKENS),
        )
    )
    ids = torch.randint(0, 1_024, (4, tokens + _PROMPT_TOKENS))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        times.append(time.perf_counter() - begin)
    return {"row_seconds": min(times) / len(ids), "parameters": model.num_parameters()}


def measure(quick: bool) -> dict[str, Any]:
    """Measure milliseconds of each part at P = 1024, G = 8 and completions of 1,000 tokens on average, on two processes."""
    groups, group_size, tokens, repetitions = (16, 4, 50, 2) if quick else (1_024, 8, 1_000, 5)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        shape = [str(number) for number in (groups, group_size, tokens, repetitions)]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        launch([*launcher, "-m", __name__, str(report), *shape])
        steps = json.loads(report.read_text())
    return circumstances("overhead") | {
        "groups": groups,
        "group_size": group_size,
        "tokens": tokens,
        "milliseconds": {name: [1e3 * step[name] for step in steps] for name in steps[0]},
        "smallest": smallest_update(tokens),
    }


def step_seconds(result: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of what a step is compared with: nothing but the update of the chosen rows on each of two processes."""
    rows = SHARE * result["groups"] * result["group_size"] / PROCESSES
    smallest = result["smallest"]
    flops = _FLOPS_PER_TOKEN * rows * (result["tokens"] + _PROMPT_TOKENS)
    return {
        f"measured: a model of {smallest['parameters'] / 1e6:.1f} M weights on a core of this machine": (
            rows * smallest["row_seconds"]
        ),
        "computed: a model of 0.5 G weights on a GPU at 400 TFLOP/s": flops / _FLOPS_PER_SECOND,
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    spreads = {name: Spread(tuple(values)) for name, values in result["milliseconds"].items()}
    rows = [[title, shown(spreads[name])] for name, title in PARTS.items()]
    totals = Spread(tuple(map(sum, zip(*(result["milliseconds"][name] for name in PARTS), strict=True))))
    rows.append(["together", shown(totals)])
    rows.append(["(writing of the telemetry, in the background)", shown(spreads["background"])])
    telemetry, background = (spreads[name].median for name in ("telemetry", "background"))
    shares = [
        [
            name,
            f"{seconds:.3g}",
            f"{totals.median / 1e3 / seconds:.2%}",
            verdict(totals.median / 1e3 / seconds, TARGET),
            f"{telemetry / 1e3 / seconds:.2%}",
            f"{(telemetry + background) / 1e3 / seconds:.2%}",
        ]
        for name, seconds in step_seconds(result).items()
    ]
    return "\n\n".join(
        [
            "## Overhead",
            f"{result['groups']:,} groups of {result['group_size']} completions of {result['tokens'] // 2:,} to "
            f"{result['tokens'] * 3 // 2:,} tokens with log-probabilities, ρ = {SHARE:g}, {PROCESSES} processes (gloo), one optimizer step a batch, telemetry as by default. Milliseconds "
            f"of the slowest process, median and range of {len(totals.values)} steps.",
            table(["part", "ms"], rows),
            "As a share of the update of the chosen rows alone, without rollouts and log-probabilities. A step of "
            f"{totals.median / 1e3 / TARGET:.0f} s or longer has less than {TARGET:.0%} of it.",
            table(["update", "s", "share", "target", "telemetry", "telemetry, its background too"], shares),
            measured_on(result),
        ]
    )


def main(argv: list[str] | None = None):
    """Run a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    for name in ("groups", "group_size", "tokens", "repetitions"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    worker = Worker(arguments.groups, arguments.group_size, arguments.tokens, arguments.report.parent)
    for _ in range(3):  # the first one allocates, and prompts become known
        worker.step()
    steps = [worker.step() for _ in range(arguments.repetitions)]
    worker.recorder.close()
    if worker.rank == 0:
        write_json(arguments.report, steps)
    worker.accelerator.end_training()


if __name__ == "__main__":
    main()
