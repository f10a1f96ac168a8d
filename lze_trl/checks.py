"""What cannot be trained is refused once, when the trainer is made; and the defaults that a training set allows."""

import inspect
import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset
from torch import nn
from trl.trainer.utils import get_callable_name

from .config import LZEGRPOConfig
from .memory.identity import add_prompt_ids, columns_of
from .memory.outcomes import OutcomeRule
from .plan.planners import Planner
from .rollout.controllers import ReinforceAda, RolloutController, is_plain
from .rollout.settling import GroupReward
from .select.selectors import Selector


logger = logging.getLogger(__name__)

PUBLISHED_THRESHOLD = 0.7
"""Reward above which Reinforce-Ada's published runs count a completion as positive (arXiv 2510.04996)."""

_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL calls every reward function with, besides the columns of the dataset."""
_NEVER_PASSED = ("prompt", "completion", "completion_ids")
"""Columns that TRL keeps from reward functions."""

OWN: dict[str, Any] = {"selector": Selector, "controller": RolloutController, "planner": Planner}
"""What the user's own strategies, arguments of the trainer, are derived from."""


class Run(NamedTuple):
    """What a trainer is made of; the planner, the selector and the sampler are those of the user's own, if any."""

    args: LZEGRPOConfig
    dataset: Any
    controller: RolloutController
    pruning: str | None
    planner: Planner | None
    selector: Selector | None
    votes: str | None  # name of a reward of whole groups
    sampler: str | None


def prepare(
    args: LZEGRPOConfig,
    train_dataset: Any,
    given: dict[str, Any],
    planner: Planner | None = None,
    controller: RolloutController | None = None,
    own_sampler: str | None = None,
    pruning: str | None = None,
    selector: Selector | None = None,
) -> tuple[Dataset | IterableDataset, RolloutController, dict[str, Any]]:
    """
    Refuse what cannot be trained; `given` are the arguments of the trainer by name, and `own_sampler` is the name of a user's
    `_get_train_sampler`. `pruning` replaces that of `args`. Returns the training set with prompt ids, the controller, and the
    values of the settings that adapt to the data.
    """
    if not isinstance(args, LZEGRPOConfig):
        raise TypeError(
            f"`args` must be an `LZEGRPOConfig`, got `{type(args).__name__}`. It takes every field of `GRPOConfig`."
        )
    _refuse_unfit_data(train_dataset, given)
    _refuse_unfit_rewards(args, given)
    controller, pruning = controller or args.make_controller(), pruning or args.pruning
    funcs = given.get("reward_funcs")
    votes: list[Any] = [
        func for func in (funcs if isinstance(funcs, list) else [funcs]) if isinstance(func, GroupReward)
    ]
    name = get_callable_name(votes[0]) if votes else None
    run = Run(args, train_dataset, controller, pruning, planner, selector, name, own_sampler)
    _refuse(_contradictions_of_settings(args), _contradictions_of_parts(run), _contradictions_of_self_play(run))
    _refuse(_contradictions_of_overlap(run, given))
    run = run._replace(pruning=_resolved_pruning(run))
    _refuse(_contradictions_of_sampler(run))
    dataset, deduplicate = _with_prompt_ids(train_dataset, args, not given.get("environment_factory"))
    return dataset, controller, {"pruning": run.pruning, "deduplicate": deduplicate}


def refuse_contradictions(args: LZEGRPOConfig):
    """Refuse settings that do not go together, whatever the data: before anything is loaded."""
    _refuse(_contradictions_of_settings(args))


def _refuse(*contradictions: Iterator[str]):
    for sentence in chain(*contradictions):
        raise ValueError(sentence)


# ---- Settings and parts that do not go together: each with what to do ----


