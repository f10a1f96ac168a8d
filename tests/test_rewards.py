"""Answers are read and compared as mathematics, and what cannot be scored is `None`."""

import contextlib
import logging
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.rewards import get_soft_overlong_punishment

import tiny
from lze_trl import LZEGRPOTrainer, rewards
from lze_trl.rewards import (
    MajorityReward,
    accuracy_reward,
    exact_match_reward,
    format_reward,
    functions,
    get_reward,
    grading,
    limit,
)
from lze_trl.rewards.grading import gold_text, last_boxed, marked_answer, read_gold
from lze_trl.rewards.limit import GradingTimeout


def conversation(text):
    return [{"role": "assistant", "content": text}]


def score(gold, completion):
    return accuracy_reward([completion], [gold])[0]


@pytest.fixture
def counters(monkeypatch):
    """Counters that start at zero."""
    for name in ("unreadable_golds", "grading_timeouts"):
        monkeypatch.setattr(functions, name, functions.CountedWarning(vars(functions)[name].message))
    return functions


# Known mistakes of graders that cut numbers out of gold answers, and of reading bare gold answers as prose
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3.14", "14"),
        ("14", "3.14"),
        ("27.0", "0"),
        ("(0,5)", "5"),
        ("(0,5)", "0"),
        ("2^{10}", "2"),
        ("6+9i", "6"),
        ("1,2", "1.2"),
        ("5{,}600", "5"),
        ("1,234", "1"),
        ("[0,1)", "[0,1]"),
        ("[0,1)", "(0,1)"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "2"),
        ("x=5", "y=5"),
        ("-3", "3"),
        (r"\frac{1}{3}", "0.333"),
        (r"\frac{3}{4}", r"\frac{4}{3}"),
        ("C", "D"),
        (r"\text{Evelyn}", r"\text{Carla}"),
    ],
)
@pytest.mark.parametrize("wrap", [r"So we get $\boxed{{{}}}$.", "{}"], ids=["boxed", "bare"])
def test_different_answers_do_not_match(gold, answer, wrap):
    assert score(gold, wrap.format(answer)) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1,234", "1234"),
        ("1234", "1,234"),
        (r"\frac12", "0.5"),
        ("0.5", r"\frac{1}{2}"),
        ("27.0", "27"),
        (27.0, "27"),
        (27, "27.0"),
        ("025", "25"),
        (".6", "0.6"),
        ("5{,}600", "5600"),
        (r"\$32{,}348", "32348"),
        ("(0,5)", r"\left(0, 5\right)"),
        ("1,2", "2, 1"),
        (r"\{1,2\}", "2,1"),
        ("2^{10}", "1024"),
        ("6+9i", "9i+6"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
        (r"10\%", "10"),
        (r"90^\circ", "90"),
        ("x=5", "5"),
        ("5", "x=5"),
        ("C", r"\text{(C)}"),
        (r"\text{Evelyn}", "Evelyn"),
        ("104.", "104"),
        ("$1$", "1"),
        ("48/2=24>>24 clips.\n#### 24", "24"),
        ("He pays 1,000 and 234 more.\n#### 1,234\n", "1234"),
        (r"First $\boxed{15}$, so the sum is $\fbox{\frac{3}{4}}$.", "0.75"),
        (r"The final answer is $\frac13$", r"\frac{1}{3}"),
    ],
)
@pytest.mark.parametrize("wrap", [r"So we get $\boxed{{{}}}$.", "{}"], ids=["boxed", "bare"])
def test_equal_answers_match(gold, answer, wrap):
    assert score(gold, wrap.format(answer)) == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("The answer is 27.", 1.0),
        ("**Answer: 27**", 1.0),
        ("The answer is **27**.", 1.0),
        ("The final answer is $27$. I hope it is correct.", 1.0),
        ("24 + 3 = 27\n#### 27", 1.0),
        ("The answer to the first part is 5.\n#### \\frac{54}{2}", 1.0),
        ("#### Step 1\nAdd.\n\n#### Conclusion\nThe final answer is 27.", 1.0),
        ("#### Step 27\nAdd 20 and 7.", 0.0),
        ("The answer is 27.\n#### 5", 0.0),
        ("27.", 1.0),
        (r"First \boxed{5}, and then \boxed{27}.", 1.0),
        (r"<think>It may be \boxed{5}.</think> It is \boxed{27}.", 1.0),
        (r"First \boxed{27}, and then \boxed{5}.", 0.0),
        ("There are 20 and 7 more, which makes 27 in all, as is easily seen.", 0.0),
        (r"It is \boxed{27", 0.0),
        (r"It is \boxed{}", 0.0),
        ("", 0.0),
    ],
)
def test_where_a_completion_has_its_answer(completion, expected):
    assert score("27", completion) == expected
    assert score("27", conversation(completion)) == expected


