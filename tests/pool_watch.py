"""Watches what a pool of servers sends where and what fails, for the tests of servers that die."""

from lze_trl.servers.client import ServerError


class PoolWatch:
    """Notes the requests that a pool begins, and those that fail."""

    def __init__(self, pool, monkeypatch):
        self.begun: list[tuple[str, tuple]] = []  # URL and prompt
        self.failed: list[tuple[str, tuple]] = []
        for server in pool.servers:
            monkeypatch.setattr(server, "complete", self._watched(server))

    def _watched(self, server):
        complete = server.complete

        async def watched(http, prompt, count, body):
            request = (server.url, tuple(prompt))
            self.begun.append(request)
            try:
                return await complete(http, prompt, count, body)
            except ServerError:
                self.failed.append(request)
                raise

        return watched

    def assert_went_on(self, groups: int, dead: str, survivor: str, at_a_time: int):
        """One server died, and all that was lost are its requests in progress, each sent once more to the other."""
        assert 0 < len(self.failed) <= at_a_time
        assert {url for url, _ in self.failed} == {dead}
        assert len(self.begun) == groups + len(self.failed)
        assert {(survivor, prompt) for _, prompt in self.failed} <= set(self.begun)
