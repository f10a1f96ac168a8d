"""Configuration: TRL's own fields plus those of data selection."""

import logging
import math
import numbers
import re
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from trl import GRPOConfig

from .memory.state import MAX_STREAK
from .plan.planners import GresoPlanner, Planner, SolvedPlanner
from .rollout.controllers import (
    DynamicSampling,
    Gate,
    ReinforceAda,
    RolloutController,
    UniformController,
)
from .select.advantages import Estimator
from .select.selectors import Selector, make_selector
from .strategies import DEFAULT, REMOVED, STRATEGIES, settings_of


logger = logging.getLogger(__name__)

SELECTORS = ("energy", "variance", "midpoint", "random", "all", "zero_variance")
CONTROLLERS = (
    "uniform",
    "reinforce_ada_positive",
    "reinforce_ada_balanced",
    "dynamic",
    "gate",
)

_TRL_FIELDS = {theirs.name for theirs in fields(GRPOConfig)}
_KINDS = {
    bool: ((bool,), "true or false"),
    int: ((numbers.Integral,), "a whole number"),
    float: ((numbers.Real,), "a number"),
}
RANGES = {
    "selection_ratio": (lambda x: 0 < x <= 1, "in (0, 1]", "Use 1.0 to train on every group"),
    "difficulty_floor": (lambda x: 0 <= x <= 1, "in [0, 1]", "The paper uses 0.05"),
    "momentum_weight": (lambda x: 0 <= x < math.inf, "at least 0", "Use 0 for no momentum"),
    "ema_decay": (lambda x: 0 <= x < 1, "in [0, 1)", "The paper uses 0.9"),
    "gumbel_scale": (lambda x: 0 <= x < math.inf, "at least 0", "Use 0 to rank without noise"),
    "pass_threshold": (math.isfinite, "finite", "Use 0.5 for rewards of 0 and 1"),
    "pruning_streak": (lambda x: 1 <= x <= MAX_STREAK, f"between 1 and {MAX_STREAK}", "Or set `pruning='none'`"),
    "replay_ratio": (lambda x: 0 <= x <= 1, "in [0, 1]", "Use 0 to re-check one prompt a pass"),
    "greso_exploration": (lambda x: 0.05 <= x <= 0.95, "in [0.05, 0.95]", "The paper uses 0.5"),
    "greso_target": (lambda x: 0 < x < 1, "in (0, 1)", "The paper uses 0.25"),
    "greso_step": (lambda x: 0 < x < 1, "in (0, 1)", "The paper uses 0.01"),
    "gate_explore": (lambda x: 0 < x <= 1, "in (0, 1]", "Use 0.05, or the forecast never sees what it drops"),
    "instruct_examples": (lambda x: x >= 1, "at least 1", "8 were published"),
    "instruct_own": (lambda x: x >= 0, "at least 0", "2 were published"),
    "instruct_requests": (lambda x: x >= 1, "at least 1", "4 were published"),
    "instruct_temperature": (lambda x: 0 < x < math.inf, "greater than 0", "0.8 was published"),
    "instruct_top_p": (lambda x: 0 < x <= 1, "in (0, 1]", "0.95 was published"),
    "instruct_max_tokens": (lambda x: x >= 1, "at least 1", "1024 were published"),
    "instruct_presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]", "2 was published"),
    "instruct_overlap": (lambda x: 0 < x < 1, "in (0, 1)", "0.7 was published"),
    "instruct_max_rounds": (lambda x: x >= 1, "at least 1", "16 is the default"),
    "instruct_stock": (lambda x: x >= 1, "at least 1", "Leave it unset for the prompts of a generation batch"),
    "instruct_reuse": (lambda x: x >= 1, "at least 1", "1 was published"),
    "max_tokens_per_micro_batch": (lambda x: x >= 1, "at least 1", "Leave it unset to bound micro-batches by rows"),
    "vllm_sync_tolerance": (lambda x: x > 0, "greater than 0", "Leave it unset for a default by the dtypes"),
    "vllm_max_concurrent_requests": (lambda x: x >= 1, "at least 1", "64 is the default"),
    "vllm_request_timeout": (lambda x: x > 0, "greater than 0", "1800 is the default"),
    "vllm_recovery_timeout": (lambda x: x >= 0, "at least 0", "Use 0 to not wait"),
    # Fields of TRL whose bad values would show late or never
    "learning_rate": (lambda x: 0 <= x < math.inf, "at least 0", "TRL's default is 1e-6"),
    "temperature": (lambda x: 0 < x < math.inf, "greater than 0", "Use 1.0 to sample as the model says"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]", "Use 1.0 for all tokens"),
    "max_completion_length": (lambda x: x >= 1, "at least 1", "TRL's default is 256"),
    "max_steps": (lambda x: x >= 1 or x == -1, "at least 1, or -1", "Use -1 to train for `num_train_epochs`"),
}
"""What is allowed of a number, in words, and what to do; NaN fails every comparison."""

