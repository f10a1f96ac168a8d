"""Rollout controllers in training, on one process: what every selector and controller keeps to, and goldens."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

import tiny
from controllers_run import CONTROLLERS, PROMPTS, FixedTrainer, passes, quarter_reward
from lze_trl import LZEGRPOTrainer
from lze_trl.config import SELECTORS
from lze_trl.record.reader import open_run
from lze_trl.rollout.controllers import RolloutController, UniformController
from test_laws import distance, moved, shape
from tiny import history


# ---- The laws ----

SHAPE = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
"""P = 6 prompts, G = 4."""


def assert_laws(records: list[dict], controller: str, settings: dict):
    """What any run must keep to, from the record of a `FixedTrainer` on each of its processes."""
    settings = settings | settings.get("controller_kwargs", {})
    first = records[0]
    assert [entry["lze/empty_update"] for entry in first["log"]] == [0.0] * 3
    # All processes decide alike, and make forward passes over as many rows
    for name in ("rounds", "batches", "forwards"):
        assert all(record[name] == first[name] for record in records)
    groups = drawn_groups(first)
    trained_rows = 0
    for index, batch in enumerate(first["batches"]):
        rounds = [entry for entry in first["rounds"] if entry["generation"] == index]
        # Every round of a batch comes from one version of the policy
        assert len({(entry["step"], entry["weights"]) for entry in rounds}) == 1
        assert_rounds(rounds, batch, controller, settings)
        # Each process has as many micro-batches
        own = [[part for part in record["micro_batches"] if part["generation"] == index] for record in records]
        assert len({len(parts) for parts in own}) == 1
        # The rows trained on are the kept ones of the chosen groups, with advantages by all that was drawn
        expected = Counter()
        for prompt in batch["chosen"]:
            expected.update(trained_on(prompt, groups[index][prompt], controller, settings.get("kept", 4)))
        given = Counter(
            (prompt, tuple(completion), round(advantage, 4))
            for parts in own
            for part in parts
            for prompt, completion, advantage in part["rows"]
        )
        assert given == expected
        trained_rows += expected.total()
        assert_metrics(first["log"][index], batch, rounds, controller)
    assert len(first["forwards"]) >= len(first["micro_batches"]) > 0
    ledger = first["ledger"]
    assert all({**record["ledger"], **times(ledger)} == ledger for record in records)
    assert ledger["rows_trained"] == trained_rows > 0
    assert ledger["rows_rolled_out"] == sum(len(entry["rows"]) for entry in first["rounds"])
    assert ledger["groups_rolled_out"] == sum(batch["groups"] for batch in first["batches"])
    assert ledger["groups_trained"] == sum(len(batch["chosen"]) for batch in first["batches"])


def times(ledger: dict) -> dict:
    return {name: value for name, value in ledger.items() if name.endswith("seconds")}


def drawn_groups(record: dict) -> list[dict[str, list]]:
    """Completions of each prompt in the order drawn, for each generation batch."""
    groups = [{} for _ in record["batches"]]
    for entry in record["rounds"]:
        for prompt, completion in entry["rows"]:
            groups[entry["generation"]].setdefault(prompt, []).append(completion)
    return groups


def rows_of(trainer: FixedTrainer) -> list[list]:
    """Prompt, completion and advantage of every row that was trained on."""
    return [row for batch in trainer.micro_batches for row in batch["rows"]]


def trained_on(prompt: str, completions: list, controller: str, n: int) -> list[tuple]:
    """Rows of a chosen group that are trained on, with their advantages."""
    rewards = np.array([passes(completion) for completion in completions])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) if rewards.std() else 0.0 * rewards
    kept = range(len(completions))
    if controller.startswith("reinforce_ada") or n < 4:
        positives, negatives = (np.flatnonzero(rewards == kind).tolist() for kind in (1.0, 0.0))
        share = max(min(n // 2, len(positives)), n - len(negatives))
        kept = positives[:share] + negatives[: n - min(share, len(positives))]
    if not controller.startswith("reinforce_ada"):
        # Each row stands for the others of its kind
        of_kind = [[np.sum(rewards[rows] == rewards[row]) for rows in (range(len(rewards)), kept)] for row in kept]
        advantages[kept] *= [everywhere / here for everywhere, here in of_kind]
    return [(prompt, tuple(completions[row]), round(float(advantages[row]), 4)) for row in kept]


def assert_rounds(rounds: list[dict], batch: dict, controller: str, settings: dict):
    """Each round draws for exactly the prompts that still need completions, and as many as they need."""
    outcomes: dict[str, list[float]] = {}
    for entry in rounds:
        given = Counter(prompt for prompt, _ in entry["rows"])
        assert len(outcomes) > 0 or len(given) == batch["prompts"]
        if controller.startswith("reinforce_ada"):
            active = {prompt for prompt, known in outcomes.items() if not met(known, controller)} or given
            assert given == dict.fromkeys(active, settings["round_size"])
        elif controller == "gate":
            assert set(given) <= set(outcomes or given)
            further = settings["num_generations"] - 1
            assert given == dict.fromkeys(given, further if outcomes else 1)
        else:
            assert not set(given) & set(outcomes)
            assert given == dict.fromkeys(given, settings.get("num_generations", 4))
        for prompt, completion in entry["rows"]:
            outcomes.setdefault(prompt, []).append(passes(completion))
    done = all(met(known, controller) for known in outcomes.values())
    if controller.startswith("reinforce_ada") and not done:
        assert len(rounds) == settings["max_rounds"]
    assert len(rounds) <= settings.get("max_rounds", 2 if controller == "gate" else 1)
    assert len(outcomes) == batch["groups"] == batch["prompts"] or controller == "dynamic"


def met(outcomes: list[float], controller: str) -> bool:
    """Whether a prompt has met the exit condition of Reinforce-Ada."""
    if controller == "reinforce_ada_positive":
        return 1.0 in outcomes
    return outcomes.count(1.0) >= 2 and outcomes.count(0.0) >= 2


def assert_metrics(log: dict, batch: dict, rounds: list[dict], controller: str):
    assert log["lze/groups"] == batch["groups"]
    assert log["lze/groups"] * log["lze/group_size"] == pytest.approx(sum(len(entry["rows"]) for entry in rounds))
    assert log["lze/groups"] * log["lze/selected_share"] == pytest.approx(len(batch["chosen"]))
    # TRL's names tell of the first round, as of uniform sampling
    completions = [completion for _, completion in rounds[0]["rows"]]
    if controller != "gate":  # which also counts what is remembered of other prompts
        assert log["reward"] == pytest.approx(np.mean([passes(completion) for completion in completions]), abs=1e-6)
    lengths = np.array([len(completion) for completion in completions])
    ended = np.array([completion[-1] in (0, 1) for completion in completions])
    expected = {"clipped_ratio": 1.0 - ended.mean()}
    for kind, of_kind in (("", lengths), ("terminated_", lengths[ended] if ended.any() else np.zeros(1))):
        for name in ("mean", "min", "max"):
            expected[f"{name}_{kind}length"] = getattr(np, name)(of_kind)
    assert {name: log[f"completions/{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)


def make(directory, model=None, cls=FixedTrainer, rewards=quarter_reward, dataset=None, trainer=None, **settings):
    saved = {} if model is None else {"model": model, "processing_class": None}
    data = tiny.prompts(PROMPTS) if dataset is None else dataset
    return tiny.make(directory, cls, rewards, data, saved | (trainer or {}), **SHAPE | settings)


def run(directory, **kwargs):
    trainer = make(directory, **kwargs)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("controller", "selector"), [*zip(CONTROLLERS, SELECTORS, strict=True)])
def test_every_controller_and_selector(tmp_path, controller, selector):
    settings = CONTROLLERS[controller]
    pruning = ["refill", "skip", "none"][SELECTORS.index(selector) % 3] if controller != "dynamic" else "refill"
    own = {"controller": controller, "selector": selector, "pruning": pruning, "telemetry": selector == "energy"}
    trainer = run(tmp_path, selection_ratio=0.8, **own, **settings)
    assert_laws([trainer.record()], controller, settings)


# ---- Goldens ----


def scripted(outcomes: dict[str, list[int]], lengths: dict[str, int] | None = None):
    """
    A trainer whose completions of each prompt pass and fail as told, over and over, and have the prompt's own number of tokens, or
    1, 2, 3, …
    """

    class ScriptedTrainer(FixedTrainer):
        def complete(self, prompt, place):
            text = self._tokenizer.decode(list(prompt))
            script, more = outcomes[text], lengths[text] - 1 if lengths else place % 5
            return [8 if script[place % len(script)] else 9, *[10 + place] * more]

    return ScriptedTrainer


ONE_STEP = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_steps": 1}
# One positive in 12, an exit after the first round, and no positive in 12
THREE = {"0+0=": [0] * 11 + [1], "1+1=": [0, 1, 0, 1], "2+4=": [0]}
BALANCED = {"controller": "reinforce_ada_balanced", "controller_kwargs": {"round_size": 4, "max_rounds": 3}}


def test_advantages_and_energies_are_those_of_all_completions_drawn(tmp_path):
    own = BALANCED | ONE_STEP | {"selector": "all", "scale_rewards": "batch", "telemetry": True}
    trainer = run(tmp_path, cls=scripted(THREE), dataset=tiny.prompts(3), **own)
    # σ with Bessel's correction. Each prompt stands for as many rows, 12 of 36: 1 + 6 + 0 positives, 36·(7/36)·(29/36) = 203/36
    sigma, given = math.sqrt(203 / 36 / 35), defaultdict(list)
    for prompt, _, advantage in rows_of(trainer):
        given[prompt].append(advantage * (sigma + 1e-4))
    expected = {"0+0=": [-1 / 12] * 3 + [11 / 12], "1+1=": [-1 / 2] * 2 + [1 / 2] * 2, "2+4=": [0.0] * 4}
    assert given.keys() == expected.keys()
    for prompt, advantages in expected.items():
        assert sorted(given[prompt]) == pytest.approx(advantages, abs=1e-5)
    assert trainer.ledger.rows_rolled_out == 28 and trainer.ledger.rows_trained == 12
    # D·4·p·(1 − p) with p = 1/12 and 1/2; visited for the first time, they have no momentum
    rows = open_run(tmp_path).arrow("SELECT groups.*, text FROM groups JOIN prompts USING (prompt_id)").to_pylist()
    energies = {"0+0=": 11 / 12 * 4 * 11 / 144, "1+1=": 0.5, "2+4=": 0.0}
    assert {row["text"]: row["energy"] for row in rows} == pytest.approx(energies, abs=1e-6)
    assert {row["text"]: row["size"] for row in rows} == {"0+0=": 12, "1+1=": 4, "2+4=": 12}


# ---- Refill ----

ALL = tiny.prompts(PROMPTS)["prompt"]
HALF_DEAD = {prompt: [1, 0] if index % 2 == 0 else [0] for index, prompt in enumerate(ALL)}


def test_refill_until_enough_groups_are_live(tmp_path):
    own = {"controller": "dynamic", "selection_ratio": 2 / 3, "shuffle_dataset": False, "pruning": "none"}
    trainer = run(tmp_path, cls=scripted(HALF_DEAD), **own)
    # K = 4 of 6: three of prompts 0 to 5 are live, so 2 further ones are expected to give another one, and do. So it is with
    # prompts 8 to 13. Of prompts 16 and 0 to 4 of the next pass, four are live
    assert history(trainer, "lze/groups") == [8, 8, 6]
    assert [len(batch["chosen"]) for batch in trainer.batches] == [4, 4, 4]
    assert [len(trainer.rounds_of(batch)) for batch in range(3)] == [2, 2, 1]


# ---- Strategies of the user ----


class Doubtful(RolloutController):
    """
    Two completions of every other prompt; where they disagree, three more; another prompt for each that has none yet. The last
    completion of a group is not trained on.
    """

    def draw(self, round, prompts, drawn, rng):
        sizes = drawn.sizes
        passed = np.bincount(drawn.group[drawn.outcomes > 0.5], minlength=len(prompts))
        first = np.where(np.arange(len(prompts)) % 2 == 0, 2, 0)
        again = np.where((sizes == 2) & (passed == 1), 3, 0)
        return np.where(sizes == 0, first, again) if round < 2 else np.zeros(len(prompts), dtype=int)

    def more(self, round, prompts, drawn, k):
        return int((drawn.sizes == 0).sum()) if round == 1 else 0

    def keep(self, drawn, rng):
        last = np.zeros(drawn.num_rows, dtype=bool)
        last[np.cumsum(drawn.sizes[drawn.sizes > 0]) - 1] = True
        return ~last


class Sizes:
    """All groups; notes how large they are."""

    def __init__(self):
        self.sizes = []

    def select(self, groups, k, rng):
        self.sizes.append(groups.sizes.tolist())
        return np.arange(len(groups))


def test_an_own_controller_with_an_own_selector(tmp_path):
    # Prompts 0, 2, 4 get two completions, 6 and 8 join in round 1: prompts 2, 4 and 6 are of two minds
    outcomes = {prompt: [1, 0] if index in (2, 4, 6) else [1] for index, prompt in enumerate(ALL)}
    selector = Sizes()
    own = {"trainer": {"controller": Doubtful(), "selector": selector}, "shuffle_dataset": False, "max_steps": 1}
    trainer = run(tmp_path, cls=scripted(outcomes), **own)
    assert [[prompt for prompt, _ in entry["rows"]] for entry in trainer.rounds] == [
        [ALL[0]] * 2 + [ALL[2]] * 2 + [ALL[4]] * 2,
        [ALL[2]] * 3 + [ALL[4]] * 3 + [ALL[6]] * 2 + [ALL[8]] * 2,
    ]
    assert selector.sizes == [[5, 5, 2]]  # a controller that draws prompts trains on live groups only
    # The quota of 2 of 6 prompts takes the first two, of which the fifth completion is not kept
    assert Counter(prompt for prompt, _, _ in rows_of(trainer)) == {ALL[2]: 4, ALL[4]: 4}


class OneMore(RolloutController):
    """So many completions of the first prompt, in every round."""

    def __init__(self, count: int):
        self.count = count

    def draw(self, round, prompts, drawn, rng):
        return self.count * np.eye(len(prompts), dtype=int)[0]


def test_a_controller_that_never_ends_is_stopped(tmp_path):
    with pytest.raises(ValueError, match=r"`OneMore.draw` asked for more than 100 rounds. Return zeros"):
        run(tmp_path, trainer={"controller": OneMore(1)})


def test_a_controller_that_asks_for_nothing(tmp_path):
    trainer = run(tmp_path, trainer={"controller": OneMore(0)})
    assert trainer.rounds == []
    assert trainer.ledger.empty_updates == trainer.state.global_step == 3
    assert moved(trainer) == 0.0


# ---- What is logged of several rounds ----


MANY = tiny.prompts(6 * PROMPTS)
RATES = dict(zip(MANY["prompt"], 6 * [*[0.0] * 11, 0.1, 0.2, 0.4, 0.6, 0.9, 1.0], strict=True))


class ChancyTrainer(FixedTrainer):
    """Every prompt passes with a probability of its own, most of them never; failures are long."""

    def complete(self, prompt, place):
        rate = RATES[self._tokenizer.decode(list(prompt))]
        return [8] if self.digest(prompt, place)[0] < 256 * rate else [9] * 5


@pytest.mark.parametrize("hold", ["nothing", "signal", "completions"])
def test_what_is_logged_is_what_uniform_sampling_sees(tmp_path, hold):
    settings = {"selector": "zero_variance", "pruning": "none", "scale_rewards": "none", "max_steps": 170}
    settings["controller_kwargs"] = {"hold": hold}
    trainer = run(tmp_path, cls=ChancyTrainer, learning_rate=0.0, controller="gate", **settings)
    rates = np.array(list(RATES.values()))
    dead = (rates**4 + (1.0 - rates) ** 4).mean()
    expected = {"reward": rates.mean(), "rewards/quarter_reward/mean": rates.mean(), "lze/pass_rate": rates.mean()}
    expected |= {"lze/dead_share": dead, "frac_reward_zero_std": dead}
    for name, value in expected.items():  # a group that goes on by chance stands for 20
        tolerance = 0.08 if value == dead else 0.04
        assert np.mean(history(trainer, name)) == pytest.approx(value, abs=tolerance), name
    stds = history(trainer, "reward_std")
    assert np.nanmean(stds) == pytest.approx(np.sqrt(rates.mean() * (1.0 - rates.mean())), abs=0.12)


def test_the_places_of_stopped_groups_go_to_further_prompts(tmp_path):
    settings = {"selector": "zero_variance", "pruning": "none", "max_steps": 120, "learning_rate": 0.0}
    settings |= {"cls": ChancyTrainer, "dataset": MANY, "controller": "gate"}
    kinds = ("nothing", "signal", "completions")
    trainers = {hold: run(tmp_path / hold, controller_kwargs={"hold": hold}, **settings) for hold in kinds}
    rates = np.array(list(RATES.values()))
    alive = 1.0 - (rates**4 + (1.0 - rates) ** 4).mean()
    drawn, live = {}, {}
    for hold, trainer in trainers.items():
        batches = [trainer.rounds_of(generation) for generation in range(40, 120)]  # it has learned by then
        drawn[hold] = np.mean([sum(len(entry["rows"]) for entry in rounds) for rounds in batches])
        live[hold] = sum(len(batch["chosen"]) for batch in trainer.batches if batch["generation"] >= 40) / 80
        for rounds in batches:
            prompts = Counter(prompt for entry in rounds for prompt, _ in entry["rows"])
            assert max(prompts.values(), default=0) <= 4 and len(rounds) <= 3  # none comes twice into a batch
    assert drawn["nothing"] < drawn["signal"] < drawn["completions"]
    assert live["nothing"] < live["signal"] < live["completions"]
    assert live["signal"] == pytest.approx(6 * alive, rel=0.4)  # about as many as uniform sampling would have given
    assert drawn["completions"] == pytest.approx(24, rel=0.4)  # about as many as uniform sampling draws


GRESO = {"planner": "greso", "planner_kwargs": {"exploration": 0.3, "step": 0.2}}


def test_greso_skips_prompts_without_a_signal(tmp_path):
    dead = {prompt for prompt, script in HALF_DEAD.items() if script == [0]}
    trainer = run(tmp_path, cls=scripted(HALF_DEAD), pruning="skip", max_steps=12, **GRESO)
    visits = dict(zip(trainer.prompt_state["prompt_ids"].tolist(), trainer.prompt_state["visits"], strict=True))
    visits = {trainer.prompts[prompt_id]: count for prompt_id, count in visits.items()}
    # All prompts of a pass are rolled out or left out
    assert 0 < trainer.ledger.visits_skipped == 12 * 6 - trainer.ledger.groups_rolled_out
    assert np.mean([visits[prompt] for prompt in dead]) < np.mean([visits[p] for p in HALF_DEAD if p not in dead]) - 1
    # None is solved, so that solved ones are looked for more and more; of hopeless ones there are too many
    assert trainer.passes.planner.p_easy == 0.95 > trainer.passes.planner.p_hard


@pytest.mark.parametrize(("controller", "pruning"), [("uniform", "skip"), ("reinforce_ada_positive", "refill")])
def test_resumed_with_greso_is_uninterrupted_bit_for_bit(tmp_path, controller, pruning):
    settings = GRESO | CONTROLLERS[controller] | {"controller": controller, "pruning": pruning, "max_steps": 9}
    settings |= {"cls": LZEGRPOTrainer, "learning_rate": 5e-2, "save_strategy": "steps", "save_steps": 4}
    whole, resumed = run(tmp_path, **settings), make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert distance(whole, resumed) == 0.0
    np.testing.assert_equal(resumed.passes.stream.state_dict(), whole.passes.stream.state_dict())
    assert whole.ledger.visits_skipped == resumed.ledger.visits_skipped > 0


@pytest.mark.parametrize(
    ("written", "resumed", "message"),
    [
        (GRESO, {}, "with `planner='greso'`, and this run has 'solved'"),
        ({"pruning": "none"}, {"pruning": "none", "controller": "dynamic"}, "with `draws_prompts=False`"),
        ({"pruning": "none"}, {"dataset": tiny.prompts(16).to_iterable_dataset()}, "with `streamed=False`"),
        ({"num_iterations": 3}, {"num_iterations": 3, "beta": 0.1}, "batch with `reference_model=False`"),
    ],
)
def test_another_strategy_cannot_go_on(tmp_path, written, resumed, message):
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    model = tiny.save(tmp_path / "model")
    run(tmp_path, model=model, **written, **saved)
    with pytest.raises(ValueError, match=message):
        make(tmp_path, model, **resumed, **saved | {"max_steps": 3}).train(resume_from_checkpoint=True)


# ---- Shapes and losses ----


@pytest.mark.parametrize(
    ("controller", "shape_name", "loss_type"),
    [
        ("reinforce_ada_positive", "accumulated", "grpo"),
        ("reinforce_ada_balanced", "two optimizer steps a batch", "dapo"),
        ("dynamic", "two batches an optimizer step", "bnpo"),
        ("gate", "iterated", "dr_grpo"),
    ],
)
def test_packing_changes_nothing(tmp_path, controller, shape_name, loss_type):
    settings = shape(shape_name) | CONTROLLERS[controller] | {"controller": controller, "loss_type": loss_type}
    settings |= {"selection_ratio": 0.5, "beta": 0.05, "optim": "sgd", "learning_rate": 0.2}
    settings["model"] = tiny.save(tmp_path / "model")
    on, off = (run(tmp_path / str(packing), packing=packing, **settings) for packing in (True, False))
    assert on.batches == off.batches
    assert moved(on) > 1e-3
    assert distance(on, off) < 1e-5


# ---- The full batch, from a part of it ----


class Stops(RolloutController):
    """Four completions of every prompt, but only the first one where `stops`, a function of prompts and first ones, says so."""

    def __init__(self, stops):
        self.stops = stops

    def draw(self, round, prompts, drawn, rng):
        if round == 0:
            return np.ones(len(prompts), dtype=np.int64)
        return np.where(self.stops(prompts, drawn), 0, 3 if round == 1 else 0)


@pytest.mark.parametrize(("loss_type", "scale"), [("dapo", "group"), ("grpo", "batch"), ("cispo", "batch")])
def test_a_gate_that_stops_dead_groups_alone_makes_the_step_of_the_full_batch(tmp_path, loss_type, scale):
    # Dead prompts are long, live ones short; of two dead kinds, one passes and the other fails
    kinds, lengths = [[1, 0, 0, 1], [0], [1], [0, 0, 1, 0]], [2, 5, 4, 1]
    scripts, lengths = (dict(zip(ALL, values * 5, strict=False)) for values in (kinds, lengths))
    settings = {"strategy": "exact", "loss_type": loss_type, "scale_rewards": scale, "max_grad_norm": 0.0}
    settings |= {"optim": "sgd", "learning_rate": 0.5, "max_steps": 4, "model": tiny.save(tmp_path / "model")}
    settings["cls"] = scripted(scripts, lengths)
    full = run(tmp_path / "full", **settings)
    dead = [prompt_id for prompt_id, prompt in full.prompts.items() if len(set(scripts[prompt])) == 1]
    controller = Stops(lambda prompts, drawn: np.isin(prompts.prompt_ids, dead))
    ours = run(tmp_path / "ours", trainer={"controller": controller}, **settings)
    assert ours.ledger.rows_rolled_out < full.ledger.rows_rolled_out == 4 * 24
    assert ours.normalisers == full.normalisers and len(set(full.normalisers.values())) > 1
    assert moved(full) > 1e-3
    assert distance(ours, full) < 1e-5


class RechecksLong(RolloutController):
    """Four completions of every prompt, but of the long ones only every second time."""

    def __init__(self, long: set[int]):
        self.long = long

    def probabilities(self, round, prompts, drawn):
        return np.where(np.isin(prompts.prompt_ids, list(self.long)), 0.5, 1.0) if round == 0 else None

    def draw(self, round, prompts, drawn, rng):
        begins = rng.random(len(prompts)) < self.probabilities(0, prompts, drawn)
        return np.where(begins & (round == 0), 4, 0)


@pytest.mark.parametrize("kind", ["stopped", "not begun"])
def test_the_expected_normaliser_is_that_of_the_full_batch(tmp_path, kind):
    class LengthTrainer(FixedTrainer):
        def complete(self, prompt, place):
            digest, index = self.digest(prompt, place), ALL.index(self._tokenizer.decode(list(prompt)))
            length = (1, 4)[index % 2] + digest[0] % 2 if kind == "not begun" else (1, 5)[digest[0] % 2]
            return [8 + digest[1] % 2, *[10] * (length - 1)]

    ids = {prompt: prompt_id for prompt_id, prompt in make(tmp_path / "ids").prompts.items()}
    # Those with a long first completion are stopped: lengths and what is drawn of them depend on each other
    controller = Stops(lambda prompts, drawn: drawn.completion_tokens[drawn.first_rows] > 3)
    if kind == "not begun":
        controller = RechecksLong({ids[prompt] for prompt in ALL[1::2]})
    settings = {"strategy": "exact", "loss_type": "dapo", "learning_rate": 0.0, "max_steps": 60}
    settings |= {"per_device_train_batch_size": 24}  # P = 12
    trainer = run(tmp_path / "run", cls=LengthTrainer, trainer={"controller": controller}, **settings)
    assert trainer.ledger.rows_rolled_out < 0.8 * 60 * 48
    # Completions have 3 tokens on average: 1 or 5, or 1, 2, 4 or 5, of which eight prompts of 17 are long
    expected = 48 * (3.0 if kind == "stopped" else (9 * 1.5 + 8 * 4.5) / 17)
    assert np.mean(list(trainer.normalisers.values())) == pytest.approx(expected, rel=0.05)


def test_a_uniform_controller_of_another_size_is_asked(tmp_path):
    # Also one of the size of plain GRPO that was derived from: both are controllers like any other
    class Fewer(UniformController):
        def draw(self, round, prompts, drawn, rng):
            return super().draw(round, prompts, drawn, rng) // 2

    for controller, size in ((UniformController(8), 8), (Fewer(4), 2)):
        assert run(tmp_path, trainer={"controller": controller}, **ONE_STEP).ledger.rows_rolled_out == 3 * size
