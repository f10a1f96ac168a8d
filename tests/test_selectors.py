"""Selectors: the K rule, the ramp, the noise, and who can never be chosen."""

import itertools
import math
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.seeding import keyed_rng
from lze_trl.select.selectors import EnergySelector, choose, make_selector, quota
from samples import NAN, outcome_groups, scored


NAMES = ["energy", "variance", "random", "all", "zero_variance"]
LIVE_ONLY = ["energy", "variance", "zero_variance"]


class FixedNoise:
    """A generator whose Gumbel numbers are given."""

    def __init__(self, *noise: float):
        self.noise = np.array(noise)

    def gumbel(self, size: int) -> np.ndarray:
        return self.noise[:size]


def test_quota_of_every_ratio_in_percent():
    for percent, num_groups in itertools.product(range(1, 101), range(1, 257)):
        ratio = Decimal(percent) / 100
        k = max(1, int((ratio * num_groups).quantize(Decimal(1), ROUND_HALF_UP)))  # 0.29 of 50 is 14.5, so 15
        assert quota(float(ratio), num_groups) == k, (ratio, num_groups)


def test_energy_ranks_by_energy_and_noise():
    # P = 4, G = 4: E = 9/16, 1/2, 0, and D = 1/4, u = 3/4: 3/16. The scale is 0.05 · (9/16 − 3/16) = 0.01875 over the
    # live groups: group 1 overtakes group 0 with more than (9/16 − 1/2) / 0.01875 = 3.33 of noise
    groups = scored([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]])
    selector = EnergySelector(gumbel_scale=0.05)
    assert selector.select(groups, 1, FixedNoise(0.0, 3.3, 99.0, 0.0)).tolist() == [0]
    assert selector.select(groups, 1, FixedNoise(0.0, 3.4, 99.0, 0.0)).tolist() == [1]
    assert selector.select(groups, 2, FixedNoise(0.0, 3.3, 99.0, 0.0)).tolist() == [0, 1]
    assert selector.select(groups, 4, FixedNoise(0.0, 0.0, 99.0, 0.0)).tolist() == [0, 1, 3]


def test_the_scale_of_the_noise_has_a_floor():
    # D = 0.505 and 0.5, u = 1: E = 0.505 and 0.5, a range of 0.005 that counts as 0.01. Scale 0.5 · 0.01 = 0.005:
    # group 1 overtakes with more than 0.005 / 0.005 = 1 of noise (without the floor: 2)
    memory = {"first_pass_rates": [0.495, 0.5], "ema": [0.5, 0.5]}
    groups = scored([[1, 0], [0, 1]], **memory)
    selector = EnergySelector(gumbel_scale=0.5)
    assert selector.select(groups, 1, FixedNoise(0.0, 0.99)).tolist() == [0]
    assert selector.select(groups, 1, FixedNoise(0.0, 1.01)).tolist() == [1]


@pytest.mark.parametrize("pair", [([1, 0, 0], [1, 1, 0]), ([1, 0, 0], [0, 0, 1])], ids=["1/3 and 2/3", "1/3 and 1/3"])
def test_a_tie_is_a_tie_whatever_its_rounding(pair):
    groups = scored(list(pair))
    selector = make_selector("variance")
    assert {int(selector.select(groups, 1, np.random.default_rng(seed))[0]) for seed in range(30)} == {0, 1}


def test_noise_of_a_group_does_not_depend_on_who_is_alive():
    # Group 3 dies; the others are ranked with the noise that they had before
    alive, dead = [[1, 0]] * 4, [*[[1, 0]] * 3, [1, 1]]
    for seed in range(20):
        rank = [EnergySelector().select(scored(alive), k, keyed_rng(seed, 0, "selection")) for k in range(1, 5)]
        order = [next(iter(set(b) - set(a))) for a, b in zip([[], *rank], rank, strict=False)]
        without = [group for group in order if group != 3]
        assert EnergySelector().select(scored(dead), 1, keyed_rng(seed, 0, "selection")).tolist() == without[:1]


@pytest.mark.parametrize("name", NAMES)
@given(outcomes=outcome_groups(), k=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_what_every_selector_keeps(name, outcomes, k, seed):
    groups, selector = scored(outcomes), make_selector(name)
    chosen = choose(selector, groups, k, keyed_rng(seed, 3, "selection"))
    live = np.array([len({v for v in row if not math.isnan(v)}) == 2 for row in outcomes])
    if name in LIVE_ONLY:
        assert not (chosen & ~live).any()
    count = {"all": len(outcomes), "zero_variance": live.sum(), "random": min(k, len(outcomes))}
    assert chosen.sum() == count.get(name, min(k, live.sum()))
    # Every process, and every resumed run, gets the same answer, whatever was drawn before
    keyed_rng(seed, 2, "selection").random(5)
    np.testing.assert_array_equal(chosen, choose(selector, groups, k, keyed_rng(seed, 3, "selection")))


@given(outcomes=outcome_groups(values=(0.0, 0.3, 1.0, NAN)), k=st.integers(1, 9))
def test_without_noise_nobody_left_out_has_more_energy(outcomes, k):
    groups = scored(outcomes)
    chosen = choose(EnergySelector(0.0), groups, k, keyed_rng(0, 0, "selection"))
    if chosen.any() and not chosen.all():
        assert groups.energies[~chosen].max() <= groups.energies[chosen].min()


class Returns:
    """A user's own selector, with a fixed answer."""

    def __init__(self, answer):
        self.select = lambda groups, k, rng: answer


@pytest.mark.parametrize("answer", [[2, 0], np.array([0, 2], dtype=np.int32), []], ids=["list", "array", "none"])
def test_a_users_answer(answer):
    chosen = choose(Returns(answer), scored([[1, 0]] * 3), 2, keyed_rng(0, 0, "selection"))
    assert np.flatnonzero(chosen).tolist() == sorted(answer)


@pytest.mark.parametrize(
    "answer", [np.array([True, False, True]), [0.0, 1.0], 1, [[0, 1]], None, [0, 0], [0, 3], [-1]], ids=str
)
def test_a_users_wrong_answer(answer):
    message = r"`Returns.select` must return a one-dimensional array of distinct group indices in \[0, 3\), got "
    with pytest.raises(ValueError, match=message):
        choose(Returns(answer), scored([[1, 0]] * 3), 2, keyed_rng(0, 0, "selection"))