# Name and description of a field in the docstring
_ENTRY = re.compile(r"^ {8}(\w+) \(`.*\):\n((?: {12}.+\n)+)", re.M)


def _with_help(config: type) -> type:
    """Let command lines show what the docstring says of each field."""
    defaults = settings_of(DEFAULT)
    for name, text in _ENTRY.findall(config.__doc__ or ""):  # absent under `python -OO`
        help = " ".join(text.split())
        if name in defaults:
            help += f" Default: by the strategy, {defaults[name]!r}."
        vars(config)["__dataclass_fields__"][name].metadata = {"help": help}
    return config


@_with_help
@dataclass
class LZEGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`LZEGRPOTrainer`].

    Holds the fields of data selection only; see [`~trl.GRPOConfig`] for all others. TRL's batch settings keep their
    meaning: they describe the *rollout* batch, P = `generation_batch_size / num_generations` prompts.

    Parameters:
        strategy (`str`, *optional*, defaults to `"exact"`):
            Name of a combination of settings, see `lze_trl.strategies.STRATEGIES`: `"exact"` (the updates of plain GRPO
            without computing groups that have no gradient), `"lze"` (the published method), `"grpo"` (plain TRL),
            `"zero_variance"`, `"random"`, `"variance"`, `"dapo"`, `"reinforce_ada"`, `"reinforce_ada_positive"`,
            `"greso"`, `"gate"`, `"lze_reinforce_ada"` or `"lze_dynamic"`. Any field
            that is given besides wins. The defaults below are those of `"exact"`, which adapts to what is given besides: a
            `selection_ratio` alone chooses by energy, and where groups with equal rewards have a gradient, as with
            `advantage_estimator="reinforce_plus_plus"`, all are trained on. A configuration that was made holds the values
            themselves: to change its strategy, make another.

        > Parameters that control which groups are trained on

        selector (`str`, *optional*, defaults to `"zero_variance"`):
            Which groups are trained on: `"zero_variance"` (every group whose total rewards differ), `"all"`, or a share of
            them, ranked by `"energy"` (Learning-Zone Energy with Gumbel noise), `"variance"` (outcome uncertainty alone),
            `"midpoint"` (−|p − 0.5|) or `"random"`. A selector object passed to the trainer wins.
        selection_ratio (`float`, *optional*, defaults to `0.4`):
            ρ, the share of the groups of a generation batch to train on, in (0, 1]. Dead groups never fill the quota.
            Ignored by the selectors `"all"` and `"zero_variance"`, unless a controller draws prompts until K groups live.
        difficulty_floor (`float`, *optional*, defaults to `0.05`):
            d_min, the lower bound of the initial-difficulty anchor, in [0, 1].
        momentum_weight (`float`, *optional*, defaults to `0.3`):
            α, the weight of the pass-rate momentum in the energy, at least 0.
        ema_decay (`float`, *optional*, defaults to `0.9`):
            λ, the decay of the moving average of a prompt's pass rate, in [0, 1).
        gumbel_scale (`float`, *optional*, defaults to `0.05`):
            Scale of the Gumbel noise on the energies, relative to their range over the live groups. 0 ranks without
            noise.
        label_confidence (`str`, *optional*, defaults to `"none"`):
            What the energy of a group is multiplied by where its label is a majority vote, which may be wrong: `"share"`, the
            winner's share of the completions; `"calibrated"`, the share corrected by how often labels of such a share were right
            so far, where gold answers tell; or `"none"`, nothing. Without it, prompts are ranked highest at a first visit where a
            third of the completions agree.
        loss_normalizer (`str`, *optional*, defaults to `"all"`):
            What the loss is averaged over: `"selected"` (the chosen completions, as DAPO does) or `"all"` (a full batch,
            whatever of it was rolled out: the gradient is that of the full batch minus the groups that were dropped,
            skipped or not drawn in full).
        scale_rewards (`str`, *optional*, defaults to `"group"`):
            TRL's: what advantages are divided by, the standard deviation within a `"group"`, over the `"batch"`, or
            `"none"`. Reinforce-Ada was published with `"none"`.
        advantage_estimator (`str`, *optional*, defaults to `"grpo"`):
            How advantages follow from the rewards of all completions drawn: `"grpo"` (reward minus the mean of the group,
            scaled by `scale_rewards`), `"rloo"` (minus the mean of the others of the group), `"reinforce_plus_plus"`
            (normalised over all tokens of the generation batch) or `"reinforce_plus_plus_baseline"` (minus the mean of the
            group, then so normalised). All but the first need `scale_rewards="none"`, which they set.
        advantage_statistics (`str`, *optional*, defaults to `"scored"`):
            Which completions `"reinforce_plus_plus"` and its variant with a baseline take mean and deviation of: `"scored"`,
            those with a reward, or `"drawn"`, also those of groups for which a majority reward abstains, with the rewards
            that the vote would give them (published by SeRL, which drops these groups afterwards).

        > Parameters that define a pass

        pass_reward (`str`, *optional*):
            Name of the reward function by which groups are ranked and prompts pruned, or `"total"` for the weighted sum
            of all, which is the default. Completions for which it returns `None` have no outcome. Whatever it says, a group
            whose total rewards differ is never taken for dead.
        pass_threshold (`float`, *optional*):
            A completion passes when its reward is greater than this. Defaults to none: outcomes are graded, which for
            rewards of 0 and 1 is the same as passes. Reinforce-Ada, which counts passes, then uses the published 0.7, and
            needs a threshold of yours if rewards are not 0 and 1. With `pass_reward` and without `reward_range`, 0.5.
        reward_range (`list[float]`, *optional*):
            Lowest and highest reward that graded outcomes are scaled from; rewards outside are clipped. Defaults to the
            range of the last 100 rounds of completions.

        > Parameters that control which prompts are rolled out

        pruning (`str`, *optional*):
            What happens to prompts that stay solved: `"refill"` (their slots go to other prompts, so a pass over the
            data takes fewer steps), `"skip"` (they get no rollouts and the batch is smaller, as in the paper), or
            `"none"`. Defaults to `"none"` with `loss_normalizer="all"`, unless a policy or a planner is given, and for a
            streamed dataset, whose rows cannot be read again; else to `"refill"`.
        pruning_streak (`int`, *optional*, defaults to `2`):
            k, the number of fully correct visits in a row after which a prompt is pruned, at least 1.
        replay_ratio (`float`, *optional*, defaults to `0.1`):
            Share of the pruned prompts (at least one) that each pass over the data rolls out again, in [0, 1]; under
            `"gate"`, the probability with which a prompt is begun that is not worth one completion.

        pruning_policy (`str`, *optional*, defaults to `"solved"`):
            Who is pruned: `"solved"` (prompts with `pruning_streak` fully correct visits in a row, as in the paper), or
            `"greso"` (any prompt whose last visits had no signal, with a probability that grows with their number).
        greso_exploration (`float`, *optional*, defaults to `0.5`):
            Probability with which `"greso"`, at the start, rolls out a prompt after one visit without signal, in [0.05, 0.95].
        greso_target (`float`, *optional*, defaults to `0.25`):
            Share of groups without signal that `"greso"` steers to, in (0, 1): a third solved, the rest hopeless.
        greso_step (`float`, *optional*, defaults to `0.01`):
            By how much `"greso"` moves its exploration after each generation batch, in (0, 1).

        > Parameters that control how many completions a prompt gets

        controller (`str`, *optional*, defaults to `"uniform"`):
            Who gets how many completions: `"uniform"` (`num_generations` each), `"reinforce_ada_positive"` or
            `"reinforce_ada_balanced"` (in rounds, until a prompt has a positive, or enough of either kind), `"dynamic"`
            (DAPO: further prompts, until enough groups are alive), or `"gate"` (one completion, the others where the group is likely to be alive). A `RolloutController`
            passed to the trainer wins.
        round_size (`int`, *optional*, defaults to `8`):
            M, completions of each active prompt in a round of Reinforce-Ada.
        max_rounds (`int`, *optional*, defaults to `4`):
            R, the largest number of rounds of Reinforce-Ada and of dynamic sampling.
        kept_completions (`int`, *optional*):
            n, the most completions of a prompt that are trained on: of both kinds where there are, weighted to stand for
            the others of their kind; with Reinforce-Ada unweighted, as published. Defaults to all, with Reinforce-Ada to
            `num_generations`.
        gate_explore (`float`, *optional*, defaults to `0.05`):
            Probability with which `"gate"` draws a group that it would stop to its end all the same, to learn from it, in
            (0, 1].

        > Parameters that control identity and state

        deduplicate (`bool`, *optional*):
            Whether to drop rows of the training set that repeat another row in all columns that reward functions can
            read, or in `prompt_id`, if there is such a column. `False` keeps them, each remembered as another prompt.
            Defaults to `True`, and to `False` for a streamed dataset, which cannot be searched, and where too few prompts for
            a generation batch would remain.
        state_from (`str`, *optional*):
            Directory (a run or one of its checkpoints) or Hub id of an earlier run, whose prompt state this run starts
            from. Ignored when training resumes from a checkpoint.

        > Parameters that control the update

        packing (`bool`, *optional*):
            Whether to pack the chosen completions, sorted by length and trimmed, into few micro-batches. It changes where a
            completion is computed, never what it weighs: with KL and an entropy bonus as well, which give gradients to
            dead groups, too, if they are chosen. `False` keeps TRL's micro-batches. Defaults to packing, except where the
            loss depends on which rows share a micro-batch (`top_entropy_quantile`).
        max_tokens_per_micro_batch (`int`, *optional*):
            Token budget of a micro-batch (rows × padded length) on each process. A packed micro-batch then holds as
            many rows as fit, instead of `per_device_train_batch_size`.

        > Parameters that control generation by vLLM servers over HTTP (`use_vllm=True`, `vllm_mode="http"`)

        vllm_mode (`str`, *optional*, defaults to `"colocate"`):
            `"colocate"` and `"server"` are TRL's. `"http"` takes completions from one or several vLLM servers over plain
            HTTP and syncs weights through a file system: no vLLM, CUDA or NCCL in the trainer's environment.
        vllm_server_urls (`list[str]`, *optional*):
            Base URLs of the servers.
        vllm_sync_dir (`str`, *optional*):
            Directory for the weights, which trainer and servers see at the same path. Defaults to shared memory if every
            server runs on this host.
        vllm_sync_tolerance (`float`, *optional*):
            Largest mean difference between the log-probs of a server and of the trainer after a sync, in nats. Defaults
            to 1e-3 where both compute in float32, and to 0.05 otherwise.
        vllm_max_concurrent_requests (`int`, *optional*, defaults to `64`):
            Number of prompts that one server completes at a time.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds after which a request is given up and sent again.
        vllm_recovery_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds to wait for a server to return when none is left.

        > Parameters that control self-instruction, in which the model writes its own problems

        self_instruct (`bool`, *optional*, defaults to `False`):
            Whether the policy writes the problems that it is trained on. The training set is then what it begins with: the seeds
            that it is shown, which are not trained on. Needs `max_steps`, and a reward without labels such as `majority`.
        instruct_template (`str`, *optional*, defaults to `"tagged"`):
            How problems are asked for: `"tagged"` (each between two tags) or `"serl"` (the published numbered list).
        instruct_examples (`int`, *optional*, defaults to `8`):
            Exemplars in a request.
        instruct_own (`int`, *optional*, defaults to `2`):
            How many of these are problems of its own that proved worth training on, as far as there are any. The others are
            seeds.
        instruct_exemplars (`str`, *optional*, defaults to `"energy"`):
            How problems of its own are chosen for a request: `"energy"` (by a softmax of the energy that their next visit is
            expected to have, times the winner's share with `label_confidence="share"`) or `"uniform"` (all alike, as published).
        instruct_requests (`int`, *optional*, defaults to `16`):
            Requests of a round. 4 were published.
        instruct_temperature (`float`, *optional*, defaults to `0.8`):
            Temperature at which problems are sampled.
        instruct_top_p (`float`, *optional*, defaults to `0.95`):
            Share of the probability that they are sampled from.
        instruct_max_tokens (`int`, *optional*, defaults to `1024`):
            Most tokens of the answer to a request.
        instruct_presence_penalty (`float`, *optional*, defaults to `0.0`):
            Presence penalty of vLLM's servers, where these write. 2 was published.
        instruct_overlap (`float`, *optional*, defaults to `0.7`):
            ROUGE-L F1 with a seed, an evaluation problem or any problem accepted before, above which a problem is rejected.
        instruct_refuse_overlap (`bool`, *optional*, defaults to `False`):
            Whether evaluation problems that a seed resembles by more than `instruct_overlap` are an error. Otherwise they are
            counted, and the first ones are named.
        instruct_max_rounds (`int`, *optional*, defaults to `16`):
            Rounds in a row without an acceptable problem after which the run stops, with the reasons.
        instruct_stock (`int`, *optional*):
            Problems with visits left, below which further ones are written. Defaults to P, the prompts of a generation batch,
            which is also the least.
        instruct_reuse (`int`, *optional*, defaults to `1`):
            Visits after which a problem is retired.

        > Parameters that control what is recorded

        telemetry (`bool`, *optional*, defaults to `True`):
            Whether the main process records every group of every generation batch under `output_dir/telemetry`.
        telemetry_completions (`str`, *optional*, defaults to `"sampled"`):
            Which completions are recorded: `"none"`, `"sampled"` (in every generation batch, the three live groups of
            highest energy and one group drawn at random) or `"all"`. Their text goes to the main process alone.
        hub_telemetry_id (`str`, *optional*):
            Hub dataset to which `push_to_hub` also uploads telemetry, report and prompt state. The viewer opens it by
            this name, and `state_from` starts from it. Recorded prompts and completions become as public as it is.
        summary (`bool`, *optional*, defaults to `True`):
            Whether the main process shows one readable line at each log and, at the end, a summary and a report of the
            telemetry. `False` leaves what transformers prints. Trackers get all metrics either way.
    """

    if TYPE_CHECKING:  # unset in TRL's declarations, and set when `__post_init__` has run
        output_dir: str = ""
        num_generations: int = 8
        generation_batch_size: int = 8
        steps_per_generation: int = 1
        report_to: list[str] = field(default_factory=list)
        disable_tqdm: bool = False
        gradient_checkpointing: bool = True

    strategy: Literal[tuple(STRATEGIES)] = DEFAULT  # type: ignore[valid-type]  # the names are those of the table
    selector: Literal[*SELECTORS, None] = None  # type: ignore[valid-type]
    selection_ratio: float | None = None
    difficulty_floor: float = 0.05
    momentum_weight: float = 0.3
    ema_decay: float = 0.9
    gumbel_scale: float = 0.05
    label_confidence: Literal["none", "share", "calibrated"] = "none"
    loss_normalizer: Literal["selected", "all", None] = None
    scale_rewards: str | None = None  # type: ignore[assignment]  # `None` until `__post_init__`: by the strategy
    advantage_estimator: Estimator = "grpo"
    advantage_statistics: Literal["scored", "drawn"] = "scored"
    pass_reward: str | None = None
    pass_threshold: float | None = None
    reward_range: list[float] | None = None
    pruning: Literal["none", "skip", "refill", None] = None
    pruning_streak: int = 2
    replay_ratio: float = 0.1
    pruning_policy: Literal["solved", "greso", None] = None
    greso_exploration: float = 0.5
    greso_target: float = 0.25
    greso_step: float = 0.01
    controller: Literal[*CONTROLLERS, None] = None  # type: ignore[valid-type]
    round_size: int | None = None
    max_rounds: int | None = None
    kept_completions: int | None = None
    gate_explore: float = 0.05
    deduplicate: bool | None = None
    state_from: str | None = None
    packing: bool | None = None
    max_tokens_per_micro_batch: int | None = None
    vllm_mode: Literal["colocate", "server", "http"] = "colocate"
    vllm_server_urls: list[str] | None = None
    vllm_sync_dir: str | None = None
    vllm_sync_tolerance: float | None = None
    vllm_max_concurrent_requests: int = 64
    vllm_request_timeout: float = 1800.0
    vllm_recovery_timeout: float = 600.0
    self_instruct: bool = False
    instruct_template: str = "tagged"
    instruct_examples: int = 8
    instruct_own: int = 2
    instruct_exemplars: Literal["energy", "uniform"] = "energy"
    instruct_requests: int = 16
    instruct_temperature: float = 0.8
    instruct_top_p: float = 0.95
    instruct_max_tokens: int = 1024
    instruct_presence_penalty: float = 0.0
    instruct_overlap: float = 0.7
    instruct_refuse_overlap: bool = False
    instruct_max_rounds: int = 16
    instruct_stock: int | None = None
    instruct_reuse: int = 1
    telemetry: bool = True
    telemetry_completions: Literal["none", "sampled", "all"] = "sampled"
    hub_telemetry_id: str | None = None
    summary: bool = True

    def __new__(cls, *args: Any, **kwargs: Any):
        for name in kwargs.keys() & REMOVED:
            raise ValueError(f"`{name}` is no setting any more. {REMOVED[name]}")
        return super().__new__(cls)

    def __getstate__(self) -> dict[str, Any]:
        # `training_args.bin` is uploaded with the model: the token of the Hub stays out of it
        return vars(self) | {"hub_token": None}

    def __copy__(self) -> "LZEGRPOConfig":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "LZEGRPOConfig":
        copied = object.__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def __post_init__(self):
        if self.advantage_estimator != "grpo" and self.scale_rewards is None:
            self.scale_rewards = "none"
        for name, value in (settings_of(self.strategy) | self._adapted()).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__()
        hints = get_type_hints(type(self))
        for name in [
            own.name for own in fields(self) if own.name not in _TRL_FIELDS or own.name in (*RANGES, "vllm_mode")
        ]:
            self._check_value(name, getattr(self, name), hints[name])
        self._check_reward_range()
        self._check_combinations()
        self._check_estimator()
        if self.self_instruct:
            self.make_instruct()  # refuses settings that contradict each other
        self._resolve_packing()

    def _adapted(self) -> dict[str, Any]:
        """What the default strategy changes for settings that it would otherwise ignore or refuse."""
        if self.strategy != DEFAULT:
            return {}
        if self.advantage_estimator.startswith("reinforce"):  # groups with equal rewards have a gradient
            return {"selector": "all", "loss_normalizer": "selected"}
        return {} if self.selection_ratio is None else {"selector": "energy"}

    def _check_value(self, name: str, value: Any, hint: Any):
        options = get_args(hint) or (hint,)
        if get_origin(hint) is Literal and value not in options:
            own = " To use your own strategy, pass it to the trainer." if name in ("selector", "controller") else ""
            named = [choice for choice in options if choice is not None]
            raise ValueError(f"`{name}` must be one of {named}, got {value!r}.{own}")
        kind = next((kind for kind in _KINDS if kind in options), None)
        if kind is None or (value is None and type(None) in options):
            return
        accepted, words = _KINDS[kind]
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"`{name}` must be {words}, got {value!r}.")
        allowed, words, advice = RANGES.get(name, (lambda value: True, "", ""))
        if not allowed(value):
            raise ValueError(f"`{name}` must be {words}, got {value}. {advice}.")

    def _check_reward_range(self):
        bounds = self.reward_range
        if bounds is None:
            return
        ends = [end for end in bounds if isinstance(end, numbers.Real) and math.isfinite(end)]
        if len(bounds) != 2 or len(ends) != 2 or not ends[0] < ends[1]:
            raise ValueError(
                f"`reward_range` must be two increasing, finite numbers, got {bounds}. Give the lowest and the highest "
                "reward, for example [0.0, 1.0], or leave it unset for the range that the run sees."
            )
        if self.pass_threshold is not None:
            raise ValueError(
                f"`reward_range={bounds}` grades outcomes, and `pass_threshold={self.pass_threshold}` makes them passes "
                "and fails. Set one of them."
            )
        if self.controller.startswith("reinforce_ada"):
            raise ValueError(
                f"`controller={self.controller!r}` counts passes, and `reward_range={bounds}` grades outcomes. Leave it "
                "unset, and set a `pass_threshold`."
            )

    def _check_estimator(self):
        name = self.advantage_estimator
        if self.advantage_statistics != "scored" and not name.startswith("reinforce"):
            raise ValueError(
                f"`advantage_statistics={self.advantage_statistics!r}` is a setting of REINFORCE++, and `advantage_estimator` is "
                f"{name!r}. Leave it unset, or use 'reinforce_plus_plus' or 'reinforce_plus_plus_baseline'."
            )
        if name == "grpo":
            return
        if self.scale_rewards != "none":
            raise ValueError(
                f"`scale_rewards={self.scale_rewards!r}` is a setting of GRPO's advantages, and `advantage_estimator={name!r}` "
                "says itself what they are divided by. Leave `scale_rewards` unset."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`advantage_estimator={name!r}` takes total rewards, and `multi_objective_aggregation="
                f"{self.multi_objective_aggregation!r}` makes none. Use 'sum_then_normalize'."
            )
        if name.startswith("reinforce") and self.loss_normalizer == "all":
            raise ValueError(
                "`loss_normalizer='all'` counts groups that are dropped as groups without a gradient, and by "
                f"`advantage_estimator={name!r}` those with equal rewards have one. Use `loss_normalizer='selected'`, or the "
                "estimator 'grpo' or 'rloo'."
            )

    def make_planner(self) -> Planner:
        """The planner that the settings describe."""
        if self.pruning_policy == "greso":
            return GresoPlanner(self.greso_exploration, self.greso_target, self.greso_step)
        return SolvedPlanner(self.replay_ratio)

    def make_controller(self) -> RolloutController:
        """
        The controller that the settings describe; only the settings that it uses are checked.

        Raises:
            ValueError: If a setting of the controller is out of its range.
        """
        size, kept = self.num_generations, self.kept_completions
        num_prompts = self.generation_batch_size // size
        match self.controller:
            case "reinforce_ada_positive" | "reinforce_ada_balanced":
                exit = self.controller.removeprefix("reinforce_ada_")
                return ReinforceAda(exit, self.round_size, self.max_rounds, size if kept is None else kept)  # type: ignore[arg-type]  # refused there if unset
            case "dynamic":
                return DynamicSampling(size, self.max_rounds, num_prompts, kept=kept)  # type: ignore[arg-type]  # likewise
            case "gate":
                return Gate(size, self.gate_explore, self.replay_ratio, kept=kept)
        return UniformController(size, kept=kept)

    def make_instruct(self) -> Any:
        """The [`~lze_trl.selfplay.settings.InstructSettings`] of self-instruction."""
        from .selfplay.settings import InstructSettings

        own = {own.name for own in fields(InstructSettings)} - {"seed"}
        return InstructSettings(self.seed, **{name: vars(self)[f"instruct_{name}"] for name in own})

    def make_selector(self) -> Selector:
        """The selector that the settings describe."""
        return make_selector(self.selector, self.gumbel_scale)

    def _check_combinations(self):
        self.make_controller()  # refuses settings that it cannot use
        if self.pruning_policy == "greso" and self.pruning == "none":
            raise ValueError(
                "`pruning_policy='greso'` needs pruning, and `pruning='none'`. Set `pruning='refill'` or 'skip'."
            )
        if self.enable_jit_checkpoint:
            raise ValueError(
                "`enable_jit_checkpoint=True` is not supported: it saves between the backward pass and the optimizer step, "
                "in the middle of what a resumed run could repeat. Set `save_steps`; a run resumes from it exactly."
            )
        if self.fp16:
            raise ValueError(
                "`fp16=True` is not supported: its gradient scaler fails on a step in which no group was worth a "
                "gradient. Use `bf16=True`, or neither."
            )
        http, mode = self.use_vllm and self.vllm_mode == "http", self.vllm_importance_sampling_mode
        if http and not self.vllm_server_urls:
            raise ValueError(
                "`vllm_mode='http'` needs `vllm_server_urls`, the base URLs of the vLLM servers, for example "
                "['http://127.0.0.1:8000']."
            )
        if self.vllm_server_urls and not http:
            logger.warning(
                "`vllm_server_urls=%s` is ignored: these servers generate with `use_vllm=True` and `vllm_mode='http'`, and this "
                "run has `use_vllm=%s` and `vllm_mode=%r`. Set both, or leave `vllm_server_urls` unset.",
                *(self.vllm_server_urls, self.use_vllm, self.vllm_mode),
            )
        allowed = ("token_truncate", "token_mask")  # TRL's own check only sees its own engine
        corrects = self.loss_type == "vespo" and self.vllm_importance_sampling_correction
        if http and corrects and mode not in allowed:
            raise ValueError(
                f"`loss_type='vespo'` needs `vllm_importance_sampling_mode` to be one of {list(allowed)}, got {mode!r}."
            )

    def _resolve_packing(self):
        quantile = self.top_entropy_quantile
        if self.packing and quantile < 1.0:
            raise ValueError(
                f"`packing=True` is not exact with `top_entropy_quantile={quantile}`: TRL takes the quantile of every "
                "micro-batch, and packing changes which rows share one. Leave `packing` unset, or set it to False."
            )
        if self.packing is None:
            self.packing = quantile == 1.0
            if not self.packing:
                logger.warning(
                    "Packing is off: it would change the micro-batches of `top_entropy_quantile=%s`.", quantile
                )
        if not self.packing and self.max_tokens_per_micro_batch is not None:
            why = "`packing=False`" if quantile == 1.0 else f"it is off with `top_entropy_quantile={quantile}`"
            raise ValueError(
                f"`max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}` needs packing, and {why}. Leave "
                "`max_tokens_per_micro_batch` unset."
            )
