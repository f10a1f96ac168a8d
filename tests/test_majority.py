"""The majority reward: votes, what it says of a group, and that groups are scored as one over processes, rounds and evaluations."""

import copy
import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer

import tiny
import votes_run
from case_runs import run_all
from launches import gap, launch, records, write
from lze_trl import LZEGRPOTrainer
from lze_trl.rewards import MajorityReward
from lze_trl.rewards.majority import REASONS_TO_ABSTAIN, answer_classes, read_vote, same_answer
from votes_run import VotingTrainer, answer, boxed_rollouts


EVERY = {"selector": "all", "selection_ratio": 1.0, "pruning": "none"}
SGD = {"optim": "sgd", "learning_rate": 0.5}


# ---- Votes ----


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        (r"First \boxed{1}, then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> I am not sure.", None),
        (r"\fbox{no solution}", "no solution"),  # that is an answer
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{3} and \boxed{4", None),  # the last box is not closed
        (r"\boxed{}", None),
        (r"so \boxed 5$ it is", None),
        ("The answer is 7", None),  # neither announced answers nor bare ones nor marks are votes
        ("#### 7", None),
        ("", None),
    ],
)
def test_votes_are_closed_boxes(text, vote):
    assert read_vote(text, truncated=False) == vote
    assert read_vote(text, truncated=True) is None


NO_ANSWERS = r"""
    \; | ? | \text{ } | \underline{\hspace{1cm}} | \frac{\square}{\square} | \left( \right) | ___ | N/A | \text{unknown}
    | \textbf{your answer here} | \text{[insert answer]} | \text{Cannot be determined.} | \text{Not enough information}
"""
ANSWERS = r"""
    0 | x | na | \frac{n}{a} | \pi | ∞ | < | \text{even} | \text{none} | \text{no solution} | \emptyset | \text{cannot be factored}
"""


@pytest.mark.parametrize("box", [*map(str.strip, NO_ANSWERS.split("|"))])
def test_a_box_without_an_answer_neither_votes_nor_wins(box):
    assert read_vote(rf"\boxed{{{box}}}", truncated=False) is None
    assert judge(*[box] * 5, *["8"] * 4) == [0.0] * 5 + [1.0] * 4


@pytest.mark.parametrize("box", [*map(str.strip, ANSWERS.split("|"))])
def test_an_answer_in_words_or_signs_votes(box):
    assert read_vote(rf"\boxed{{{box}}}", truncated=False) == box


def test_equality_is_not_transitive_and_classes_are_cliques():
    # All three equal 5, but x = 5 is not y = 5: the most frequent text is first, and takes the first of the others by text
    assert same_answer("x=5", "5") and same_answer("5", "y=5") and not same_answer("x=5", "y=5")
    assert answer_classes(["y=5", "5", "x=5", "5"], same_answer).tolist() == [1, 0, 0, 0]
    # Without the 5 in the middle nothing joins them
    assert answer_classes(["y=5", "x=5", "y=5"], same_answer).tolist() == [0, 1, 0]


TEXTS = "abcde"
VOTES = st.lists(st.sampled_from([*TEXTS, None]), min_size=1, max_size=12)
RELATIONS = st.sets(st.sampled_from(list(itertools.combinations(TEXTS, 2)))).map(
    lambda pairs: lambda one, other: (min(one, other), max(one, other)) in pairs
)


@given(VOTES, RELATIONS, st.randoms())
def test_classes_of_any_relation(votes, same, random):
    classes = answer_classes(votes, same)
    assert [c == -1 for c in classes] == [vote is None for vote in votes]
    members = {c: sorted({vote for vote, own in zip(votes, classes, strict=True) if own == c}) for c in set(classes)}
    members.pop(-1, None)
    assert sorted(itertools.chain(*members.values())) == sorted(set(votes) - {None})  # equal texts share a class
    for texts in members.values():
        assert all(same(one, other) for one, other in itertools.combinations(texts, 2))
    order = random.sample(range(len(votes)), len(votes))
    assert answer_classes([votes[i] for i in order], same).tolist() == classes[order].tolist()


# ---- One group ----


def votes(*answers):
    """Completions that box these answers, and one without a box for each `None`."""
    return ["no idea" if text is None else rf"So it is \boxed{{{text}}}." for text in answers]


def verdict_of(*answers, truncated=(), gold=None, **arguments):
    """What is said of one group of completions."""
    reward = MajorityReward(**{"bounds": (0.0, 1.0), "margin": 1, "min_valid": 0.0} | arguments)
    cut = [i in truncated for i in range(len(answers))]
    return reward.score_group(reward.read(votes(*answers), cut, None if gold is None else [gold] * len(answers)))


def judge(*answers, **arguments):
    return verdict_of(*answers, **arguments).rewards


