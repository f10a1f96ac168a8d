"""The majority reward: what it says of a group, and that groups are settled as one over processes, rounds and evaluations."""

import copy
import inspect
import json
import logging
import re
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

import tiny
import votes_run
from case_runs import run_all
from launches import on_processes
from lze_trl import LZEGRPOTrainer
from lze_trl.data import DataError, load_mixture, load_prompts
from lze_trl.evaluation.command import _reward as reward_of_evaluation
from lze_trl.evaluation.settings import EvaluationError
from lze_trl.job.recipe import LZEScriptArguments
from lze_trl.rewards import MajorityReward, accuracy_reward, get_reward
from votes_run import VotingTrainer, answer, boxed_rollouts, parity_reward


PLAIN = {"num_generations": 4, "end_token_ids": [0]}
EVERY = {"selector": "all", "selection_ratio": 1.0, "pruning": "none"}


def votes(*answers):
    """Completions that box these answers, and one without a box for each `None`."""
    return ["no idea" if text is None else rf"So it is \boxed{{{text}}}." for text in answers]


def judge(*answers, truncated=(), **arguments):
    """Rewards of one group of completions."""
    arguments = {"bounds": (0.0, 1.0), "margin": 1, "min_valid": 0.0} | arguments
    reward = MajorityReward(**arguments)
    cut = [i in truncated for i in range(len(answers))]
    return reward.settle(reward.read(votes(*answers), cut)).rewards


# ---- One group ----


def test_the_winner_gets_one_and_all_others_nothing():
    assert judge("7", "0.5", r"\frac12", "1/2", None) == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert judge("7", "7", "7", truncated=[2]) == [1.0, 1.0, 0.0]


def test_answerless_completions_agree_on_nothing():
    # Published: both are said to equal the number of the question, and get 1
    reward = MajorityReward(**PLAIN)
    completions = ["I cannot solve this.", "Let me think about it.", "Hm.", "Well."]
    prompts = [r"What is \boxed{12} + 5?"] * 4
    assert reward(prompts, completions, [[7, 0]] * 4) == [None] * 4
    read = reward.read(completions, [False] * 4, question=prompts, problem=prompts)
    assert [ballot.vote for ballot in read] == [None] * 4


@given(
    st.lists(st.sampled_from(["1", "2", "3", None]), min_size=4, max_size=4), st.sampled_from(["2+2", r"\boxed{1}"])
)
def test_rewards_do_not_depend_on_the_prompt(answers, prompt):
    reward = MajorityReward((0.0, 1.0), 1, 0.0, **PLAIN)
    assert reward([prompt] * 4, votes(*answers), [[5, 0]] * 4) == reward(["?"] * 4, votes(*answers), [[5, 0]] * 4)


