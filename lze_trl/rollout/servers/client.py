"""One vLLM server, spoken to over plain HTTP."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2


# Seconds to open a connection; a server that is up answers at once, however busy it is
_CONNECT_TIMEOUT = 10.0
_CACHE_RESET_ATTEMPTS = 25
_CACHE_RESET_INTERVAL = 0.2
# What reading an answer of another form raises
_MISREADINGS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
# What vLLM answers to every request once its engine has died. /health then answers 503, without a body
_ENGINE_DEAD = ("EngineDeadError", "EngineCore encountered an issue")
_WANTED = "as vLLM's OpenAI API server, version 0.32 or later"


class ServerError(RuntimeError):
    """A server failed, or answered with something that is no answer. Another server, or this one later, may do better."""


class EngineDeadError(ServerError):
    """The engine behind a server has died. The server does not come back unless someone restarts it."""


class RequestRefusedError(ValueError):
    """A server understood a request and refused it. Asking again does not help."""


class ServerMismatchError(ValueError):
    """A server is not the one that the trainer needs: another model, tokenizer or weights."""


@dataclass(frozen=True)
class Completion:
    """
    One completion.

    Attributes:
        token_ids (`list[int]` of length C): Sampled tokens, the end token included.
        logprobs (`list[float]` of length C): Log-probability of each sampled token, in nats, as sampled.
    """

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Snapshot:
    """
    Weights that every server must hold, and how to tell that it does.

    Attributes:
        version (`str`): Name of the weights, different for every sync of every run. A restarted server does not know it.
        directory (`str`): Absolute path of the checkpoint, readable by the servers.
        probe (`list[int]` of length N): Tokens to compare log-probs on.
        reference (`list[float]` of length N - 1): The trainer's log-probs of `probe[1:]`.
        tolerance (`float`): Largest mean absolute difference of the log-probs.
    """

    version: str
    directory: str
    probe: list[int]
    reference: list[float]
    tolerance: float


@dataclass(frozen=True)
class Difference:
    """Mean and maximum of the absolute differences between a server's and the trainer's log-probs, in nats."""

    mean: float
    max: float


@dataclass(frozen=True)
class Identity:
    """
    What the trainer needs a server to be.

    Attributes:
        text (`str`): A text to compare the tokenizers on.
        token_ids (`list[int]`): Its tokens, without special tokens.
        last_token_id (`int`): Largest token id that the model or the tokenizer knows.
        context_length (`int`): Tokens that a prompt and its completion take at least.
    """

    text: str
    token_ids: list[int]
    last_token_id: int
    context_length: int


class VLLMServer:
    """
    One vLLM server. Every method but the constructor runs inside an `httpx2.AsyncClient` given to it.

    Args:
        url (`str`): Base URL, such as `"http://127.0.0.1:8000"`.
        request_timeout (`float`): Seconds that a request may take, generation included.
    """

    def __init__(self, url: str, request_timeout: float):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"`vllm_server_urls` must hold base URLs such as 'http://127.0.0.1:8000', got {url!r}. Give scheme, host "
                "and port."
            )
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.request_timeout = request_timeout
        self.model = ""
        self.max_model_len = 0
        self.dtype = ""
        self.logprobs_mode = ""
        self.difference: Difference | None = None  # of the last checked load

    # ---- Requests ----

    async def _request(self, http: httpx2.AsyncClient, method: str, path: str, **kwargs: Any) -> Any:
        where = f"{method} {self.url}{path}"
        try:
            # The timeout of the HTTP library is one between bytes, and a server may trickle them
            async with asyncio.timeout(self.request_timeout):
                response = await http.request(method, self.url + path, **kwargs)
        except TimeoutError as error:
            raise ServerError(f"{where}: no complete answer within {self.request_timeout:g} s") from error
        except httpx2.RequestError as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in (408, 429) or response.status_code >= 500:
            problem = f"{where} answered {response.status_code}: {_text(response)}"
            if any(sign in response.text for sign in _ENGINE_DEAD) or (path == "/health" and not response.content):
                raise EngineDeadError(
                    f"{problem.rstrip('.')}. Its engine has died, and its log says why. Restart it; if it runs on a CPU, "
                    "with `--no-enable-chunked-prefill`"
                )
            raise ServerError(problem)
        if response.status_code == 404 and path != "/v1/completions":
            raise ServerMismatchError(
                f"{where} answered 404: {_text(response)}. Start the server {_WANTED}, with the variable "
                "VLLM_SERVER_DEV_MODE=1, which makes it serve weight reloading."
            )
        if response.status_code >= 400:
            raise RequestRefusedError(f"{where} answered {response.status_code}: {_text(response)}")
        if not response.content:
            return {}
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{where} answered something that is not JSON: {_text(response)}") from error

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Make a failure to read an answer one of the server."""
        try:
            yield
        except _MISREADINGS as error:
            raise ServerError(f"{self.url}{path} sent a damaged answer: {error!r}") from error

    async def identify(self, http: httpx2.AsyncClient, identity: Identity):
        """
        Learn what the server serves, and check that it is what the trainer needs.

        Raises:
            [`ServerError`]: If the server is not up.
            [`ServerMismatchError`]: If model, tokenizer or context length are not those of the trainer, or its version does
                not tell.
        """
        await self._request(http, "GET", "/health")
        models = await self._request(http, "GET", "/v1/models")
        with self._reading("/v1/models"):
            card, *_ = (card for card in models["data"] if card.get("parent") is None)  # the others are adapters
            self.model, self.max_model_len = card["id"], card["max_model_len"]
        info = await self._request(http, "GET", "/server_info", params={"config_format": "json"})
        try:
            config = info["vllm_config"]["model_config"]
            self.dtype, self.logprobs_mode = config["dtype"].removeprefix("torch."), config["logprobs_mode"]
        except _MISREADINGS as error:
            raise ServerMismatchError(
                f"{self.url}/server_info does not tell the model's type and the mode of its log-probs: {_short(info)}. "
                f"Start the server {_WANTED}."
            ) from error
        serves = f"The vLLM server {self.url}, which serves {self.model!r},"
        if self.max_model_len < identity.context_length:
            raise ServerMismatchError(
                f"{serves} has a context of {self.max_model_len} tokens, and prompt and completion take up to "
                f"{identity.context_length}. Start it with a larger `--max-model-len`, or lower "
                "`max_completion_length`."
            )
        body = {"model": self.model, "prompt": identity.text, "add_special_tokens": False}
        answer = await self._request(http, "POST", "/tokenize", json=body)
        with self._reading("/tokenize"):
            tokens = answer["tokens"]
        if tokens != identity.token_ids:
            raise ServerMismatchError(
                f"{serves} has another tokenizer: {identity.text!r} is {_short(tokens)} there and "
                f"{_short(identity.token_ids)} in the trainer. Start it with the model that is trained."
            )
        for token, known in ((identity.last_token_id, True), (identity.last_token_id + 1, False)):
            if await self._knows(http, token) != known:
                raise ServerMismatchError(
                    f"{serves} has another vocabulary: its model {'does not know' if known else 'knows'} token {token}, "
                    f"and the trainer's last token is {identity.last_token_id}. Start it with the model that is trained."
                )

    async def _knows(self, http: httpx2.AsyncClient, token: int) -> bool:
        body = {"model": self.model, "prompt": [token], "max_tokens": 1}
        try:
            await self._request(http, "POST", "/v1/completions", json=body)
        except RequestRefusedError:
            return False
        return True

    async def complete(self, http: httpx2.AsyncClient, prompt: list[int], count: int, body: dict) -> list[Completion]:
        """
        Complete a prompt.

        Args:
            http (`httpx2.AsyncClient`): Client.
            prompt (`list[int]`): Tokens of the prompt.
            count (`int`): G, the number of completions.
            body (`dict`): Sampling settings, in the server's names.

        Returns:
            `list[Completion]` of length G: The completions.

        Raises:
            [`ServerError`]: If the server failed or its answer is incomplete.
            [`RequestRefusedError`]: If the server refused the request.
        """
        body = body | {"model": self.model, "logprobs": 0, "return_token_ids": True}
        if body["temperature"] == 0:
            body |= {"prompt": [prompt] * count}  # vLLM refuses `n > 1` when decoding is greedy
        else:
            body |= {"prompt": prompt, "n": count}
        answer = await self._request(http, "POST", "/v1/completions", json=body)
        with self._reading("/v1/completions"):
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            completions = [_completion(choice) for choice in choices]
        if len(completions) != count:
            raise ServerError(f"{self.url}/v1/completions sent {len(completions)} completions instead of {count}")
        return completions

    async def prompt_logprobs(self, http: httpx2.AsyncClient, tokens: list[int]) -> list[float]:
        """Log-probs of `tokens[1:]`, in nats."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._request(http, "POST", "/v1/completions", json=body)
        with self._reading("/v1/completions"):
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens[1:], strict=True)]

    # ---- Weights ----

    async def hold(self, http: httpx2.AsyncClient, snapshot: Snapshot):
        """
        Make sure that the server holds the weights of a snapshot: load and check them unless it has them already.

        Raises:
            [`ServerError`]: If the server is not up or failed.
            [`ServerMismatchError`]: If it cannot load the weights, or computes other log-probs than the trainer with them.
        """
        info = await self._request(http, "GET", "/weight_info")
        with self._reading("/weight_info"):
            if info["weight_version"] == snapshot.version:
                return
        await self._reload(http, snapshot.directory)
        self.difference = await self._compare(http, snapshot)
        # Last, so that a server which was interrupted anywhere above does not pass for one that holds the weights
        await self._request(http, "POST", "/update_weight_version", json={"new_version": snapshot.version})

    async def _reload(self, http: httpx2.AsyncClient, directory: str):
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        try:
            await self._request(http, "POST", "/collective_rpc", json=body)
        except EngineDeadError:
            raise
        except ServerError as error:
            await self._request(http, "GET", "/health")  # a server that has died answers no better
            raise ServerMismatchError(
                f"The vLLM server {self.url} could not load the weights in {directory}: {error}. Make sure that it was "
                "started with the model that is trained, and that it can read the directory: `vllm_sync_dir` must be on "
                "a file system that trainer and servers share."
            ) from error
        for _ in range(_CACHE_RESET_ATTEMPTS):
            # Fails as long as a request that nobody waits for any more is running
            answer = await self._request(http, "POST", "/reset_prefix_cache")
            with self._reading("/reset_prefix_cache"):
                if answer["success"]:
                    return
            await asyncio.sleep(_CACHE_RESET_INTERVAL)
        raise ServerError(f"{self.url}: the prefix cache, which belongs to older weights, could not be reset")

    async def _compare(self, http: httpx2.AsyncClient, snapshot: Snapshot) -> Difference:
        logprobs = await self.prompt_logprobs(http, snapshot.probe)
        gaps = [abs(theirs - ours) for theirs, ours in zip(logprobs, snapshot.reference, strict=True)]
        difference = Difference(mean=sum(gaps) / len(gaps), max=max(gaps))
        if not difference.mean <= snapshot.tolerance:  # also when it is not a number
            raise ServerMismatchError(
                f"After a weight sync, the log-probs of the vLLM server {self.url} differ from the trainer's by "
                f"{difference.mean:.2e} nats on average (at most {difference.max:.2e}) over {len(gaps)} probe tokens, and "
                f"`vllm_sync_tolerance` is {snapshot.tolerance:g}. Look at: whether it serves the model that is trained "
                f"(it serves {self.model!r} in {self.dtype}), without quantization or adapters of its own; whether every "
                f"weight is in {snapshot.directory}, `lm_head.weight` included, also for tied embeddings; whether it says "
                "in its log that weights were not loaded. If only the precision differs, raise the tolerance."
            )
        return difference


def _completion(choice: dict) -> Completion:
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"generation ended by {choice['finish_reason']!r}")
    if not token_ids or len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs")
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise ValueError("a log-prob is not a finite number")
    return Completion(token_ids, logprobs)


def _text(response: httpx2.Response) -> str:
    """The server's own words, as far as they help."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return _short(response.text) or "(empty)"


def _short(value: Any, limit: int = 500) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def open_client() -> httpx2.AsyncClient:
    """A client without limits of its own, which goes to the servers directly, whatever proxy the environment names."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT), limits=limits, trust_env=False)
