"""The update phase against TRL's own: the same rows, the same model, one process, step about."""

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from lze_trl.config import LZEGRPOConfig
from lze_trl.trainer import LZEGRPOTrainer

from ..addition import build_tokenizer
from ..comparison import Spread
from ..tables import table
from .shared import Lengths, circumstances, equal_batch, measured_on, ratios, reasoning_batch, shown, verdict


LENGTHS = ("equal", "log-normal")
SHARES = (1.0, 0.4, 0.2)
TARGETS = {("equal", 1.0): 1.0, ("equal", 0.4): 0.42, ("log-normal", 1.0): 0.75, ("log-normal", 0.4): 0.3}
CONTROL = "trl again"
"""A second trainer of TRL: how far two that are the same differ on this machine."""
_SPECIAL_TOKENS = 3  # of the tokenizer: random completions leave them out


@dataclass(frozen=True)
class UpdateSettings:
    """
    What is measured.

    Attributes:
        hidden_size (`int`): Width of the Qwen2 model, with heads of 64 and an inner width three times as large.
        layers (`int`): Its layers.
        vocabulary (`int`): Its vocabulary.
        longest (`int`): Longest completion in tokens.
        groups (`int`): P.
        group_size (`int`): G.
        micro_batch_rows (`int`): Rows of a micro-batch in TRL.
        steps (`int`): Optimizer steps of a repetition.
        repetitions (`int`): Repetitions with equal lengths, each of every method in turn.
        uneven_repetitions (`int`): The same with log-normal lengths, which take far longer and differ far more.
        dtype (`str`): Type of weights and activations.
    """

    hidden_size: int
    layers: int
    vocabulary: int
    longest: int
    groups: int = 10
    group_size: int = 8
    micro_batch_rows: int = 8
    steps: int = 1
    repetitions: int = 8
    uneven_repetitions: int = 3
    dtype: str = "float32"


PRESETS = {
    # Lengths are 1/16 of those of reasoning traces up to 16k, and the width is 1/16 of 4,096: attention has the same share
    # of the FLOPs as at full size
    "cpu": UpdateSettings(hidden_size=256, layers=2, vocabulary=1_024, longest=1_024),
    "gpu": UpdateSettings(
        hidden_size=1_024, layers=16, vocabulary=32_768, longest=4_096, micro_batch_rows=4, dtype="bfloat16"
    ),
    "tiny": UpdateSettings(
        hidden_size=64,
        layers=1,
        vocabulary=64,
        longest=64,
        groups=5,
        group_size=2,
        micro_batch_rows=2,
        repetitions=2,
        uneven_repetitions=2,
    ),
}


class Rows:
    """
    A `rollout_func` that answers with given tokens, and rewards that make every group worth training on.

    Args:
        batches (`list[Lengths]`): Lengths of the batches, in turn.
        vocabulary (`int`): Token ids are smaller than this.
        process (`int`): Which part of a batch is asked for, if several processes ask for theirs.
    """

    def __init__(self, batches: list[Lengths], vocabulary: int, process: int = 0):
        rng = np.random.default_rng(0)

        def tokens(lengths: np.ndarray) -> list[list[int]]:
            return [rng.integers(_SPECIAL_TOKENS, vocabulary, size=length).tolist() for length in lengths]

        self._batches = [(tokens(batch.prompt_tokens), tokens(batch.completion_tokens)) for batch in batches]
        self._turn, self._process = itertools.count(), process

    def rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return the next batch."""
        prompt_ids, completion_ids = self._batches[next(self._turn) % len(self._batches)]
        mine = slice(self._process * len(prompts), (self._process + 1) * len(prompts))
        return {"prompt_ids": prompt_ids[mine], "completion_ids": completion_ids[mine], "logprobs": None}


def every_other_passes(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward function: in each group, half of the completions pass."""
    return [float(index % 2) for index in range(len(completions))]