def test_ties_abstain_with_any_margin():
    assert judge("1", "1", "2", "2") == [None] * 4
    assert judge("1", "1", "1", "2", "2", margin=2) == [None] * 5
    assert judge("1", "1", "1", "2", "2", margin=1) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_bounds_are_inclusive_and_of_all_completions():
    ten = ["1"] * 8 + ["2"] * 2
    assert judge(*ten, bounds=(0.2, 0.8)) == [1.0] * 8 + [0.0] * 2
    assert judge(*ten, bounds=(0.2, 0.79)) == [None] * 10
    assert judge("1", "1", *[None] * 8, bounds=(0.2, 0.8)) == [1.0, 1.0, *[0.0] * 8]
    assert judge("1", "1", *[None] * 9, bounds=(0.2, 0.8)) == [None] * 11
    assert judge("1", "1", "1", "2", None, None, min_valid=0.7) == [None] * 6
    assert judge("1", "1", "1", "2", None, None, min_valid=4 / 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_reason_of_an_abstention_is_logged():
    reasons = {}
    for name, answers in {
        "few_votes": ["1", None, None, None],
        "low_share": [str(i) for i in range(10)],
        "high_share": ["1"] * 4,
        "margin": ["1", "1", "2", "2"],
        None: ["1", "1", "1", "2"],
    }.items():
        logged = {}
        reward = MajorityReward(num_generations=len(answers), end_token_ids=[0])
        found = reward(
            ["?"] * len(answers), votes(*answers), [[0]] * len(answers), log_metric=logged.__setitem__, level=["1"]
        )
        assert (found[0] is None) == (name is not None) == logged["majority/abstained"]
        reasons[name] = [key for key, value in logged.items() if key.startswith("majority/abstained_") and value]
        assert logged["majority/no_vote_share"] == answers.count(None) / len(answers)
        most = max((answers.count(text) for text in answers if text is not None), default=0)
        assert logged["majority/winner_share"] == most / len(answers)
    assert reasons == {name: [f"majority/abstained_{name}"] if name else [] for name in reasons}


DIGITS = st.lists(st.sampled_from(["1", "2", "3", None]), min_size=2, max_size=9)


@given(DIGITS)
@settings(deadline=None)
def test_where_the_winner_is_gold_majority_is_accuracy(answers):
    counts = Counter(vote for vote in answers if vote is not None).most_common(2)
    leads = bool(counts) and (len(counts) == 1 or counts[0][1] > counts[1][1])
    rewards = judge(*answers)
    if leads:
        assert rewards == accuracy_reward(votes(*answers), [counts[0][0]] * len(answers))
    else:
        assert rewards == [None] * len(answers)


@given(DIGITS, st.randoms())
@settings(deadline=None)
def test_the_order_of_completions_does_not_matter(answers, random):
    order = random.sample(range(len(answers)), len(answers))
    for arguments in ({}, {"bounds": (0.2, 0.8), "margin": 2, "min_valid": 0.5}):
        rewards = judge(*answers, **arguments)
        assert judge(*(answers[i] for i in order), **arguments) == [rewards[i] for i in order]


def test_gold_decides_where_there_is_gold():
    completions, gold = votes("1", "1", "1", "2"), ["2", "2", "2", "2"]
    cut, unanimous = [False] * 4, ["1"] * 4
    reward = MajorityReward()
    assert reward.settle(reward.read(completions, cut, gold)).rewards == accuracy_reward(completions, gold)
    assert reward.settle(reward.read(votes(*unanimous), cut, ["1"] * 4)).rewards == [1.0] * 4
    blind = MajorityReward(labelled="none")
    assert blind.settle(blind.read(completions, cut, gold)).rewards == [1.0, 1.0, 1.0, 0.0]
    # Without gold, or one that cannot be read, the vote decides
    for none in (None, [None] * 4, ["}"] * 4):
        assert reward.settle(reward.read(completions, cut, none)).rewards == [1.0, 1.0, 1.0, 0.0]


def test_labels_that_leave_nothing_to_vote_on_are_told(caplog):
    reward = MajorityReward()
    for gold in ([None, "1"], ["1", "1"], ["1", "1"]):
        reward.read(votes("1", "2"), [False] * 2, gold)
    assert [("majority_labelled='none'" in record.getMessage()) for record in caplog.records] == [True]


@pytest.mark.parametrize(("columns", "warnings"), [((), 0), (("solution",), 1)])
def test_labels_of_an_evaluation_set_are_not_those_of_the_training(tmp_path, caplog, columns, warnings):
    trainer = make(tmp_path, columns=columns, eval_dataset=tiny.prompts(3), per_device_eval_batch_size=12)
    trainer.evaluate()
    assert "nothing is voted on" not in caplog.text
    trainer.train()
    assert caplog.text.count("nothing is voted on") == warnings


def test_conversations_and_logged_votes():
    reward, columns = MajorityReward((0.0, 1.0), **PLAIN), {}
    talks = [[{"role": "assistant", "content": text}] for text in votes("1", "1", "1", None)]
    assert reward(["?"] * 4, talks, [[0]] * 4, log_extra=columns.__setitem__) == [1.0, 1.0, 1.0, 0.0]
    assert columns == {"vote": ["1", "1", "1", ""]}


# ---- Bad input ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bounds": [0.8, 0.2]}, r"`majority_bounds` must be two increasing numbers in \[0, 1\], got \[0.8, 0.2\]"),
        ({"bounds": [0.2]}, r"got \[0.2\]"),
        ({"bounds": [0.0, 1.1]}, r"got \[0.0, 1.1\]"),
        ({"bounds": [float("nan"), 1.0]}, "two increasing numbers"),
        ({"margin": 0}, "`majority_margin` must be a whole number of at least 1, got 0"),
        ({"margin": 1.5}, "got 1.5"),
        ({"min_valid": 1.01}, r"`majority_min_valid` must be in \[0, 1\], got 1.01"),
        ({"labelled": "both"}, r"`majority_labelled` must be one of \['gold', 'none'\], got 'both'"),
        ({"num_generations": 1}, "`num_generations` must be at least 2, got 1"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        MajorityReward(**arguments)


def test_plain_trl_has_to_say_what_a_group_is():
    completions, ids = votes(*"1112"), [[0]] * 4
    with pytest.raises(ValueError, match=r"Outside of `LZEGRPOTrainer`.*MajorityReward\(num_generations=…"):
        MajorityReward()(["?"] * 4, completions, ids)
    reward = MajorityReward(**PLAIN)
    with pytest.raises(ValueError, match="needs all 4 completions of a prompt on one process, and got 3"):
        reward(["?"] * 3, completions[:3], ids[:3])
    with pytest.raises(ValueError, match="a group is incomplete"):
        reward(["?", "?", "?", "!"], completions, ids)


def make(tmp_path, cls=LZEGRPOTrainer, majority=None, columns=(), **kwargs):
    kwargs = {"num_generations": 4, "per_device_train_batch_size": 12, "optim": "sgd", "learning_rate": 0.5} | kwargs
    others = {"eval_dataset": kwargs.pop("eval_dataset")} if "eval_dataset" in kwargs else {}
    dataset = tiny.prompts(11)
    return cls(
        model=votes_run.save(tmp_path / "model"),
        reward_funcs=[majority or MajorityReward(), parity_reward],
        args=tiny.config(tmp_path / "run", reward_weights=[1.0, 0.0], **kwargs),
        train_dataset=dataset if "solution" in columns else dataset.remove_columns("solution"),
        **({"rollout_func": boxed_rollouts} if not issubclass(cls, VotingTrainer) else {}),
        **others,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"controller": "reinforce_ada_positive", "controller_kwargs": {"round_size": 4}},
            "by 'majority_reward' every group has one",
        ),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "for which 'majority_reward' abstains"),
    ],
)
def test_what_does_not_go_with_votes_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)


