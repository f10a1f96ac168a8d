"""A packed generation batch: what TRL's loss gets in each micro-step, and what a checkpoint keeps of it."""

import numpy as np
import pytest
import torch

from lze_trl.batch import Batch, Table
from lze_trl.checkpoint import load, save
from lze_trl.pack import micro_batch as packed
from lze_trl.pack.layout import Geometry, Layout, MicroBatch
from lze_trl.pack.micro_batch import filler_inputs
from lze_trl.pack.weights import BATCH_TOKEN_LOSSES


GEOMETRY = Geometry(num_processes=2, steps_per_generation=3, chunk_steps=3, micro_batch_rows=2)
PROMPTS, COMPLETIONS = np.array([2, 4, 1, 3]), np.array([5, 3, 2, 1])


def padded(lengths: np.ndarray, width: int, left: bool) -> torch.Tensor:
    """Row i holds 10·i + 1, 10·i + 2, …, padded with 0."""
    rows = torch.zeros(len(lengths), width, dtype=torch.int64)
    for i, length in enumerate(lengths):
        tokens = 10 * i + torch.arange(1, int(length) + 1)
        rows[i, width - int(length) :] if left else rows[i, : int(length)]
        rows[i, slice(width - int(length), width) if left else slice(int(length))] = tokens
    return rows


def build(norm_tokens=(40.0,) * 4, weights=(1.0,) * 4, process: int = 0, **held: torch.Tensor | list) -> Batch:
    """
    Four chosen rows on 2 processes: process 0 holds the rows 0, 1 and 3, process 1 the rows 2 and 3, as TRL pads them.

    Micro-step 0 is empty. Micro-step 1: rows 0 and 1 on process 0, 2 and a filler on process 1. Micro-step 2:
    row 3 on process 0, and a filler.
    """
    local = np.array([[0, 1, 3], [2, 3]][process])
    prompts, completions = padded(PROMPTS, 4, left=True)[local], padded(COMPLETIONS, 5, left=False)[local]
    tensors = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts > 0).long(),
        "completion_ids": completions,
        "completion_mask": (completions > 0).long(),
        "advantages": torch.tensor([0.5, -1.0, 1.5, 2.0])[local],
        "old_per_token_logps": -completions.float(),
    }
    first = MicroBatch(np.array([[0, 1], [2, 2]]), np.array([[False, False], [False, True]]))
    layout = Layout([None, first, MicroBatch(np.array([[3], [3]]), np.array([[False], [True]]))])
    lengths = {"prompt_tokens": PROMPTS, "completion_tokens": COMPLETIONS, "loss_tokens": COMPLETIONS}
    norms = {"norm_rows": np.full(4, 4.0), "norm_tokens": np.array(norm_tokens), "num_items": np.full(4, 11.0)}
    rows = Table(**lengths, **norms, weight=np.array(weights))
    return Batch(Table(), rows, tensors | held | {"row": local}, layout=layout)


def micro_batch(batch: Batch, slot: int, process: int = 0, loss_type: str = "grpo", multiple=None, trim=True) -> dict:
    return packed.micro_batch(batch, slot, process, loss_type, GEOMETRY, multiple, trim)


def test_a_micro_batch_is_trimmed_to_its_own_rows():
    batch = build()
    assert [step is None for step in batch.layout.micro_steps] == [True, False, False]
    inputs = micro_batch(batch, 1)
    assert inputs["prompt_ids"].tolist() == [[0, 0, 1, 2], [11, 12, 13, 14]]
    assert inputs["completion_ids"].tolist() == [[1, 2, 3, 4, 5], [11, 12, 13, 0, 0]]
    inputs = micro_batch(batch, 2)
    assert inputs["prompt_ids"].tolist() == [[31, 32, 33]]  # left-padded: columns are cut on the left
    assert inputs["prompt_mask"].tolist() == [[1, 1, 1]]
    assert inputs["completion_ids"].tolist() == [[31]]
    assert inputs["completion_mask"].tolist() == [[1]]
    assert inputs["old_per_token_logps"].tolist() == [[-31.0]]
    assert inputs["advantages"].tolist() == [2.0]


def test_widths_are_multiples():
    inputs = micro_batch(build(), 2, multiple=2)
    assert inputs["prompt_ids"].tolist() == [[0, 31, 32, 33]]
    assert inputs["completion_ids"].tolist() == [[31, 0]]
    # No wider than what TRL has padded, as where nothing is trimmed
    assert micro_batch(build(), 2, trim=False)["prompt_ids"].tolist() == [[0, 31, 32, 33]]
    assert micro_batch(build(), 2, multiple=64)["completion_ids"].shape == (1, 5)


def test_scale_and_normaliser():
    # Row mean: R · W · g / N = 2 · 2 · 3 / 4 and 1 · 2 · 3 / 4
    batch = build()
    assert micro_batch(batch, 1)["lze_scale"] == 3.0
    assert micro_batch(batch, 2)["lze_scale"] == 1.5
    for loss_type in BATCH_TOKEN_LOSSES:
        inputs = micro_batch(batch, 2, loss_type=loss_type)
        assert inputs["lze_scale"] == 1.0
        assert inputs["lze_row_share"] == 1.5  # for terms that TRL averages over micro-batches
        assert inputs["num_items_in_batch"].item() == 11


