"""One vLLM server, spoken to over plain HTTP."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2


_CONNECT_TIMEOUT = 10.0  # a server that is up answers at once, however busy it is
_CACHE_RESET_ATTEMPTS = 25
_CACHE_RESET_INTERVAL = 0.2
# What reading an answer of another form raises
_MISREADINGS = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
_LARGEST_TOKEN = 2**31 - 1
_LOWEST_LOGPROB = -1e4  # vLLM sends -9999 for minus infinity
_ROUNDING = 1e-3  # by which a log-prob may be above 0
# What vLLM answers to every request once its engine has died. /health then answers 503, without a body
_ENGINE_DEAD = ("EngineDeadError", "EngineCore encountered an issue")
_UNNAMED = "default"  # the version of weights that a server was started with
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
    """One completion of C tokens."""

    token_ids: list[int]  # of length C, the end token included
    logprobs: list[float]  # of each token, in nats, as it was sampled


@dataclass(frozen=True)
class Answer:
    """One completion as text."""

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


class Difference(NamedTuple):
    """Absolute differences between a server's and the trainer's log-probs, in nats."""

    mean: float
    max: float


@dataclass(frozen=True)
class Identity:
    """What the trainer needs a server to be."""

    text: str  # to compare the tokenizers on
    token_ids: list[int]  # of the text, without special tokens
    last_token_id: int  # largest that the model or the tokenizer knows
    context_length: int  # tokens that a prompt and its completion take at least


class VLLMServer:
    """
    One vLLM server, asked through an `httpx2.AsyncClient`, and what is known of it. A request may take `request_timeout`
    seconds, generation included. It raises [`ServerError`] if the server fails, [`RequestRefusedError`] if it refuses.
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
        self.model = self.dtype = self.logprobs_mode = ""
        self.max_model_len = 0
        self.last_token_id = _LARGEST_TOKEN  # that it may send
        self.difference: Difference | None = None  # of the last checked load
        self.ready = False  # known to hold the current weights
        self.running = 0  # requests in progress
        self.problem: ServerError | None = None  # of the outage that it is in

    def note(self, error: ServerError) -> bool:
        """
        Note what is wrong, and return whether that is worth a report: when an outage begins, and when the server says that
        its engine has died, which explains the outage. What it says while it restarts does not.
        """
        if isinstance(self.problem, EngineDeadError):
            return False
        worth_it = self.problem is None or isinstance(error, EngineDeadError)
        self.problem = error
        return worth_it

    # ---- Requests ----

    async def _request(
        self, http: httpx2.AsyncClient, path: str, body: dict | None = None, read: Callable = lambda answer: answer
    ) -> Any:
        """
        Send a request, as a POST if it has a body, and return what `read` finds in the JSON of the answer. An answer that it
        cannot read is a failure of the server.
        """
        method = "GET" if body is None else "POST"
        where = f"{method} {self.url}{path}"
        try:
            # The timeout of the HTTP library is one between bytes, and a server may trickle them
            async with asyncio.timeout(self.request_timeout):
                response = await http.request(method, self.url + path, json=body)
        except TimeoutError as error:
            raise ServerError(f"{where}: no complete answer within {self.request_timeout:g} s") from error
        except httpx2.RequestError as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code >= 400:
            raise self._failure(path, response, f"{where} answered {response.status_code}: {_words(response)}")
        try:
            return read(response.json() if response.content else {})
        except json.JSONDecodeError as error:
            raise ServerError(f"{where} answered something that is not JSON: {_words(response)}") from error
        except _MISREADINGS as error:
            raise ServerError(f"{where} sent a damaged answer: {error!r}") from error

    def _failure(self, path: str, response: httpx2.Response, problem: str) -> Exception:
        if response.status_code in (408, 429) or response.status_code >= 500:
            if any(sign in response.text for sign in _ENGINE_DEAD) or (path == "/health" and not response.content):
                return EngineDeadError(
                    f"{problem.rstrip('.')}. Its engine has died, and its log says why. Restart it; if it runs on a CPU, "
                    "with `--no-enable-chunked-prefill`"
                )
            return ServerError(problem)
        if response.status_code == 404 and path != "/v1/completions":
            return ServerMismatchError(
                f"{problem}. Start the server {_WANTED}, with the variable VLLM_SERVER_DEV_MODE=1, which makes it serve "
                "weight reloading."
            )
        return RequestRefusedError(problem)

    async def learn_model(self, http: httpx2.AsyncClient):
        """Learn which model the server serves, and how long its context is."""
        await self._request(http, "/health")

        def own_card(models: dict) -> tuple[str, int]:
            card, *_ = (card for card in models["data"] if card.get("parent") is None)  # the others are adapters
            return _text(card["id"]), _whole(card["max_model_len"], "context length", 1)

        self.model, self.max_model_len = await self._request(http, "/v1/models", read=own_card)

    async def identify(self, http: httpx2.AsyncClient, identity: Identity):
        """Learn what the server serves, and raise [`ServerMismatchError`] unless that is what the trainer needs."""
        await self.learn_model(http)
        info = await self._request(http, "/server_info?config_format=json")
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
        tokens = await self._request(http, "/tokenize", body, read=itemgetter("tokens"))
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
        self.last_token_id = identity.last_token_id

    async def _knows(self, http: httpx2.AsyncClient, token: int) -> bool:
        try:
            await self._request(http, "/v1/completions", {"model": self.model, "prompt": [token], "max_tokens": 1})
        except RequestRefusedError:
            return False
        return True

    async def complete(self, http: httpx2.AsyncClient, prompt: list[int], count: int, body: dict) -> list[Completion]:
        """`count` completions of a prompt, with sampling settings in the server's names."""
        # vLLM refuses `n > 1` when decoding is greedy
        wanted = {"prompt": [prompt] * count} if body["temperature"] == 0 else {"prompt": prompt, "n": count}
        body = body | wanted | {"model": self.model, "logprobs": 0, "return_token_ids": True}

        def completions(answer: dict) -> list[Completion]:
            choices = sorted(answer["choices"], key=itemgetter("index"))
            if len(choices) != count:
                raise ValueError(f"{len(choices)} completions instead of {count}")
            if (indices := [choice["index"] for choice in choices]) != [*range(count)]:
                raise ValueError(f"completions with the indices {indices} instead of {[*range(count)]}")
            return [_completion(choice, body["max_tokens"], self.last_token_id) for choice in choices]

        return await self._request(http, "/v1/completions", body, read=completions)

    async def answer(self, http: httpx2.AsyncClient, prompt: str | list[dict[str, str]], body: dict) -> Answer:
        """One completion of a text or of a conversation, with sampling settings in the server's names."""
        is_text = isinstance(prompt, str)
        path = "/v1/completions" if is_text else "/v1/chat/completions"

        def read(answer: dict) -> Answer:
            (choice,) = answer["choices"]
            if choice["finish_reason"] not in ("stop", "length"):
                raise ValueError(f"generation ended by {choice['finish_reason']!r}")
            text = choice["text"] if is_text else choice["message"]["content"] or ""
            tokens = _whole(answer["usage"]["completion_tokens"], "completion length", 0, body["max_tokens"])
            return Answer(_text(text), tokens, choice["finish_reason"] == "length")

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

    async def weight_version(self, http: httpx2.AsyncClient) -> str | None:
        """What the weights were called by whoever loaded them into the running server; `None` if nobody did or it cannot tell."""
        try:
            version = await self._request(http, "/weight_info", read=lambda answer: _text(answer["weight_version"]))
        except (RequestRefusedError, ServerMismatchError):  # not in development mode
            return None
        return None if version == _UNNAMED else version

    async def hold(self, http: httpx2.AsyncClient, snapshot: Snapshot):
        """
        Load and check the weights of a snapshot, unless the server has them already. Raises [`ServerMismatchError`] if it
        cannot load them, or computes other log-probs than the trainer with them.
        """
        if await self._request(http, "/weight_info", read=itemgetter("weight_version")) == snapshot.version:
            return
        await self._reload(http, snapshot.directory)
        await self._check(http, snapshot)
        # Last, so that a server which was interrupted anywhere above does not pass for one that holds the weights
        await self._request(http, "/update_weight_version", {"new_version": snapshot.version})

    async def _reload(self, http: httpx2.AsyncClient, directory: str):
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        try:
            await self._request(http, "/collective_rpc", body)
        except EngineDeadError:
            raise
        except ServerError as error:
            await self._request(http, "/health")  # a server that has died answers no better
            raise ServerMismatchError(
                f"The vLLM server {self.url} could not load the weights in {directory}: {error}. Make sure that it was "
                "started with the model that is trained, and that it can read the directory: `sync_dir` of `vllm_server_kwargs` must be on "
                "a file system that trainer and servers share."
            ) from error
        for _ in range(_CACHE_RESET_ATTEMPTS):
            # Fails as long as a request that nobody waits for any more is running
            if await self._request(http, "/reset_prefix_cache", {}, read=itemgetter("success")):
                return
            await asyncio.sleep(_CACHE_RESET_INTERVAL)
        raise ServerError(f"{self.url}: the prefix cache, which belongs to older weights, could not be reset")

    async def _check(self, http: httpx2.AsyncClient, snapshot: Snapshot):
        logprobs = await self.prompt_logprobs(http, snapshot.probe)
        gaps = [abs(theirs - ours) for theirs, ours in zip(logprobs, snapshot.reference, strict=True)]
        self.difference = Difference(sum(gaps) / len(gaps), max(gaps))
        if not self.difference.mean <= snapshot.tolerance:  # also when it is not a number
            raise ServerMismatchError(
                f"After a weight sync, the log-probs of the vLLM server {self.url} differ from the trainer's by "
                f"{self.difference.mean:.2e} nats on average (at most {self.difference.max:.2e}) over {len(gaps)} probe "
                f"tokens, and `sync_tolerance` of `vllm_server_kwargs` is {snapshot.tolerance:g}. Look at: whether it serves the model that "
                f"is trained (it serves {self.model!r} in {self.dtype}), without quantization or adapters of its own; "
                f"whether every weight is in {snapshot.directory}, `lm_head.weight` included, also for tied embeddings; "
                "whether it says in its log that weights were not loaded. If only the precision differs, raise the "
                "tolerance."
            )


