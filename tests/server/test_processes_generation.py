"""Two processes generate with real vLLM servers what one process does."""

import json
from pathlib import Path

import pytest

from launches import by_accelerate, on_two_cpus, run_to_end


SCRIPT = Path(__file__).parent / "process_generation.py"


def run(directory: Path, settings: dict, config: dict) -> list[dict]:
    directory.mkdir()
    (directory / "settings.json").write_text(json.dumps(settings))
    run_to_end([*by_accelerate(directory, config), SCRIPT, directory], timeout=400, env={"DS_ACCELERATOR": "cpu"})
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(config["num_processes"])]


WAYS = {"ddp": "DistributedDataParallel", "zero2": "DeepSpeedEngine", "zero3": "DeepSpeedEngine", "fsdp2": "FSDP"}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, servers, models, tmp_path):
    settings = {"model": str(models["untied"]), "urls": [servers["first"].url, servers["second"].url], "way": way}
    ranks = run(tmp_path / way, settings, on_two_cpus("ddp" if way == "fsdp2" else way))
    for record in ranks:
        assert record["sharding"].startswith(WAYS[way])
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


def test_two_processes_generate_what_one_does(servers, models, tmp_path):
    settings = {"model": str(models["untied"]), "urls": [servers["first"].url], "way": "ddp"}
    two = run(tmp_path / "two", settings, on_two_cpus("ddp"))
    one = run(tmp_path / "one", settings, on_two_cpus("single_process") | {"num_processes": 1})
    together = [[a + b for a, b in zip(*(record["rows"][0] for record in two), strict=True)]]
    assert together == one[0]["rows"][:1]  # before the first step; after it, the data of the processes differs
