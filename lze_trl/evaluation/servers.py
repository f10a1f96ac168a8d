"""An engine of running vLLM servers, which share the requests."""

import logging
import re
from collections.abc import Iterable, Iterator
from functools import partial

import httpx2

from ..servers.client import Output, RequestRefusedError, VLLMServer
from ..servers.pool import ServerPool
from .engines import SampleRequest
from .settings import Decoding, EvaluationError


logger = logging.getLogger(__name__)

_TOO_LONG = re.compile(
    r"maximum context(\s|\\n)+length|maximum model length|max_tokens must be at least 1"
)  # in vLLM's words


class ServerEngine:
    """
    Generates with vLLM servers that serve the same model.

    Args:
        pool ([`~lze_trl.servers.pool.ServerPool`]): The servers, which are connected.
        name (`str`): What results call the model.
    """

    def __init__(self, pool: ServerPool, name: str):
        self.pool, self.name = pool, name

    @classmethod
    def connect(
        cls, urls: list[str], max_concurrent_requests: int = 64, recovery_timeout: float = 60.0
    ) -> "ServerEngine":
        """Wait until all servers are up, and check that they serve the same model."""
        try:
            pool = ServerPool(urls, max_concurrent_requests, 1800.0, recovery_timeout)
        except ValueError as error:
            raise EvaluationError(str(error)) from error
        pool.connect(recovery_timeout)
        served = {server.url: server.model for server in pool.servers}
        name, *others = set(served.values())
        if others:
            raise EvaluationError(f"The servers serve different models: {served}. Give those of one model.")
        return cls(pool, name)

    def generate(
        self, requests: Iterable[SampleRequest], decoding: Decoding
    ) -> Iterator[tuple[SampleRequest, Output]]:
        """Complete requests, in whatever order the servers finish."""
        shortest = min(server.max_model_len for server in self.pool.servers)
        if decoding.max_tokens is not None and decoding.max_tokens >= shortest:
            raise EvaluationError(
                f"`max_tokens={decoding.max_tokens}` leaves no room for a prompt in the servers' context of {shortest} "
                "tokens. Lower it, or start the servers with a larger `--max-model-len`."
            )
        asked = list(requests)
        for place, output in self.pool.stream([partial(_answer, request, decoding) for request in asked]):
            yield asked[place], output


async def _answer(request: SampleRequest, decoding: Decoding, http: httpx2.AsyncClient, server: VLLMServer) -> Output:
    """What a server answers. A prompt that is too long for it counts as truncated, without an answer."""
    # All settings are given, or the server would take the others from the model's own
    body = {name: vars(decoding)[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "presence_penalty")}
    body |= {"min_p": 0.0, "repetition_penalty": 1.0, "stop": list(decoding.stop)}
    if decoding.temperature > 0:
        body["seed"] = request.seed(decoding)
    try:
        return await server.answer(http, request.problem.prompt, body)
    except RequestRefusedError as error:
        if _TOO_LONG.search(str(error)) is None:
            raise
        logger.warning("Problem %s is too long for the server, and counts as truncated.", request.problem.id)
        return Output("", 0, True)