def _completion(choice: dict, most_tokens: int, last_token_id: int) -> Completion:
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"generation ended by {choice['finish_reason']!r}")
    for values, what in ((token_ids, "tokens"), (logprobs, "log-probs")):
        if not isinstance(values, list):
            raise ValueError(f"{_short(repr(values))} in place of a list of {what}")
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs")
    _whole(len(token_ids), "completion length", 1, most_tokens)
    for token in token_ids:
        _whole(token, "token", 0, last_token_id)
    for logprob in logprobs:
        if type(logprob) not in (int, float) or not _LOWEST_LOGPROB <= logprob <= _ROUNDING:
            raise ValueError(f"log-prob {_short(repr(logprob))}, which must be from {_LOWEST_LOGPROB:.0f} to 0")
    return Completion(token_ids, logprobs)


def _whole(value: Any, what: str, least: int, most: int | None = None) -> int:
    """A whole number that a server sent, checked: in JSON, `true` would be 1 and `7.0` would be 7."""
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{what} {_short(repr(value))}, which must be a whole number {allowed}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_short(repr(value))} in place of text")
    return value


def _words(response: httpx2.Response) -> str:
    """The server's own words, as far as they help."""
    try:
        return _short(response.json()["error"]["message"])
    except _MISREADINGS:
        return _short(response.text) or "(empty)"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 500 else f"{text[:500]}…"


def open_client() -> httpx2.AsyncClient:
    """A client without limits of its own, which goes to the servers directly, whatever proxy the environment names."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT), limits=limits, trust_env=False)