def test_a_mark_and_words():
    assert score("Paris", "It is in France.\n#### Paris") == 1.0
    assert read_gold("#### Step 1\nAdd.\n#### Conclusion\nThe answer is 27.").text == "27"


def test_conversation_with_content_blocks_and_several_messages():
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{27}"}]}]
    turns = [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "4"}, *conversation("27")]
    assert accuracy_reward([blocks, turns, []], ["27", "27", "27"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("gold", [None, "", "  ", float("nan")])
def test_without_a_gold_answer_there_is_no_score(gold, counters, caplog):
    with caplog.at_level(logging.WARNING):
        assert accuracy_reward(["5"] * 25, [gold] * 25) == [None] * 25
    assert counters.unreadable_golds.count == 25
    assert [record.args[0] for record in caplog.records] == [1, 10]
    assert "cannot read the gold answer" in caplog.text


def test_metrics_and_extra_columns_reach_the_trainer(counters):
    metrics, columns = {}, {}
    scored = accuracy_reward(
        [r"\boxed{5}", "5", "no idea what it could be, none at all"],
        ["5", None, "5"],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
        level=["1", "2", "3"],
    )
    assert scored[:2] == [1.0, None]
    assert scored[2] == 0.0
    assert metrics == {"accuracy/unscorable": pytest.approx(1 / 3)}
    assert columns["answer"][:2] == ["5", ""]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="zip"):
        accuracy_reward(["5", "6"], ["5"])


def test_gold_answer_of_an_unknown_kind_is_refused():
    with pytest.raises(TypeError, match="must be text, a number or a list with one of them, got dict"):
        accuracy_reward(["5"], [{"value": 5}])


ENDLESS = [r"\int_0^1 x^{x^{x^x}} dx", "(x+y+z+1)^{200}", r"\cos(" * 11 + "1" + ")" * 11]


@pytest.mark.parametrize("place", ["main thread", "another thread"])
@pytest.mark.parametrize("endless", ENDLESS)
def test_an_answer_that_takes_long_has_no_score_and_costs_the_others_none(endless, place, counters, caplog):
    found = []

    def grade():
        completions = [rf"So it is \boxed{{{endless}}}.", r"\boxed{27}", r"\boxed{28}"]
        found.extend(
            accuracy_reward(completions, ["27"] * 3, log_metric=lambda name, value: found.append((name, value)))
        )

    if place == "main thread":
        grade()
    else:
        thread = threading.Thread(target=grade)
        thread.start()
        thread.join()
    assert found == [("accuracy/unscorable", pytest.approx(1 / 3)), None, 1.0, 0.0]
    assert counters.grading_timeouts.count == 1
    assert "1 completions so far have no accuracy, since math-verify did not finish in time" in caplog.text
    assert repr(endless) in caplog.text


def test_a_batch_has_a_budget_beyond_which_only_quick_answers_are_graded(counters, monkeypatch):
    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    with limit.budget(1.0):
        limit.in_time(spin, 0.5)
        with pytest.raises(GradingTimeout):
            limit.in_time(spin, 0.9)  # uses up the rest
        limit.in_time(spin, 0.02)
        with pytest.raises(GradingTimeout):
            limit.in_time(spin, 0.4)
    limit.in_time(spin, 0.4)
    monkeypatch.setattr(limit, "BATCH_SECONDS", 0.0)
    endless = [rf"\boxed{{(x+y+z+1)^{{{300 + i}}}}}" for i in range(6)]
    assert accuracy_reward([*endless, "27", "28"], ["27"] * 8) == [None] * 6 + [1.0, 0.0]
    assert counters.grading_timeouts.count == 6


def test_votes_that_take_long_differ_from_all_others_but_their_own_text(monkeypatch, caplog):
    monkeypatch.setattr(grading, "slow_votes", grading.CountedWarning(grading.slow_votes.message))
    votes = [rf"\boxed{{{text}}}" for text in (ENDLESS[0], ENDLESS[0], "1/2", "0.5", "1/2")]
    reward = MajorityReward(bounds=(0, 1), margin=1)
    verdict = reward.settle(reward.read(votes, [False] * 5))
    assert verdict.rewards == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert grading.slow_votes.count > 0
    assert "pairs of votes so far count as different" in caplog.text and "x^{x^{x^x}}" in caplog.text


def test_a_gold_answer_that_cannot_be_read_in_time_is_not_read_again(counters, monkeypatch):
    calls = []

    def hang(*args, **kwargs):
        calls.append(args)
        while True:
            with contextlib.suppress(Exception):  # as SymPy and math-verify do
                list(range(1000))

    monkeypatch.setattr(grading, "parse", hang)
    monkeypatch.setattr(grading, "GOLD_SECONDS", 0.1)
    assert accuracy_reward(["5"] * 8, [r"\boxed{a gold answer of its own}"] * 8) == [None] * 8
    assert len(calls) == 1
    assert counters.grading_timeouts.count == 8


def test_a_limit_is_not_passed_by_whoever_catches_the_interruption():
    caught = []

    def stubborn():
        while len(caught) < 3:
            try:
                while True:
                    pass
            except BaseException as error:
                caught.append(error)
        while True:
            pass

    for in_thread in (False, True):
        caught.clear()
        failure = []

        def run(failure=failure):
            with pytest.raises(GradingTimeout) as raised:
                limit.in_time(stubborn, seconds=0.1)
            failure.append(raised)
            sum(range(10**6))  # nothing arrives later

        if in_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
        assert len(failure) == 1 and len(caught) == 3


def test_grading_leaves_alarms_and_handlers_as_they_are():
    def mine(*args):
        raise AssertionError

    before = signal.signal(signal.SIGVTALRM, mine), signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert score("27", r"\boxed{(x+y)^{-1}}") == 0.0
        assert signal.getsignal(signal.SIGVTALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGVTALRM, before[0])
    assert signal.getsignal(signal.SIGALRM) is before[1]


def test_an_answer_in_the_words_of_the_gold_answer_needs_no_computation():
    assert score("9^{9^{9}}", r"\boxed{9^{9^{9}}}") == 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27.0, "27"),
        (-0.5, "-0.5"),
        (1e-7, "0.0000001"),
        (1e22, "10000000000000000000000"),
        (34, "34"),
        (["34"], "34"),
        ([34.0], "34"),
        (" 315", "315"),
        ([None], None),
        (float("inf"), None),
    ],
)
def test_gold_text(value, text):
    assert gold_text(value) == text


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{12} or \boxed{18}", "18"),
        (r"$\boxed{\frac{1}{2}}$ done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"$\boxed 5$ hours", "5"),
        (r"\boxed  {7}", "7"),
        (r"\fbox{C}", "C"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{3", None),
        (r"\boxed{}", None),
        ("3", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


def test_marked_answer():
    assert marked_answer("a #### b\n#### 1,234 \nmore") == "1,234"
    assert marked_answer("1,234") is None
    assert marked_answer("####") is None


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


@given(st.integers(-999, 999), st.integers(1, 999))
@settings(max_examples=40, deadline=None)
def test_fractions_equal_their_quotient(numerator, denominator):
    gold = rf"\frac{{{numerator}}}{{{denominator}}}"
    assert score(gold, rf"\boxed{{{numerator}/{denominator}}}") == 1.0
    assert score(gold, rf"\boxed{{\frac{{{numerator + denominator}}}{{{denominator}}}}}") == 0.0


def test_an_answer_without_a_value_equals_only_the_same_text():
    gold = r"\triangle ABC \sim \triangle DEF"
    assert read_gold(gold).expressions == ()
    assert score(gold, rf"\boxed{{{gold}}}") == 1.0
    assert score(gold, r"\boxed{\triangle ABC}") == 0.0


def test_an_unreadable_gold_answer_is_not_a_wrong_answer(counters):
    assert read_gold("}") is None
    assert score("}", r"\boxed{5}") is None
    assert counters.unreadable_golds.count == 1


def test_exact_match():
    completions = ["24", " 24\n", "24.0", conversation("24"), "24"]
    assert exact_match_reward(completions, ["24", "24", "24", 24, None]) == [1.0, 1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("completion", "think", "boxed", "both"),
    [
        (r"<think>a</think>\boxed{3}", 1.0, 1.0, 1.0),
        (r"<think>\boxed{3}</think>3", 1.0, 1.0, 0.0),
        (r"\boxed{3}", 0.0, 1.0, 0.0),
        (r"<think>a</think>\boxed{3", 1.0, 0.0, 0.0),
        ("<think>a", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_formats(completion, think, boxed, both):
    for form in (completion, conversation(completion)):
        assert rewards.think_format_reward([form], solution=["3"]) == [think]
        assert rewards.boxed_format_reward([form], solution=["3"]) == [boxed]
        assert format_reward([form], solution=["3"]) == [both]


def test_rewards_are_found_by_name_and_by_import_path():
    assert get_reward("accuracy") is accuracy_reward
    assert get_reward("lze_trl.rewards.exact_match_reward") is exact_match_reward
    assert {reward.__name__ for reward in rewards.REWARDS.values()} == {f"{name}_reward" for name in rewards.REWARDS}


@pytest.mark.parametrize("cache", [None, 2])
def test_soft_overlong_is_the_penalty_of_dapo_from_trl(cache):
    # L_max = 10, L_cache = 2, a fifth: 0 up to 8 tokens, then (8 − |y|) / 2 down to −1 at the limit
    reward = get_reward("soft_overlong", max_completion_length=10, soft_overlong_cache=cache)
    lengths = [0, 7, 8, 9, 10, 11]
    expected = [0.0, 0.0, 0.0, -0.5, -1.0, -1.0]
    assert reward(completion_ids=[[5] * length for length in lengths], completions=[""] * 6) == expected
    assert type(reward) is type(get_soft_overlong_punishment(10, 2))


def test_soft_overlong_has_room_for_one_token_at_least():
    assert get_reward("soft_overlong", max_completion_length=4)(completion_ids=[[1] * 3, [1] * 4]) == [0.0, -1.0]


def test_soft_overlong_in_a_training(tmp_path):
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=[tiny.even_length_reward, get_reward("soft_overlong", 5)],
        args=tiny.config(tmp_path, max_steps=1, selector="all", pruning="none"),
        train_dataset=tiny.prompts(7),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    logs = next(logs for logs in trainer.state.log_history if "loss" in logs)
    # An untrained model hardly ever ends by itself: L_cache is 1, so that a completion of 5 tokens has −1, others 0
    share = logs["completions/clipped_ratio"]
    assert share > 0.5
    assert logs["rewards/soft_overlong_punishment_reward/mean"] == pytest.approx(-share)
    assert trainer.ledger.groups_rolled_out == 3


@pytest.mark.parametrize(
    ("limit", "cache", "message"),
    [
        (None, None, r"needs a limit, and `max_completion_length` is None"),
        (10, 0, r"`soft_overlong_cache` must be between 1 and `max_completion_length` = 10, got 0"),
        (10, 11, r"`soft_overlong_cache` must be between 1 and `max_completion_length` = 10, got 11"),
    ],
)
def test_soft_overlong_with_settings_that_make_no_sense(limit, cache, message):
    with pytest.raises(ValueError, match=message):
        get_reward("soft_overlong", limit, cache)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("soft_overlongg", r"Did you mean 'soft_overlong'\?"),
        ("acuracy", r"Unknown reward function 'acuracy'. Did you mean 'accuracy'\?"),
        ("zzz", r"Known are \['accuracy', "),
        ("lze_trl.rewards.exact_mach_reward", r"Did you mean 'exact_match_reward'\?"),
        ("no_such_package.my_reward", r"cannot be imported: No module named 'no_such_package'.*PYTHONPATH"),
        ("lze_trl.rewards.REWARDS", "must be a function, got dict"),
    ],
)
def test_unknown_rewards(name, message):
    with pytest.raises(ValueError, match=message):
        get_reward(name)
