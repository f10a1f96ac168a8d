"""What is refused, with a reason, before anything is loaded; and the defaults that a training set allows."""

import inspect
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOTrainer, is_conversational
from trl.trainer.utils import get_callable_name

from .config import LZEGRPOConfig
from .memory.identity import add_prompt_ids, columns_of
from .memory.outcomes import OutcomeRule
from .plan.planners import Planner
from .rollout.controllers import ReinforceAda, RolloutController, is_plain
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


def prepare(
    args: LZEGRPOConfig,
    train_dataset: Any,
    given: dict[str, Any],
    planner: Planner | None = None,
    controller: RolloutController | None = None,
    own_sampler: str | None = None,
    pruning: str | None = None,
) -> tuple[Dataset | IterableDataset, RolloutController, dict[str, Any]]:
    """
    Refuse what cannot be trained; `given` are the arguments of the trainer by name, and `own_sampler` is the name of a user's
    `_get_train_sampler`. `pruning` replaces that of `args`. Returns the training set with prompt ids, the controller, and the
    values of the settings that adapt to the data.
    """
    refuse_unsupported(args, train_dataset, given)
    if not given.get("environment_factory"):  # whose `reset` may make the prompt
        refuse_unfit_prompts(given)
    refuse_unfit_rewards(args, given)
    controller, pruning = controller or args.make_controller(), pruning or args.pruning
    refuse_unfit_strategies(args, train_dataset, planner, controller, pruning)
    refuse_unfit_instruction(args, train_dataset, planner)
    pruning = resolved_pruning(args, train_dataset, planner, pruning, own_sampler)
    if own_sampler is not None:
        refuse_ignored_sampler(args, own_sampler, controller, pruning)
    if train_dataset is None:
        logger.warning(
            "There is no `train_dataset`: the environment makes the prompts, and none is recognised when it comes again. Pruning "
            "and what is remembered of prompts are off. Groups are scored, selected and packed."
        )
        return None, controller, {"pruning": pruning, "deduplicate": False}
    dataset, deduplicate = with_prompt_ids(train_dataset, args, not given.get("environment_factory"))
    return dataset, controller, {"pruning": pruning, "deduplicate": deduplicate}


def resolved_pruning(
    args: LZEGRPOConfig, train_dataset: Any, planner: Planner | None, pruning: str | None, own_sampler: str | None
) -> str:
    """`pruning`, or what this training set, and what else is given, allows if it is unset."""
    if train_dataset is None:
        return "none"
    if not isinstance(train_dataset, IterableDataset):
        ranked = planner is not None or args.planner != "solved"
        refills = ranked or args.loss_normalizer == "selected"
        if refills and not ranked and pruning is None and own_sampler is not None:
            logger.warning(
                "`%s` orders the prompts: `pruning` is off, which would draw them in another order.", own_sampler
            )
            return "none"
        return pruning or ("refill" if refills else "none")
    off = [f"`{name}`" for name, value in (("pruning", pruning), ("deduplicate", args.deduplicate)) if value is None]
    if off:
        logger.warning(
            "`train_dataset` is streamed, its rows cannot be read again: %s off. Selection works; for the rest, load the "
            "dataset without streaming.",
            " and ".join(off) + (" is" if len(off) == 1 else " are"),
        )
    return pruning or "none"


def refuse_ignored_sampler(args: LZEGRPOConfig, name: str, controller: RolloutController, pruning: str):
    """Refuse a user's sampler where the prompts of a batch do not come from the data loader."""
    if args.self_play["instruct"]:
        why, instead = "`self_play={'instruct': True}` trains on prompts that the model writes", "Remove the override"
    elif controller.draws_prompts:
        why = f"`{type(controller).__name__}` draws prompts in an order of its own"
        instead = "Remove the override, or use another `strategy` or `controller`"
    elif pruning == "refill":
        why = "`pruning='refill'` draws them in an order of its own"
        instead = "Set `pruning='skip'` or 'none', or remove the override"
    else:
        return
    raise ValueError(f"`{name}` orders the prompts, and {why}, so it would be ignored. {instead}.")


def refuse_ignored_override(name: str):
    """Refuse an override of a method of TRL that data selection does not call."""
    raise TypeError(
        f"`{name}` would never be called in training: data selection generates, scores, chooses and packs completions in steps "
        "of its own. Override `_generate` to change completions, `_calculate_rewards` to change rewards, or `_compute_loss` "
        "to change advantages and other tensors (`inputs`) of the rows that are trained on; or use `trl.GRPOTrainer`."
    )


