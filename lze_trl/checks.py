"""Refuse what cannot be trained when the trainer is made, and choose the defaults that depend on the training set."""

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import nn
from trl.distributed import DistributedBackend
from trl.trainer.utils import get_callable_name

from .config import LZEGRPOConfig
from .files import displayed
from .memory.identity import ID_COLUMN, add_prompt_ids, columns_of
from .memory.outcomes import OutcomeRule
from .names import near
from .plan.planners import Planner
from .prompt_checks import PROMPTS, are_messages, is_prompt, prompts_of
from .rollout.controllers import Gate, ReinforceAda, RolloutController, is_plain
from .rollout.group_rewards import GroupReward
from .select.selectors import Selector


logger = logging.getLogger(__name__)

PUBLISHED_THRESHOLD = 0.7
"""Reward above which Reinforce-Ada's published runs count a completion as positive (arXiv 2510.04996)."""


def prepare(
    args: LZEGRPOConfig,
    train_dataset: Any,
    reward_funcs: list[Any],
    given: dict[str, Any],
    planner: Planner | None = None,
    controller: RolloutController | None = None,
    own_sampler: str | None = None,
    selector: Selector | None = None,
) -> tuple[Dataset | IterableDataset, RolloutController, dict[str, Any]]:
    """
    Refuse what cannot be trained. `given` holds the further arguments of the trainer, and `own_sampler` names a user's
    `_get_train_sampler` or `get_train_dataloader`. Returns the training set with prompt ids, the controller, and the settings that depend on the data.
    """
    if not isinstance(args, LZEGRPOConfig):
        raise TypeError(
            f"`args` must be an `LZEGRPOConfig`, got `{type(args).__name__}`. It takes every field of `GRPOConfig`."
        )
    _refuse_unfit_object("selector", Selector, selector)
    _refuse_unfit_object("controller", RolloutController, controller)
    _refuse_unfit_object("planner", Planner, planner)
    makes_prompts = bool(given.get("environment_factory"))  # by its `reset`
    columns = columns_of(train_dataset) if isinstance(train_dataset, (Dataset, IterableDataset)) else []
    for name in (name for name in args.report_by or () if name not in columns and (columns or train_dataset is None)):
        raise ValueError(
            f"`report_by` names the column {name!r}, which the training set lacks: it has {sorted({*columns} - {ID_COLUMN})}."
            f"{near(name, columns)} Name some of these, or leave it unset."
        )
    if train_dataset is None and not makes_prompts:
        raise ValueError("`train_dataset` is required, unless an `environment_factory` makes the prompts.")
    if isinstance(train_dataset, dict):
        raise ValueError(f"`train_dataset` is a dictionary of the splits {[*train_dataset]}. Pass one of them.")
    called = "training set"
    if isinstance(train_dataset, IterableDataset) and args.shuffle_dataset:  # before a map, which changes the order
        train_dataset, called = train_dataset.shuffle(seed=args.seed), f"shuffled {called}"
    train_dataset = with_prompts_checked(train_dataset, called, args, given, columns)
    if controller is None:
        controller, usual = args.make_controller(), args.defaults()["controller_kwargs"]
        if own_sampler and isinstance(controller, Gate) and controller.hold == usual["hold"] != "nothing":
            controller = replace(controller, hold="nothing")
            logger.warning("`%s` orders the prompts, so the gate draws no others: `hold` is off.", own_sampler)
    group_rewards: list[Any] = [func for func in reward_funcs if isinstance(func, GroupReward)]
    group_reward = get_callable_name(group_rewards[0]) if group_rewards else None
    if any(isinstance(func, type) for func in group_rewards):
        raise TypeError(
            f"The reward of whole groups `{group_reward}` is a class. Pass an object of it among the `reward_funcs`."
        )
    if not makes_prompts and len(args.reward_weights or reward_funcs) != len(reward_funcs):
        raise ValueError(
            f"`reward_weights` has {len(args.reward_weights or ())} numbers for {len(reward_funcs)} reward functions. Give one for each."
        )
    has_planner = planner is not None or args.planner != "solved"
    window = _resolved_window(args, train_dataset, own_sampler)
    of_data = _of_data(args, train_dataset, given, controller, planner, has_planner, group_reward, own_sampler, window)
    refuse_contradictions(args, of_data)
    pruning = _resolved_pruning(args, train_dataset, has_planner, own_sampler)
    if own_sampler and (args.self_play["instruct"] or controller.draws_prompts or pruning == "refill"):
        raise ValueError(
            f"`{own_sampler}` orders the prompts, and would be ignored: with `pruning='refill'`, a controller that draws prompts, or "
            "`self_play={'instruct': True}` they have an order of their own. Set `pruning='skip'` or 'none', and with a gate `hold='nothing'`, or remove it."
        )
    dataset, deduplicate = _with_prompt_ids(train_dataset, args, columns)
    return dataset, controller, {"pruning": pruning, "deduplicate": deduplicate, "window": window}