def test_an_evaluation_of_incomplete_groups_is_refused(tmp_path):
    trainer = make(tmp_path, eval_dataset=tiny.prompts(3).remove_columns("solution"))
    ids = [[0]] * 6
    trainer.model.eval()
    with pytest.raises(ValueError, match=r"`num_generations_eval=4`\. Use a multiple of it"):
        trainer._calculate_rewards([{"prompt": "?"}] * 6, ["?"] * 6, votes(*"111222"), ids)


class Broken(MajorityReward):
    """Answers with what it is told to."""

    def __init__(self, ballots=None, rewards=None):
        super().__init__()
        self.given = ballots, rewards

    def read(self, completions, truncated, **columns):
        return super().read(completions, truncated) if self.given[0] is None else self.given[0]

    def settle(self, ballots, final=True):
        return super().settle(ballots, final)._replace(rewards=self.given[1])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Broken(ballots=[]), r"`majority_reward\.read` returned 0 ballots for 12 completions"),
        (Broken(rewards=[1.0]), r"`majority_reward\.settle` returned 1 rewards for a group of 4 completions"),
        (Broken(rewards=[1.0, None, float("nan"), 0.0]), r"settle` returned the reward nan\. Return finite numbers"),
    ],
)
def test_answers_of_a_group_reward_are_checked(tmp_path, reward, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, majority=reward).train()


