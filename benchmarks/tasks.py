"""The tasks of the benchmark: their warm starts, their data, and the settings that all strategies share."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .settings import BenchError, content_hash, unknown_name


CHECKOUT = Path(__file__).resolve().parents[1]
ADDITION_DIR = CHECKOUT / "runs" / "demo" / "warm-start"
CALCULATOR_DIR = CHECKOUT / "runs" / "calculator"
OF_ADDITION = ("addition", "few_sums")  # tasks with its model and data
# Tasks whose prompts [`~benchmarks.skills`] makes
OF_SKILLS = ("words", "words_small", "few_words", "skills", "count")
MIXED_DIR = CHECKOUT / "runs" / "mixed"
TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "test.jsonl"
_READY_MADE = CHECKOUT.parent / "shared"
_VALIDATION_SHARE = 4  # one in so many of the held-out prompts is for tuning only

SHARED: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "num_generations": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "loss_type": "dapo",
    "scale_rewards": "none",
    "beta": 0.0,
    "epsilon": 0.2,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.01,
}


@dataclass(frozen=True)
class Task:
    """
    A task.

    Attributes:
        title (`str`): What tables call it.
        training (`dict`): Fields of [`~trl.GRPOConfig`] that all strategies share.
        learning_rate (`float`): Learning rate of all strategies, unless it is tuned.
        steps (`int`): Optimizer steps of the baseline.
        quick_steps (`int`): The same with `--quick`.
        eval_every (`int`): Optimizer steps between evaluations.
        train_limit (`int`, *optional*): Number of training prompts. Defaults to all.
        eval_train (`int`): Number of training prompts to evaluate on.
        on_gpu (`dict`): What replaces fields of `training` where there is a GPU.
    """

    title: str
    training: dict[str, Any]
    learning_rate: float
    steps: int
    quick_steps: int
    eval_every: int
    train_limit: int | None = None
    eval_train: int = 256
    on_gpu: dict[str, Any] = field(default_factory=dict)


# In each, an update follows each generation batch
TASKS: dict[str, Task] = {
    "addition": Task(
        title="Two-digit addition",
        training={
            **SHARED,
            "generation_batch_size": 256,
            "per_device_train_batch_size": 128,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 5,
        },
        learning_rate=2e-4,
        steps=150,
        quick_steps=100,
        eval_every=5,
        train_limit=512,
    ),
    "calculator": Task(
        title="GSM8K calculator expressions",
        training={
            **SHARED,
            "generation_batch_size": 256,
            "per_device_train_batch_size": 64,  # what plain TRL is fastest with on one core, of 32, 64, 128 and 512
            "gradient_accumulation_steps": 4,
            "max_completion_length": 8,
        },
        learning_rate=2.5e-5,
        steps=120,
        quick_steps=50,
        eval_every=10,
    ),
}

TASKS["mixed"] = replace(
    TASKS["addition"],
    title="Sums of one to five digits, products and remainders",
    training=TASKS["addition"].training | {"max_completion_length": 8},
    steps=96,  # three quarters of a pass
    quick_steps=24,
    eval_every=12,
    train_limit=None,
)


TASKS["few_sums"] = replace(
    TASKS["addition"],
    title="Two-digit addition, 64 prompts",
    training=TASKS["addition"].training | {"generation_batch_size": 128, "gradient_accumulation_steps": 1},
    steps=48,  # twelve passes
    quick_steps=24,
    eval_every=4,
    train_limit=64,
)
_SMALL = ("addition", "calculator")  # what `all` means


def _of_skills(title: str, max_completion_length: int, rows: int = 256, **fields: Any) -> Task:
    """
    A task of [`~benchmarks.skills`] with so many rows in a batch; `fields` replace those of the others. In bfloat16 the model learns in jumps: a
    step at this rate is smaller than the spacing of most of its weights.
    """
    batch = {
        "generation_batch_size": rows,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": rows // 32,
    }
    return Task(
        title=f"{title}, SmolLM2-135M",
        training={**SHARED, **batch, "max_completion_length": max_completion_length},
        learning_rate=2e-5,
        quick_steps=4,
        eval_train=64,
        on_gpu={"use_cpu": False, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1},
        **{"steps": 12, "eval_every": 3, **fields},
    )


TASKS |= {
    "words": _of_skills("Words to numbers", 10),
    "words_small": _of_skills("Words to numbers, 8 × 8", 10, rows=64, eval_every=4),
    # Nine passes over them, where pruning has something to leave out
    "few_words": _of_skills("Words to numbers, 32 prompts", 10, rows=64, steps=36, eval_every=4, train_limit=32),
    "skills": _of_skills("Five skills", 26),
    "count": _of_skills("Counting", 58),
}


@dataclass(frozen=True)
class TaskFiles:
    """
    Where the warm start and the data of a task lie.

    Attributes:
        model (`Path`): Folder of model and tokenizer.
        train (`Path`): Training prompts, JSON lines with `prompt` and `solution` or `answer`.
        held_out (`Path`): Held-out prompts, likewise.
    """

    model: Path
    train: Path
    held_out: Path

    @property
    def model_hash(self) -> str:
        """Hash of the weights."""
        return content_hash(*sorted(self.model.glob("*.safetensors")))

    @property
    def data_hash(self) -> str:
        """Hash of the data files."""
        return content_hash(self.train, self.held_out)


@dataclass(frozen=True)
class TaskData:
    """
    Prompts of a task, as mappings with `prompt` and `solution`.

    Attributes:
        train (`list[dict]`): What is trained on.
        evaluation (`dict[str, list[dict]]`): What is evaluated on: `held_out` and a sample of `train`.
    """

    train: list[dict[str, str]]
    evaluation: dict[str, list[dict[str, str]]] = field(default_factory=dict)


def chosen_tasks(name: str) -> list[str]:
    """
    Names of the tasks that `--task` means; `all` leaves out those of a language model, which take far longer on a CPU.

    Raises:
        BenchError: There is no such task.
    """
    if name == "all":
        return list(_SMALL)
    if name not in TASKS:
        raise unknown_name("task", name, [*TASKS, "all"])
    return [name]


def locate(task: str, model: str | None = None, data: str | None = None) -> TaskFiles:
    """
    Find the files of a task.

    Args:
        task (`str`): Name of the task.
        model (`str`, *optional*): Folder of model and tokenizer, instead of the task's own.
        data (`str`, *optional*): Folder with `train.jsonl` and `test.jsonl`, instead of the task's own.

    Raises:
        BenchError: They are not there. What the benchmark makes when it is needed may be missing: files of the addition task
            and of those of skills.
    """
    if (model is None) != (data is None):
        raise BenchError("`--model` and `--data` belong together: give both or neither.")
    if model is not None:
        return _checked(TaskFiles(Path(model), Path(data) / TRAIN_FILE, Path(data) / HELD_OUT_FILE))
    if task in OF_ADDITION:
        folder = ADDITION_DIR
        return TaskFiles(folder / "model", folder / TRAIN_FILE, folder / "held_out.jsonl")
    if task == "mixed":
        return TaskFiles(ADDITION_DIR / "model", MIXED_DIR / TRAIN_FILE, ADDITION_DIR / "held_out.jsonl")
    if task in OF_SKILLS:
        folder = CHECKOUT / "runs" / "skills"
        return TaskFiles(folder / "model", folder / task / TRAIN_FILE, folder / task / HELD_OUT_FILE)
    shared = _READY_MADE / "data" / "gsm8k_calc"
    for files in (
        TaskFiles(CALCULATOR_DIR / "model", CALCULATOR_DIR / TRAIN_FILE, CALCULATOR_DIR / HELD_OUT_FILE),
        TaskFiles(_READY_MADE / "models" / "gsm8k-calc-1.6m", shared / TRAIN_FILE, shared / HELD_OUT_FILE),
    ):
        if files.model.is_dir():
            return _checked(files)
    raise BenchError(
        "The calculator task has no warm start yet. Make it with `python -m benchmarks.calculator`, or give "
        "`--model DIR --data DIR`, the second with `train.jsonl` and `test.jsonl`."
    )


def _checked(files: TaskFiles) -> TaskFiles:
    for path in (files.train, files.held_out):
        if not path.is_file():
            raise BenchError(
                f"There is no file `{path}`. `--data` takes a folder with `train.jsonl` and `test.jsonl`."
            )
    if not any(files.model.glob("*.safetensors")):
        raise BenchError(f"`{files.model}` holds no `*.safetensors`. `--model` takes a folder of a saved model.")
    return files


def profile_of(task: str) -> Path:
    """Folder of the profile of a task's prompts, which `python -m benchmarks.profiled` makes."""
    return CHECKOUT / "runs" / "profiles" / task


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a data file as mappings with `prompt` (or `question`), `solution` (or `answer`) and perhaps `kind`, each pair once."""
    pairs = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt"] if "prompt" in row else row["question"]
        pairs[prompt, row["solution"] if "solution" in row else row["answer"]] = row.get("kind")
    rows = [{"prompt": prompt, "solution": solution, "kind": kind} for (prompt, solution), kind in pairs.items()]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def load(task: Task, files: TaskFiles, held_out: str) -> TaskData:
    """
    Read the prompts of a task.

    A held-out prompt that also occurs in the training file, with its answer written in another way, is left out. A quarter
    of the others is for tuning only.

    Args:
        task ([`Task`]): The task.
        files ([`TaskFiles`]): Its files.
        held_out (`str`): `"test"` or `"validation"`.

    Raises:
        BenchError: `held_out` is neither.
    """
    if held_out not in ("test", "validation"):
        raise unknown_name("part of the held-out prompts", held_out, ("test", "validation"))
    rows = read_rows(files.train)
    seen = {row["prompt"] for row in rows}
    train = rows[: task.train_limit]
    unseen = [row for row in read_rows(files.held_out) if row["prompt"] not in seen]
    # The same split and sample in every run
    generator = np.random.default_rng(0)
    order = generator.permutation(len(unseen))
    cut = len(unseen) // _VALIDATION_SHARE
    part = order[cut:] if held_out == "test" else order[:cut]
    sample = generator.permutation(len(train))[: task.eval_train]
    return TaskData(
        train=train,
        evaluation={
            "held_out": [unseen[i] for i in np.sort(part)],
            "train": [train[i] for i in np.sort(sample)],
        },
    )