# ---- Contradictions ----

Contradictions = list[tuple[Any, str]]
"""Each with whether it applies, and a sentence that says what to do."""


def refuse_contradictions(args: LZEGRPOConfig, of_data: Iterable[tuple[Any, str]] = ()):
    """Raise a `ValueError` with the sentence of the first contradiction that applies: in the settings whatever the data, then those `of_data`."""
    for applies, sentence in (*_of_settings(args), *of_data):
        if applies:
            raise ValueError(sentence)


def _of_settings(args: LZEGRPOConfig) -> Contradictions:
    """List what contradicts each other in the settings."""
    http, mode, reinforce = args.over_http, args.vllm_importance_sampling_mode, args.advantage_estimator != "grpo"
    graded, by = args.reward_range is not None, "`advantage_estimator='reinforce_plus_plus'`"
    corrects = http and args.loss_type == "vespo" and args.vllm_importance_sampling_correction
    allowed = ("token_truncate", "token_mask")  # TRL's own check only sees its own engine
    return [
        (displayed(args.output_dir) != args.output_dir, f"`output_dir` must be a name in UTF-8, which weights are saved under, got {args.output_dir!r}. Give another."),
        (args.alive == "outcome" and args.pass_reward in (None, "total"), "`alive='outcome'` is about a named reward. Set `pass_reward` to that of right answers, or leave `alive` unset."),
        (graded and args.pass_threshold is not None, "`reward_range` grades outcomes, and `pass_threshold` makes them passes and fails. Set one of them."),
        (graded and str(args.controller).startswith("reinforce_ada"), f"`controller={args.controller!r}` counts passes. Set a `pass_threshold` instead of `reward_range`."),
        (reinforce and args.scale_rewards != "none", f"`scale_rewards` is of 'grpo': {by} has its own scale. Leave it unset."),
        (reinforce and args.multi_objective_aggregation != "sum_then_normalize", f"{by} needs `multi_objective_aggregation='sum_then_normalize'`. Set it."),
        (reinforce and args.loss_normalizer == "all", f"`loss_normalizer='all'` drops groups that have a gradient by {by}. Use 'selected'."),
        (args.planner == "greso" and args.pruning == "none", "`planner='greso'` needs pruning, and `pruning='none'`. Set `pruning='refill'` or 'skip'."),
        (args.hub_telemetry_texts and args.hub_telemetry_id is None, "`hub_telemetry_texts` go to `hub_telemetry_id`, which is not set. Set it, or leave them unset."),
        (args.hub_telemetry_id is not None and not re.fullmatch(r"(?a)([\w.-]+/)?[\w.-]+", args.hub_telemetry_id), f"`hub_telemetry_id` must be a name on the Hub, such as 'me/run', got {args.hub_telemetry_id!r}."),
        (args.hub_telemetry_id is not None and not args.telemetry, "`hub_telemetry_id` uploads telemetry, and `telemetry=False`. Leave one of them unset."),
        (http and not args.vllm_server_urls, "`vllm_mode='http'` needs `vllm_server_urls`. Give base URLs, such as ['http://127.0.0.1:8000']."),
        (http and args.max_completion_length is None, "`vllm_mode='http'` asks for a number of tokens, and `max_completion_length` is None. Set it."),
        (corrects and mode not in allowed, f"`loss_type='vespo'` needs `vllm_importance_sampling_mode` to be one of {allowed}, got {mode!r}. Set it."),
        (args.packing and args.top_entropy_quantile < 1.0, "`packing=True` changes the micro-batches that `top_entropy_quantile` is taken of. Leave `packing` unset."),
        (args.window > 1 and args.pruning == "skip", f"`pruning='skip'` makes batches smaller, and `window={args.window}` fills them. Use 'refill' or 'none'."),
        (not args.packing and args.max_tokens_per_micro_batch is not None, "`max_tokens_per_micro_batch` needs packing, which is off. Leave it unset."),
    ]  # fmt: skip