def test_by_name(tmp_path):
    reward = get_reward("majority", majority={"margin": 3, "labelled": "none"})
    assert (type(reward), reward.margin, reward.labelled) == (MajorityReward, 3, "none")
    with pytest.raises(ValueError, match="Did you mean 'majority'"):
        get_reward("majorty")
    with pytest.raises(EvaluationError, match=r"judges groups, not completions\. Use 'accuracy'"):
        reward_of_evaluation("majority")
    trainer = make(tmp_path, majority=MajorityReward)  # the class itself, with the defaults
    assert trainer.reward_func_names == ["majority_reward", "parity_reward"]
    assert trainer.group_rewards[0].bounds == (0.2, 0.8)


PAGE = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_settings_have_the_defaults_of_the_page():
    rows = re.findall(r"^\| `majority_(\w+)` \| `(\w+)` \| `(.+?)` \|", PAGE, re.M)
    parameters = inspect.signature(MajorityReward).parameters
    documented = {name: yaml.safe_load(default) for _, name, default in rows}
    assert [setting for setting, *_ in rows] == [name for _, name, _ in rows]
    defaults = {name: parameters[name].default for name in documented}
    assert {**documented, "bounds": tuple(documented["bounds"])} == defaults
    flags = {f"majority_{name}" for name in documented}
    assert flags == {field.name for field in fields(LZEScriptArguments) if field.name.startswith("majority_")}


def test_the_group_reward_of_the_page_trains(tmp_path):
    (example,) = [block for block in re.findall(r"```python\n(.+?)```", PAGE, re.S) if "class Shortest" in block]
    names = {}
    exec(example, names)
    trainer = make(tmp_path, majority=names["Shortest"](), **EVERY)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "rewards/Shortest/mean" in entry]
    assert len(logged) == 3
    assert all(entry["rewards/Shortest/mean"] >= 1 / 4 and entry["Shortest/shortest"] > 0 for entry in logged)


# ---- Recipes ----


def test_the_settings_of_a_recipe(tmp_path):
    given = {"bounds": [0.1, 0.9], "margin": 3, "min_valid": 0.25, "labelled": "none"}
    args = LZEScriptArguments(reward_funcs=["majority"], **{f"majority_{name}": v for name, v in given.items()})
    assert args.majority == given
    assert LZEScriptArguments().majority == {}
    with pytest.raises(
        ValueError, match=r"`majority_margin=3` is a setting of the reward 'majority', and `reward_funcs` is"
    ):
        LZEScriptArguments(majority_margin=3)
    with pytest.raises(ValueError, match="`majority_margin` must be a whole number of at least 1, got 0"):
        LZEScriptArguments(reward_funcs=["majority"], majority_margin=0)


def test_sets_without_answers(tmp_path, caplog):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "1 + 1?"}\n{"problem": "2 + 2?"}\n')
    with pytest.raises(DataError, match="no column for the gold answer"):
        load_prompts(str(path))
    read = load_prompts(str(path), unlabelled=True, conversational=False)
    assert read["prompt"] == ["1 + 1?", "2 + 2?"]
    assert (read["solution"], read["labelled"]) == ([None, None], [False, False])
    assert len(set(read["prompt_id"])) == 2
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text('{"problem": "3 + 3?", "answer": "6"}\n{"problem": "4 + 4?", "answer": null}\n')
    mixture = load_mixture([str(path), str(labelled)], unlabelled=True)
    assert mixture["labelled"] == [False, False, True, False]
    with caplog.at_level(logging.WARNING):
        scored = accuracy_reward(votes("1", "1", "6", "1"), mixture["solution"], labelled=mixture["labelled"])
    assert scored == [None, None, 1.0, None]
    assert "gold answer" not in caplog.text
    assert "labelled" not in load_prompts(str(labelled)).column_names


# ---- Training ----


def expected_rewards(prompt: str, turn: int, size: int) -> list[float | None]:
    """The default majority reward of a group, by counting digits."""
    prompt_ids = tuple(tiny.tokenizer()(prompt)["input_ids"])
    given = [answer(prompt_ids, place, turn) for place in range(size)]
    ballots = [None if ending else digit for digit, ending in given]
    (_, most), (_, next_most) = [*Counter(filter(None, ballots)).most_common(2), (None, 0), (None, 0)][:2]
    valid = size - ballots.count(None)
    winner = next((digit for digit in set(filter(None, ballots)) if ballots.count(digit) == most), None)
    if valid / size < 0.5 or not 0.2 <= most / size <= 0.8 or most - next_most < 2:
        return [None] * size
    return [float(vote == winner) for vote in ballots]


