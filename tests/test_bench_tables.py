"""Tables and pictures say what the results say."""

import math

import pytest
from PIL import Image

from bench_samples import result
from benchmarks.comparison import Spread
from benchmarks.plots import colour, write_picture
from benchmarks.sections import sort_results
from benchmarks.tables import (
    averaged_table,
    price_table,
    ratio,
    section_text,
    short_table,
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


def test_the_longest_of_equal_runs_counts():
    short, long = result([0.1, 0.2], "lze"), result([0.1, 0.2, 0.3], "lze", stretch=1.5)
    for order in ([short, long], [long, short]):
        (section,), left_out = sort_results([result([0.1, 0.2, 0.3]), *order])
        assert [len(curve.accuracy) for curve in section.curves() if curve.strategy == "lze"] == [3]
        assert left_out == {}


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
