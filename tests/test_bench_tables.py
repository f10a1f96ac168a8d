"""Tables and pictures say what the results say."""

import math

import pytest
from PIL import Image

from bench_samples import result, settings
from benchmarks.comparison import Spread
from benchmarks.plots import colour, write_picture
from benchmarks.sections import NO_BASELINE, REDEFINED, sort_results
from benchmarks.strategies import STRATEGIES
from benchmarks.tables import (
    accuracy,
    averaged_table,
    gain,
    mean_ratio,
    price_table,
    ratio,
    section_text,
    short_table,
    table,
    target_table,
)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.4,), "0.40"),
        ((0.5, 0.3, 0.4), "0.40 (0.30–0.50)"),
        ((0.5, math.inf, 0.4), "0.50 (0.40–0.50; 1 of 3 not reached)"),
        ((math.inf, 0.4, math.inf), "not reached (2 of 3; else 0.40)"),
        ((math.inf, math.inf), "not reached"),
    ],
)
def test_ratios(values, text):
    assert ratio(Spread(values)) == text


def test_ratio_of_nothing():
    assert ratio(None) == "–"


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (None, None, "–"),
        (0.4, None, "0.40"),
        (0.4, (0.3, 0.512), "0.40 (0.30–0.51)"),
        (0.4, (0.3, math.inf), "0.40 (0.30–∞)"),
        (math.inf, (0.3, math.inf), "not reached (0.30–∞)"),
        (math.inf, (math.inf, math.inf), "not reached"),
        (math.inf, None, "not reached"),
    ],
)
def test_ratios_of_averaged_curves(value, interval, text):
    assert mean_ratio(value, interval) == text


def test_accuracies_and_gains():
    assert accuracy(Spread((0.5,))) == "0.500"
    assert accuracy(Spread((0.4, 0.6))) == "0.500 ± 0.141"
    assert gain(Spread((0.013,))) == "+1.3"
    assert gain(Spread((0.013, -0.02, 0.005))) == "+0.5 (-2.0 to +1.3)"


def test_table_is_markdown():
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| :-- | --: |\n| x | 1 |"


def compared():
    """Smoothed, the baselines end at 0.3 after 3 evaluations; LZE is there after 2, at half the FLOPs each."""
    return [
        *(result([0.1, 0.2, 0.3, 0.4], seed=seed) for seed in (0, 1)),
        *(result([0.1, 0.3, 0.5, 0.5], "lze", seed, flops=50.0) for seed in (0, 1)),
    ]


def test_tables_of_costs():
    (section,), _ = sort_results(compared())
    one = "1.00 (1.00–1.00)"
    lines = price_table(section.curves()).splitlines()
    assert lines[0] == (
        "| strategy | seeds | steps | final accuracy | price at 70 % | rollouts × | updates × | price at 25 % "
        "| price at 50 % | price at 90 % | completions per live group |"
    )
    assert lines[2:] == [
        f"| GRPO (TRL) | 2 | 30 | 0.300 ± 0.000 | {' | '.join([one] * 6)} | – |",
        f"| GRPO (TRL), target of another seed | 2 pairs |  |  | {' | '.join([one] * 6)} |  |",
        f"| LZE, 40 % | 2 | 30 | 0.433 ± 0.000 | {' | '.join(['0.33 (0.33–0.33)'] * 6)} | – |",
    ]
    lines = target_table(section.curves()).splitlines()
    assert lines[2:] == [
        f"| GRPO (TRL) | 2 | {' | '.join([one] * 4)} | 25 / 0 / 75 | 20 / 0 / 60 |",
        f"| GRPO (TRL), target of another seed | 2 pairs | {' | '.join([one] * 4)} |  |  |",
        "| LZE, 40 % | 2 | 0.33 (0.33–0.33) | 0.67 (0.67–0.67) | 0.67 (0.67–0.67) | 0.33 (0.33–0.33) "
        "| 25 / 0 / 75 | 20 / 0 / 60 |",
    ]
    short = short_table(section.curves()).splitlines()
    assert short[3] == "| LZE, 40 % | 2 | 0.433 ± 0.000 | 0.33 (0.33–0.33) | 0.33 (0.33–0.33) | 0.33 (0.33–0.33) |"
    assert averaged_table(section.curves()).splitlines()[2:] == [
        "| GRPO (TRL) | 2 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |",
        "| LZE, 40 % | 2 | 0.33 | 0.33 | 0.33 | 0.33 | 0.67 | 0.67 |",
    ]


def test_a_single_baseline_has_no_other_target():
    (section,), _ = sort_results([compared()[0], compared()[2]])
    assert "another seed" not in target_table(section.curves())


def test_missing_and_unequal_runs_are_told():
    """LZE lacks a seed, and goes on for longer than the baseline."""
    further = result([0.1, 0.3, 0.5, 0.5, 0.5, 0.5], "lze", 2, flops=50.0)
    (section,), _ = sort_results([*compared()[:3], result([0.1, 0.2, 0.3, 0.4], seed=2), further])
    curves = section.curves()
    assert "| GRPO (TRL) | 3 | 30 | 0.300 ± 0.000 |" in price_table(curves)
    assert "| LZE, 40 % | 2 of 3 | 40 | 0.467 ± 0.047 |" in price_table(curves)  # the median of 30 and 50 steps
    assert "| GRPO (TRL) | 3 | 0.300 ± 0.000 |" in short_table(curves)
    assert "| LZE, 40 % | 2 of 3 | 0.467 ± 0.047 |" in short_table(curves)
    assert "| LZE, 40 % | 2 of 3 | 0.33 | 0.33 |" in averaged_table(curves)
    assert "| GRPO (TRL) | 3 | 1.00 (1.00–1.00) | 1.00 |" in averaged_table(curves)