ROWS = {"rows": 30, "num_generations": 6, "max_steps": 3, "optim": "sgd", "learning_rate": 0.5}
"""P = 5 and G = 6: groups straddle two processes, which have 15 rows each, and three, which have 10."""
SIX = ROWS | EVERY | {"rows": 36}
"""P = 6. In rounds, two processes have 9 rows each, or 6, of prompts that get 2 and 4, or 1 and 3."""
CALIBRATED = {
    "selection_ratio": 0.4,
    "self_play": {"label_confidence": "calibrated"},
    "gold": True,
    "majority": {"labelled": "none"},
}
CASES = {
    "one round": ROWS | EVERY,
    "by energy": ROWS | {"selection_ratio": 0.4},
    "by energy times share": ROWS | {"selection_ratio": 0.4, "self_play": {"label_confidence": "share"}},
    "by energy, calibrated": ROWS | CALIBRATED,
    "batch scale": ROWS | EVERY | {"scale_rewards": "batch"},
    "six prompts": SIX,
    "two rounds": SIX | {"sizes": [[2, 4], [4, 2]]},
    "three rounds": SIX | {"sizes": [[1, 3], [3, 1], [2, 2]]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("votes")
    votes_run.save(directory / "model")
    (directory / "cases.json").write_text(json.dumps(CASES))
    run_all(votes_run.run, directory / "cases.json")
    for processes in (2, 3):
        on_processes(processes, directory / f"log{processes}.txt", run_all, votes_run.run, directory / "cases.json")
    return directory


def groups_of(runs, name, processes):
    records = [
        json.loads((runs / f"{name}.{processes}.{rank}.json").read_text())["groups"] for rank in range(processes)
    ]
    assert all(record == records[0] for record in records)
    return records[0]


def weights_apart(runs, one, other):
    first, second = (torch.load(runs / f"{name}.pt") for name in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_groups_are_settled_as_by_hand(runs):
    groups = groups_of(runs, "one round", 1)
    assert len(groups) == 15
    for group in groups:
        assert group["rewards"] == expected_rewards(group["prompt"], group["generation"], 6)
    kinds = Counter(group["rewards"][0] is None for group in groups)
    assert kinds[True] >= 3 and kinds[False] >= 3  # the samples have both


def test_an_abstained_group_leaves_no_trace(runs):
    for name in CASES:
        visits = defaultdict(int)
        for group in groups_of(runs, name, 1):
            judged = group["rewards"][0] is not None
            visits[group["prompt"]] += judged
            assert group["visits"] == visits[group["prompt"]]
            assert group["alive"] == (len(set(group["rewards"])) > 1)
    record = json.loads((runs / "one round.1.0.json").read_text())
    dead = {(g["generation"], g["prompt"]) for g in groups_of(runs, "one round", 1) if not g["alive"]}
    rows = [(part["generation"], *row) for part in record["micro_batches"] for row in part["rows"]]
    assert {advantage == 0.0 for turn, prompt, _, advantage in rows if (turn, prompt) in dead} == {True}
    assert any(advantage != 0.0 for _, _, _, advantage in rows)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_settle_as_one(runs, name, processes):
    assert groups_of(runs, name, processes) == groups_of(runs, name, 1)
    assert weights_apart(runs, f"{name}.{processes}", f"{name}.1") < 1e-5


@pytest.mark.parametrize("name", ["two rounds", "three rounds"])
def test_rounds_are_settled_as_one(runs, name):
    assert groups_of(runs, name, 1) == groups_of(runs, "six prompts", 1)
    assert weights_apart(runs, f"{name}.1", "six prompts.1") < 1e-5


def test_the_run_learned_something(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "model")
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in CASES:
        end = torch.load(runs / f"{name}.1.pt")
        assert max(float((end[key] - start[key]).abs().max()) for key in start) > 1e-3


@pytest.mark.parametrize("scale", ["group", "none"])
def test_every_group_is_plain_trl(tmp_path, scale):
    ends = [1]
    plain = MajorityReward(num_generations=4, end_token_ids=ends)
    theirs = make(tmp_path, GRPOTrainer, majority=plain, scale_rewards=scale)
    theirs.train()
    ours = make(tmp_path, majority=MajorityReward(), scale_rewards=scale, packing=False, **EVERY)
    start = copy.deepcopy(dict(ours.model.named_parameters()))
    ours.train()
    ends = [dict(trainer.model.named_parameters()) for trainer in (ours, theirs)]
    assert max(float((ends[0][name] - ends[1][name]).detach().abs().max()) for name in start) < 1e-6
    assert max(float((ends[0][name] - start[name]).detach().abs().max()) for name in start) > 1e-3
    for mine, trl in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        for name in ("rewards/majority_reward/mean", "rewards/parity_reward/mean", "majority/abstained"):
            assert mine[name] == pytest.approx(trl[name], nan_ok=True)


def test_an_evaluation_votes_by_its_own_groups(tmp_path):
    trainer = make(
        tmp_path,
        num_generations_eval=6,
        per_device_eval_batch_size=24,
        eval_dataset=tiny.prompts(4).remove_columns("solution"),
        cls=VotingTrainer,
    )
    logged = trainer.evaluate()
    groups = [expected_rewards(prompt, 0, 6) for prompt in tiny.prompts(4)["prompt"]]
    rewards = [reward for group in groups for reward in group if reward is not None]
    assert rewards
    assert logged["eval_rewards/majority_reward/mean"] == pytest.approx(np.mean(rewards))
    assert logged["eval_majority/abstained"] == np.mean([group[0] is None for group in groups])
    assert "eval_rewards/parity_reward/mean" in logged


@pytest.mark.parametrize("controller", ["dynamic", "gate", "reinforce_ada_balanced"])
def test_every_controller_trains_by_votes(tmp_path, controller):
    own = {
        "dynamic": {"controller_kwargs": {"max_rounds": 3}},
        "gate": {},
        "reinforce_ada_balanced": {
            "controller_kwargs": {"round_size": 4, "max_rounds": 3, "kept": 4},
        },
    }[controller]
    trainer = make(
        tmp_path, VotingTrainer, num_generations=8, per_device_train_batch_size=24, controller=controller, **own
    )
    trainer.train()
    sizes = set()
    for group in trainer.groups:
        size = len(group["rewards"])
        sizes.add(size)
        assert group["rewards"] == expected_rewards(group["prompt"], group["generation"], size)
        assert group["alive"] == (len(set(group["rewards"])) > 1)
    if controller == "gate":
        assert sizes <= {1, 8}
        assert trainer.ledger.groups_trained > 0
    logged = [entry for entry in trainer.state.log_history if "majority/winner_share" in entry]
    assert len(logged) == trainer.state.global_step
    assert all(0 <= entry["majority/abstained"] <= 1 for entry in logged)


def test_ttrl_votes_with_more_than_it_trains_on(tmp_path):
    trainer = make(tmp_path, num_generations=8, per_device_train_batch_size=24, controller_kwargs={"kept": 4}, **EVERY)
    trainer.train()
    live = [entry["lze/dead_share"] for entry in trainer.state.log_history if "lze/dead_share" in entry]
    assert trainer.ledger.rows_rolled_out == 3 * 24
    judged = sum(
        round(3 * (1 - entry["majority/abstained"]))
        for entry in trainer.state.log_history
        if "majority/abstained" in entry
    )
    assert 0 < trainer.ledger.rows_trained == 4 * judged < 3 * 12
    assert min(live) < 1.0


def test_majority_watches_itself_against_labels(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, majority=MajorityReward(labelled="none"), columns=["solution"])
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "rewards/parity_reward/mean" in entry]
    assert all(entry["majority/gold_share"] == 0.0 for entry in logged)
    assert "has a gold answer, which decides" not in caplog.text