def refuse_unsupported(args: LZEGRPOConfig, train_dataset: Any, given: dict[str, Any]):
    """Refuse, before anything is loaded, what selection cannot do; `given` are the arguments of the trainer by name."""
    if not isinstance(args, LZEGRPOConfig):
        raise TypeError(
            f"`args` must be an `LZEGRPOConfig`, got `{type(args).__name__}`. It takes every field of `GRPOConfig`."
        )
    if train_dataset is None and not given.get("environment_factory"):
        raise ValueError("`train_dataset` is required, unless an `environment_factory` makes the prompts.")


def refuse_unfit_objects(**given: Any):
    """Refuse a name or a class where a strategy of the user's own, given by its argument, is expected."""
    for name, value in given.items():
        kind = OWN[name]
        if value is None or (not isinstance(value, type) and all(hasattr(value, m) for m in kind.__abstractmethods__)):
            continue
        advice = f"Derive your own from `{kind.__name__}`, or leave it unset"
        if isinstance(value, type):
            advice = f"Pass an object of the class, `{value.__name__}(…)`"
        elif isinstance(value, str):
            advice = f"Built-in ones are set by name in the configuration: `LZEGRPOConfig({name}={value!r})`"
        raise TypeError(f"`{name}` must be an object of your own, a `{kind.__name__}`, got {value!r}. {advice}.")


def refuse_unfit_prompts(given: dict[str, Any]):
    """Refuse rows without a prompt, which fail in the tokenizer or train on nothing."""
    for place, row, prompt in _prompts(given):
        if isinstance(prompt, list):
            fits = any(isinstance(message, dict) and message.get("content") for message in prompt)
        else:
            fits = isinstance(prompt, str) and prompt != ""
        if not fits:
            raise ValueError(
                f"{place} has {prompt!r} as the prompt of row {row}. A prompt is a text that is not empty, or a list of messages "
                "with content. Mend the row, or leave such rows out (`dataset.filter`)."
            )


def refuse_long_prompts(trainer: GRPOTrainer, given: dict[str, Any]):
    """Refuse prompts that leave no room in the model's context, where it is known, before anything is generated."""
    model: Any = trainer.model
    encoder: Any = trainer.processing_class
    config = model.config.get_text_config()
    tokenizer: Any = encoder.tokenizer if isinstance(encoder, ProcessorMixin) else encoder
    context = config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None
    # Other ways to scale rotary positions reach further
    scaling = config.to_dict().get("rope_parameters") or {}
    if scaling.get("rope_type", "default") not in (
        "default",
        "llama3",
        "longrope",
    ):
        return
    if not isinstance(context, int) or context < 1:
        return
    for place, row, prompt in _prompts(given):
        text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)
        if len(text.encode()) < context:  # a token stands for one byte or more
            continue
        if isinstance(prompt, str):
            encoded = tokenizer(prompt)
        else:
            template = {"chat_template": encoder.chat_template, "add_generation_prompt": True}
            encoded = tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=True, **template)
        if (tokens := len(encoded["input_ids"])) >= context:
            raise ValueError(
                f"{place} has a prompt of {tokens:,} tokens in row {row} ({text[:40]!r}…), and the model has a context of "
                f"{context:,} tokens (`max_position_embeddings`) for prompt and completion. Leave such rows out "
                "(`dataset.filter`), or use a model with a longer context."
            )


