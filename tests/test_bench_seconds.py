"""The timed server: its timing model on paper, and its answers."""

import httpx2
import pytest

from benchmarks.seconds import least_overlapped
from benchmarks.timed_server import Timing, dead_share, on_paper, serving


def test_continuous_batching_on_paper():
    timing = Timing(places=2, floor=1.0, per_sequence=0.75)  # one sequence takes 1 s a step, two take 1.5 s
    assert on_paper(timing, [[3]]) == 3.0
    assert on_paper(timing, [[3, 1]]) == 1 * 1.5 + 2 * 1.0
    # The third waits for a place, the second leaves it after one step, and it ends with the first or after it
    assert on_paper(timing, [[3, 1], [2]]) == 3 * 1.5
    assert on_paper(timing, [[3, 1], [4]]) == 3 * 1.5 + 2 * 1.0
    # The same three, the last of which comes when the second has ended; and when the first has
    assert on_paper(timing, [[3], [1]], {1: [2]}) == 3 * 1.5
    assert on_paper(timing, [[3], [1]], {0: [2]}) == 1 * 1.5 + 4 * 1.0


def test_half_of_the_prompts_pass_and_most_groups_are_dead():
    timing = Timing()
    drawn = [timing.completion([prompt], seed, 0) for prompt in range(100) for seed in range(6)]
    assert 0.35 < sum(passed for _, passed, _ in drawn) / len(drawn) < 0.65
    assert all(length >= 1 and logprob <= 0.0 for length, _, logprob in drawn)
    assert dead_share(timing, 8) == pytest.approx(0.79, abs=0.01)
    assert dead_share(timing, 4) > dead_share(timing, 8)


def test_answers_follow_from_prompt_and_seed_and_not_from_their_order():
    def ask(prompt):
        body = {"prompt": [prompt], "n": 3, "seed": 7 * prompt}
        return httpx2.post(f"{url}/v1/completions", json=body).json()["choices"]

    with serving(Timing(scale=1e-6)) as (url, engine):
        assert [ask(prompt) for prompt in range(5)] == [ask(prompt) for prompt in reversed(range(5))][::-1]
        assert engine.tokens == 2 * sum(sum(engine.timing.lengths([p], 7 * p, 3)) for p in range(5))


def test_batches_that_differ_leave_less_to_overlap():
    equal, different = (least_overlapped(Timing(sigma=sigma), 16, 4, 50) for sigma in (0.0, 1.0))
    assert equal == pytest.approx(0.5)
    assert 0.5 < different < 1.0
    assert least_overlapped(Timing(sigma=0.0), 16, 4, 0) == 1.0