def _contradictions_of_settings(args: LZEGRPOConfig) -> Iterator[str]:
    estimator, http = args.advantage_estimator, args.use_vllm and args.vllm_mode == "http"
    reinforce = estimator.startswith("reinforce")
    if args.reward_range is not None and args.pass_threshold is not None:
        yield "`reward_range` grades outcomes, and `pass_threshold` makes them passes and fails. Set one of them."
    if args.reward_range is not None and str(args.controller).startswith("reinforce_ada"):
        yield f"`controller={args.controller!r}` counts passes. Set a `pass_threshold` instead of `reward_range`."
    if args.self_play["advantage_statistics"] != "scored" and not reinforce:
        yield f"`advantage_statistics` is of REINFORCE++, not of `advantage_estimator={estimator!r}`. Leave it unset."
    if estimator != "grpo" and args.scale_rewards != "none":
        yield f"`scale_rewards` is of 'grpo': `advantage_estimator={estimator!r}` has its own scale. Leave it unset."
    if estimator != "grpo" and args.multi_objective_aggregation != "sum_then_normalize":
        yield f"`advantage_estimator={estimator!r}` needs `multi_objective_aggregation='sum_then_normalize'`. Set it."
    if reinforce and args.loss_normalizer == "all":
        yield f"`loss_normalizer='all'` drops groups that have a gradient by {estimator!r}. Use 'selected'."
    if args.planner == "greso" and args.pruning == "none":
        yield "`planner='greso'` needs pruning, and `pruning='none'`. Set `pruning='refill'` or 'skip'."
    if http and not args.vllm_server_urls:
        yield "`vllm_mode='http'` needs `vllm_server_urls`. Give base URLs, such as ['http://127.0.0.1:8000']."
    mode, allowed = args.vllm_importance_sampling_mode, ("token_truncate", "token_mask")
    corrects = args.loss_type == "vespo" and args.vllm_importance_sampling_correction
    if http and corrects and mode not in allowed:  # TRL's own check only sees its own engine
        yield f"`loss_type='vespo'` needs `vllm_importance_sampling_mode` to be one of {allowed}, got {mode!r}. Set it."
    if args.packing and args.top_entropy_quantile < 1.0:
        yield "`packing=True` changes the micro-batches that `top_entropy_quantile` is taken of. Leave `packing` unset."
    if not args.packing and args.max_tokens_per_micro_batch is not None:
        yield "`max_tokens_per_micro_batch` needs packing, which is off. Leave it unset."


def _contradictions_of_overlap(run: Run, given: dict[str, Any]) -> Iterator[str]:
    if run.args.overlap == "none":
        return
    if not (run.args.use_vllm and run.args.vllm_mode == "http"):
        yield "`overlap='one_step'` needs servers of its own: set `use_vllm=True` and `vllm_mode='http'`, or `overlap='none'`."
    if not isinstance(run.dataset, Dataset) or run.sampler:
        yield (
            "`overlap='one_step'` has to know the prompts of the next batch: it needs a `train_dataset` that is not streamed, and TRL's "
            "own `_get_train_sampler`. Set `overlap='none'`."
        )
    if run.pruning == "skip":
        yield "`overlap='one_step'` plans batches of one size, and `pruning='skip'` makes smaller ones. Use `pruning='refill'`."
    for name in ("tools", "environment_factory", "rollout_func"):
        if given.get(name):
            yield f"`overlap='one_step'` begins plain completions ahead, and `{name}` is given. Set `overlap='none'`."
    if run.args.self_play["instruct"]:
        yield "`overlap='one_step'` has to know the next prompts, and `self_play` writes them. Set `overlap='none'`."