def _prompts(given: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """
    Place, row and prompt of all rows that can be read before: those of no stream, and none that a transform makes. None for a
    rollout function, which takes what it likes.
    """
    for place, dataset in _datasets(given):
        if given.get("rollout_func") or isinstance(dataset, IterableDataset) or "prompt" not in dataset.column_names:
            continue
        if dataset.format["type"] != "custom":
            batches = dataset.select_columns("prompt").with_format("arrow").iter(1000)
            prompts = (prompt for batch in batches for prompt in batch["prompt"].to_pylist())
            yield from ((place, row, prompt) for row, prompt in enumerate(prompts))


def refuse_unfit_strategies(
    args: LZEGRPOConfig,
    train_dataset: Any,
    planner: Planner | None,
    controller: RolloutController,
    pruning: str | None,
):
    """Refuse strategies that the training set, or another setting, does not allow; `planner` is one of the user's."""
    ranks, draws = type(planner).__name__, type(controller).__name__
    uniform = is_plain(controller, args.num_generations)
    if train_dataset is None:
        for unfit, what in (
            (pruning not in (None, "none"), f"`pruning={pruning!r}`"),
            (args.planner != "solved", f"`planner={args.planner!r}`"),
            (planner is not None, f"`{ranks}`"),
        ):
            if unfit:
                raise ValueError(
                    f"{what} needs prompts that come again, and there is no `train_dataset`: the environment makes them. Leave it "
                    "unset, or pass a dataset whose rows `reset` reads."
                )
    if isinstance(train_dataset, IterableDataset):
        for unfit, what, instead in (
            (pruning not in (None, "none"), f"`pruning={pruning!r}` needs", "Set `pruning='none'`"),
            (args.planner != "solved", "`planner='greso'` needs", "Set `planner='solved'`"),
            (planner is not None, f"`{ranks}` ranks the prompts of", "Pass no `planner`"),
            (not uniform, f"`{draws}` needs", "Use `controller='uniform'`"),
        ):
            if unfit:
                raise ValueError(
                    f"{what} a dataset whose rows can be read again, and `train_dataset` is an `IterableDataset`. {instead} "
                    "(selection works), or load the dataset without streaming."
                )
    if planner is not None and pruning == "none":
        raise ValueError(
            f"`pruning='none'` rolls out every prompt, and `{ranks}` was passed to rank them. Set `pruning='refill'` or "
            "'skip', or pass no `planner`."
        )
    if not uniform and args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` needs groups of one size, and `{draws}` "
            "draws others. Use 'sum_then_normalize'."
        )
    if controller.draws_prompts and pruning == "skip":
        raise ValueError(
            f"`pruning='skip'` makes batches smaller, and `{draws}` draws further prompts to fill them. Use "
            "`pruning='refill'` or 'none'."
        )


def refuse_unfit_label_confidence(
    args: LZEGRPOConfig, rewards: Mapping[int, Any], selector: Any, train_dataset: Dataset | IterableDataset
):
    """Refuse to weigh energies by votes where there are none, or where nothing is ranked by energy."""
    confidence = args.self_play["label_confidence"]
    value = f"`label_confidence={confidence!r}`"
    if confidence == "none":
        return
    if not rewards:
        raise ValueError(
            f"{value} is about a majority vote, and none of the reward functions is the majority reward. Add "
            "'majority' to them (`MajorityReward()`), or leave `label_confidence` unset."
        )
    if selector is None and args.selector != "energy":
        raise ValueError(
            f"{value} corrects the energy, and `selector={args.selector!r}` does not go by it. Set `selector='energy'` and a "
            "`selection_ratio`, or leave `label_confidence` unset."
        )
    if confidence == "calibrated":
        _refuse_without_labels(args, train_dataset)


def _refuse_without_labels(args: LZEGRPOConfig, train_dataset: Dataset | IterableDataset):
    """Refuse to learn what votes are worth where no gold answer will ever tell."""
    columns = columns_of(train_dataset)
    stored = train_dataset.with_format(None) if isinstance(train_dataset, Dataset) else None
    if args.self_play["instruct"]:
        why = "the problems of `self_play={'instruct': True}` have none"
    elif "solution" not in columns:
        why = "the training set has no column `solution`"
    elif stored and "solution" in stored.column_names and all(gold is None for gold in stored["solution"]):
        why = "the column `solution` of the training set is empty"
    else:
        return
    raise ValueError(
        f"`label_confidence='calibrated'` learns from gold answers how often votes are right, and {why}. Add some problems with "
        "gold answers, or use 'share'."
    )


def refuse_unfit_instruction(args: LZEGRPOConfig, train_dataset: Any, planner: Planner | None):
    """Refuse what does not go with prompts that the model writes itself; `planner` is one of the user's."""
    if not args.self_play["instruct"]:
        return
    for unfit, what, instead in (
        (not isinstance(train_dataset, Dataset), "reads all seeds", "Load the training set without streaming"),
        (args.max_steps <= 0, "has no end of its own", "Set `max_steps`"),
        (planner is not None, "has no passes that a planner could rank", "Pass no `planner`"),
        (args.planner != "solved", "has no passes to prune", "Set `planner='solved'`"),
        (args.pruning == "skip", "has no passes to prune", "Set `pruning='refill'` or 'none'"),
        (
            args.self_play["presence_penalty"] and not (args.use_vllm and args.vllm_mode == "http"),
            "writes by transformers here, which has no `presence_penalty`",
            "Set it to 0, or use servers (`vllm_mode='http'`)",
        ),
    ):
        if unfit:
            raise ValueError(f"`self_play={{'instruct': True}}` {what}. {instead}.")


def refuse_unfit_group_rewards(args: LZEGRPOConfig, rewards: Mapping[int, Any], controller: RolloutController):
    """Refuse settings that rewards of whole groups, given by their columns, do not go with."""
    if not rewards:
        return
    name = get_callable_name(next(iter(rewards.values())))
    if isinstance(controller, ReinforceAda) and controller.exit == "positive":
        raise ValueError(
            f"`controller='reinforce_ada_positive'` draws until a completion passes, and by '{name}' one of every group does: "
            "the winner of a vote. Use 'reinforce_ada_balanced', or 'uniform'."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` normalises each reward over the batch, which "
            f"would give a gradient to groups for which '{name}' abstains. Use 'sum_then_normalize'."
        )


