"""Watches a pool of servers at work, for the tests of servers that die."""

import asyncio
from types import SimpleNamespace

from lze_trl.rollout.servers import pool as pool_module
from lze_trl.rollout.servers.client import ServerError


class PoolWatch:
    """
    Notes what a pool sends where, what fails, and whether it ever pauses: an interval between two attempts to reach a
    server in which no request was in progress and none was sent.
    """

    def __init__(self, pool, monkeypatch):
        self.begun: list[tuple[str, tuple]] = []  # URL and prompt
        self.failed: list[tuple[str, tuple]] = []
        self.in_progress = self.intervals = self.pauses = 0
        for server in pool.servers:
            monkeypatch.setattr(server, "complete", self._watched(server))
        monkeypatch.setattr(pool_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": self._sleep}))

    def _watched(self, server):
        complete = server.complete

        async def watched(http, prompt, count, body):
            request = (server.url, tuple(prompt))
            self.begun.append(request)
            self.in_progress += 1
            try:
                return await complete(http, prompt, count, body)
            except ServerError:
                self.failed.append(request)
                raise
            finally:
                self.in_progress -= 1

        return watched

    async def _sleep(self, seconds):
        begun, busy = len(self.begun), self.in_progress
        await asyncio.sleep(seconds)
        self.intervals += 1
        self.pauses += busy == 0 and len(self.begun) == begun

    def assert_went_on(self, groups: int, dead: str, survivor: str, at_a_time: int):
        """One server died, and all that it cost are its requests in progress, each sent once more to the other."""
        assert self.pauses == 0
        assert 0 < len(self.failed) <= at_a_time
        assert {url for url, _ in self.failed} == {dead}
        assert len(self.begun) == groups + len(self.failed)
        assert {(survivor, prompt) for _, prompt in self.failed} <= set(self.begun)
