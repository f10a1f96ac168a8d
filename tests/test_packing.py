"""Packing: where a row is computed never changes what it weighs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from lze_trl.pack.layout import (
    REPLICATED_COST,
    SHARDED_COST,
    Geometry,
    Layout,
    MicroBatch,
    pack,
    padding_efficiency,
    trl_layout,
    unpacked,
)
from lze_trl.pack.weights import (
    BATCH_TOKEN_LOSSES,
    LOSS_TYPES,
    MICRO_BATCH_TOKEN_LOSSES,
    ROW_MEAN_LOSSES,
    Weights,
    entropy_weights,
    loss_scale,
    weights_of_chosen,
    weights_of_full,
    weights_of_part,
)
from lze_trl.seeding import keyed_rng


CHUNKS = Geometry(num_processes=1, steps_per_generation=4, chunk_steps=2, micro_batch_rows=3)


def rows_of(layout: Layout) -> list[list[list[int]] | None]:
    """Rows of each micro-step by process, fillers as −1."""
    return [None if batch is None else np.where(batch.filler, -1, batch.rows).tolist() for batch in layout.micro_steps]


@pytest.mark.parametrize(
    ("shape", "prompts", "completions", "owner", "rows"),
    [
        # W = 2, one row a micro-batch: pairs of similar length; the odd one out has a filler beside it
        ((2, 3, 3, 1), [1] * 5, [5, 1, 9, 4, 8], None, [[[2], [4]], [[0], [3]], [[1], [-1]]]),
        # Of rows of one length, the longer completion comes first
        ((1, 1, 1, 4), [5, 7, 3, 5], [4, 2, 6, 5], None, [[[3, 2, 0, 1]]]),
        # Two rows a micro-batch, the longest with 10 + 50 tokens: room for 120, and for 100 of completions. Five rows of
        # 10 + 10 take exactly as many completion tokens as 10 + 50 twice would, but more rows
        ((1, 4, 4, 2), [10] * 7, [10, 50, 10, 50, 10, 10, 10], None, [None, None, [[1, 3]], [[0, 2, 4, 5, 6]]]),
        # Up to 40 tokens: 2 × (10 + 9) = 38 fit, 3 × 19 do not; then 3 × (10 + 3) = 39
        ((1, 5, 5, 1, 40), [10] * 5, [9, 8, 3, 2, 1], None, [None, None, None, [[0, 1]], [[2, 3, 4]]]),
        # A budget too small for the micro-steps shares the rows out
        ((1, 2, 2, 1, 1), [10] * 5, [5, 4, 3, 2, 1], None, [[[0, 1]], [[2, 3, 4]]]),
        # W = 2, two micro-batches of two rows each. Process 0 holds the longest three: one of them has to move
        ((2, 1, 1, 2), [1] * 4, [9, 8, 7, 6], [0, 0, 0, 1], [[[0, 1], [2, 3]]]),
        ((2, 1, 1, 2), [1] * 4, [9, 8, 7, 6], [1, 1, 1, 0], [[[2, 3], [0, 1]]]),
        # Rows of one length, a block on each process, as after generation: nothing has to move
        ((2, 2, 2, 2), [1] * 8, [1] * 8, [0] * 4 + [1] * 4, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        # W = 3 and five rows, two each: process 1 holds one row, and gets a filler
        ((3, 1, 1, 2), [1] * 5, [9, 8, 7, 6, 5], [0, 2, 2, 1, 0], [[[0, 4], [3, -1], [1, 2]]]),
    ],
)
def test_pack_by_length_and_owner(shape, prompts, completions, owner, rows):
    one, owner = np.zeros(len(prompts), dtype=int), owner and np.array(owner)
    assert rows_of(pack(np.array(prompts), np.array(completions), one, Geometry(*shape), owner)) == rows


@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1], [2, 0.5, 1, 1, 3]])
def test_weights_of_chosen(weights):
    # n = 5 rows of 1, 2, 4, 8, 16 tokens in 2 chunks: 3 and 2 rows, drawn at random. A row of weight w counts as w rows
    tokens, weights = np.array([1, 2, 4, 8, 16]), np.array(weights)

    def reference(seed):
        return weights_of_chosen(tokens, weights, CHUNKS, keyed_rng(0, seed, "steps"))

    found = reference(0)
    assert sorted(np.bincount(found.chunk).tolist()) == [2, 3]
    for chunk in (0, 1):
        mine = found.chunk == chunk
        assert (found.norm_rows[mine] == weights[mine].sum()).all()
        assert (found.norm_tokens[mine] == (weights * tokens)[mine].sum()).all()
    assert set(found.num_items) == {(weights * tokens).sum()}
    assert len({tuple(reference(seed).chunk) for seed in range(20)}) > 1


def test_weights_of_part():
    # Three chosen of 12 rows of 2.5 tokens each, in 2 chunks of 6 rows
    reference = weights_of_part(np.array([1.0, 2.0, 1.0]), 12, 2.5, CHUNKS, keyed_rng(0, 0, "steps"))
    assert sorted(np.bincount(reference.chunk).tolist()) == [1, 2]
    assert reference.norm_rows.tolist() == [6.0] * 3
    assert reference.norm_tokens.tolist() == [15.0] * 3
    assert set(reference.num_items) == {30.0}
    assert weights_of_part(np.ones(2), 12, 0.0, CHUNKS, keyed_rng(0, 0, "steps")).norm_tokens.tolist() == [1.0] * 2
    assert reference.weight.tolist() == [1.0, 2.0, 1.0]


def test_only_fillers_weigh_nothing_and_unknown_losses_are_refused():
    geometry = Geometry(2, steps_per_generation=1, chunk_steps=1, micro_batch_rows=2)
    batch = MicroBatch(np.array([[0], [0]]), np.array([[False], [True]]))
    ones = dict.fromkeys(("norm_rows", "norm_tokens", "num_items", "weight", "loss_tokens"), np.ones(1))
    reference = Weights(chunk=np.zeros(1, dtype=int), **ones)
    for loss_type in LOSS_TYPES:
        assert loss_scale(loss_type, batch, 1, reference, geometry) == (0.0, None)
    with pytest.raises(ValueError, match=r"`loss_type` must be one of \['grpo', .*got 'grpo2'"):
        tiny.config("unused", loss_type="grpo2")


def test_padding_efficiency():
    # Process 0: rows 0 and 1 with 3 + 5 and 4 + 1 tokens are computed as 2 × (4 + 5). Process 1: row 2, and a filler
    batch = MicroBatch(np.array([[0, 1], [2, 2]]), np.array([[False, False], [False, True]]))
    layout = Layout([None, batch])
    prompts, completions = np.array([3, 4, 1]), np.array([5, 1, 2])
    assert padding_efficiency(layout, prompts, completions, 0) == (13, 18)
    assert padding_efficiency(layout, prompts, completions, 1) == (3, 6)


@st.composite
def geometries(draw):
    """W, S, g and the rows of a micro-batch."""
    chunk_steps = draw(st.integers(1, 4))
    return Geometry(
        num_processes=draw(st.integers(1, 3)),
        steps_per_generation=chunk_steps * draw(st.integers(1, 3)),
        chunk_steps=chunk_steps,
        micro_batch_rows=draw(st.integers(1, 4)),
        micro_step_cost=draw(st.sampled_from([0, 10, REPLICATED_COST])),
    )


@st.composite
def batches(draw):
    """A geometry, and the chosen rows of a batch of that geometry: lengths of prompts and completions, chunks."""
    geometry = draw(geometries())
    full = geometry.num_processes * geometry.steps_per_generation * geometry.micro_batch_rows
    count, rng = draw(st.integers(0, full)), np.random.default_rng(draw(st.integers(0, 2**16)))
    prompts, completions = rng.integers(1, 12, size=count), rng.integers(1, 20, size=count)
    reference = weights_of_chosen(completions, rng.choice([0.5, 1.0, 3.0], size=count), geometry, rng)
    return geometry, prompts, completions, reference.with_columns(loss_tokens=completions)


LAYOUTS = {
    "packed": lambda geometry, *rows: pack(*rows, geometry),
    "packed-in-place": lambda geometry, *rows: pack(*rows, geometry, (7 * rows[0] + rows[1]) % geometry.num_processes),
    "unpacked": lambda geometry, prompts, completions, chunk: unpacked(chunk, geometry),
}


@pytest.mark.parametrize("name", LAYOUTS)
@given(batches())
def test_every_layout(name, batch):
    geometry, prompts, completions, reference = batch
    layout = LAYOUTS[name](geometry, prompts, completions, reference.chunk)
    assert len(layout.micro_steps) == geometry.steps_per_generation
    real = []
    for start in range(0, geometry.steps_per_generation, geometry.chunk_steps):
        window = layout.micro_steps[start : start + geometry.chunk_steps]
        empty = [micro_batch is None for micro_batch in window]
        assert empty == sorted(empty, reverse=True)  # empty ones first
        if name == "packed":  # long rows first
            lengths = [(prompts + completions)[step.rows] for step in window if step is not None]
            assert all(longer.min() >= shorter.max() for longer, shorter in itertools.pairwise(lengths))
        rows = int((reference.chunk == start // geometry.chunk_steps).sum())
        fewest = -(-rows // (geometry.num_processes * geometry.micro_batch_rows))
        assert empty.count(False) <= 1.1 * fewest or name == "unpacked"
        for micro_batch in filter(None, window):
            # The same number of rows on every process, and only rows of this chunk
            assert micro_batch.rows.shape == micro_batch.filler.shape
            assert micro_batch.rows.shape[0] == geometry.num_processes
            assert (reference.chunk[micro_batch.rows] == start // geometry.chunk_steps).all()
            assert (~micro_batch.filler).any()
            assert micro_batch.filler.sum() < geometry.num_processes
            for rows in micro_batch.rows:
                # TRL pads every micro-batch to the longest prompt and the longest completion of all
                widths, most = (prompts[rows].max(), completions[rows].max()), (prompts.max(), completions.max())
                assert len(rows) * sum(widths) <= geometry.micro_batch_rows * sum(most)
                assert len(rows) * widths[1] <= geometry.micro_batch_rows * most[1]
                assert len(rows) <= geometry.micro_batch_rows or name != "unpacked"
            real += micro_batch.rows[~micro_batch.filler].tolist()
    assert sorted(real) == list(range(len(prompts)))  # every chosen row exactly once


@given(batches(), st.integers(0, 2**16))
def test_no_more_rows_move_than_have_to(batch, seed):
    geometry, prompts, completions, reference = batch
    owner = np.random.default_rng(seed).integers(0, geometry.num_processes, size=len(prompts))
    layout = pack(prompts, completions, reference.chunk, geometry, owner)
    cards = pack(prompts, completions, reference.chunk, geometry)
    for micro_batch, dealt in zip(layout.micro_steps, cards.micro_steps, strict=True):
        if micro_batch is None:
            assert dealt is None
            continue
        real = ~micro_batch.filler
        assert sorted(micro_batch.rows[real].tolist()) == sorted(dealt.rows[~dealt.filler].tolist())
        held = np.bincount(owner[micro_batch.rows[real]], minlength=geometry.num_processes)
        stay = sum(
            (owner[rows[kept]] == rank).sum()
            for rank, (rows, kept) in enumerate(zip(micro_batch.rows, real, strict=True))
        )
        # The fewest that can move are those that their owner has no place for
        assert stay == np.minimum(held, real.sum(axis=1)).sum()
        assert stay >= np.sort(np.minimum(held, real.shape[1]))[::-1].sum() - micro_batch.filler.sum()


@pytest.mark.parametrize("cost", [REPLICATED_COST, SHARDED_COST])
def test_a_batch_of_uneven_lengths_has_little_padding(cost):
    rng = np.random.default_rng(0)  # 8 processes × 4 rows × 64 micro-steps, four optimizer steps, ρ = 0.4
    count = round(0.4 * 8 * 4 * 256)
    completions = np.clip(np.exp(rng.normal(np.log(512), 0.8, count)), 1, 4_096).astype(int)
    prompts = rng.integers(16, 65, size=count)
    geometry = Geometry(8, 256, 64, micro_batch_rows=4, micro_step_cost=cost)
    layout = pack(prompts, completions, weights_of_chosen(completions, np.ones(count), geometry, rng).chunk, geometry)
    real, computed = np.sum([padding_efficiency(layout, prompts, completions, rank) for rank in range(8)], axis=0)
    assert real / computed > (
        0.85 if cost == REPLICATED_COST else 0.7
    )  # TRL, which pads all rows to the longest: 0.17


@given(batches())
def test_a_further_micro_step_saves_more_padding_than_it_costs(batch):
    geometry, prompts, completions, reference = batch
    free = replace(geometry, further_micro_steps=np.inf)
    few = replace(free, micro_step_cost=10**9)

    def computed(layout: Layout) -> int:  # of a process, had it the longest row of all
        each = [(step.rows.shape[1], step.rows.ravel()) for step in layout.micro_batches]
        return sum(count * (prompts[rows].max() + completions[rows].max()) for count, rows in each)

    more, least = (pack(prompts, completions, reference.chunk, shape) for shape in (free, few))
    further = len(more.micro_batches) - len(least.micro_batches)
    assert further >= 0
    assert computed(least) - computed(more) >= further * geometry.micro_step_cost


@given(st.integers(1, 3), st.integers(0, 20), st.integers(1, 80), st.integers(0, 2**16))
def test_the_token_budget_is_kept(processes, count, max_tokens, seed):
    # As many micro-steps as rows: the budget never has to give way to the number of micro-steps
    rng, steps = np.random.default_rng(seed), max(count, 1)
    prompts, completions = rng.integers(1, 12, size=count), rng.integers(1, 20, size=count)
    geometry = Geometry(processes, steps, steps, micro_batch_rows=1, max_tokens=max_tokens)
    for micro_batch in pack(prompts, completions, np.zeros(count, dtype=int), geometry).micro_batches:
        for rows in micro_batch.rows:
            assert len(rows) == 1 or len(rows) * (prompts[rows].max() + completions[rows].max()) <= max_tokens


def trl_weights(
    loss_type: str, layout: Layout, loss_tokens: np.ndarray, reference: Weights, geometry: Geometry
) -> tuple[np.ndarray, np.ndarray]:
    """
    What each chosen row (each of its tokens, for losses over tokens) weighs in an optimizer step, and its tokens' entropy.

    Follows `GRPOTrainer._compute_loss`: a mean over the micro-batch, divided by the A = g micro-steps of the window; the
    gradients of the W processes are averaged; `lze_scale` multiplies the loss. A filler has no unmasked token.
    """
    weights, entropies = np.zeros(len(loss_tokens)), np.zeros(len(loss_tokens))
    for batch, process in itertools.product(layout.micro_batches, range(geometry.num_processes)):
        rows, real = batch.rows[process], ~batch.filler[process]
        scale, own = loss_scale(loss_type, batch, process, reference, geometry)
        tokens = max(loss_tokens[rows[real]].sum(), 1.0)
        if loss_type in ROW_MEAN_LOSSES:
            share = 1 / len(rows)
        elif loss_type in MICRO_BATCH_TOKEN_LOSSES:
            share = 1 / tokens
        else:  # this normaliser holds the accumulation already
            share = geometry.steps_per_generation * geometry.num_processes / max(reference.num_items[0], 1.0)
        mean = scale * share * (np.ones(len(rows)) if own is None else own)
        entropy = entropy_weights(batch, process, scale, reference, geometry)
        entropy = np.full(len(rows), scale / tokens) if entropy is None else entropy
        for total, found in ((weights, mean), (entropies, entropy)):
            np.add.at(total, rows[real], found[real] / geometry.chunk_steps / geometry.num_processes)
    return weights, entropies


def reference_weights(loss_type: str, reference: Weights, geometry: Geometry) -> np.ndarray:
    """What each row is to weigh: each chunk is averaged on its own."""
    if loss_type in ROW_MEAN_LOSSES:
        return reference.weight / reference.norm_rows
    if loss_type in MICRO_BATCH_TOKEN_LOSSES:
        return reference.weight / reference.norm_tokens
    return reference.weight * geometry.num_chunks / np.maximum(reference.num_items, 1.0)


LOSSES = [ROW_MEAN_LOSSES[0], *MICRO_BATCH_TOKEN_LOSSES, BATCH_TOKEN_LOSSES[0]]  # one of each kind


@pytest.mark.parametrize("loss_type", LOSSES)
@settings(max_examples=60)
@given(batches(), st.sampled_from(sorted(LAYOUTS)))
def test_the_layout_does_not_change_what_a_chosen_row_weighs(loss_type, batch, name):
    geometry, prompts, loss_tokens, reference = batch
    layout = LAYOUTS[name](geometry, prompts, loss_tokens, reference.chunk)
    weights, entropies = trl_weights(loss_type, layout, loss_tokens, reference, geometry)
    np.testing.assert_allclose(weights, reference_weights(loss_type, reference, geometry))
    np.testing.assert_allclose(entropies, reference_weights("bnpo", reference, geometry))
    if loss_type in ROW_MEAN_LOSSES:  # each chunk is a mean over its rows
        totals = np.bincount(reference.chunk, weights=weights, minlength=geometry.num_chunks)
        np.testing.assert_allclose(totals[np.unique(reference.chunk)], 1.0)


@pytest.mark.parametrize("loss_type", LOSSES)
@settings(max_examples=60)
@given(geometries(), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2**16), st.data())
def test_dropping_rows_does_not_change_what_the_others_weigh(loss_type, geometry, name, seed, data):
    # loss_normalizer="all": the weights are those of the full batch as TRL lays it out
    rng = np.random.default_rng(seed)
    per_process = geometry.steps_per_generation * geometry.micro_batch_rows
    count = per_process * geometry.num_processes
    prompts, loss_tokens = rng.integers(1, 12, size=count), rng.integers(0, 20, size=count)  # 0: masked, truncated
    order = np.concatenate([rng.permutation(per_process) for _ in range(geometry.num_processes)])
    slot, process = order // geometry.micro_batch_rows, np.repeat(np.arange(geometry.num_processes), per_process)

    def weights_of(rows):
        found = weights_of_full(slot, process, loss_tokens, rows, np.ones(len(rows)), geometry)
        return found.with_columns(loss_tokens=loss_tokens[rows])

    full = weights_of(np.arange(count))
    theirs = trl_layout(slot, process, order, geometry)
    for micro_batch in theirs.micro_steps:  # nothing is scaled: this is TRL
        for rank in range(geometry.num_processes):
            scale, weights = loss_scale(loss_type, micro_batch, rank, full, geometry)
            assert (scale, weights) == (1.0, None)
            assert entropy_weights(micro_batch, rank, scale, full, geometry) is None
    expected, _ = trl_weights(loss_type, theirs, loss_tokens, full, geometry)
    chosen = np.flatnonzero(rng.random(count) < data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    reference = weights_of(chosen)
    layout = LAYOUTS[name](geometry, prompts[chosen], loss_tokens[chosen] + 1, reference.chunk)
    weights, _ = trl_weights(loss_type, layout, loss_tokens[chosen], reference, geometry)
    # A row without a loss token weighs nothing in a loss over tokens, whatever its factor
    counts = loss_tokens[chosen] > 0 if loss_type in MICRO_BATCH_TOKEN_LOSSES else np.ones(len(chosen), dtype=bool)
    np.testing.assert_allclose(weights[counts], expected[chosen][counts])
