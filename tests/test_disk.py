"""Files and folders appear whole or not at all; where a disk fills up, the error says what is safe and how to go on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import tiny
from benchmarks.settings import made_aside
from lze_trl.checkpoint import DiskError, last_complete_checkpoint
from lze_trl.files import write_atomically
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import run as run_job
from lze_trl.profile.folder import ProfileError, read_groups
from lze_trl.profile.rollout import profile
from lze_trl.record import open_run
from nodes_run import served


SAVED = {"telemetry": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class Fills(TrainerCallback):
    """Leaves so many bytes of the disk in an event of a step."""

    def __init__(self, disk: Path, left: int, event: str, step: int = 0):
        def fill(args, state, control, **kwargs):
            if step in (0, state.global_step):
                with open(disk / "full", "ab") as file:
                    file.write(bytes(max(0, shutil.disk_usage(disk).free - left)))

        setattr(self, event, fill)


def status(directory: Path) -> str:
    return open_run(directory).status()["state"]


def test_a_profile_that_does_not_fit_goes_on_when_there_is_room(tmp_path, disk):
    (disk / "full").write_bytes(bytes(shutil.disk_usage(disk).free - 16_384))
    with pytest.raises(ProfileError, match=r"completions.jsonl` cannot be written: .* Make room"):
        profile(tiny.make(tmp_path / "run", dataset=tiny.prompts(60)), disk / "profile")
    (disk / "full").unlink()
    profile(tiny.make(tmp_path / "run", dataset=tiny.prompts(60)), disk / "profile")
    assert len(read_groups(disk / "profile")) == 60


# From nothing to more than a checkpoint: each of its writers fails once
@pytest.mark.parametrize("left", [0, 4_096, 12_288, 32_768, 65_536, 98_304, 131_072, 163_840])
def test_a_checkpoint_that_does_not_fit(tmp_path, disk, left):
    trainer = tiny.make(disk / "run", trainer={"callbacks": [Fills(disk, left, "on_step_end", 2)]}, **SAVED)
    with pytest.raises(DiskError) as caught:
        trainer.train()
    told = str(caught.value)
    assert "checkpoint-2" in told.split("could not be written")[0] and "There are 0 MiB left." in told
    assert f"To go on from `{disk}/run/checkpoint-1`" in told
    assert status(disk / "run") == "failed"
    assert last_complete_checkpoint(disk / "run") == str(disk / "run" / "checkpoint-1")
    (disk / "full").unlink()
    resumed = tiny.make(disk / "run", **SAVED)
    resumed.train(resume_from_checkpoint=True)
    whole = tiny.run(tmp_path / "whole", **SAVED)
    assert torch.equal(resumed.model.lm_head.weight, whole.model.lm_head.weight)
    assert status(disk / "run") == "finished"


@pytest.mark.parametrize("left", [0, 32_768, 65_536])
def test_a_model_that_cannot_be_saved_is_of_no_finished_run(tmp_path, disk, left):
    own = {"output_dir": str(disk / "run"), "max_steps": 2, "save_steps": 2}
    recipe = tiny.recipe(tmp_path, **tiny.job(tmp_path, train=12) | own)
    fills = Fills(disk, left, "on_train_end")
    with pytest.raises(DiskError, match=r"disk/run.*could not be written.*checkpoint-2`: the same command with"):
        run_job(*parse_recipe([recipe]), before_training=lambda trainer: trainer.add_callback(fills))
    assert status(disk / "run") == "failed"
    (disk / "full").unlink()
    run_job(*parse_recipe([recipe, "--resume_from_checkpoint", "auto"]))
    assert status(disk / "run") == "finished"
    assert (disk / "run" / "model.safetensors").is_file()


def test_telemetry_that_cannot_be_written_is_of_no_finished_run(tmp_path, disk, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "telemetry").symlink_to(disk)
    tiny.run(tmp_path / "run", trainer={"callbacks": [Fills(disk, 0, "on_step_end", 3)]}, **SAVED)
    assert "is lost" in caplog.text and status(tmp_path / "run") == "failed"


def test_weights_for_servers_that_do_not_fit(tmp_path, disk, fakes):
    own = served(tmp_path, fakes[0].url)
    own["vllm_server_kwargs"] |= {"sync_dir": str(disk)}
    fills = Fills(disk, 16_384, "on_train_begin")
    message = rf"could not be written.* If `{disk}/.*` is full, give another one.* no checkpoint yet"
    with pytest.raises(DiskError, match=message):
        tiny.run(tmp_path / "run", trainer={"callbacks": [fills]}, dataset=tiny.prompts(12), **SAVED | own)
    assert not list(disk.glob("*/*.safetensors"))


def test_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full_disk(number):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full_disk)
        write_atomically(path, b"new")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.json": b"old"}
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_folder_takes_the_place_of_the_old_one_when_it_is_done(tmp_path):
    folder = tmp_path / "new" / "warm-start"
    for name in ("first", "second"):
        with made_aside(folder) as unfinished:
            (unfinished / name).touch()
            assert not (folder / name).exists()
        assert [file.name for file in folder.iterdir()] == [name]
    with pytest.raises(KeyboardInterrupt), made_aside(folder) as unfinished:
        (unfinished / "third").touch()
        raise KeyboardInterrupt
    assert [file.name for file in folder.iterdir()] == ["second"]
    assert [file.name for file in folder.parent.iterdir()] == ["warm-start"]
