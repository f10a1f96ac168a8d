"""Configuration: TRL's fields, and fields of data selection."""

import math
import re
from copy import copy, deepcopy
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import numpy as np
from trl import GRPOConfig

from .pack.weights import LOSS_TYPES
from .plan.planners import GresoPlanner, Planner, SolvedPlanner
from .redaction import redacted
from .rollout.controllers import DynamicSampling, Gate, ReinforceAda, RolloutController, UniformController
from .select.advantages import Estimator
from .select.selectors import Selector, make_selector
from .settings import SETTING_BLOCKS, SelectorSettings, SelfPlaySettings, ServerSettings, check_value, filled
from .strategies import DEFAULT, STRATEGIES, settings_of


SELECTORS = ("energy", "variance", "random", "all", "zero_variance")
CONTROLLERS: dict[str, type[RolloutController]] = {
    "uniform": UniformController,
    "reinforce_ada_positive": ReinforceAda,
    "reinforce_ada_balanced": ReinforceAda,
    "dynamic": DynamicSampling,
    "gate": Gate,
}
PLANNERS: dict[str, type[Planner]] = {"solved": SolvedPlanner, "greso": GresoPlanner}

_CHOICES = {
    "loss_type": Literal[*LOSS_TYPES],
    "scale_rewards": Literal["group", "batch", "none", True, False, None],
    "importance_sampling_level": Literal["token", "sequence"],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
}
"""Settings of TRL of which it refuses other values once the first batch has been generated."""
_TRL_FIELDS = {theirs.name for theirs in fields(GRPOConfig)}

if TYPE_CHECKING:  # complete when `__post_init__` has run
    Settings = dict[str, Any]
