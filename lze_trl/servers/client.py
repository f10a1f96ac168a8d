"""One vLLM server, spoken to over plain HTTP. What it answers is checked before anything uses it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

import httpx2

from ..redaction import without_secrets


_CONNECT_TIMEOUT = 10.0  # a server that is up answers at once, however busy it is
# What reading an answer of another form raises
_MISREADINGS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_LOWEST_LOGPROB = -1e4  # vLLM sends -9999 for minus infinity
_ROUNDING = 1e-3  # by which a log-prob may be above 0


class ServerError(RuntimeError):
    """A server failed or sent a damaged answer. Another server, or this one later, may do better."""


class RequestRefusedError(ValueError):
    """A server understood a request and refused it. Asking again does not help."""


class ServerMismatchError(ValueError):
    """A server has another model or other weights than it must have."""


@dataclass(frozen=True)
class Completion:
    """One completion of C tokens."""

    token_ids: list[int]  # of length C, the end token included
    logprobs: list[float]  # of each token, in nats, as it was sampled


@dataclass(frozen=True)
class Output:
    """A completion as text."""

    text: str
    tokens: int  # its length, the end token included
    truncated: bool  # whether the limit of tokens cut it off


@dataclass(frozen=True)
class Snapshot:
    """Weights that every server must hold, and how to tell that it does."""

    version: str  # different for every sync of every run, so that a restarted server does not know it
    directory: str  # absolute path of the checkpoint, readable by the servers
    probe: list[int]  # N tokens to compare log-probs on
    reference: list[float]  # the trainer's log-probs of `probe[1:]`
    tolerance: float  # largest mean absolute difference of the log-probs


class VLLMServer:
    """
    One vLLM server, asked through an `httpx2.AsyncClient`, and what is known of it. Every request raises [`ServerError`]
    if the server fails or takes longer than `request_timeout` seconds, and [`RequestRefusedError`] if it refuses.
    """

    def __init__(self, url: str, request_timeout: float):
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or " " in url:
                raise ValueError
        except ValueError:  # also of a port that is none
            raise ValueError(
                "A vLLM server is given by its base URL with a port up to 65535, such as 'http://127.0.0.1:8000' "
                f"(`vllm_server_urls`), got {without_secrets(url)!r}."
            ) from None
        self._base = url.rstrip("/").removesuffix("/v1")  # with which OpenAI's clients want it
        self.url = without_secrets(self._base)  # as it is shown
        self.host, self.request_timeout = str(parts.hostname), request_timeout
        self.model = self.dtype = self.logprobs_mode = ""
        self.max_model_len = 0
        self.difference: float | None = None  # mean one from the trainer's log-probs, in nats, after the last load
        self.ready = False  # known to hold the current weights
        self.running = 0  # requests in progress
        self.problem: ServerError | None = None  # of the outage that it is in

    # ---- Requests ----

    async def _request(
        self, http: httpx2.AsyncClient, path: str, body: dict | None = None, read: Callable = lambda answer: answer
    ) -> Any:
        """Send a request, as a POST if it has a body, and return what `read` finds in the JSON of the answer."""
        method = "GET" if body is None else "POST"
        where = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(self.request_timeout):  # that of the HTTP library is one between bytes
                response = await http.request(method, self._base + path, json=body)
        except TimeoutError as error:
            raise ServerError(f"{where}: no complete answer within {self.request_timeout:g} s") from error
        except httpx2.RequestError as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
        status = response.status_code
        if status >= 400:
            problem = f"{where} answered {status}: {_short(response.text) or '(empty)'}"
            if status in (408, 429) or status >= 500:
                raise ServerError(problem)
            if status == 404 and path != "/v1/completions":
                raise ServerMismatchError(
                    f"{problem}. Start the server as vLLM's OpenAI API server, version 0.32 or later, with the variable "
                    "VLLM_SERVER_DEV_MODE=1, which makes it serve weight reloading."
                )
            raise RequestRefusedError(problem)
        try:
            return read(response.json() if response.content else {})
        except _MISREADINGS as error:
            raise ServerError(f"{where} sent a damaged answer: {_short(repr(error))}") from error

    async def learn_model(self, http: httpx2.AsyncClient, trains: bool = False):
        """Learn which model the server serves and how long its context is; for a training also how it computes."""
        await self._request(http, "/health")

        def own_card(models: dict) -> tuple[str, int]:
            card, *_ = (card for card in models["data"] if card.get("parent") is None)  # the others are adapters
            return card["id"], int(card["max_model_len"])

        self.model, self.max_model_len = await self._request(http, "/v1/models", read=own_card)
        if not trains:
            return

        def settings(info: dict) -> tuple[str, str]:
            config = info["vllm_config"]["model_config"]
            return config["dtype"].removeprefix("torch."), config["logprobs_mode"]

        path = "/server_info?config_format=json"
        self.dtype, self.logprobs_mode = await self._request(http, path, read=settings)

    async def complete(self, http: httpx2.AsyncClient, prompt: list[int], count: int, body: dict) -> list[Completion]:
        """`count` completions of a prompt, with sampling settings in the server's names."""
        # vLLM refuses `n > 1` when decoding is greedy
        wanted = {"prompt": [prompt] * count} if body["temperature"] == 0 else {"prompt": prompt, "n": count}
        body = body | wanted | {"model": self.model, "logprobs": 0, "return_token_ids": True}

        def completions(answer: dict) -> list[Completion]:
            choices = sorted(answer["choices"], key=itemgetter("index"))
            if (indices := [choice["index"] for choice in choices]) != [*range(count)]:
                raise ValueError(f"completions with the indices {indices} instead of {[*range(count)]}")
            return [self._completion(choice, body["max_tokens"]) for choice in choices]

        return await self._request(http, "/v1/completions", body, read=completions)

    def _completion(self, choice: dict, most_tokens: int) -> Completion:
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        _check_reason(choice)
        if not 0 < len(token_ids) == len(logprobs) <= most_tokens:
            raise ValueError(
                f"{len(token_ids)} tokens and {len(logprobs)} log-probs, where {most_tokens} is the limit"
            )
        known = all(token_id >= 0 for token_id in token_ids)
        if not known or not all(_LOWEST_LOGPROB <= logprob <= _ROUNDING for logprob in logprobs):  # nor NaN
            raise ValueError("impossible tokens or log-probs")
        return Completion(token_ids, logprobs)

    async def answer(self, http: httpx2.AsyncClient, prompt: str | list[dict[str, str]], body: dict) -> Output:
        """One completion of a text or of a conversation, with sampling settings in the server's names."""
        is_text = isinstance(prompt, str)
        path = "/v1/completions" if is_text else "/v1/chat/completions"

        def read(answer: dict) -> Output:
            (choice,) = answer["choices"]
            text = choice["text"] if is_text else choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError(f"{text!r} as a text")
            return Output(text, int(answer["usage"]["completion_tokens"]), _check_reason(choice) == "length")

        return await self._request(
            http, path, body | {"model": self.model, "prompt" if is_text else "messages": prompt}, read
        )

    async def prompt_logprobs(self, http: httpx2.AsyncClient, tokens: list[int]) -> list[float]:
        """Log-probs of `tokens[1:]`, in nats."""

        def logprobs(answer: dict) -> list[float]:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens[1:], strict=True)]

        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return await self._request(http, "/v1/completions", body, read=logprobs)

    # ---- Weights ----

    async def hold(self, http: httpx2.AsyncClient, snapshot: Snapshot):
        """
        Load and check the weights of a snapshot, unless the server has them already. Raises [`ServerMismatchError`] if it
        cannot load them, or computes other log-probs than the trainer with them.
        """
        if await self._request(http, "/weight_info", read=itemgetter("weight_version")) == snapshot.version:
            return
        await self._reload(http, snapshot.directory)
        await self._compare(http, snapshot)
        # Last, so that a server which was interrupted anywhere above does not pass for one that holds the weights
        await self._request(http, "/update_weight_version", {"new_version": snapshot.version})

    async def _reload(self, http: httpx2.AsyncClient, directory: str):
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        try:
            await self._request(http, "/collective_rpc", body)
        except ServerError as error:
            await self._request(http, "/health")  # fails if the server has died, which is another problem
            raise ServerMismatchError(
                f"The vLLM server {self.url} could not load the weights in {directory}: {error}. Make sure that it was "
                "started with the model that is trained, and that it can read the directory: `sync_dir` of `vllm_server_kwargs` must be on "
                "a file system that trainer and servers share."
            ) from error
        # Requests that nobody waits for any more may still be running
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not await self._request(http, path, {}, read=itemgetter("success")):
            raise ServerError(f"{self.url}: the prefix cache, which belongs to older weights, could not be reset")

    async def _compare(self, http: httpx2.AsyncClient, snapshot: Snapshot):
        logprobs = await self.prompt_logprobs(http, snapshot.probe)
        gaps = [abs(theirs - ours) for theirs, ours in zip(logprobs, snapshot.reference, strict=True)]
        self.difference = sum(gaps) / len(gaps)
        if not self.difference <= snapshot.tolerance:  # also when it is not a number
            raise ServerMismatchError(
                f"After a weight sync, the log-probs of the vLLM server {self.url} (model {self.model!r} in {self.dtype}) "
                f"differ from the trainer's by {self.difference:.2e} nats on average, and `sync_tolerance` is "
                f"{snapshot.tolerance:g}. Check that it serves the model that is trained, without quantization or adapters, "
                f"and that every weight is in {snapshot.directory}, `lm_head.weight` included. If only the precision "
                "differs, raise the tolerance."
            )


def _check_reason(choice: dict) -> str:
    """Why a completion has ended, if it has: an aborted one raises a `ValueError`."""
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"a completion that ended by {choice['finish_reason']!r}")
    return choice["finish_reason"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 500 else f"{text[:500]}…"


def open_client() -> httpx2.AsyncClient:
    """A client without limits of its own, which goes to the servers directly, whatever proxy the environment names."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT), limits=limits, trust_env=False)