def _contradictions_of_parts(run: Run) -> Iterator[str]:
    args, pruning = run.args, run.pruning
    ranks, draws = f"`{type(run.planner).__name__}`", f"`{type(run.controller).__name__}`"
    uniform, aggregation = is_plain(run.controller, args.num_generations), args.multi_objective_aggregation
    if isinstance(run.dataset, IterableDataset):
        stream = "needs a dataset whose rows can be read again, and `train_dataset` is an `IterableDataset`"
        instead = "or load the dataset without streaming"
        if pruning not in (None, "none"):
            yield f"`pruning={pruning!r}` {stream}. Set `pruning='none'`, {instead}."
        if run.planner is not None or args.planner != "solved":
            yield f"`planner` {stream}. Leave it unset, {instead}."
        if not uniform:
            yield f"{draws} {stream}. Use `controller='uniform'`, {instead}."
    if run.dataset is None and (pruning not in (None, "none") or run.planner is not None or args.planner != "solved"):
        yield (
            "`pruning` and `planner` need prompts that come again, and there is no `train_dataset`: the environment makes them. "
            "Leave them unset, or pass a dataset whose rows `reset` reads."
        )
    if run.planner is not None and pruning == "none":
        yield f"`pruning='none'` rolls out every prompt, and {ranks} was passed to rank them. Set 'refill' or 'skip'."
    if run.controller.draws_prompts and pruning == "skip":
        yield f"`pruning='skip'` makes batches smaller, and {draws} fills them. Use 'refill' or 'none'."
    if not uniform and aggregation != "sum_then_normalize":
        yield (
            f"`multi_objective_aggregation={aggregation!r}` needs groups of one size, and {draws} draws others. Use "
            "'sum_then_normalize'."
        )
    if run.votes is None:
        return
    if isinstance(run.controller, ReinforceAda) and run.controller.exit == "positive":
        yield f"`controller='reinforce_ada_positive'` stops at a pass: by '{run.votes}' every group has one. Use another."
    if aggregation != "sum_then_normalize":
        yield f"`multi_objective_aggregation={aggregation!r}` trains groups for which '{run.votes}' abstains. Unset it."


def _contradictions_of_self_play(run: Run) -> Iterator[str]:
    args, writes = run.args, run.args.self_play["instruct"]
    confidence = args.self_play["label_confidence"]
    value, itself = f"`label_confidence={confidence!r}`", "`self_play={'instruct': True}`"
    if confidence != "none" and run.votes is None:
        yield f"{value} is about a majority vote. Add 'majority' to the reward functions, or leave it unset."
    if confidence != "none" and run.selector is None and args.selector != "energy":
        yield f"{value} corrects the energy. Set `selector='energy'` and a `selection_ratio`, or leave it unset."
    if confidence == "calibrated" and (why := _why_without_labels(run)):
        yield f"{value} learns from gold answers how often votes are right, and {why}. Add some, or use 'share'."
    if not writes:
        return
    if not isinstance(run.dataset, Dataset):
        yield f"{itself} reads all seeds. Load the training set without streaming."
    if args.max_steps <= 0:
        yield f"{itself} has no end of its own. Set `max_steps`."
    if run.planner is not None or args.planner != "solved" or run.pruning == "skip":
        yield f"{itself} has no passes over the data. Leave `planner` and `pruning` unset."
    if args.self_play["presence_penalty"] and not (args.use_vllm and args.vllm_mode == "http"):
        yield f"{itself} writes by transformers here, which has no `presence_penalty`. Set it to 0, or use servers."


def _why_without_labels(run: Run) -> str | None:
    """Why no gold answer will ever tell what votes are worth; `None` where one can."""
    if run.args.self_play["instruct"]:
        return "the problems of `self_play={'instruct': True}` have none"
    if "solution" not in columns_of(run.dataset):
        return "the training set has no column `solution`"
    stored = run.dataset.with_format(None) if isinstance(run.dataset, Dataset) else None
    if stored and "solution" in stored.column_names and all(gold is None for gold in stored["solution"]):
        return "the column `solution` of the training set is empty"
    return None


def _contradictions_of_sampler(run: Run) -> Iterator[str]:
    """Where prompts do not come from the data loader."""
    ignored = f"`{run.sampler}` orders the prompts, and would be ignored:"
    if run.sampler is None:
        return
    if run.args.self_play["instruct"]:
        yield f"{ignored} `self_play={{'instruct': True}}` trains on prompts that the model writes. Remove it."
    if run.controller.draws_prompts:
        yield f"{ignored} `{type(run.controller).__name__}` has an order of its own. Remove it, or use another controller."
    if run.pruning == "refill":
        yield f"{ignored} `pruning='refill'` has an order of its own. Set 'skip' or 'none', or remove it."


# ---- What the trainer is given ----


def refuse_ignored_override(name: str):
    """Refuse an override of a method of TRL that data selection does not call."""
    raise TypeError(
        f"`{name}` would never be called in training: data selection generates, scores, chooses and packs completions in steps "
        "of its own. Override `_generate` to change completions, `_calculate_rewards` to change rewards, or `_compute_loss` "
        "to change advantages and other tensors (`inputs`) of the rows that are trained on; or use `trl.GRPOTrainer`."
    )