def now() -> float:
    """Return the seconds, with all work of the GPU done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class _Timed:
    """Mixin for a trainer: seconds and computed tokens of each optimizer step, without drawing and scoring."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.step_seconds: list[float] = []
        self.step_cpu_seconds: list[float] = []
        self.step_tokens: list[int] = []
        self.step_passes: list[int] = []
        self.step_micro_steps: list[int] = []
        self.tokens = self.forwards = self.micro_steps = 0
        self.elsewhere = self.elsewhere_cpu = 0.0
        super().__init__(*args, **kwargs)
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.add_callback(_StepTimer(self))

    def _count(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.tokens += kwargs["input_ids"].numel()
        self.forwards += 1
        self.micro_steps += torch.is_grad_enabled()

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        begin, begin_cpu = now(), time.process_time()
        yield
        self.elsewhere += now() - begin
        self.elsewhere_cpu += time.process_time() - begin_cpu

    def _generate(self, *args: Any, **kwargs: Any):
        with self._untimed():
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any):
        with self._untimed():
            return super()._calculate_rewards(*args, **kwargs)

    def run(self, steps: int) -> dict[str, float]:
        """Train; return the means over the optimizer steps of their seconds, CPU seconds and computed tokens."""
        self.args.max_steps = steps
        done = len(self.step_seconds)
        self.train()
        found = {
            "seconds": self.step_seconds,
            "cpu_seconds": self.step_cpu_seconds,
            "computed_tokens": self.step_tokens,
        }
        return {name: float(np.mean(values[done:])) for name, values in found.items()}


class _StepTimer(TrainerCallback):
    def __init__(self, trainer: _Timed):
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any):
        self.trainer.tokens = self.trainer.forwards = self.trainer.micro_steps = 0
        self.trainer.elsewhere = self.trainer.elsewhere_cpu = 0.0
        self.begin, self.begin_cpu = now(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any):
        self.trainer.step_seconds.append(now() - self.begin - self.trainer.elsewhere)
        self.trainer.step_cpu_seconds.append(time.process_time() - self.begin_cpu - self.trainer.elsewhere_cpu)
        self.trainer.step_tokens.append(self.trainer.tokens)
        self.trainer.step_micro_steps.append(self.trainer.micro_steps)
        self.trainer.step_passes.append(self.trainer.forwards + self.trainer.micro_steps)


class TimedGRPO(_Timed, GRPOTrainer):
    """TRL's trainer."""


class TimedLZE(_Timed, LZEGRPOTrainer):
    """This package's trainer."""