def test_the_winner_gets_one_and_all_others_nothing():
    assert judge("7", "0.5", r"\frac12", "1/2", None) == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert judge("7", "7", "7", truncated=[2]) == [1.0, 1.0, 0.0]
    assert judge(None, None, None) == [None] * 3  # answerless completions agree on nothing


def test_bounds_are_inclusive_and_of_all_completions():
    ten = ["1"] * 8 + ["2"] * 2
    assert judge(*ten, bounds=(0.2, 0.8)) == [1.0] * 8 + [0.0] * 2
    assert judge(*ten, bounds=(0.2, 0.79)) == [None] * 10
    assert judge("1", "1", *[None] * 8, bounds=(0.2, 0.8)) == [1.0, 1.0, *[0.0] * 8]
    assert judge("1", "1", *[None] * 9, bounds=(0.2, 0.8)) == [None] * 11
    assert judge("1", "1", "1", "2", None, None, min_valid=0.7) == [None] * 6
    assert judge("1", "1", "1", "2", None, None, min_valid=4 / 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reason", "answers"),
    [
        ("few_votes", ["1", None, None, None]),
        ("low_share", [str(i) for i in range(10)]),
        ("high_share", ["1"] * 4),
        ("margin", ["1", "1", "2", "2"]),
        (None, ["1", "1", "1", "2"]),
    ],
)
def test_the_reason_of_an_abstention_is_logged(reason, answers):
    reward = MajorityReward()
    verdict = reward.score_group(reward.read(votes(*answers), [False] * len(answers), level=["1"]))
    logged = verdict.metrics
    assert (verdict.rewards[0] is None) == (reason is not None) == logged["abstained"]
    assert [name for name in REASONS_TO_ABSTAIN if logged[f"abstained_{name}"]] == ([reason] if reason else [])
    assert logged["no_vote_share"] == answers.count(None) / len(answers)
    assert logged["winner_share"] == answers.count("1") / len(answers)


def test_gold_decides_where_there_is_gold():
    assert judge("1", "1", "1", "2", gold="2") == [0.0, 0.0, 0.0, 1.0]
    assert judge("1", "1", "1", "1", gold="1", bounds=(0.2, 0.8)) == [1.0] * 4
    assert judge("1", "1", "1", "2", gold="2", labelled="none") == [1.0, 1.0, 1.0, 0.0]
    for none in (None, "", "}"):  # without gold, or one that cannot be read, the vote decides
        assert judge("1", "1", "1", "2", gold=none) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("labelled", ["gold", "none"])
@pytest.mark.parametrize(("gold", "right"), [("3", 1.0), ("2", 0.0)])
def test_labels_are_checked_whether_or_not_gold_decides(labelled, gold, right):
    verdict = verdict_of("3", "3", "3", "2", gold=gold, labelled=labelled)
    assert verdict.metrics["label_precision"] == right
    assert verdict.winner == "3"


# ---- Bad input ----


def make(directory, cls=VotingTrainer, **settings):
    model = votes_run.save(directory / "model")
    return votes_run.make(directory / "run", model, cls, **SGD, **settings)


class WithoutBallots(MajorityReward):
    def read(self, completions, truncated, **columns):
        return []


class WithOneReward(MajorityReward):
    def score_group(self, ballots, final=True):
        return super().score_group(ballots, final)._replace(rewards=[1.0])


@pytest.mark.parametrize(
    ("majority", "message"),
    [
        (WithoutBallots(), "`majority_reward.read` returned 0 readings for 12 completions"),
        (WithOneReward(), "score_group` returned 1 rewards for a group of 4 completions"),
    ],
)
def test_a_reward_that_loses_completions_is_refused(tmp_path, majority, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, majority=majority).train()


def test_an_evaluation_of_incomplete_groups_is_refused(tmp_path):
    trainer = make(tmp_path)
    trainer.model.eval()
    with pytest.raises(ValueError, match=r"`num_generations_eval=4`\. Use a multiple of it"):
        trainer._calculate_rewards([{"prompt": "?"}] * 6, ["?"] * 6, votes(*"111222"), [[0]] * 6)


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