def test_section_text_tells_how_it_was_measured():
    (section,), _ = sort_results(compared())
    text = section_text(section, ["a.png"])
    assert "![Two-digit addition](a.png)" in text
    assert "32 prompts × 8 completions a step, learning rate 2.0e-04; the baseline makes 40 steps" in text
    assert "Abacus 5, 3 cores, 1 thread(s) a run. 2026-01-02. python 3.11.9, trl 1.16.0. Source 5a5a." in text
    assert "over 4 evaluations, sampled accuracy differs from it by +1.00 ± 1.00 points" in text
    assert text.count("\n| GRPO (TRL) |") == 7
    assert "tuned" not in text
    for one, at_once in zip(section.main, (2, 2, 2, 1), strict=True):
        one["machine"]["at_once"] = at_once
    machines = "Abacus 5, 3 cores, 1 thread(s) a run, 1 run at a time; Abacus 5, 3 cores, 1 thread(s) a run, 2 runs at a time."
    assert machines in section_text(section, [])
    section.main[1]["source"] = "b6b6"
    assert "**The runs were made by 2 versions of this package: 5a5a, b6b6.**" in section_text(section, [])


def test_greedy_accuracy_is_told():
    (section,), _ = sort_results(
        [result([0.1, 0.2, 0.3, 0.4], task="word_problems", learning_rate=1e-5) | {"checks": []}]
    )
    text = section_text(section, [])
    assert (
        "Accuracy is that of greedy completions, read from them by the reward of the training, on 192 held-out" in text
    )
    assert "Checked by sampling" not in text


def test_tuned_strategies_are_compared_at_their_own_rates():
    tuning = [
        result([0.1, final, final, final], strategy, seed, learning_rate=rate, held_out="validation")
        for seed in (100, 101)
        for strategy, rate, final in (
            ("grpo", 1e-4, 0.2),
            ("grpo", 2e-4, 0.3),
            ("grpo", 4e-4, 0.2),
            ("lze", 2e-4, 0.2),
            ("lze", 4e-4, 0.3),
        )
    ]
    tuned = [result([0.1, 0.4, 0.7], "lze", seed, flops=50.0, learning_rate=4e-4) for seed in (0, 1)]
    tuned[0]["source"] = "b6b6"
    (section,), _ = sort_results([*compared(), *tuning, *tuned])
    assert section.rates == {"grpo": 2e-4, "lze": 4e-4}
    before, _, after = section_text(section, []).partition("### Learning rate tuned for each strategy")
    assert "2 versions of this package: 5a5a, b6b6" in before
    assert "on the seeds [100, 101]" in after
    lines = after.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[-2].startswith("| GRPO (TRL) | 2.0e-04 | 2 | 30 | 0.300 ± 0.000 | 1.00")
    # Smoothed 0.1, 0.25, 0.4: at 0.3 after 1 1/3 evaluations of 50 FLOPs, against 300
    assert rows[-1].startswith(
        "| LZE, 40 % | 4.0e-04 (edge of the grid) | 2 | 20 | 0.400 ± 0.000 | 0.22 (0.22–0.22) |"
    )
    (section,), _ = sort_results([*compared(), *tuning, tuned[0]])
    assert "(edge of the grid) | 1 of 2 | 20 | 0.400 |" in section_text(section, [])


def test_results_are_sorted_by_what_must_be_equal():
    other = [result([0.1, 0.2], steps=20), result([0.1, 0.2], "lze", steps=20)]
    earlier = result([0.1, 0.2], "lze", overrides={"selector": "energy"})
    alone = result([0.1, 0.2], "lze", eval_every=5)
    (first, second), left_out = sort_results([*other, *compared(), earlier, alone])
    assert [len(first.main), len(second.main)] == [4, 2]
    assert first.protocol == settings().protocol
    assert left_out == {REDEFINED: [earlier], NO_BASELINE: [alone]}


def test_the_longest_of_equal_runs_counts():
    short, long = result([0.1, 0.2], "lze"), result([0.1, 0.2, 0.3], "lze", stretch=1.5)
    for order in ([short, long], [long, short]):
        (section,), left_out = sort_results([result([0.1, 0.2, 0.3]), *order])
        assert [len(curve.accuracy) for curve in section.curves() if curve.strategy == "lze"] == [3]
        assert left_out == {}


def test_every_strategy_has_a_colour_of_its_own():
    assert len({colour(strategy) for strategy in STRATEGIES}) == len(STRATEGIES)


def test_picture_has_every_strategy(tmp_path):
    (section,), _ = sort_results(compared())
    write_picture(tmp_path / "both.png", "Title", section.curves())
    write_picture(tmp_path / "one.png", "Title", [c for c in section.curves() if c.strategy == "grpo"])
    lze = tuple(bytes.fromhex(colour("lze").removeprefix("#")))
    for name, drawn in (("both", True), ("one", False)):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width > 800
            colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24)}
            assert (lze in colours) is drawn
