"""Saved state: whole or not at all, and read strictly."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig

import tiny
from lze_trl import checkpoint as store


ARRAYS = {
    "transposed": np.arange(12).reshape(3, 4).T,
    "reversed": np.arange(4)[::-1],
    "ids": np.array([-(2**63), 5, 2**63 - 1]),
    "rates": np.array([[0.25, np.nan], [1.0, np.inf]], dtype=np.float32),
    "pruned": np.array([True, False]),
    "none": np.empty(0, dtype=np.int16),
}


class Part(dict):
    """A part whose state is what it holds."""

    state_dict, load_state_dict = dict.copy, dict.update


def save_arrays(directory: Path, name: str, arrays: dict[str, np.ndarray] = ARRAYS, **meta):
    store.save(directory, name, {"part": Part(arrays)}, meta)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    np.testing.assert_equal(first, second)
    return all(array.dtype == second[name].dtype for name, array in first.items())


def test_what_was_saved_is_loaded(tmp_path):
    folder = tmp_path / "new" / "folder"
    parts = {"state": Part(**ARRAYS, step=3), "stateful": Part(rows=[0.5]), "empty": Part()}
    store.save(folder, store.STATE_NAME, parts, {"global_step": 2})
    states, meta = store.load(folder, store.STATE_NAME)
    assert (meta["global_step"], meta["schema_version"]) == (2, store.SCHEMA_VERSION)
    assert files(folder) == [f"{store.STATE_NAME}.arrays", f"{store.STATE_NAME}.json"]
    loaded = {name: Part() for name in (*parts, "not saved")}
    assert store.load_parts(folder, loaded)["global_step"] == 2
    for found in (states, loaded):
        assert found["state"].pop("step") == 3
        assert same(found["state"], ARRAYS)
        assert found["stateful"] == {"rows": [0.5]}
    assert loaded["empty"] == loaded["not saved"] == {}
    for odd in (np.int64(1), {1: 2}, (1,), {"a": {1}}, {"a": np.arange(2)}, np.array(["a"])):
        with pytest.raises(store.CheckpointError, match="state: 'odd' of a `state_dict"):
            store.save(folder, store.STATE_NAME, {"state": Part(odd=odd)}, {})


@pytest.mark.parametrize("written", [0, 1])
def test_a_writer_that_fails_leaves_the_old_files_or_nothing_to_trust(tmp_path, monkeypatch, written):
    """When the disk fills up before the first or the second file is put in its place."""
    save_arrays(tmp_path, "pair", step=1)
    done, replace = [], os.replace

    def fill_up(source, target):
        if len(done) == written:
            raise OSError("No space left on device")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", fill_up)
    with pytest.raises(OSError, match="No space left on device"):
        save_arrays(tmp_path, "pair", {"other": np.arange(2)}, step=2)
    assert files(tmp_path) == ["pair.arrays", "pair.json"]
    if written:
        with pytest.raises(ValueError, match="belong to different checkpoints"):
            store.load(tmp_path, "pair")
    else:
        states, meta = store.load(tmp_path, "pair")
        assert same(states["part"], ARRAYS) and meta["step"] == 1


def rewrite(path: Path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap_arrays(directory: Path, tensors: dict[str, np.ndarray]):
    """Put the arrays of another pair beside a description."""
    save_arrays(directory / "other", "pair", tensors)
    (directory / "other" / "pair.arrays").replace(directory / "pair.arrays")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: (d / "pair.json").unlink(), FileNotFoundError, r"pair\.json"),
        (lambda d: (d / "pair.arrays").unlink(), FileNotFoundError, r"pair\.arrays"),
        (lambda d: cut(d / "pair.json"), ValueError, "pair.json` is damaged"),
        (lambda d: (d / "pair.json").write_text("[1]"), ValueError, "was not written by lze_trl"),
        (lambda d: rewrite(d / "pair.json", format="other"), ValueError, "was not written by lze_trl"),
        (lambda d: rewrite(d / "pair.json", schema_version=99), ValueError, "has schema version"),
        (lambda d: cut(d / "pair.arrays"), ValueError, "pair.arrays` is damaged"),
        # The arrays of the next save, when it was killed before its description: the same shapes, other values
        (
            lambda d: swap_arrays(d, ARRAYS | {"ids": ARRAYS["ids"] // 2}),
            ValueError,
            "belong to different checkpoints",
        ),
    ],
)
def test_what_cannot_be_trusted_is_refused(tmp_path, damage, error, message):
    save_arrays(tmp_path, "pair")
    damage(tmp_path)
    with pytest.raises(error, match=message):
        store.load(tmp_path, "pair")


def make_checkpoint(run: Path, step: int) -> Path:
    checkpoint = run / f"checkpoint-{step}"
    save_arrays(checkpoint, store.STATE_NAME, global_step=step)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"step": step}, checkpoint / name)
    return checkpoint


def test_checkpoints_by_number_not_by_name(tmp_path):
    for step in (9, 100, 20):
        make_checkpoint(tmp_path, step)
    for name in ("checkpoint-", "checkpoint-best", "my-checkpoint-5", "checkpoint-5-old", "runs"):
        (tmp_path / name).mkdir()
    assert [path.name for path in store.checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-20", "checkpoint-9"]
    assert store.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100" / "rng_state.pth").unlink()  # as with `save_only_model`
    assert store.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")
    assert store.find_state(tmp_path) == tmp_path / "checkpoint-100"
    assert files(store.set_aside(tmp_path, after=9)) == ["checkpoint-100", "checkpoint-20"]
    assert [path.name for path in store.checkpoints(tmp_path)] == ["checkpoint-9"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: (c / "trainer_state.json").unlink(),
        lambda c: cut(c / "trainer_state.json"),
        lambda c: rewrite(c / "trainer_state.json", global_step=19),  # copied from another checkpoint
        lambda c: cut(c / f"{store.STATE_NAME}.json"),
        lambda c: (c / f"{store.STATE_NAME}.arrays").unlink(),
    ],
)
def test_an_incomplete_checkpoint_is_passed_over(tmp_path, damage):
    make_checkpoint(tmp_path, 10)
    newest = make_checkpoint(tmp_path, 20)
    assert store.is_complete(newest)
    damage(newest)
    assert not store.is_complete(newest)
    assert store.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def of_training(run: Path, **settings) -> Path:
    own = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    tiny.run(run, **own | settings)
    return run / "checkpoint-2"


def in_shards(run: Path) -> Path:
    checkpoint = of_training(run)
    (checkpoint / "model.safetensors").unlink()
    tiny.model().save_pretrained(checkpoint, max_shard_size="10KB")
    return checkpoint


def of_fsdp(run: Path) -> Path:
    checkpoint = of_training(run)
    for old, new in (("model.safetensors", "pytorch_model_fsdp_0"), ("optimizer.pt", "optimizer_0")):
        (checkpoint / old).unlink()
        dcp.save(tiny.model().state_dict(), checkpoint_id=checkpoint / new, no_dist=True)
    return checkpoint


def of_deepspeed(run: Path) -> Path:
    checkpoint = of_training(run)
    for old in ("model.safetensors", "optimizer.pt", "scheduler.pt"):  # its own schedule is in the states
        (checkpoint / old).unlink()
    rewrite(checkpoint / f"{store.STATE_NAME}.json", num_processes=2)
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    torch.save({}, checkpoint / "rng_state_1.pth")
    (checkpoint / "latest").write_text("global_step2")
    (checkpoint / "global_step2").mkdir()
    for rank in range(2):
        for kind in ("model", "optim"):
            torch.save({}, checkpoint / f"global_step2/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    return checkpoint


of_lora = partial(of_training, trainer={"peft_config": LoraConfig(r=2, target_modules=["q_proj"])})
in_the_middle_of_a_batch = partial(of_training, num_iterations=3, gradient_accumulation_steps=1)


@pytest.mark.parametrize("layout", [of_training, in_shards, of_lora, of_fsdp, of_deepspeed, in_the_middle_of_a_batch])
def test_a_checkpoint_with_a_damaged_file_is_neither_taken_nor_accepted(tmp_path, layout):
    newest = layout(tmp_path)
    assert store.refuse_non_checkpoint(newest)["global_step"] == 2
    assert store.last_complete_checkpoint(tmp_path) == str(newest)
    read = (
        "*.safetensors", "*.safetensors.index.json", "optimizer*", "scheduler.pt", "rng_state*", "*_fsdp_0", "latest", "global_*", "lze_*",
    )  # fmt: skip
    of_resume = [
        file for name in read for path in newest.glob(name) for file in [path, *path.rglob("*")] if file.is_file()
    ]
    assert len(of_resume) >= 6
    for file in of_resume:
        content = file.read_bytes().rstrip(b"\n")
        for left in (None, 0, 1, len(content) // 2, len(content) - 1):
            file.unlink()
            if left is not None:
                file.write_bytes(content[:left])
            if file.name == ".metadata" and left is not None:
                continue  # a pickle, which nobody reads to look at it: PyTorch writes it beside itself and renames it
            told: list[str] = []
            last = store.last_complete_checkpoint(tmp_path, told.append)
            assert last == str(tmp_path / "checkpoint-1"), (file, left)
            assert len(told) == 1 and told[0].startswith(f"`{newest}` is passed over: ")
            with pytest.raises(store.CheckpointError, match="is no complete checkpoint"):
                store.refuse_non_checkpoint(newest)
            file.touch()
        file.write_bytes(content)
    assert store.last_complete_checkpoint(tmp_path) == str(newest)


@pytest.mark.parametrize("gone", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_what_is_missing_is_named(tmp_path, gone, caplog):
    newest = of_training(tmp_path)
    (newest / gone).unlink()
    named = "random" if gone == "rng_state.pth" else gone[:5]
    with pytest.raises(store.CheckpointError, match=rf"it lacks .*{named}.* such as"):
        tiny.make(tmp_path, max_steps=3).train(resume_from_checkpoint=str(newest))
    tiny.make(tmp_path, max_steps=3, learning_rate=1e-4).train(resume_from_checkpoint=True)
    assert f"`{newest}` is passed over: it lacks" in caplog.text and "now 0.0001. The old learning" in caplog.text
    assert f"Checkpoints of later steps, which this run takes again, are now in `{tmp_path}/replaced.1`" in caplog.text


def test_the_state_of_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no prompt state: neither `lze_state\.json` nor a complete"):
        store.find_state(tmp_path)
    make_checkpoint(tmp_path, 10)
    (make_checkpoint(tmp_path, 20) / "trainer_state.json").unlink()
    assert store.find_state(tmp_path) == tmp_path / "checkpoint-10"
    assert store.find_state(tmp_path / "checkpoint-10") == tmp_path / "checkpoint-10"
    save_arrays(tmp_path, store.STATE_NAME, global_step=15)
    assert store.find_state(tmp_path) == tmp_path
    make_checkpoint(tmp_path, 30)  # the run was continued, and killed
    assert store.find_state(tmp_path) == tmp_path / "checkpoint-30"
