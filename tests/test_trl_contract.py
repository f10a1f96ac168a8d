"""
What this package takes for granted about TRL and transformers.

The trainer overrides private methods, and answers some of their calls. A release that changes one of them has to be
noticed here, with a clear message, and not as a wrong gradient.
"""

import inspect
from importlib.metadata import version

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler, get_callable_name, is_async_callable

import tiny
from lze_trl.engine import PRIVATE


TESTED = {"trl": "1.16", "transformers": "5.23"}

SIGNATURES = {
    GRPOTrainer.training_step: "(self, model, inputs, num_items_in_batch)",
    GRPOTrainer.compute_loss: "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    GRPOTrainer.get_train_dataloader: "(self)",
    GRPOTrainer.log: "(self, logs: dict[str, float], start_time: float | None = None) -> None",
    Trainer.init_hf_repo: "(self, token: str | None = None, private: bool | None = None) -> None",
    GRPOTrainer.create_model_card: (
        "(self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None)"
    ),
    Trainer.train: (
        "(self, resume_from_checkpoint: str | bool | None = None, trial: 'optuna.Trial | dict[str, Any] | None' = None, "
        "ignore_keys_for_eval: list[str] | None = None) -> transformers.trainer_utils.TrainOutput"
    ),
    RepeatSampler.__init__: (
        "(self, data_source: collections.abc.Sized, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1, "
        "shuffle: bool = True, seed: int | None = None)"
    ),
    get_callable_name: "(func: collections.abc.Callable) -> str",
    is_async_callable: "(func: collections.abc.Callable) -> bool",
}
SIGNATURES |= {getattr(GRPOTrainer, name): form for name, form in PRIVATE.items() if form is not None}

ATTRIBUTES = [
    *(name for name, form in PRIVATE.items() if form is None and name != "_get_logits_processor"),
    "accelerator",
    "aux_loss_enabled",
    "beta",
    "entropy_coef",
    "eos_token_ids",
    "log_completions",
    "loss_type",
    "mask_truncated_completions",
    "num_generations",
    "num_iterations",
    "pad_to_multiple_of",
    "reward_func_names",
    "reward_weights",
    "router_aux_loss_coef",
    "scale_rewards",
    "shuffle_dataset",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_transformers_continuous_batching",
    "use_vllm",
    "vllm_importance_sampling_correction",
]


def explain(what: str) -> str:
    running = ", ".join(f"{name} {version(name)}" for name in TESTED)
    tested = ", ".join(f"{name} {release}" for name, release in TESTED.items())
    return (
        f"{what}\nlze_trl was written for {tested}; this is {running}. Read what has changed, adapt what depends on it, "
        "run the exactness laws (tests/test_laws.py), and only then change this table and the pin in setup.cfg."
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> GRPOTrainer:
    return GRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.digit_reward,
        args=tiny.config(tmp_path_factory.mktemp("contract")),
        train_dataset=tiny.prompts(5),
        processing_class=tiny.tokenizer(),
    )


@pytest.mark.parametrize("package", TESTED)
def test_release(package):
    assert version(package).startswith(f"{TESTED[package]}."), explain(f"{package} is another release.")


@pytest.mark.parametrize(("function", "expected"), SIGNATURES.items(), ids=lambda x: getattr(x, "__qualname__", ""))
def test_signature(function, expected):
    given = str(inspect.signature(function))
    assert given == expected, explain(f"`{function.__qualname__}` was {expected}\nand is now {given}.")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute(trainer, name):
    optional = name in ("_last_loaded_step", "_environment_pool")  # with vLLM, or an environment
    assigned = optional and f"self.{name} =" in inspect.getsource(GRPOTrainer)
    assert hasattr(trainer, name) or assigned, explain(f"`GRPOTrainer` has no attribute `{name}` any more.")


def test_log_of_completions(trainer):
    known = {"images", "prompt", "completion", "rewards", "advantages", "extra"}
    assert set(trainer._logs) == known, explain(f"`_logs` had {sorted(known)}\nand now has {sorted(trainer._logs)}.")