def refuse_unfit_objects(**given: Any):
    """Refuse a name or a class where a strategy of the user's own, given by its argument, is expected."""
    for name, value in given.items():
        kind = OWN[name]
        if value is None or (not isinstance(value, type) and all(hasattr(value, m) for m in kind.__abstractmethods__)):
            continue
        advice = f"Derive your own from `{kind.__name__}`, or leave it unset"
        if isinstance(value, str):
            advice = f"Built-in ones are set by name in the configuration: `LZEGRPOConfig({name}={value!r})`"
        raise TypeError(f"`{name}` must be an object of your own, a `{kind.__name__}`, got {value!r}. {advice}.")


def _refuse_unfit_data(train_dataset: Any, given: dict[str, Any]):
    if train_dataset is None and not given.get("environment_factory"):
        raise ValueError("`train_dataset` is required, unless an `environment_factory` makes the prompts.")
    if given.get("environment_factory"):  # whose `reset` may make the prompts
        return
    if not given.get("rollout_func"):  # which takes what it likes
        for place, dataset in _datasets(given):
            _refuse_unfit_prompts(place, dataset)


def _refuse_unfit_prompts(place: str, dataset: Dataset | IterableDataset):
    """Refuse rows without a prompt, which fail in the tokenizer or train on nothing."""
    if isinstance(dataset, IterableDataset) or "prompt" not in dataset.column_names:
        return
    if dataset.format["type"] == "custom":  # a transform makes them
        return
    batches = dataset.select_columns("prompt").with_format("arrow").iter(1000)
    for row, prompt in enumerate(prompt for batch in batches for prompt in batch["prompt"].to_pylist()):
        if isinstance(prompt, list):
            fits = any(isinstance(message, dict) and message.get("content") for message in prompt)
        else:
            fits = isinstance(prompt, str) and prompt != ""
        if not fits:
            raise ValueError(
                f"{place} has {prompt!r} as the prompt of row {row}. A prompt is a text that is not empty, or a list of messages "
                "with content. Mend the row, or leave such rows out (`dataset.filter`)."
            )


def _refuse_unfit_rewards(args: LZEGRPOConfig, given: dict[str, Any]):
    """Refuse reward functions that cannot be called with what the datasets hold."""
    funcs = given.get("reward_funcs")
    for func in funcs if isinstance(funcs, list) else [funcs]:
        if isinstance(func, (str, nn.Module)) or not callable(func):
            continue
        try:
            signature = inspect.signature(func)
        except ValueError:  # some builtins have no signature to read
            continue
        passed = [*_ALWAYS_PASSED, *(["environments"] if given.get("environment_factory") else [])]
        bind = signature.bind_partial if given.get("rollout_func") else signature.bind  # it can return further columns
        for place, dataset in _datasets(given):
            columns = [] if args.remove_unused_columns else sorted({*columns_of(dataset)} - {*_NEVER_PASSED})
            try:
                bind(**dict.fromkeys([*passed, *columns]))
            except TypeError as error:
                raise ValueError(
                    f"The reward function '{get_callable_name(func)}' cannot be called with the columns of "
                    f"{place[0].lower()}{place[1:]}, {columns}: {error}. Rename the column that holds it "
                    "(`dataset.rename_column`), set `remove_unused_columns=False`, or add `**kwargs` to its parameters."
                ) from error


def _datasets(given: dict[str, Any]) -> list[tuple[str, Dataset | IterableDataset]]:
    """The training set and the evaluation sets, each with words for it; TRL says what is wrong with other kinds of data."""
    held_out = given.get("eval_dataset")
    places = [("The training set", given.get("train_dataset"))]
    if isinstance(held_out, dict):
        places += [(f"The evaluation set '{name}'", dataset) for name, dataset in held_out.items()]
    else:
        places.append(("The evaluation set", held_out))
    return [(place, data) for place, data in places if isinstance(data, (Dataset, IterableDataset))]


# ---- What adapts to the data ----