else:  # text on command lines
    Settings = dict[str, Any] | str | None

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
    meaning: they describe the *rollout* batch, P = `generation_batch_size / num_generations` prompts. Settings that are
    dictionaries are complete once the configuration is made: what was left out has its default.

    Parameters:
        strategy (`str`, *optional*, defaults to `"exact"`):
            Name of a combination of settings: `"exact"` (the updates of plain GRPO without computing groups that have no
            gradient), `"gate"` (one completion of the most promising prompts, the others where a signal is likely), `"lze"` (the published method),
            `"grpo"` (plain TRL), `"dapo"`, `"reinforce_ada"` or `"greso"`. Explicitly set fields take precedence. The defaults
            below are those of `"exact"`, which selects by energy if only a `selection_ratio` is set.

        > Parameters that control which groups are trained on

        selector (`str`, *optional*, defaults to `"zero_variance"`):
            Which groups are trained on: `"zero_variance"` (every group whose total rewards differ), `"all"`, or a share of
            them ranked by `"energy"` (Learning-Zone Energy with Gumbel noise), `"variance"` (outcome variance) or
            `"random"`. A selector object passed to the trainer takes precedence.
        selection_ratio (`float`, *optional*, defaults to `0.4`):
            ρ, the share of the groups of a generation batch to train on, in (0, 1]. Dead groups never fill the quota.
            Ignored by the selectors `"all"` and `"zero_variance"`, unless a controller draws prompts until K groups live.
        selector_kwargs (`dict[str, Any]`, *optional*):
            Settings of the energy: `gumbel_scale` (0.05, noise relative to the range of the energies; 0 ranks without),
            `difficulty_floor` (d_min, 0.05), `momentum_weight` (α, 0.3) and `ema_decay` (λ, 0.9).
        loss_normalizer (`str`, *optional*, defaults to `"all"`):
            What the loss is averaged over: `"selected"` (the chosen completions, as DAPO does) or `"all"` (a full batch,
            in which dropped and skipped groups contribute no gradient).
        scale_rewards (`str`, *optional*, defaults to `"group"`):
            TRL's: what advantages are divided by, the standard deviation within a `"group"`, over the `"batch"`, or
            `"none"`. Reinforce-Ada was published with `"none"`.
        advantage_estimator (`str`, *optional*, defaults to `"grpo"`):
            How advantages follow from rewards: `"grpo"`, or `"reinforce_plus_plus"` (normalised over all tokens of the
            generation batch), which sets `scale_rewards="none"`.

        > Parameters that define a pass

        pass_reward (`str`, *optional*):
            Name of the reward function by which groups are ranked and prompts pruned, or `"total"` for the weighted sum
            of all, the default. Completions for which it returns `None` have no outcome. A group whose total rewards
            differ never counts as dead.
        pass_threshold (`float`, *optional*):
            A completion passes when its reward is greater than this. Defaults to none, outcomes are graded; to 0.7 with
            Reinforce-Ada, as published; and to 0.5 with `pass_reward` and without `reward_range`.
        reward_range (`list[float]`, *optional*):
            Lowest and highest reward that graded outcomes are scaled from; rewards outside are clipped. Defaults to the
            range of the last 100 rounds of completions.
        alive (`str`, *optional*, defaults to `"total"`):
            Which groups can be trained on: those whose `"total"` rewards differ, which alone leaves plain GRPO's gradient as it is, or
            with a `pass_reward` those whose `"outcome"` by it differs. A shaped total (length, format) differs in nearly every group,
            also where all answers are wrong; then little but the shaping is learned there.
        environment_timeout (`float`, *optional*):
            Seconds that `reset`, a tool or `get_reward` of an environment may take. An episode that takes longer, whose `reset`
            or `get_reward` raises, or which loses its server, gets no reward and is left out; three in a row of one prompt end
            the run. Each environment then runs in a thread of its own. Defaults to no limit.

        > Parameters that control which prompts are rolled out

        pruning (`str`, *optional*):
            What happens to prompts that are pruned: `"refill"` (their slots go to other prompts), `"skip"` (the batch is
            smaller, as in the paper) or `"none"`. Defaults to `"none"` with `loss_normalizer="all"`, unless a planner is
            given, and for a streamed dataset; else to `"refill"`.
        planner (`str`, *optional*, defaults to `"solved"`):
            Which prompts are pruned: `"solved"` (those with `streak` fully correct visits in a row) or `"greso"` (those
            without signal, at random, the more likely the longer). A planner object passed to the trainer takes precedence.
        planner_kwargs (`dict[str, Any]`, *optional*):
            Settings of the planner. `"solved"`: `streak` (2) and `replay_ratio` (0.1, the share of the pruned prompts that
            each pass re-checks, at least one). `"greso"`: `exploration` (0.5, the probability to roll out after one visit
            without signal), `target` (0.25, the wanted share of dead groups) and `step` (0.01).

        window (`int`, *optional*, defaults to `1`):
            Number of batches to look ahead. A batch takes the prompts whose groups are the likeliest to be alive, as forecast from earlier
            visits, or for new prompts from their text and the columns in `report_by`; the others wait until the end of the pass. Nine in
            ten of those that are forecast dead then move to the next pass. 1 keeps the order. 4 with `strategy="gate"`, unless
            `pruning="skip"` or `shuffle_dataset=False` is set or prompts cannot be read ahead.

        > Parameters that control how many completions a prompt gets

        controller (`str`, *optional*, defaults to `"uniform"`):
            `"uniform"` (`num_generations` for each prompt), `"reinforce_ada_positive"` or `"reinforce_ada_balanced"` (in
            rounds, until a prompt has a pass, or enough passes and fails), `"dynamic"` (DAPO: further prompts until enough
            groups are alive) or `"gate"` (one first). A controller object passed to the trainer takes precedence.
        controller_kwargs (`dict[str, Any]`, *optional*):
            Settings of the controller: `kept` of `"uniform"` and Reinforce-Ada (the most completions of a prompt that are
            trained on; default: all, and `num_generations`); `round_size` (8) and `max_rounds` (4) of Reinforce-Ada;
            `max_rounds` (4) of `"dynamic"`; of `"gate"`, `explore` (0.05), the share of the groups that it would stop
            and completes all the same, `recheck` (0.1), the share of the prompts that it would skip and begins all the same, `control`
            (0.05), the share that it draws whole whatever it forecasts, to see whether it pays (0: no such guard), and `hold`, how many
            prompts it adds to a batch: with `"signal"` until as many live groups are expected as plain GRPO would have of the batch's
            own prompts (the default with `strategy="gate"`, unless `pruning="skip"` or a sampler of your own chooses the prompts of a
            batch), with `"completions"` until plain GRPO's completions are spent, with `"nothing"` none, else the default.

        > Parameters that control identity and state

        deduplicate (`bool`, *optional*, defaults to `False`):
            Whether to drop rows of the training set that repeat another row, as strategies do that remember prompts. If `False`, each
            row is a prompt of its own. So it is in a streamed dataset, and if too few rows for a generation batch would remain.
        state_from (`str`, *optional*):
            Directory (a run, one of its checkpoints, or a profile) or Hub id of an earlier run, whose prompt state this run starts
            from. Ignored when training resumes from a checkpoint.

        > Parameters that control the update

        packing (`bool`, *optional*):
            Whether to pack the chosen completions, sorted by length and trimmed, into few micro-batches. The result is the
            same. Defaults to packing, except where the loss depends on which rows share a micro-batch
            (`top_entropy_quantile`).
        max_tokens_per_micro_batch (`int`, *optional*):
            Token budget of a micro-batch (rows × padded length) on each process. A packed micro-batch then holds as
            many rows as fit, instead of `per_device_train_batch_size`.

        > Parameters that control generation by vLLM servers over HTTP (`use_vllm=True`, `vllm_mode="http"`)

        vllm_mode (`str`, *optional*, defaults to `"colocate"`):
            `"colocate"` and `"server"` are TRL's. `"http"` takes completions from one or several vLLM servers over plain
            HTTP and syncs weights through a file system: no vLLM, CUDA or NCCL in the trainer's environment.
        vllm_server_urls (`list[str]`, *optional*):
            Base URLs of the servers.
        vllm_server_kwargs (`dict[str, Any]`, *optional*):
            `sync` (`"adapter"` sends the LoRA adapter alone, `"merged"` whole weights; default: the adapter where servers load it),
            `sync_dir` (a directory for weights that all see at the same path; default: shared memory on one host),
            `sync_tolerance` (largest mean difference of log-probs in nats; default: 1e-3 in float32, else 0.05),
            `max_concurrent_requests` (64, for each server), `request_timeout` (1800 s) and `recovery_timeout` (600 s).
        overlap (`str`, *optional*, defaults to `"none"`):
            `"one_step"` generates the next batch during the last optimizer step on this one, with the weights before that step;
            TRL's importance sampling correction accounts for it. `"none"` generates with the newest weights.

        > Parameters that control self-play

        self_play (`dict[str, Any]`, *optional*):
            `instruct: true` trains on problems that the model writes itself; the training set holds the seeds. See
            `docs/self-play.md` for `examples`, `own`, `requests`, `temperature`, `top_p`, `overlap`,
            `stock`, `reuse` and others.

        > Parameters that control what is recorded

        telemetry (`bool`, *optional*, defaults to `True`):
            Whether the main process records every group of every generation batch under `output_dir/telemetry`.
        telemetry_completions (`str`, *optional*, defaults to `"sampled"`):
            Which completions are recorded: `"none"`, `"sampled"` (in every generation batch, the three live groups of
            highest energy and one group drawn at random) or `"all"`.
        hub_telemetry_id (`str`, *optional*):
            Hub dataset to which `push_to_hub` also uploads telemetry, report and prompt state: ids and numbers, and the texts
            of `hub_telemetry_texts`. The viewer and `state_from` take this name.
        hub_telemetry_texts (`list[str]`, *optional*):
            Texts that are also uploaded to `hub_telemetry_id`, and as public as it is: `prompt`, `completion`, `images`, and
            columns of the training set by name. Defaults to none.
        report_by (`list[str]`, *optional*):
            Columns of the training set, such as `source` or `level`, by whose values rewards, dead groups and costs are also logged.
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

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, *SETTING_BLOCKS]  # noqa: RUF012  # as TRL declares it

    strategy: Literal[tuple(STRATEGIES)] = DEFAULT  # type: ignore[valid-type]  # the names are those of the table
    selector: Literal[*SELECTORS, None] = None  # type: ignore[valid-type]
    selection_ratio: float | None = None
    selector_kwargs: Settings = None  # type: ignore[assignment]
    loss_normalizer: Literal["selected", "all", None] = None
    scale_rewards: str | None = None  # type: ignore[assignment]  # `None` until `__post_init__`: by the strategy
    advantage_estimator: Estimator = "grpo"
    pass_reward: str | None = None
    pass_threshold: float | None = None
    reward_range: list[float] | None = None
    alive: Literal["total", "outcome"] = "total"
    environment_timeout: float | None = None
    pruning: Literal["none", "skip", "refill", None] = None
    planner: Literal[*PLANNERS, None] = None  # type: ignore[valid-type]
    planner_kwargs: Settings = None  # type: ignore[assignment]
    window: int = None  # type: ignore[assignment]  # `None` until `__post_init__`: by the strategy
    controller: Literal[*CONTROLLERS, None] = None  # type: ignore[valid-type]
    controller_kwargs: Settings = None  # type: ignore[assignment]
    deduplicate: bool | None = None
    state_from: str | None = None
    packing: bool | None = None
    max_tokens_per_micro_batch: int | None = None
    vllm_mode: Literal["colocate", "server", "http"] = "colocate"
    vllm_server_urls: list[str] | None = None
    vllm_server_kwargs: Settings = None  # type: ignore[assignment]
    overlap: Literal["none", "one_step"] = "none"
    self_play: Settings = None  # type: ignore[assignment]
    telemetry: bool = True
    telemetry_completions: Literal["none", "sampled", "all"] = "sampled"
    hub_telemetry_id: str | None = None
    hub_telemetry_texts: list[str] | None = None
    report_by: list[str] | None = None
    summary: bool = True

    def __getstate__(self) -> dict[str, Any]:
        # A checkpoint pickles it as `training_args.bin`: no tokens and passwords
        return redacted(vars(self), mark=None)

    def to_dict(self) -> dict[str, Any]:
        # Differs from transformers: secrets at any depth are hidden, because trackers show this
        return redacted(super().to_dict())

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    __repr__ = __str__

    def __copy__(self) -> "LZEGRPOConfig":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "LZEGRPOConfig":
        copied = object.__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def __post_init__(self):
        numbers = {name: value.item() for name, value in vars(self).items() if isinstance(value, np.generic)}
        vars(self).update(numbers)  # of NumPy: checkpoints and reports are JSON
        if self.advantage_estimator != "grpo" and self.scale_rewards is None:
            self.scale_rewards = "none"
        chosen = settings_of(self.strategy) | self._adapted()
        for name, value in chosen.items():
            if name not in SETTING_BLOCKS and getattr(self, name) is None:
                setattr(self, name, value)
        self._check_values()
        super().__post_init__()
        self._fill_blocks()
        self.make_controller()  # the parts refuse values that do not fit together
        if self.packing is None:  # a quantile is taken of the rows that share a micro-batch
            self.packing = self.top_entropy_quantile == 1.0

    def _adapted(self) -> dict[str, Any]:
        """Return what a strategy changes for settings that it would otherwise ignore or refuse."""
        if self.strategy == "gate":
            return {"window": 1} if self.pruning == "skip" else {}
        if self.strategy != DEFAULT:
            return {}
        if self.advantage_estimator != "grpo":  # groups with equal rewards have a gradient
            return {"selector": "all", "loss_normalizer": "selected"}
        return {} if self.selection_ratio is None else {"selector": "energy"}

    def _check_values(self):
        """Refuse values of a wrong type or out of range."""
        hints = get_type_hints(type(self))
        for own in fields(self):
            if own.name not in SETTING_BLOCKS:  # TRL's other settings are checked by range alone
                is_own = own.name in LZEGRPOConfig.__annotations__.keys() - _TRL_FIELDS or own.name == "vllm_mode"
                hint = _CHOICES.get(own.name, hints[own.name] if is_own else object)
                check_value(own.name, getattr(self, own.name), hint)
        if not all(map(math.isfinite, self.reward_weights or ())):
            raise ValueError(
                f"`reward_weights` must be finite numbers, got {self.reward_weights}. Use 0 for no weight."
            )
        bounds = self.reward_range
        if bounds is not None and not (len(bounds) == 2 and -math.inf < bounds[0] < bounds[1] < math.inf):
            raise ValueError(f"`reward_range` must be two increasing, finite numbers, got {bounds}.")

    def _fill_blocks(self):
        """Check the settings that are dictionaries, and add the defaults of those that are left out."""
        controller, defaults, chosen = CONTROLLERS[str(self.controller)], {}, settings_of(self.strategy)
        is_its_controller = controller is CONTROLLERS[chosen["controller"]]
        fits = controller is not Gate or self.pruning != "skip"  # which makes batches smaller
        of_strategy = chosen.get("controller_kwargs", {}) if is_its_controller and fits else {}
        if controller is ReinforceAda:
            defaults["kept"] = self.num_generations
        elif controller is DynamicSampling:
            defaults["max_rounds"] = 4
        given = {name: {} if vars(self)[name] is None else vars(self)[name] for name in SETTING_BLOCKS}
        if isinstance(given["controller_kwargs"], dict):
            given["controller_kwargs"] = of_strategy | given["controller_kwargs"]
        self.selector_kwargs = filled("selector_kwargs", SelectorSettings, given["selector_kwargs"])
        self.planner_kwargs = filled("planner_kwargs", PLANNERS[str(self.planner)], given["planner_kwargs"])
        self.controller_kwargs = filled("controller_kwargs", controller, given["controller_kwargs"], **defaults)
        self.vllm_server_kwargs = filled("vllm_server_kwargs", ServerSettings, given["vllm_server_kwargs"])
        self.self_play = filled("self_play", SelfPlaySettings, given["self_play"])

    def defaults(self) -> dict[str, Any]:
        """Return the default of each setting, with this strategy, controller and planner."""
        plain, of_strategy = copy(self), settings_of(self.strategy) | self._adapted()
        vars(plain).update(dict.fromkeys(SETTING_BLOCKS))
        plain._fill_blocks()
        found = {own.name: own.default for own in fields(self) if own.default is not MISSING}
        return {name: of_strategy.get(name) if default is None else default for name, default in found.items()} | {
            name: vars(plain)[name] for name in SETTING_BLOCKS
        }

    @property
    def over_http(self) -> bool:
        """Whether vLLM servers over HTTP generate."""
        return self.use_vllm and self.vllm_mode == "http"

    def make_selector(self) -> Selector:
        """Create the selector of these settings."""
        return make_selector(self.selector, self.selector_kwargs["gumbel_scale"])

    def make_planner(self) -> Planner:
        """Create the planner of these settings."""
        return PLANNERS[str(self.planner)](**self.planner_kwargs)

    def make_controller(self) -> RolloutController:
        """Create the controller of these settings."""
        size, settings = self.num_generations, self.controller_kwargs
        match self.controller:
            case "reinforce_ada_positive" | "reinforce_ada_balanced":
                return ReinforceAda(self.controller.removeprefix("reinforce_ada_"), **settings)
            case "dynamic":
                return DynamicSampling(size, num_prompts=self.generation_batch_size // size, **settings)
            case "gate":
                return Gate(size, **settings)
        return UniformController(size, **settings)
