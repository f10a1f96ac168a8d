"""Two processes generate with real vLLM servers what one process does."""

import functools
import json
from pathlib import Path

import process_generation
import pytest

from launches import by_accelerate, on_processes, on_two_cpus, run_to_end


SCRIPT = Path(__file__).parent / "process_generation.py"
# The config by which each is launched, and the class of the model
WAYS = {
    "ddp": ("ddp", "DistributedDataParallel"),
    "zero2": ("zero2", "DeepSpeedEngine"),
    "zero3": ("zero3", "DeepSpeedEngine"),
    "fsdp2": ("ddp", "FSDP"),
}


@pytest.fixture(scope="module")
def settings(session_servers, models) -> dict:
    """Settings of a run with two servers, which are up."""
    servers = [session_servers[name] for name in ("first", "second")]
    for server in servers:
        server.ensure()
    return {"model": str(models["untied"]), "urls": [server.url for server in servers], "way": "ddp"}


@pytest.fixture(scope="module")
def launched(settings, tmp_path_factory):
    """Runs on two processes, launched together by one config; gives the directory of each, by its name."""

    @functools.cache
    def launch(name: str) -> dict[str, Path]:
        runs = {way: settings | {"way": way} for way, (config, _) in WAYS.items() if config == name}
        if name == "ddp":
            runs["one server"] = settings | {"urls": settings["urls"][:1]}
        root = tmp_path_factory.mktemp(name)
        directories = {run: directory_of(root / run, own) for run, own in runs.items()}
        command = [*by_accelerate(root, on_two_cpus(name)), SCRIPT, *directories.values()]
        run_to_end(command, timeout=400, env={"DS_ACCELERATOR": "cpu"})
        return directories

    return launch


def directory_of(path: Path, settings: dict) -> Path:
    path.mkdir()
    (path / "settings.json").write_text(json.dumps(settings))
    return path


def records(directory: Path, processes: int = 2) -> list[dict]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, settings, launched):
    config, sharding = WAYS[way]
    ranks = records(launched(config)[way])
    for record in ranks:
        assert record["sharding"].startswith(sharding)
        assert max(record["gaps"]) < 1e-3
        assert record["groups"] == ranks[0]["groups"]
        assert [[len(group) for group in batch] for batch in record["groups"]] == [[1, 3, 2]] * 3
        assert set(record["differences"]) == set(settings["urls"])
    prompts, completions = [], []
    for step in range(3):
        for record in ranks:
            prompts += record["rows"][step][0]
            completions += record["rows"][step][1]
    assert len(completions) == 3 * 12 and all(completions)
    for begin in range(0, 36, 4):
        assert prompts[begin : begin + 4] == [prompts[begin]] * 4
    first, last = ranks[0]["groups"][0], ranks[0]["groups"][-1]
    assert first != last  # the weights moved


def test_two_processes_generate_what_one_does(settings, launched, tmp_path):
    alone = directory_of(tmp_path / "alone", settings | {"urls": settings["urls"][:1]})
    on_processes(1, tmp_path / "log.txt", process_generation.main, alone)
    one, two = records(alone, 1), records(launched("ddp")["one server"])
    together = [[a + b for a, b in zip(*(record["rows"][0] for record in two), strict=True)]]
    assert together == one[0]["rows"][:1]  # before the first step; after it, the data of the processes differs