def refuse_unwritable(args: LZEGRPOConfig):
    """Refuse a folder in which nothing can be written, before the first rollout is paid for."""
    if not args.should_save:
        return
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output_dir) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(
            f"`output_dir={str(args.output_dir)!r}` cannot be written to ({error.strerror}). Name a folder in which "
            "this process may create files, on a disk with free space."
        ) from error


def refuse_unfit_rewards(args: LZEGRPOConfig, given: dict[str, Any]):
    """Refuse, before anything is loaded, reward functions that cannot be called with what the datasets hold."""
    funcs = given.get("reward_funcs")
    for func in funcs if isinstance(funcs, list) else [funcs]:
        if isinstance(func, (str, nn.Module)) or not callable(func):
            continue
        if isinstance(func, type):
            raise TypeError(
                f"The reward function '{func.__name__}' is a class. Pass an object of it, `{func.__name__}(…)`, that can be called."
            )
        try:
            parameters = inspect.signature(func).parameters
        except ValueError:  # some builtins have no signature to read
            continue
        for place, dataset in _datasets(given):
            _refuse_unfit_call(
                get_callable_name(func), list(parameters.values()), place, columns_of(dataset), args, given
            )


def _datasets(given: dict[str, Any]) -> list[tuple[str, Dataset | IterableDataset]]:
    """The training set and the evaluation sets, each with words for it; TRL says what is wrong with other kinds of data."""
    held_out = given.get("eval_dataset")
    places = [("The training set", given.get("train_dataset"))]
    if isinstance(held_out, dict):
        places += [(f"The evaluation set '{name}'", dataset) for name, dataset in held_out.items()]
    else:
        places.append(("The evaluation set", held_out))
    return [(place, data) for place, data in places if isinstance(data, (Dataset, IterableDataset))]


def _refuse_unfit_call(
    name: str, parameters: list[inspect.Parameter], place: str, columns: list[str], args: Any, given: dict[str, Any]
):
    kept = [] if args.remove_unused_columns else [column for column in columns if column not in _NEVER_PASSED]
    passed = [*_ALWAYS_PASSED, *kept, *(["environments"] if given.get("environment_factory") else [])]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [name for name, p in named.items() if p.default is p.empty and name not in passed]
    if missing and not given.get("rollout_func"):  # which can return further columns
        column = missing[0]
        if column in columns and column not in _NEVER_PASSED:
            raise ValueError(
                f"The reward function '{name}' needs the column `{column}`, and `remove_unused_columns=True` drops it. Set "
                "`remove_unused_columns=False`."
            )
        raise ValueError(
            f"The reward function '{name}' needs `{column}`, and {place[0].lower()}{place[1:]} has no such column to give "
            f"it: it has {sorted(columns)}. Rename the column that holds it to `{column}` (`dataset.rename_column`), or "
            "give the parameter a default value."
        )
    unknown = [known for known in passed if known not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"The reward function '{name}' has no parameter for {unknown}, and it is called with these. Add `**kwargs` to "
            "its parameters."
        )


