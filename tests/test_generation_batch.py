"""A packed generation batch: the tensors that TRL's loss gets in each micro-step. What its rows weigh is in `test_packing.py`."""

import numpy as np
import torch

from lze_trl.batch import Batch, Table
from lze_trl.pack import micro_batch as packed
from lze_trl.pack.layout import Geometry, Layout, MicroBatch
from lze_trl.pack.micro_batch import filler_inputs


GEOMETRY = Geometry(num_processes=2, steps_per_generation=3, chunk_steps=3, micro_batch_rows=2)
PROMPTS, COMPLETIONS = np.array([2, 4, 1, 3]), np.array([5, 3, 2, 1])


def padded(lengths: np.ndarray, width: int, left: bool) -> torch.Tensor:
    """Row i holds 10·i + 1, 10·i + 2, …, padded with 0."""
    rows = torch.zeros(len(lengths), width, dtype=torch.int64)
    for i, length in enumerate(lengths.tolist()):
        rows[i, width - length if left else 0 :][:length] = 10 * i + torch.arange(1, length + 1)
    return rows


def build(process: int = 0) -> Batch:
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
    norms = {"norm_rows": np.full(4, 4.0), "norm_tokens": np.full(4, 40.0), "num_items": np.full(4, 11.0)}
    rows = Table(**lengths, **norms, weight=np.ones(4))
    return Batch(Table(), rows, tensors | {"row": local}, layout=layout)


def micro_batch(batch: Batch, slot: int, process: int = 0, multiple=None, trim=True) -> dict:
    return packed.micro_batch(batch, slot, process, "grpo", GEOMETRY, multiple, trim)


def test_a_micro_batch_is_trimmed_to_its_own_rows():
    batch = build()
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