def _of_data(
    args: LZEGRPOConfig,
    dataset: Any,
    given: dict[str, Any],
    controller: RolloutController,
    planner: Planner | None,
    has_planner: bool,
    group_reward: str | None,
    sampler: str | None,
    window: int,
) -> Contradictions:
    """List what contradicts the data and the objects passed; `planner` and `sampler` are the user's own, if any."""
    pruning, prunes, aggregation = args.pruning, args.pruning in ("refill", "skip"), args.multi_objective_aggregation
    streamed, readable = isinstance(dataset, IterableDataset), isinstance(dataset, Dataset)
    planner_name, controller_name = f"`{type(planner).__name__}`", f"`{type(controller).__name__}`"
    uniform, normalizes = is_plain(controller, args.num_generations), aggregation != "sum_then_normalize"
    stops_at_pass = isinstance(controller, ReinforceAda) and controller.exit == "positive"
    writes_prompts, self_play = args.self_play["instruct"], "`self_play={'instruct': True}`"
    harness = next((name for name in ("tools", "environment_factory", "rollout_func") if given.get(name)), None)
    overlaps, overlap = args.overlap != "none", "`overlap='one_step'`"
    ahead = f"`window={window}`"
    needs = "needs a dataset whose rows can be read again, and `train_dataset` is an `IterableDataset`"
    instead = "or load the dataset without streaming"
    return [
        (streamed and prunes, f"`pruning={pruning!r}` {needs}. Set `pruning='none'`, {instead}."),
        (streamed and has_planner, f"`planner` {needs}. Leave it unset, {instead}."),
        (streamed and not uniform, f"{controller_name} {needs}. Use `strategy='exact'` (`controller='uniform'`), {instead}."),
        (dataset is None and (prunes or has_planner), "`pruning` and `planner` need prompts that come again, and there is no `train_dataset`: the environment makes them. Leave them unset, or pass a dataset whose rows `reset` reads."),
        (window > 1 and not (readable and "prompt" in dataset.column_names), f"{ahead} reads prompts before they are rolled out, and needs a `train_dataset` with a column `prompt` that is not streamed. Leave it unset."),
        (window > 1 and writes_prompts, f"{ahead} chooses among the prompts of a pass, and {self_play} has none. Leave it unset."),
        (window > 1 and sampler, f"`{sampler}` orders the prompts, and {ahead} another way. Leave `window` unset, or remove it."),
        (planner is not None and pruning == "none", f"`pruning='none'` rolls out every prompt, and {planner_name} was passed to rank them. Set 'refill' or 'skip'."),
        (controller.draws_prompts and pruning == "skip", f"`pruning='skip'` makes batches smaller, and {controller_name} fills them. Use 'refill' or 'none'."),
        (normalizes and not uniform, f"`multi_objective_aggregation={aggregation!r}` needs groups of one size, and {controller_name} draws others. Use 'sum_then_normalize'."),
        (group_reward and stops_at_pass, f"`controller='reinforce_ada_positive'` stops at a pass: by '{group_reward}' every group has one. Use another."),
        (group_reward and normalizes, f"`multi_objective_aggregation={aggregation!r}` trains groups for which '{group_reward}' abstains. Unset it."),
        (given.get("instruction") and not writes_prompts, f"`instruction`, or the `instruct_generator` of a recipe, is for a model that writes its problems. Set {self_play}, or leave it out."),
        (writes_prompts and not readable, f"{self_play} reads all seeds. Load the training set without streaming."),
        (writes_prompts and args.max_steps <= 0, f"{self_play} has no end of its own. Set `max_steps`."),
        (writes_prompts and (has_planner or pruning == "skip"), f"{self_play} has no passes over the data. Leave `planner` and `pruning` unset."),
        (writes_prompts and args.self_play["presence_penalty"] and not args.over_http, f"{self_play} writes by transformers here, which has no `presence_penalty`. Set it to 0, or use servers."),
        (args.over_http and harness in ("tools", "environment_factory") and args.world_size > 1, f"With `{harness}`, processes need different numbers of turns, and `vllm_mode='http'` asks for all of a turn at once. Use one process, or `vllm_mode='colocate'`."),
        (overlaps and not args.over_http, f"{overlap} needs servers of its own: set `use_vllm=True` and `vllm_mode='http'`, or `overlap='none'`."),
        (overlaps and (not readable or sampler), f"{overlap} has to know the prompts of the next batch: it needs a `train_dataset` that is not streamed, and no sampler or data loader of your own. Set `overlap='none'`."),
        (overlaps and pruning == "skip", f"{overlap} plans batches of one size, and `pruning='skip'` makes smaller ones. Use `pruning='refill'`."),
        (overlaps and harness, f"{overlap} begins plain completions ahead, and `{harness}` is given. Set `overlap='none'`."),
        (overlaps and writes_prompts, f"{overlap} has to know the next prompts, and `self_play` writes them. Set `overlap='none'`."),
    ]  # fmt: skip