def refuse_unfit_tokenizers(trainer: GRPOTrainer):
    """Refuse, before anything is generated, tokenizers without the tokens and the template that the data needs."""
    # A rollout function writes its conversations itself
    encoders: list[tuple[str, Any, bool]] = [
        ("The tokenizer of the model", trainer.processing_class, trainer.rollout_func is None)
    ]
    rewards = zip(trainer.reward_func_names, trainer.reward_funcs, trainer.reward_processing_classes, strict=True)
    for name, func, encoder in rewards:
        if isinstance(func, PreTrainedModel):
            encoders.append((f"The tokenizer of the reward model '{name}'", encoder, True))
    for place, encoder, _ in encoders:
        tokenizer = encoder.tokenizer if isinstance(encoder, ProcessorMixin) else encoder
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"{place} has neither a pad token nor an end token (`eos_token`) to use as one. Set "
                "`tokenizer.pad_token` to a token of its vocabulary, and pass the tokenizer to the trainer."
            )
    if None in trainer.eos_token_ids:
        raise ValueError(
            f"{encoders[0][0]} has no end token, so no completion would ever end. Set `tokenizer.eos_token` to a token of "
            "its vocabulary, and pass the tokenizer as `processing_class`."
        )
    without = [place for place, encoder, needed in encoders if needed and encoder.chat_template is None]
    if without and any(is_conversational(next(iter(data), {})) for _, data in _datasets(vars(trainer))):
        raise ValueError(
            f"{without[0]} has no chat template, and the prompts are conversations. Set `tokenizer.chat_template` and pass "
            "the tokenizer to the trainer, or use a model that was trained for chat, or prompts of plain text "
            "(in a recipe, `conversational: false`)."
        )


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
        counted = range(len(names)) if column is None else [column]
        weights = args.reward_weights or [1.0] * len(names)
        graded = [names[i] for i in counted if isinstance(reward_funcs[i], nn.Module)]
        summed = [names[i] for i in counted if weights[i] != 0.0]
        if graded or len(summed) > 1:
            raise ValueError(
                f"Reinforce-Ada counts the completions whose reward is above `pass_threshold`, and the reward from "
                f"{graded or summed} is graded. Set `pass_threshold`, or name a reward of 0 and 1 as `pass_reward`."
            )
        threshold, binary = PUBLISHED_THRESHOLD, True
        logger.info("Reinforce-Ada counts rewards above %s, the published threshold, as passes.", threshold)
    elif threshold is None and args.pass_reward is not None and bounds is None:
        threshold = 0.5
    return OutcomeRule(column, threshold, None if bounds is None else (bounds[0], bounds[1]), binary)


def with_prompt_ids(
    dataset: Any, args: LZEGRPOConfig, needs_prompt: bool = True
) -> tuple[Dataset | IterableDataset, bool]:
    """Training set with prompt ids, once it is known to fill a generation batch, and whether repeats were dropped."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset, bool(args.deduplicate)  # TRL says what is wrong with it
    # Rows that a generation batch needs: none of those that a model is only shown
    num_groups = 0 if args.self_play["instruct"] else args.generation_batch_size // args.num_generations
    rows = dataset
    open_choice = args.deduplicate is None
    deduplicate = not isinstance(dataset, IterableDataset) if args.deduplicate is None else args.deduplicate
    with args.main_process_first(desc="prompt ids"):
        dataset = add_prompt_ids(rows, deduplicate, needs_prompt)
        if open_choice and deduplicate and len(dataset) < num_groups <= len(rows):  # plain TRL can train on these rows
            deduplicate = False
            logger.warning(
                "The training set has %d rows and %d different prompts, and a generation batch takes %d: each row counts as "
                "another prompt. Use a smaller `generation_batch_size`, to give each prompt one group.",
                *(len(rows), len(dataset), num_groups),
            )
            dataset = add_prompt_ids(rows, False, needs_prompt)
    if isinstance(dataset, IterableDataset):
        return dataset, deduplicate
    if dropped := len(rows) - len(dataset):
        logger.warning("Dropped %d of %d rows that repeat another row.", dropped, len(rows))
    if len(dataset) < num_groups:
        raise ValueError(
            f"The training set has {len(dataset)} different prompts, and a generation batch takes {num_groups} "
            f"(`generation_batch_size={args.generation_batch_size}` / `num_generations={args.num_generations}`). Use a "
            "smaller generation batch or more data."
        )
    return dataset, deduplicate
