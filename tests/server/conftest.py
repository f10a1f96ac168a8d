"""Real vLLM servers for the tests of this folder."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers that all tests share

from real_vllm import ENVIRONMENT, small_model

import tiny
from benchmarks.vllm_process import RealServer


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Directories of an untied and of a tied model, each with its tokenizer."""
    directories = {}
    for name, tied in (("untied", False), ("tied", True)):
        directories[name] = tmp_path_factory.mktemp(name)
        small_model(tied=tied).save_pretrained(directories[name])
        tiny.tokenizer().save_pretrained(directories[name])
    return directories


@pytest.fixture(scope="session")
def session_servers(models, tmp_path_factory):
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"{ENVIRONMENT.name} is not there: make vllm-env")
    logs = tmp_path_factory.mktemp("logs")
    served = {"first": "untied", "second": "untied", "tied": "tied"}
    servers = {name: RealServer(models[model], logs / f"{name}.log") for name, model in served.items()}
    for server in servers.values():
        server.start()
    yield servers
    for server in servers.values():
        server.kill()


class Awaited(dict):
    """Servers by their names, waited for when a test asks for one the first time."""

    def __init__(self, servers: dict[str, RealServer]):
        self.servers = servers

    def __missing__(self, name: str) -> RealServer:
        self.servers[name].ensure()
        return self.setdefault(name, self.servers[name])


@pytest.fixture
def servers(session_servers):
    """
    Three servers that are up: `first` and `second` serve the untied model, `tied` the tied one. Those that a test has killed
    start again while the next tests run.
    """
    yield Awaited(session_servers)
    for server in session_servers.values():
        if not server.runs:
            server.start()