def refuse_uneven_turns(args: LZEGRPOConfig, accelerator: Accelerator, tools: Any):
    """Refuse tools where processes have to generate together: one that calls more tools would wait for the others forever."""
    backend, mode = DistributedBackend(accelerator), args.vllm_mode if args.use_vllm else None
    sharded = mode is None and (backend.is_zero3 or backend.is_fsdp)
    shares = mode == "server" or (mode == "colocate" and args.vllm_tensor_parallel_size > 1)
    if tools and accelerator.num_processes > 1 and (sharded or shares):
        reason = "sharding by ZeRO-3 or FSDP gathers weights" if sharded else f"vLLM ({mode=}) gathers prompts"
        raise ValueError(
            f"With tools or environments, processes need different numbers of turns, and {reason} from all of them for each turn. Set "
            "`use_vllm=True`, `vllm_mode='colocate'` and `vllm_tensor_parallel_size=1`, or shard by ZeRO-2 at most, or use one process."
        )


# ---- What the trainer is given ----


def refuse_nothing_to_train(model: nn.Module, optimizer: torch.optim.Optimizer | None):
    """Refuse a training that would change no weight: none is trainable, or the `optimizer` that was passed has none of them."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        adapter = (
            " Load the adapter with `PeftModel.from_pretrained(…, is_trainable=True)`." if is_peft_model(model) else ""
        )
        raise ValueError(
            f"No weight of the model is trainable, so a training would change nothing.{adapter} Set `requires_grad=True` for what is to be "
            "trained, or pass a `peft_config`."
        )
    if optimizer is None or isinstance(optimizer, AcceleratedOptimizer):  # made by an earlier training
        return
    if not trained & {id(p) for group in optimizer.param_groups for p in group["params"]}:
        raise ValueError(
            "The optimizer in `optimizers` has no trainable weight of the model, so a training would change nothing. Make it of "
            "`trainer.model.parameters()`, which a `peft_config` replaces, or set `optim` instead."
        )


def _refuse_unfit_object(name: str, kind: Any, value: Any):
    """Refuse a name or a class where an object of the user's own is expected."""
    if value is None or (not isinstance(value, type) and all(hasattr(value, m) for m in kind.__abstractmethods__)):
        return
    advice = f"Derive your own from `{kind.__name__}`, or leave it unset"
    if isinstance(value, str):
        advice = f"Built-in ones are set by name in the configuration: `LZEGRPOConfig({name}={value!r})`"
    raise TypeError(f"`{name}` must be an object of your own, a `{kind.__name__}`, got {value!r}. {advice}.")