def save_model(settings: UpdateSettings, directory: Path) -> str:
    """Save a Qwen2 model with random weights, and its tokenizer."""
    set_seed(0)
    tokenizer = build_tokenizer()
    heads = max(1, settings.hidden_size // 64)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=settings.vocabulary,
            hidden_size=settings.hidden_size,
            intermediate_size=3 * settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=2 * settings.longest,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.to(torch.float32 if settings.dtype == "float32" else torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def build(
    settings: UpdateSettings,
    model: str,
    rows: Rows,
    share: float | None,
    directory: Path,
    processes: int = 1,
    micro_step_cost: int | None = None,
) -> _Timed:
    """Return the trainer of a share of the groups; `None` for TRL's own."""
    micro_steps = settings.groups * settings.group_size // (settings.micro_batch_rows * processes)
    shared = {
        "output_dir": str(directory),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,  # the weights have the type that is computed in
        "model_init_kwargs": {"dtype": settings.dtype},
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": settings.micro_batch_rows,
        "gradient_accumulation_steps": micro_steps,
        "num_generations": settings.group_size,
        "max_completion_length": settings.longest,
        "beta": 0.01,  # a pass for log-probabilities, those of the reference model
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": 1,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = GRPOConfig(**shared)
    if share is not None:
        own = {"strategy": "lze", "selection_ratio": share, "pruning": "none"}
        args = LZEGRPOConfig(**shared, **own, telemetry=False, summary=False)
    trainer = (TimedGRPO if share is None else TimedLZE)(
        model=model,
        reward_funcs=every_other_passes,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{index}+1=" for index in range(settings.groups)]}),
        rollout_func=rows.rollouts,
    )
    trainer.remove_callback(PrinterCallback)
    if micro_step_cost is not None:
        step = trainer.generation_step
        step.geometry = replace(step.geometry, micro_step_cost=micro_step_cost, further_micro_steps=math.inf)
    return trainer


def micro_step_tokens(trainer: _Timed, settings: UpdateSettings) -> dict[str, float]:
    """Say what a micro-step costs besides its tokens, from the times of forward and backward passes of 1 to 8 rows."""
    width = settings.longest // 8
    counts, seconds = (1, 2, 4, 8), []
    for rows in counts:
        ids = torch.randint(_SPECIAL_TOKENS, settings.vocabulary, (rows, width), device=trainer.accelerator.device)
        times = []
        for _ in range(2 * settings.repetitions):
            begin = now()
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), width - 1, compute_entropy=True
            )
            logps.sum().backward()
            times.append(now() - begin)
        trainer.model.zero_grad()
        seconds.append(min(times))
    slope, intercept = np.polyfit(np.array(counts) * width, seconds, 1)
    return {"tokens_per_second": float(1.0 / slope), "micro_step_tokens": max(0.0, float(intercept / slope))}


def _case(name: str, batches: list[Lengths], settings: UpdateSettings, model: str, directory: Path) -> dict[str, Any]:
    methods = {"trl": None} | {str(share): share for share in SHARES}
    if name == "equal":  # where the targets are so near to TRL that noise could decide
        methods[CONTROL] = None
    trainers = {
        method: build(settings, model, Rows(batches, settings.vocabulary), share, directory / name / method)
        for method, share in methods.items()
    }
    for trainer in trainers.values():
        trainer.run(1)  # the first step allocates
    measures = ("seconds", "cpu_seconds", "computed_tokens")
    found: dict[str, dict[str, list[float]]] = {measure: {method: [] for method in trainers} for measure in measures}
    order = list(trainers)
    for repetition in range(settings.repetitions if name == "equal" else settings.uneven_repetitions):
        first = repetition % len(order)  # every method has every place in turn
        for method in order[first:] + order[:first]:
            for measure, value in trainers[method].run(settings.steps).items():
                found[measure][method].append(value)
    return {"lengths": name, **found, "micro_step": micro_step_tokens(trainers["trl"], settings)}


def measure(quick: bool, keep: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """
    Time the update of TRL's trainer and of this package's at several shares of the groups, in turn.

    Args:
        quick (`bool`): Whether to measure something tiny.
        keep (`Callable`): Given the result so far when the case of one of `LENGTHS` is finished.
    """
    preset = "tiny" if quick else "gpu" if torch.cuda.is_available() else "cpu"
    settings = PRESETS[preset]
    # The first batch is that of the warm-up. Every trainer gets the same ones
    count = 1 + settings.repetitions * settings.steps
    rng = np.random.default_rng(0)
    shape = (settings.groups, settings.group_size, settings.longest)
    batches = {
        "equal": [equal_batch(*shape) for _ in range(count)],
        "log-normal": [reasoning_batch(*shape, rng) for _ in range(count)],
    }
    result = circumstances("update") | {"preset": preset, "settings": asdict(settings), "rows": []}
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(settings, Path(directory) / "model")
        for name in LENGTHS:
            result["rows"].append(_case(name, batches[name], settings, model, Path(directory)))
            keep(result)
    return result


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    settings, rows = result["settings"], []
    for case in result["rows"]:
        theirs = Spread(tuple(case["seconds"]["trl"])).median
        for method in [str(share) for share in SHARES] + [CONTROL] * (CONTROL in case["seconds"]):
            seconds, cpu, tokens = (
                ratios(case[measure][method], case[measure]["trl"])
                for measure in ("seconds", "cpu_seconds", "computed_tokens")
            )
            target = None if method == CONTROL else TARGETS.get((case["lengths"], float(method)))
            rows.append(
                [
                    case["lengths"],
                    "TRL again" if method == CONTROL else f"ρ = {float(method):g}",
                    f"{theirs:.3g}",
                    shown(seconds),
                    "–" if target is None else verdict(seconds.median, target),
                    shown(cpu),
                    shown(tokens),
                ]
            )
    header = [
        "lengths",
        "method",
        "TRL, s",
        "seconds × TRL's",
        "target",
        "CPU seconds × TRL's",
        "tokens computed × TRL's",
    ]
    costs = "; ".join(f"{case['micro_step']['micro_step_tokens']:.0f}" for case in result["rows"])
    speed = " and ".join(f"{case['micro_step']['tokens_per_second']:,.0f}" for case in result["rows"])
    missing = [name for name in LENGTHS if name not in [case["lengths"] for case in result["rows"]]]
    return "\n\n".join(
        [
            "## Update phase",
            "From scored completions to the end of the optimizer step: selection, packing, log-probabilities of the "
            "reference model, loss, backward and step, against TRL's on the same rows; every method in turn, median and "
            f"range of {settings['repetitions']} repetitions of {settings['steps']} step(s), or of "
            f"{settings['uneven_repetitions']} with log-normal lengths. "
            f"{settings['groups']} groups of {settings['group_size']} completions up to {settings['longest']:,} tokens, "
            f"{settings['micro_batch_rows']} rows a micro-batch in TRL; Qwen2 of width {settings['hidden_size']}, "
            f"{settings['layers']} layer(s), {settings['dtype']}.",
            table(header, rows),
            "*TRL again* is a second trainer of TRL against the first: differences within its range are none. CPU seconds "
            "feel other work on the machine less, and mean nothing on a GPU.",
            f"A micro-step costs as much as {costs} tokens besides its own, of which there are {speed} a second.",
            *(f"**Not finished: {name} lengths are missing.**" for name in missing),
            measured_on(result),
        ]
    )
