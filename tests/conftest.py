"""Settings of the whole suite."""

import functools
import gc
import importlib.metadata
import os
import signal
import tempfile

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import settings

from fake_vllm import FakeVLLM


# Nothing here depends on time, on chance, or on a network
settings.register_profile("lze", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lze")
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# DeepSpeed compiles here. A run that is killed while it does leaves a lock, for which every later one would wait for ever
os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="torch-extensions-"))
# A suite that was started in the background ignores Ctrl-C, and so would the runs that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
# accelerate parses the metadata of the same few packages many times in every training
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
datasets.disable_progress_bars()


# Files that take longest, to be started first: none of them is left to one core at the end
LONGEST = ("test_processes", "test_train", "test_controllers_processes", "test_laws", "test_errors", "test_crash")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Every training begins with a full garbage collection: it need not search what is already here."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fakes(request, monkeypatch):
    """Two servers, of the module's own `Server` if it has one, that are asked again without a pause."""
    monkeypatch.setattr("lze_trl.servers.pool._FIRST_PAUSE", 0.05)
    started = [getattr(request.module, "Server", FakeVLLM)() for _ in range(2)]
    yield started
    for fake in started:
        fake.stop()


@pytest.fixture
def accelerator():
    """An accelerator on a CPU in float32: a process shares its precision, and trainings before may have left another one."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True)


def pytest_unconfigure():
    gc.unfreeze()  # or some libraries report at the end that objects of theirs leaked