def with_prompts_checked(dataset: Any, called: str, args: LZEGRPOConfig, given: Any, columns: Any = None) -> Any:
    """Refuse columns that cannot be trained on, and rows without a prompt, unless an environment or a `rollout_func` makes it; those of a stream when read."""
    if isinstance(dataset, dict):
        return {name: with_prompts_checked(rows, f"{called} {name!r}", args, given) for name, rows in dataset.items()}
    if columns is None and isinstance(dataset, (Dataset, IterableDataset)):
        columns = columns_of(dataset)
    taken = [name for name in ("prompts", "completions") if name in (columns or ())]
    if taken and not args.remove_unused_columns:
        raise ValueError(f"The {called} has the columns {taken}, which TRL itself passes to rewards. Rename them.")
    if given.get("environment_factory"):  # makes the prompts
        return dataset
    if columns and "prompt" not in columns:
        advice = "Rename the column with the prompts to `prompt`, or load it with `lze_trl.data.load_prompts`."
        raise ValueError(f"The {called} has no `prompt` column, only {sorted(columns)}. {advice}")
    if given.get("rollout_func"):
        return dataset
    shows = {"image", "images"}.intersection(columns or ())

    def check(prompt: Any, row: int) -> dict[str, Any]:
        if not (is_prompt(prompt) or (shows and prompt and are_messages(prompt))):
            advice = f"{PROMPTS} Mend the row, or leave such rows out (`dataset.filter`)."
            raise ValueError(f"The {called} has {repr(prompt)[:200]} as the prompt of row {row}. {advice}")
        return {}

    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda row, i: check(row["prompt"], i) if "prompt" in row else {}, with_indices=True)
    for row, prompt in enumerate(prompts_of(dataset)):
        check(prompt, row)
    return dataset


# ---- Settings that depend on the data ----


def _resolved_window(args: LZEGRPOConfig, dataset: Any, sampler: str | None) -> int:
    """
    Return `window`. The strategy's becomes 1, with a warning, where the order is the user's (a sampler, no shuffling), and where prompts
    cannot be read before their batch, or only through a transform of the training set, which may take long, or draw random numbers.
    """
    if args.window == 1 or args.window != args.defaults()["window"]:
        return args.window
    if args.self_play["instruct"] or not isinstance(dataset, Dataset):
        return 1
    why_not = {
        "it has no column `prompt`": "prompt" not in dataset.column_names,
        "it has a transform": dataset.format["type"] == "custom",
        f"`{sampler}` orders it": sampler is not None,
        "`shuffle_dataset=False` keeps its order": not args.shuffle_dataset,
    }
    if reasons := [reason for reason, applies in why_not.items() if applies]:
        logger.warning(
            "`window` is 1 instead of %d: the training set is not ranked ahead, because %s. On mixed data `strategy='%s'` then trains on "
            "fewer live groups.",
            *(args.window, " and ".join(reasons), args.strategy),
        )
    return 1 if reasons else args.window


