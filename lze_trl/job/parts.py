"""Make the parts that a recipe names: data, rewards, evaluations, and what self-instruction begins with."""

import json
import logging
from dataclasses import replace
from typing import Any

from datasets import Dataset
from trl.trainer.utils import get_callable_name

from ..config import LZEGRPOConfig
from ..data import PromptStyle, load_mixture
from ..evaluation.run import Evaluation
from ..evaluation.settings import Decoding
from ..evaluation.tasks import find_tasks, load_problems
from ..names import imported
from ..prompt_checks import text_of
from ..rewards import REWARDS, accuracy_reward, get_reward
from ..rollout.group_rewards import GroupReward
from ..selfplay.online import Instruction
from ..selfplay.writer import Seeds
from . import RecipeError
from .recipe import LZEScriptArguments


logger = logging.getLogger(__name__)


def load_data(args: LZEScriptArguments, training_args: LZEGRPOConfig) -> tuple[Dataset, Dataset | None]:
    """Load the training set, and the evaluation set if the recipe names one."""
    if not args.datasets:
        raise RecipeError("`datasets` names no training set. Give a Hub id or a local file.")
    shared = {name: vars(args)[name] for name in ("system_prompt", "prompt_suffix", "conversational")}
    shared |= _columns(args)
    with training_args.main_process_first(desc="datasets"):
        train = load_mixture(args.datasets, unlabelled=args.unlabelled, limit=args.max_train_samples, **shared)
        if not args.eval_datasets:
            return train, None
        return train, load_mixture(args.eval_datasets, limit=args.max_eval_samples, **shared)


def _columns(args: LZEScriptArguments) -> dict[str, Any]:
    names = ("prompt_column", "answer_column", "context_columns", "option_column")
    return {name: vars(args)[f"dataset_{name}"] for name in names}


def make_rewards(script_args: LZEScriptArguments, args: LZEGRPOConfig) -> list[Any]:
    """Make the reward functions of a recipe."""
    rewards = [get_reward(name, args.max_completion_length, script_args.majority) for name in script_args.reward_funcs]
    return [reward() if isinstance(reward, type) else reward for reward in rewards]


def make_evaluation(
    script_args: LZEScriptArguments, args: LZEGRPOConfig, tasks: list[str], samples: int = 1, limit: int | None = None
) -> Evaluation:
    """Make an evaluation on tasks, with the prompts, reward and decoding of the training; one sample is decoded greedily."""
    sampling: dict[str, Any] = {"temperature": args.temperature, "top_p": args.top_p, "top_k": max(args.top_k, 0)}
    decoding = Decoding(
        **(sampling if samples > 1 else {}),
        max_tokens=args.max_completion_length,
        seed=args.seed,
        chat=script_args.conversational,
        system_prompt=script_args.system_prompt,
        prompt_suffix=script_args.prompt_suffix or "",  # the recipe's prompts, not the task's own
    )
    with args.main_process_first(desc="tasks"):
        found = find_tasks(tasks, _columns(script_args))
        problems = {task.name: load_problems(task, decoding, limit) for task in found}
    rewards = make_rewards(script_args, args)
    votes = any(isinstance(reward, GroupReward) for reward in rewards)  # a vote says nothing of a completion alone
    named = [reward for reward in rewards if get_callable_name(reward) == args.pass_reward]
    # One that judges answers comes first, one of length last, and before others the one that weighs most
    names, weights = script_args.reward_funcs, args.reward_weights or [1.0] * len(rewards)
    judges = zip(names, weights, rewards, strict=False)
    ranked = sorted(judges, key=lambda one: (one[0] not in REWARDS, one[0] == "soft_overlong", -one[1]))
    named += [reward for *_, reward in ranked]
    # An environment may be all that rewards
    reward = accuracy_reward if votes or not named or "accuracy" in names else named[0]
    return Evaluation(problems, decoding, samples, reward)


def make_evaluations(
    script_args: LZEScriptArguments, args: LZEGRPOConfig, dataset: Dataset
) -> tuple[Evaluation | None, Evaluation | None]:
    """Make the evaluations of a training on a dataset: on tasks, and on a probe set. Problems of the dataset are refused in a probe."""
    tasks = probe = None
    if names := script_args.eval_tasks:
        tasks = make_evaluation(script_args, args, names, script_args.eval_tasks_samples, script_args.eval_tasks_limit)
    if script_args.probe_datasets:
        probe = make_evaluation(script_args, args, script_args.probe_datasets)
    shown = {json.dumps(prompt) for prompt in dataset["prompt"]} if tasks or probe else ()
    for key, evaluation in (("eval_tasks", tasks), ("probe_datasets", probe)):
        problems = [problem for found in (evaluation.tasks if evaluation else {}).values() for problem in found]
        if both := [problem for problem in problems if json.dumps(problem.prompt) in shown]:
            told = f"{len(both)} of the {len(problems)} problems of `{key}` are trained on as well, such as "
            told += f"{text_of(both[0].prompt)[:80]!r}. Remove them from one of the two."
            if evaluation is probe:
                raise RecipeError(told)
            logger.warning(told)
    return tasks, probe


def make_instruction(script_args: LZEScriptArguments, args: LZEGRPOConfig) -> Instruction:
    """
    Collect what self-instruction begins with: the bare problems of the training sets, the problems of all evaluations, which no new problem
    may resemble, the prompts around problems, and the recipe's own generator.
    """
    plain: dict[str, Any] = {"conversational": True, "system_prompt": None, "prompt_suffix": None, "unlabelled": True}
    train, held_out = load_data(replace(script_args, **plain), args)
    references = [] if held_out is None else [prompt[-1]["content"] for prompt in held_out["prompt"]]
    columns = _columns(script_args)
    for task in [*find_tasks(script_args.eval_tasks, columns), *find_tasks(script_args.probe_datasets, columns)]:
        problems: list[Any] = load_problems(task, Decoding(prompt_suffix=""))
        references += [problem.prompt[-1]["content"] for problem in problems]
    seeds = Seeds(tuple(prompt[-1]["content"] for prompt in train["prompt"]), tuple(dict.fromkeys(references)))
    style = PromptStyle(script_args.conversational, script_args.system_prompt, script_args.prompt_suffix)
    return Instruction(seeds, style, load_named("instruct_generator", script_args.instruct_generator))


def load_named(key: str, name: str | None) -> Any:
    """Import the function or class that a setting names by its path; `None` where it is unset."""
    return None if name is None else imported(name, f"`{key}: {name}`")