def test_rows_that_weigh_differently():
    assert "lze_weights" not in micro_batch(build(), 1)
    # Row 1 stands for three: in its advantage, and for the terms that have none
    for loss_type in ("grpo", "dapo"):
        inputs = micro_batch(build(weights=(1.0, 3.0, 1.0, 1.0)), 1, loss_type=loss_type)
        assert inputs["lze_weights"].tolist() == [[1.0], [3.0]]
        assert inputs["advantages"].tolist() == [0.5, -3.0]
    # Rows 0 and 1 have norms 40 and 20: in a mean over tokens, row 1 counts double besides
    inputs = micro_batch(
        build(norm_tokens=(40.0, 20.0, 40.0, 40.0), weights=(1.0, 3.0, 1.0, 1.0)), 1, loss_type="bnpo"
    )
    assert inputs["lze_weights"].tolist() == [[1.0], [6.0]]
    assert inputs["advantages"].tolist() == [0.5, -6.0]
    assert inputs["lze_scale"] == (5 + 3) * 2 * 3 / 40


def test_entropies_that_weigh_differently():
    # W · g / norm = 6 / 40 a token; TRL's mean over 5 + 3 tokens, times a scale of 3, makes it 3 / 8
    assert micro_batch(build(), 1)["lze_entropy_weights"].squeeze(1).tolist() == pytest.approx([6 / 40, 6 / 40])
    inputs = micro_batch(build(norm_tokens=(40.0, 20.0, 40.0, 40.0), weights=(1.0, 3.0, 1.0, 1.0)), 1)
    assert inputs["lze_entropy_weights"].squeeze(1).tolist() == pytest.approx([6 / 40, 3 * 6 / 20])
    # Nothing to correct where the scale is right for them, too
    assert "lze_entropy_weights" not in micro_batch(build(), 1, loss_type="bnpo")
    assert "lze_entropy_weights" not in micro_batch(build(norm_tokens=(16.0,) * 4), 1)


def test_fillers_are_silent_and_leave_the_rows_alone():
    batch = build(process=1)
    first = micro_batch(batch, 1, process=1)
    assert first["completion_ids"].tolist() == [[21, 22], [21, 22]]
    assert first["completion_mask"].tolist() == [[1, 1], [0, 0]]
    assert first["advantages"].tolist() == [1.5, 0.0]
    assert first["lze_scale"] == 3.0
    only = micro_batch(batch, 2, process=1)
    assert only["completion_mask"].tolist() == [[0]]
    assert only["advantages"].tolist() == [0.0]
    assert only["lze_scale"] == 0.0
    assert only["lze_tokens"] == 1  # of the other process
    assert batch.held["completion_mask"].sum(dim=1).tolist() == [2, 1]
    assert batch.held["advantages"].tolist() == [1.5, 2.0]


def test_a_synchronising_filler():
    inputs = micro_batch(build(), 1)
    filler = filler_inputs(inputs)
    assert filler["prompt_ids"].shape == (1, 4)
    assert filler["completion_mask"].sum() == 0
    assert filler["advantages"].tolist() == [0.0]
    assert [filler[f"lze_{name}"] for name in ("scale", "row_share", "tokens")] == [0, 0, 0]
    assert filler["num_items_in_batch"].item() == 11
    assert inputs["completion_mask"].sum() == 8
    assert inputs["advantages"].tolist() == [0.5, -1.0]


def test_a_checkpoint_keeps_the_batch(tmp_path):
    logps = torch.tensor([[-0.1, -2.7], [-1 / 3, -9.0], [0.0, -1e-3]])
    held = {
        "ref_per_token_logps": logps,
        "flags": torch.tensor([True, False, True]),
        "seen": ["a", None, {"at": [1, 2]}],
    }
    batch = build(weights=(1.0, 3.0, 0.5, 1.0), **held)
    save(tmp_path, "rows", {"rows": batch}, {})
    again = Batch.from_state(load(tmp_path, "rows")[0]["rows"], Layout.from_state)
    assert again.held.keys() == batch.held.keys()
    assert again.held["seen"] == held["seen"]
    for name, tensor in batch.held.items():
        if isinstance(tensor, torch.Tensor):
            assert again.held[name].dtype == tensor.dtype
            assert torch.equal(again.held[name], tensor)
    for slot in (1, 2):
        for loss_type in ("grpo", "bnpo", "dapo"):
            first, second = micro_batch(batch, slot, 0, loss_type), micro_batch(again, slot, 0, loss_type)
            assert first.keys() == second.keys()
            assert all(torch.equal(torch.as_tensor(first[name]), torch.as_tensor(second[name])) for name in first)
    assert again.layout.micro_steps[0] is None