ROWS = {"rows": 30, "num_generations": 6, **SGD}
"""P = 5 and G = 6: groups straddle three processes, which have 10 rows each."""
SIX = ROWS | EVERY | {"rows": 36}
"""P = 6. In rounds, prompts get 1 and 3 completions in turn."""
CASES = {
    "one round": ROWS | EVERY,
    "by energy": ROWS | {"selection_ratio": 0.4},
    "six prompts": SIX,
    "three rounds": SIX | {"sizes": [[1, 3], [3, 1], [2, 2]]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("votes")
    votes_run.save(directory / "model")
    run_all(votes_run.run, write(directory, CASES))
    launch(directory, 3, votes_run.run, CASES)
    return directory


def groups_of(runs, name, processes):
    first, *others = [record["groups"] for record in records(runs, name, processes)]
    assert all(groups == first for groups in others)
    return first


def test_groups_are_settled_as_by_hand(runs):
    groups = groups_of(runs, "one round", 1)
    assert len(groups) == 15
    for group in groups:
        assert group["rewards"] == expected_rewards(group["prompt"], group["generation"], 6)
    assert 3 <= sum(group["rewards"][0] is None for group in groups) <= 12  # the samples have both


def test_an_abstained_group_leaves_no_trace(runs):
    for name in CASES:
        visits = defaultdict(int)
        for group in groups_of(runs, name, 1):
            judged = group["rewards"][0] is not None
            visits[group["prompt"]] += judged
            assert group["visits"] == visits[group["prompt"]]
            assert group["alive"] == (len(set(group["rewards"])) > 1)
    (record,) = records(runs, "one round", 1)
    dead = {(g["generation"], g["prompt"]) for g in groups_of(runs, "one round", 1) if not g["alive"]}
    rows = [(part["generation"], *row) for part in record["micro_batches"] for row in part["rows"]]
    assert {advantage == 0.0 for turn, prompt, _, advantage in rows if (turn, prompt) in dead} == {True}
    assert any(advantage != 0.0 for _, _, _, advantage in rows)


@pytest.mark.parametrize("name", CASES)
def test_processes_settle_as_one(runs, name):
    assert groups_of(runs, name, 3) == groups_of(runs, name, 1)
    assert gap(runs / f"{name}.3.pt", runs / f"{name}.1.pt") < 1e-5


def test_rounds_are_settled_as_one(runs):
    assert groups_of(runs, "three rounds", 1) == groups_of(runs, "six prompts", 1)
    assert gap(runs / "three rounds.1.pt", runs / "six prompts.1.pt") < 1e-5


def plain_majority(completions, completion_ids, log_metric, **kwargs):
    """The majority reward for groups of 4 in TRL's trainer, on one process."""
    reward = MajorityReward()
    ballots = reward.read(completions, [ids[-1] != 1 for ids in completion_ids])
    verdicts = [reward.score_group(ballots[start : start + 4]) for start in range(0, len(ballots), 4)]
    log_metric("majority/abstained", float(np.mean([verdict.metrics["abstained"] for verdict in verdicts])))
    return [reward for verdict in verdicts for reward in verdict.rewards]


def test_every_group_is_plain_trl(tmp_path):
    given = {"rollout_func": boxed_rollouts}
    theirs = make(tmp_path, GRPOTrainer, majority=plain_majority, trainer=given)
    theirs.train()
    ours = make(tmp_path, LZEGRPOTrainer, trainer=given, packing=False, **EVERY)
    start = copy.deepcopy(ours.model.state_dict())
    ours.train()
    end, plain = (trainer.model.state_dict() for trainer in (ours, theirs))
    assert max(float((end[name] - plain[name]).abs().max()) for name in start) < 1e-6
    assert max(float((end[name] - start[name]).abs().max()) for name in start) > 1e-3
    for mine, trl in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        assert mine["rewards/majority_reward/mean"] == pytest.approx(trl["rewards/plain_majority/mean"], nan_ok=True)
        for name in ("rewards/parity_reward/mean", "majority/abstained"):
            assert mine[name] == pytest.approx(trl[name], nan_ok=True)


def test_an_evaluation_votes_by_its_own_groups(tmp_path):
    held_out = tiny.prompts(4).remove_columns("solution")
    logged = make(tmp_path, num_generations_eval=6, per_device_eval_batch_size=24).evaluate(held_out)
    groups = [expected_rewards(prompt, 0, 6) for prompt in held_out["prompt"]]
    rewards = [reward for group in groups for reward in group if reward is not None]
    assert rewards
    assert logged["eval_rewards/majority_reward/mean"] == pytest.approx(np.mean(rewards))
    assert logged["eval_majority/abstained"] == np.mean([group[0] is None for group in groups])
    assert "eval_rewards/parity_reward/mean" in logged


@pytest.mark.parametrize(
    ("controller", "settings"),
    [("gate", {}), ("reinforce_ada_balanced", {"round_size": 4, "max_rounds": 3, "kept": 4})],
)
def test_every_controller_trains_by_votes(tmp_path, controller, settings):
    own = {"num_generations": 8, "per_device_train_batch_size": 24, "controller_kwargs": settings}
    trainer = make(tmp_path, controller=controller, **own)
    trainer.train()
    for group in trainer.groups:
        size = len(group["rewards"])
        assert group["rewards"] == expected_rewards(group["prompt"], group["generation"], size)
        assert group["alive"] == (len(set(group["rewards"])) > 1)
        assert controller != "gate" or size in (1, 8)
    logged = [entry["majority/abstained"] for entry in trainer.state.log_history if "majority/abstained" in entry]
    assert len(logged) == trainer.state.global_step and all(0 <= share <= 1 for share in logged)
