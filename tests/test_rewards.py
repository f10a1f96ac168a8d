"""Reward functions: what cannot be scored is `None`, what takes long is interrupted, and rewards have names."""

import gc
import logging
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.rewards import get_soft_overlong_punishment, think_format_reward

from lze_trl import rewards
from lze_trl.rewards import (
    MajorityReward,
    accuracy_reward,
    exact_match_reward,
    functions,
    get_reward,
    grading,
    timeouts,
)
from lze_trl.rewards.majority import same_answer
from lze_trl.rewards.timeouts import GradingTimeout


def conversation(text):
    return [{"role": "assistant", "content": text}]


def score(gold, completion):
    return accuracy_reward([completion], [gold])[0]


def listed(text):
    return [part.strip() for part in text.split("|")]


@pytest.fixture
def counters(monkeypatch):
    """Counters that start at zero."""
    monkeypatch.setattr(functions, "cases", Counter())
    return functions.cases


def test_conversation_with_content_blocks_and_several_messages():
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{27}"}]}]
    turns = [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "4"}, *conversation("27")]
    assert accuracy_reward([blocks, turns, []], ["27", "27", "27"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("gold", ["", "  ", "}", float("nan")])
def test_with_a_gold_answer_that_cannot_be_read_there_is_no_score(gold, counters, caplog):
    with caplog.at_level(logging.WARNING):
        assert accuracy_reward(["5"] * 25, [gold] * 25) == [None] * 25
    assert counters[functions.UNREADABLE_GOLD] == 25
    assert [record.args[0] for record in caplog.records] == [1, 10]
    assert "cannot read the gold answer" in caplog.text


PLACEHOLDERS = r"""
    see figure | See Figure 3. | proof | **Proof.** | See solution below. | ??? | ... | N/A | Proof omitted | The proof is given above.
    | Answers may vary | Refer to the solution | as shown in the figure | \text{see figure} | not provided | See https://x.y | TBD
    | Solution not available | ____ | (see diagram) | open-ended
"""
ANSWERS = r"""
    - | + | < | none | no solution | undefined | see | A | solution | graph theory | answer key 3 | below | the diagram
    | infinitely many | proof by induction | image of f | \emptyset | given x | the answer is 5 | -1
"""


def test_a_gold_answer_that_stands_for_none_is_told(counters, caplog):
    assert [gold for gold in listed(PLACEHOLDERS) if not functions.is_placeholder(gold)] == []
    assert [gold for gold in listed(ANSWERS) if functions.is_placeholder(gold)] == []
    accuracy_reward(["5"] * 3, ["see figure"] * 3)
    assert counters[functions.PLACEHOLDER_GOLD] == 3
    assert "none is right; the latest one is 'see figure'" in caplog.text


def test_metrics_and_extra_columns_reach_the_trainer(counters):
    metrics, columns = {}, {}
    completions = [r"\boxed{5}", "5", "5", "no idea what it could be, none at all"]
    logs = {"log_extra": columns.__setitem__, "log_metric": metrics.__setitem__}
    assert accuracy_reward(completions, ["5", "}", None, "5"], **logs, level=["1"] * 4) == [1.0, None, None, 0.0]
    assert metrics == {"accuracy/unscorable": pytest.approx(1 / 3)}
    assert columns["answer"][:2] == ["5", ""]
    assert counters[functions.UNREADABLE_GOLD] == 1  # none is not unreadable


# ---- What takes long ----

ENDLESS = [r"\int_0^1 x^{x^{x^x}} dx", "(x+y+z+1)^{200}", r"\cos(" * 11 + "1" + ")" * 11]


@pytest.mark.parametrize("endless", ENDLESS[:2])
def test_an_answer_that_takes_long_has_no_score_and_costs_the_others_none(endless, counters, caplog):
    completions, logged = [rf"So it is \boxed{{{endless}}}.", r"\boxed{27}", r"\boxed{28}"], {}
    assert accuracy_reward(completions, ["27"] * 3, log_metric=logged.__setitem__) == [None, 1.0, 0.0]
    assert logged == {"accuracy/unscorable": pytest.approx(1 / 3)}
    assert counters[functions.SLOW_ANSWER] == 1
    assert "1 completions so far have no accuracy, since math-verify did not finish in time" in caplog.text
    assert repr(endless) in caplog.text


def test_a_batch_has_a_budget_beyond_which_only_quick_answers_are_graded(counters, monkeypatch):
    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            sum(range(10_000))  # the timer counts time outside of the system

    with timeouts.budget(1.0):
        timeouts.run_with_timeout(spin, 0.5)
        for seconds in (0.9, 0.4):  # the first uses up the rest
            with pytest.raises(GradingTimeout):
                timeouts.run_with_timeout(spin, seconds)
            timeouts.run_with_timeout(spin, 0.02)
    timeouts.run_with_timeout(spin, 0.4)
    monkeypatch.setattr(timeouts, "BATCH_SECONDS", 0.0)
    endless = [rf"\boxed{{(x+y+z+1)^{{{300 + i}}}}}" for i in range(6)]
    assert accuracy_reward([*endless, "27", "28"], ["27"] * 8) == [None] * 6 + [1.0, 0.0]
    assert counters[functions.SLOW_ANSWER] == 6


def test_what_another_limit_has_cut_short_is_not_remembered_of_a_gold_answer(monkeypatch):
    def endless(text):
        while True:
            sum(range(10_000))

    with monkeypatch.context() as patch:
        patch.setattr(grading, "_read_boxed_or_marked", endless)
        with pytest.raises(GradingTimeout):
            timeouts.run_with_timeout(grading.read_gold, "9301", seconds=0.1)  # a gold answer alone may take 5 seconds
    assert grading.read_gold("9301").text == "9301"


def test_votes_that_take_long_differ_from_all_others_but_their_own_text():
    boxes = [rf"\boxed{{{text}}}" for text in (ENDLESS[0], ENDLESS[0], "1/2", "0.5", "1/2")]
    reward = MajorityReward(bounds=(0, 1), margin=1)
    assert reward.score_group(reward.read(boxes, [False] * 5)).rewards == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_limit_is_not_passed_by_whoever_catches_the_interruption():
    caught = []

    def stubborn():
        while True:
            try:
                while True:
                    pass
            except BaseException as error:
                if len(caught) == 3:
                    raise
                caught.append(error)

    with pytest.raises(GradingTimeout):
        timeouts.run_with_timeout(stubborn, seconds=0.1)
    sum(range(10**6))  # nothing arrives later
    assert len(caught) == 3
    with pytest.raises(GradingTimeout):  # nor by arithmetic, which is one instruction
        timeouts.run_with_timeout(lambda: 9 ** (9**9), seconds=0.1)


def test_collecting_the_garbage_of_a_training_takes_no_time_of_an_answer():
    assert not timeouts.run_with_timeout(gc.isenabled)
    with pytest.raises(ZeroDivisionError):
        timeouts.run_with_timeout(lambda: 1 / 0)
    assert gc.isenabled()


def in_another_thread(function, *args):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def test_the_limits_hold_in_every_thread(counters, monkeypatch):
    slow = rf"So it is \boxed{{{ENDLESS[0]}}}."
    assert in_another_thread(accuracy_reward, [slow, r"\boxed{54/2}", "28"], ["27"] * 3) == [None, 1.0, 0.0]
    assert counters[functions.SLOW_ANSWER] == 1
    monkeypatch.setattr(timeouts, "BATCH_SECONDS", 0.0)
    endless = [rf"\boxed{{(x+y+z+1)^{{{310 + i}}}}}" for i in range(4)]
    assert in_another_thread(accuracy_reward, [*endless, "27"], ["27"] * 5) == [None] * 4 + [1.0]
    assert not in_another_thread(same_answer, ENDLESS[0], "28") and in_another_thread(same_answer, "0.5", r"\frac12")


HOOK = """
import itertools
from lze_trl.rewards import functions, timeouts
own, timeouts.HELPER_SECONDS = timeouts._functions["_graded"], 1.0
timeouts._functions["_graded"] = lambda text, gold: all(itertools.repeat(True)) if text == "C" else own(text, gold)
"""


def test_a_computation_in_c_that_no_signal_handler_ends_is_ended_in_other_threads(tmp_path, counters, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(timeouts, "_helper", timeouts._Helper())
    assert in_another_thread(accuracy_reward, ["C", "27", "C"], ["27"] * 3) == [None, 1.0, None]


# What a prompt may end with, what may end the thinking, and what the completion of a template of gpt-oss shows
MARKS = [
    ("<think>\n", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
]
MARKS += [("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")]
MARKS += [("<|channel>thought\n", "<channel|>"), ("◁think▷", "◁/think▷"), ("<|START_THINKING|>", "<|END_THINKING|>")]


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_an_unfinished_thought_is_no_answer_wherever_it_was_begun(begin, end):
    cut, done = r"First \boxed{27}. But wait", rf"First \boxed{{3}}. {end} So \boxed{{27}}"
    assert [score("27", begin + text) for text in (cut, done)] == [0.0, 1.0]
    for shown in ({"prompts": [f"9 + 18? {begin}"] * 2}, {"prompts": [[]] * 2, "thinking_prefix": [begin] * 2}):
        assert accuracy_reward([cut, done], ["27"] * 2, **shown) == [0.0, 1.0]
        assert exact_match_reward(["27"], ["27"], **{name: values[:1] for name, values in shown.items()}) == [0.0]
        ballots = MajorityReward().read([cut, done], [False, False], **shown)
        assert [ballot.vote for ballot in ballots] == [None, "27"]
    told = [[{"role": role, "content": f"Think in {begin}"}] for role in ("user", "assistant")]
    assert accuracy_reward([cut, cut], ["27"] * 2, prompts=told) == [1.0, 0.0]  # an instruction begins no thought


def test_what_is_left_of_a_thought_without_its_special_tokens_is_no_answer():
    texts = [
        r"analysisWe get \boxed{27}",
        r"analysisWe get \boxed{3}assistantfinal\boxed{27}",
        r"analysis: \boxed{27}",
    ]
    assert accuracy_reward(texts, ["27"] * 3) == [0.0, 1.0, 1.0]


def test_grading_leaves_alarms_and_handlers_as_they_are():
    def mine(*args):
        raise AssertionError

    own, alarm = signal.signal(signal.SIGVTALRM, mine), signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert score("27", r"\boxed{(x+y)^{-1}}") == 0.0
        assert (signal.getsignal(signal.SIGVTALRM), signal.getsignal(signal.SIGALRM)) == (mine, alarm)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGVTALRM, own)


# ---- Properties ----


@given(st.integers(-(10**12), 10**12))
@settings(max_examples=60, deadline=None)
def test_integers_equal_themselves_and_not_their_neighbours(number):
    assert score(str(number), f"\\boxed{{{number:,}}}") == 1.0
    assert score(f"{number:,}", f"#### {number}") == 1.0
    assert score(number, f"\\boxed{{{number + 1}}}") == 0.0


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_is_scored_without_an_error(text):
    assert score("27", text) in (0.0, 1.0)
    assert score("27", rf"\boxed{{{text}}}") in (0.0, 1.0, None)


# ---- Other rewards, and names ----


def test_exact_match():
    completions = ["24", " 24\n", "24.0", conversation("24"), "24"]
    assert exact_match_reward(completions, ["24", "24", "24", 24, None]) == [1.0, 1.0, 0.0, 1.0, None]


def test_rewards_are_found_by_name_and_by_import_path():
    assert get_reward("accuracy") is accuracy_reward
    assert get_reward("lze_trl.rewards.exact_match_reward") is exact_match_reward
    assert get_reward("trl.rewards.think_format_reward") is think_format_reward  # TRL loads it when it is asked for
    assert {reward.__name__ for reward in rewards.REWARDS.values()} == {f"{name}_reward" for name in rewards.REWARDS}
    reward = get_reward("majority", majority={"margin": 3, "labelled": "none"})
    assert (type(reward), reward.margin, reward.labelled) == (MajorityReward, 3, "none")


@pytest.mark.parametrize("length", [10, 4])
def test_soft_overlong_is_the_penalty_of_dapo_from_trl(length):
    # L_max = 10, L_cache = 2, a fifth: 0 up to 8 tokens, then (8 − |y|) / 2 down to −1 at the limit; at least one token
    reward = get_reward("soft_overlong", max_completion_length=length)
    expected = {10: {0: 0.0, 8: 0.0, 9: -0.5, 10: -1.0, 11: -1.0}, 4: {3: 0.0, 4: -1.0}}[length]
    assert reward(completion_ids=[[5] * tokens for tokens in expected]) == list(expected.values())
    assert type(reward) is type(get_soft_overlong_punishment(10, 2))


@pytest.mark.parametrize(
    ("name", "majority", "message"),
    [
        ("soft_overlong", {}, "Set `max_completion_length`"),
        ("acuracy", {}, r"Did you mean 'accuracy'\? Known are \['accuracy', "),
        ("no_such_package.my_reward", {}, "cannot be imported: No module named 'no_such_package'"),
        ("lze_trl.rewards.REWARDS", {}, "is no function or class of a module"),
        ("majority", {"bounds": [0.8, 0.2]}, r"`majority_bounds` must be two increasing .* got \(0.8, 0.2\)"),
        ("majority", {"margin": 0}, "`majority_margin` must be a whole number of at least 1, got 0"),
        ("majority", {"min_valid": 1.01}, r"`majority_min_valid` must be in \[0, 1\], got 1.01"),
        ("majority", {"labelled": "both"}, r"`majority_labelled` must be 'gold' .* got 'both'"),
    ],
)
def test_names_and_settings_that_make_no_sense(name, majority, message):
    with pytest.raises(ValueError, match=message):
        get_reward(name, majority=majority)
