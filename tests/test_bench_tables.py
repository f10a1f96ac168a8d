"""Tables and pictures say what the results say."""

from bench_samples import result
from benchmarks.sections import sort_results
from benchmarks.tables import averaged_table, price_table, short_table, target_table


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