def _resolved_pruning(run: Run) -> str:
    """`pruning`, or what this training set, and what else is given, allows if it is unset."""
    args = run.args
    if run.dataset is None:
        logger.warning(
            "There is no `train_dataset`: the environment makes the prompts, and none is recognised when it comes again. Pruning "
            "and what is remembered of prompts are off. Groups are scored, selected and packed."
        )
        return "none"
    if isinstance(run.dataset, IterableDataset):
        if run.pruning is None or args.deduplicate is None:
            logger.warning(
                "`train_dataset` is streamed, its rows cannot be read again: prompts are neither pruned nor deduplicated. "
                "Selection works; for the rest, load the dataset without streaming."
            )
        return run.pruning or "none"
    ranked = run.planner is not None or args.planner != "solved"
    if not ranked and args.loss_normalizer != "selected":
        return run.pruning or "none"
    if not ranked and run.pruning is None and run.sampler is not None:
        logger.warning("`%s` orders the prompts, so `pruning` is off: it would change the order.", run.sampler)
        return "none"
    return run.pruning or "refill"


def outcome_rule(
    args: LZEGRPOConfig, reward_funcs: list[Any], names: list[str], controller: RolloutController
) -> OutcomeRule:
    """What outcomes are made of, by the settings and the reward functions. Reinforce-Ada counts passes."""
    if args.pass_reward not in (None, "total", *names):
        raise ValueError(
            f"`pass_reward={args.pass_reward!r}` is none of the reward functions {names}. Name one of them, or leave it "
            "unset for their weighted sum."
        )
    column = names.index(args.pass_reward) if args.pass_reward in names else None
    threshold, bounds, binary = args.pass_threshold, args.reward_range, False
    if threshold is None and isinstance(controller, ReinforceAda):
        weights = args.reward_weights or [1.0] * len(names)
        counted = [i for i in range(len(names)) if weights[i] != 0.0] if column is None else [column]
        if len(counted) > 1 or any(isinstance(reward_funcs[i], nn.Module) for i in counted):
            raise ValueError(
                f"Reinforce-Ada counts the completions whose reward is above `pass_threshold`, and the reward from "
                f"{[names[i] for i in counted]} is graded. Set `pass_threshold`, or name a reward of 0 and 1 as `pass_reward`."
            )
        threshold, binary = PUBLISHED_THRESHOLD, True
    elif threshold is None and args.pass_reward is not None and bounds is None:
        threshold = 0.5
    return OutcomeRule(column, threshold, None if bounds is None else (bounds[0], bounds[1]), binary)


def _with_prompt_ids(rows: Any, args: LZEGRPOConfig, needs_prompt: bool) -> tuple[Dataset | IterableDataset, bool]:
    """Training set with prompt ids, once it is known to fill a generation batch, and whether repeats were dropped."""
    if not isinstance(rows, (Dataset, IterableDataset)):
        return rows, bool(args.deduplicate)  # TRL says what is wrong with it
    # Rows that a generation batch needs: none of those that a model is only shown
    num_groups = 0 if args.self_play["instruct"] else args.generation_batch_size // args.num_generations
    deduplicate = isinstance(rows, Dataset) if args.deduplicate is None else args.deduplicate
    with args.main_process_first(desc="prompt ids"):
        dataset = add_prompt_ids(rows, deduplicate, needs_prompt)
        if isinstance(dataset, IterableDataset):
            return dataset, deduplicate
        if args.deduplicate is None and len(dataset) < num_groups <= len(rows):  # plain TRL can train on these rows
            logger.warning(
                "The training set has %d rows and %d different prompts, and a generation batch takes %d: each row counts as "
                "another prompt. Use a smaller `generation_batch_size`, to give each prompt one group.",
                *(len(rows), len(dataset), num_groups),
            )
            dataset, deduplicate = add_prompt_ids(rows, False, needs_prompt), False
    if dropped := len(rows) - len(dataset):
        logger.warning("Dropped %d of %d rows that repeat another row.", dropped, len(rows))
    if len(dataset) < num_groups:
        raise ValueError(
            f"The training set has {len(dataset)} different prompts, and a generation batch takes {num_groups} "
            f"(`generation_batch_size={args.generation_batch_size}` / `num_generations={args.num_generations}`). Use a "
            "smaller generation batch or more data."
        )
    return dataset, deduplicate