def _resolved_pruning(args: LZEGRPOConfig, dataset: Any, has_planner: bool, sampler: str | None) -> str:
    """Return `pruning`, or if it is unset, what the training set and the other arguments allow."""
    if dataset is None:
        logger.warning(
            "There is no `train_dataset`: the environment makes the prompts, and none is recognised when it comes again. Pruning "
            "and what is remembered of prompts are off. Groups are scored, selected and packed."
        )
        return "none"
    if isinstance(dataset, IterableDataset):
        logger.warning(
            "`train_dataset` is streamed, its rows cannot be read again: prompts are neither pruned nor deduplicated. "
            "Selection works; for the rest, load the dataset without streaming."
        )
        return args.pruning or "none"
    if has_planner or args.pruning is not None or args.loss_normalizer != "selected":
        return args.pruning or ("refill" if has_planner else "none")
    if sampler is not None:
        logger.warning("`%s` orders the prompts, so `pruning` is off: it would change the order.", sampler)
    return "refill" if sampler is None else "none"


def outcome_rule(
    args: LZEGRPOConfig, reward_funcs: list[Any], names: list[str], controller: RolloutController
) -> OutcomeRule:
    """Decide how outcomes follow from rewards, and refuse settings that name another reward. Reinforce-Ada counts passes."""
    if args.pass_reward not in (None, "total", *names):
        raise ValueError(
            f"`pass_reward={args.pass_reward!r}` is none of the reward functions {names}. Name one of them, or leave it "
            "unset for their weighted sum."
        )
    if (best := re.search(r"rewards/(.+)/(mean|std)$", args.metric_for_best_model or "")) and best[1] not in names:
        raise ValueError(
            f"`metric_for_best_model` is {args.metric_for_best_model!r}, and the rewards are {names}. Name one of them."
        )
    column = names.index(args.pass_reward) if args.pass_reward in names else None
    threshold, bounds, binary = args.pass_threshold, args.reward_range, False
    if threshold is None and isinstance(controller, ReinforceAda):
        weights = [*(args.reward_weights or ()), *[1.0] * len(names)]  # TRL adds a weight of 1 for each environment
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


def _with_prompt_ids(rows: Any, args: LZEGRPOConfig, columns: list[str]) -> tuple[Any, bool]:
    """Add prompt ids to a training set with these columns, which must fill a generation batch; tells whether repeats were dropped."""
    if not isinstance(rows, (Dataset, IterableDataset)):
        return rows, False  # TRL refuses it
    # Groups that the rows have to fill: none where the model writes its prompts
    num_groups = 0 if args.self_play["instruct"] else args.generation_batch_size // args.num_generations
    deduplicate = bool(args.deduplicate)
    with args.main_process_first(desc="prompt ids"):
        dataset = add_prompt_ids(rows, deduplicate, columns)
        if isinstance(dataset, IterableDataset):
            return dataset, False
        if deduplicate and len(dataset) < num_groups <= len(rows):  # plain TRL can train on these rows
            logger.warning(
                "The training set has %d rows and %d different prompts, and a generation batch takes %d: each row counts as "
                "another prompt. Use a smaller `generation_batch_size`, to give each prompt one group.",
                *(len(rows), len(dataset), num_groups),
            )
            dataset, deduplicate = add_prompt_ids(rows, False, columns), False
    if dropped := len(rows) - len(dataset):
        logger.warning("Dropped %d of %d rows that repeat others. `deduplicate=False` keeps them.", dropped, len(rows))
    refuse_too_few(dataset, args)
    return dataset, deduplicate


def refuse_too_few(dataset: Dataset, args: LZEGRPOConfig):
    """Refuse a training set that does not fill a generation batch."""
    num_groups = args.generation_batch_size // args.num_generations
    if len(dataset) < num_groups and not args.self_play["instruct"]:
        raise ValueError(
            f"The training set has {len(dataset)} different prompts, and a generation batch takes {num_groups} "
            f"(`generation_batch_size={args.generation_batch_size}` / `num_generations={args.num_generations}`). Use a "
            "smaller generation batch or more data."
        )
