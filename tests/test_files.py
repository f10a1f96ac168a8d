"""Files and folders that appear whole or not at all."""

import os

import pytest

from benchmarks.settings import made_aside
from lze_trl.files import write_atomically


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
