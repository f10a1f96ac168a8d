"""One vLLM server over plain HTTP. Its answers are checked before anything uses them."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from operator import itemgetter
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx2

from ..redaction import without_secrets


_CONNECT_TIMEOUT, _GET_TIMEOUT = 10.0, 30.0  # a server that is up answers soon, however busy it is
# Raised by reading an answer of another form
_MISREADINGS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_MIN_LOGPROB = -1e4  # vLLM sends -9999 for minus infinity
_MAX_LOGPROB = 1e-3  # rounding may put a log-prob above 0
LORA_OPTIONS = "`--enable-lora` and the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
# A server ignores new weights if its log-probs stay the same, bit for bit, while at least so much has changed
_MIN_UNCHANGED_SYNCS = 2
_MIN_CHANGED_WEIGHTS = 0.01  # shares of the weights, summed over the syncs
_MIN_LOGPROB_CHANGE = 4e-6  # of the trainer's log-probs, in nats: some units in the last place of float32
# Most bytes of an answer: so many, and more for each token, with its text, its log-prob and their punctuation in JSON
_MAX_BYTES, _MAX_BYTES_PER_TOKEN = 2**24, 2**10


class UnansweredError(RuntimeError):
    """Raised if a request gets no answer. Another server, or the same one later, may answer it."""


class ServerError(UnansweredError):
    """Raised if a server fails or sends a damaged answer."""


class BusyError(UnansweredError):
    """Raised if a server asks to come again later, after `seconds` at the earliest. Nothing is wrong with the request."""

    def __init__(self, message: str, seconds: float):
        super().__init__(message)
        self.seconds = seconds


class RequestRefusedError(ValueError):
    """Raised if a server refuses a request that it has understood. Asking again does not help."""


class ServerMismatchError(ValueError):
    """Raised if a server has another model or other weights than it must have, or does not serve us."""


@dataclass(frozen=True)
class Completion:
    """One completion of C tokens."""

    token_ids: list[int]  # of length C, the end token included
    logprobs: list[float]  # of each token, in nats, as it was sampled
    truncated: bool = False  # whether the server says that a limit cut it off
    failure: str | None = None  # why there is no completion; the tokens then mean nothing


@dataclass(frozen=True)
class Output:
    """A completion as text."""

    text: str
    tokens: int  # its length, the end token included
    truncated: bool  # whether the limit of tokens cut it off
    # The end of the rendered prompt, which a chat template may have put there; empty if unknown, or if the text holds no thinking
    prompt_end: str = field(default="", compare=False)


@dataclass(frozen=True)
class Snapshot:
    """Weights that every server must have loaded, and log-probs to check that it has."""

    version: str  # different for every sync of every run, so that no restarted server has it
    directory: str  # absolute path of the checkpoint, readable by the servers
    probe: list[int]  # N tokens to compare log-probs on
    reference: list[float]  # the trainer's log-probs of `probe[1:]`
    tolerance: float  # largest mean absolute difference of the log-probs
    changed: float = 1.0  # share of the weights that have moved since the snapshot before
    # For a LoRA adapter, which the servers load beside their base model under the name `version`: the log-probs without it
    base: list[float] | None = None


class VLLMServer:
    """
    Sends requests to one vLLM server through an `httpx2.AsyncClient`, and holds what is known of it. Every request raises
    [`ServerError`] if the server fails or takes longer than `request_timeout` seconds, [`BusyError`] if it asks to come again later,
    and [`RequestRefusedError`] if it refuses.
    """

    def __init__(self, url: str, request_timeout: float):
        try:
            parts = urlsplit(url)
            if not parts.hostname or parts.port == 0 or parts.scheme not in ("http", "https") or set(url) & {*" ?#"}:
                raise ValueError
        except ValueError:  # also raised for a port that is not a number
            raise ValueError(
                "A vLLM server is given by its base URL with a port up to 65535, such as 'http://127.0.0.1:8000' "
                f"(`vllm_server_urls`), got {without_secrets(url).rpartition('@')[2]!r}."
            ) from None
        # Without the login, which libraries log, and without the suffix that OpenAI's clients want
        self.url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/").removesuffix("/v1")
        login = [unquote(text or "") for text in (parts.username, parts.password)]
        self._auth = httpx2.BasicAuth(*login) if any(login) else None
        self.host = str(parts.hostname)
        self._seconds = {"GET": min(request_timeout, _GET_TIMEOUT), "POST": request_timeout}  # limits by method
        self.model = self.dtype = self.logprobs_mode = ""
        # By which requests ask for the weights of the last load: the model's name, or an adapter's
        self.served_name = ""
        self.max_model_len = 0
        self.max_lora_rank = 0  # of adapters that it can load while it runs
        # For snapshots in a row with the same log-probs: these, the first snapshot, and `changed` of the others by version
        self._unchanged: tuple[list[float], Snapshot, dict[str, float]] | None = None
        self._chat_end: str | None = None  # the last tokens of a rendered conversation, once asked for
        # Mean absolute difference from the trainer's log-probs, in nats, after the last load
        self.difference: float | None = None
        self.ready = False  # known to hold the current weights
        self.running = 0  # requests in progress
        self.problem: UnansweredError | None = None  # the error of the present outage
        self.answered = 0  # requests since the last load
        self.outages = 0  # since it last answered a request
        self.failed: set[object] = set()  # requests that have failed here since then
        self.rests_until = 0.0  # in monotonic seconds

    async def _request(
        self,
        http: httpx2.AsyncClient,
        path: str,
        body: dict | None = None,
        read: Callable | None = lambda answer: answer,
        tokens: int = 0,
    ) -> Any:
        """Send a request, as a POST if it has a body. Returns what `read` finds in the JSON of the answer, which has about `tokens` tokens."""
        method = "GET" if body is None else "POST"
        where, limit = f"{method} {self.url}{path}", _MAX_BYTES + _MAX_BYTES_PER_TOKEN * tokens
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._seconds[method]),  # the HTTP library's timeout is one between bytes
                http.stream(method, self.url + path, json=body, auth=self._auth) as response,
            ):
                async for part in response.aiter_bytes():  # decompressed, in small parts
                    content += part
                    if len(content) > limit:
                        raise ServerError(f"{where}: an answer of more than {limit:,} bytes, the limit for it")
        except TimeoutError as error:
            raise ServerError(f"{where}: no complete answer within {self._seconds[method]:g} s") from error
        except httpx2.RequestError as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
        status, headers = response.status_code, response.headers
        if not 200 <= status < 300:
            problem = f"{where} answered {status}: {_short(content.decode(errors='replace')) or '(empty)'}"
            if status < 400:
                raise ServerError(f"{problem}, and sends us on to {_short(headers.get('location'))}. Name that")
            if status in (429, 503):
                raise BusyError(problem, _retry_after(headers))
            has_lost_adapter = status == 404 and body is not None and body.get("model", self.model) != self.model
            if status == 408 or status >= 500 or has_lost_adapter:
                raise ServerError(problem)
            if status == 404 and not path.startswith("/v1/"):
                raise ServerMismatchError(
                    f"{problem}. Start the server as vLLM's OpenAI API server, version 0.32 or later, with the variable "
                    "VLLM_SERVER_DEV_MODE=1, which makes it serve weight reloading."
                )
            raise (RequestRefusedError if status in (400, 413, 422) else ServerMismatchError)(problem)
        try:
            return read and read(json.loads(content) if content else {})
        except ServerMismatchError:
            raise
        except _MISREADINGS as error:
            raise ServerError(f"{where} sent a damaged answer: {_short(repr(error))}") from error

    async def learn_model(self, http: httpx2.AsyncClient, trains: bool = False):
        """Ask which model the server serves and how long its context is, and for a training how it computes."""
        await self._request(http, "/health")

        def own_card(models: dict) -> tuple[str, int]:
            card, *_ = (card for card in models["data"] if card.get("parent") is None)  # the others are adapters
            return card["id"], int(card["max_model_len"])

        self.model, self.max_model_len = await self._request(http, "/v1/models", read=own_card)
        self.served_name = self.model
        if not trains:
            return

        def settings(info: dict) -> tuple[str, str, int]:
            config, lora = info["vllm_config"]["model_config"], info["vllm_config"].get("lora_config")
            loads = lora and info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
            rank = int(lora["max_lora_rank"]) if loads else 0
            return config["dtype"].removeprefix("torch."), config["logprobs_mode"], rank

        path = "/server_info?config_format=json"
        self.dtype, self.logprobs_mode, self.max_lora_rank = await self._request(http, path, read=settings)

    async def complete(
        self, http: httpx2.AsyncClient, prompt: list[int], count: int, body: dict, vocabulary: int | None = None
    ) -> list[Completion]:
        """
        Return `count` completions of a prompt, with sampling settings in the server's names. Raises [`ServerMismatchError`] for a
        token beyond the `vocabulary` of the model in training.
        """
        # vLLM refuses `n > 1` when decoding is greedy
        wanted = {"prompt": [prompt] * count} if body["temperature"] == 0 else {"prompt": prompt, "n": count}
        body = {"model": self.model, **body, **wanted, "logprobs": 0, "return_token_ids": True}

        def completions(answer: dict) -> list[Completion]:
            choices = sorted(answer["choices"], key=itemgetter("index"))
            if (indices := [choice["index"] for choice in choices]) != [*range(count)]:
                raise ValueError(f"completions with the indices {indices} instead of {[*range(count)]}")
            if any(choice.get("prompt_token_ids") not in (None, prompt) for choice in choices):
                raise ValueError("completions of another prompt")
            return [self._completion(choice, most_tokens, vocabulary) for choice in choices]

        most_tokens = body["max_tokens"] or self.max_model_len
        tokens = count * (most_tokens + len(prompt))
        return await self._request(http, "/v1/completions", body, read=completions, tokens=tokens)

    def _completion(self, choice: dict, most_tokens: int, vocabulary: int | None) -> Completion:
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        truncated = _check_reason(choice) == "length"
        if not 0 < len(token_ids) == len(logprobs) <= most_tokens:
            raise ValueError(f"{len(token_ids)} tokens and {len(logprobs)} log-probs; the limit is {most_tokens}")
        self._refuse_nan(logprobs)
        known = all(type(token_id) is int and token_id >= 0 for token_id in token_ids)
        if not known or not all(_MIN_LOGPROB <= logprob <= _MAX_LOGPROB for logprob in logprobs):  # nor NaN
            raise ValueError("impossible tokens or log-probs")
        if vocabulary is not None and max(token_ids) >= vocabulary:
            raise ServerMismatchError(
                f"The vLLM server {self.url} (model {self.model!r}) sent the token {max(token_ids)}, and the model that is "
                f"trained has {vocabulary} tokens, up to {vocabulary - 1}. Serve the model that is trained."
            )
        return Completion(token_ids, logprobs, truncated)

    def _refuse_nan(self, logprobs: Sequence[float | None]):
        if None in logprobs:  # so vLLM sends NaN
            raise ServerMismatchError(
                f"The vLLM server {self.url} (model {self.model!r}) sent log-probs that are null: its logits are NaN. Look at the weights "
                "(loss and `grad_norm` of the last steps), at the server's `--dtype` (float16 overflows), and at its log and its GPU."
            )

    async def answer(self, http: httpx2.AsyncClient, prompt: str | list[dict[str, str]], body: dict) -> Output:
        """Return one completion of a text or of a conversation, with sampling settings in the server's names."""
        is_text = isinstance(prompt, str)
        path = "/v1/completions" if is_text else "/v1/chat/completions"
        if self._chat_end is None and not isinstance(prompt, str):
            self._chat_end = await self._end_of_chat(http, prompt)

        def read(answer: dict) -> Output:
            (choice,) = answer["choices"]
            message = {} if is_text else choice["message"]
            text = choice["text"] if is_text else message["content"] or ""
            if not isinstance(text, str):
                raise TypeError(f"{text!r} as a text")
            parsed = any(message.get(name) is not None for name in ("reasoning", "reasoning_content"))
            end = "" if is_text or parsed else self._chat_end or ""
            return Output(text, int(answer["usage"]["completion_tokens"]), _check_reason(choice) == "length", end)

        body = body | {"model": self.served_name, "prompt" if is_text else "messages": prompt}
        return await self._request(http, path, body, read, tokens=body.get("max_tokens") or self.max_model_len)

    async def _end_of_chat(self, http: httpx2.AsyncClient, messages: list[dict[str, str]]) -> str:
        """Return the end of a conversation as the server's template renders it; empty if the server does not say."""
        body = {"model": self.model, "messages": messages, "return_token_strs": True}
        with suppress(ServerError, ServerMismatchError, RequestRefusedError):
            tokens = await self._request(http, "/tokenize", body, read=itemgetter("token_strs"))
            return "".join(tokens[-32:]).replace("Ċ", "\n")  # byte-level vocabularies spell a line break so
        return ""

    async def prompt_logprobs(self, http: httpx2.AsyncClient, tokens: list[int], adapter: str = "") -> list[float]:
        """Return the log-probs of `tokens[1:]`, in nats, by the model, or by an adapter."""

        def logprobs(answer: dict) -> list[float]:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            found = [entry[str(token)]["logprob"] for entry, token in zip(entries, tokens[1:], strict=True)]
            self._refuse_nan(found)
            return [*map(float, found)]

        body: dict[str, Any] = {"model": adapter or self.model, "prompt": tokens}
        body |= {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return await self._request(http, "/v1/completions", body, read=logprobs, tokens=len(tokens))

    async def ensure_weights(self, http: httpx2.AsyncClient, snapshot: Snapshot):
        """
        Load and check the weights of a snapshot, unless the server has them already. Raises [`ServerMismatchError`] if it
        cannot load them, or computes other log-probs than the trainer with them.
        """
        if snapshot.base is not None:
            await self._ensure_adapter(http, snapshot, snapshot.base)
            return
        self.served_name = self.model
        if await self._request(http, "/weight_info", read=itemgetter("weight_version")) == snapshot.version:
            return
        await self._reload(http, snapshot.directory)
        await self._compare(http, snapshot)
        # Last, so that a server that was interrupted anywhere above is loaded again
        await self._request(http, "/update_weight_version", {"new_version": snapshot.version})

    async def _ensure_adapter(self, http: httpx2.AsyncClient, snapshot: Snapshot, base: list[float]):
        """Load and check an adapter, unless the server has it already, and unload older ones. A server without any has (re)started."""
        names = await self._request(http, "/v1/models", read=lambda answer: [card["id"] for card in answer["data"]])
        series = snapshot.version.rpartition("-")[0] + "-"
        own = [name for name in names if name.startswith(series)]
        if snapshot.version not in own or self.served_name != snapshot.version:
            if not own:
                await self._compare(http, snapshot, base=base)
            if snapshot.version not in own:
                body = {"lora_name": snapshot.version, "lora_path": snapshot.directory}
                await self._load(http, "/v1/load_lora_adapter", body, snapshot.directory, LORA_OPTIONS)
            await self._compare(http, snapshot, snapshot.version)
            self.served_name = snapshot.version
        for old in {*own} - {snapshot.version}:
            with suppress(RequestRefusedError, ServerMismatchError):  # the server has unloaded it already
                await self._request(http, "/v1/unload_lora_adapter", {"lora_name": old}, read=None)

    async def _load(self, http: httpx2.AsyncClient, path: str, body: dict, where: str, options: str):
        """Ask the server to load weights. Raises [`ServerMismatchError`], with the server's `options`, if it stays up and cannot."""
        try:
            await self._request(http, path, body, read=None)
        except (ServerError, RequestRefusedError, ServerMismatchError) as error:
            await self._request(http, "/health")  # fails if the server has died, which is another problem
            raise ServerMismatchError(
                f"The vLLM server {self.url} could not load the weights in {where}: {error}. Make sure that it was "
                f"started with {options}, and that it can read the directory: `sync_dir` of `vllm_server_kwargs` must be on "
                "a file system that trainer and servers share."
            ) from error

    async def _reload(self, http: httpx2.AsyncClient, directory: str):
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self._load(http, "/collective_rpc", body, directory, "the model that is trained")
        path = "/reset_prefix_cache?reset_running_requests=true"  # cancelled requests may still be running
        if not await self._request(http, path, {}, read=itemgetter("success")):
            raise ServerError(f"{self.url}: the prefix cache, which belongs to older weights, could not be reset")

    async def _compare(
        self, http: httpx2.AsyncClient, snapshot: Snapshot, adapter: str = "", base: list[float] | None = None
    ):
        """Compare the server's log-probs with the trainer's, or those of the model without an adapter with `base`."""
        logprobs = await self.prompt_logprobs(http, snapshot.probe, adapter)
        when = "Without an adapter" if base else "After a weight sync"
        self.difference = _mean_difference(logprobs, base or snapshot.reference)
        if not self.difference <= snapshot.tolerance:  # also when it is not a number
            raise ServerMismatchError(
                f"{when}, the log-probs of the vLLM server {self.url} (model {self.model!r} in {self.dtype}) "
                f"differ from the trainer's by {self.difference:.2e} nats on average, and `sync_tolerance` is "
                f"{snapshot.tolerance:g}. Check that it serves the model that is trained, without quantization or adapters, "
                f"and that every weight is in {snapshot.directory}, `lm_head.weight` included. If only the precision "
                "differs, raise the tolerance. Whole weights that it was sent stay until it starts again."
            )
        if base is None:
            self._refuse_unchanged_answers(snapshot, logprobs)

    def _refuse_unchanged_answers(self, snapshot: Snapshot, logprobs: list[float]):
        """
        Refuse a server that says that it has loaded weights and keeps its old ones. While these are within the tolerance, only one
        thing shows it: after several syncs in a row, each of its log-probs is the same, bit for bit, although the weights and the
        trainer's log-probs have changed.
        """
        if self._unchanged is None or logprobs != self._unchanged[0]:
            self._unchanged = logprobs, snapshot, {}
        _, first, changed_shares = self._unchanged
        if snapshot.version != first.version:
            changed_shares[snapshot.version] = snapshot.changed
        logprob_change = _mean_difference(snapshot.reference, first.reference)
        # What an adapter adds is rounded where it is added, however much of it has changed
        least = _MIN_LOGPROB_CHANGE if snapshot.base is None else snapshot.tolerance / 10
        syncs, changed = len(changed_shares), sum(changed_shares.values())
        if syncs >= _MIN_UNCHANGED_SYNCS and changed >= _MIN_CHANGED_WEIGHTS and logprob_change >= least:
            raise ServerMismatchError(
                f"The vLLM server {self.url} says that it has loaded new weights, but its log-probs were the same after {syncs} "
                f"syncs in a row, in which {changed / syncs:.1%} of the weights changed each time and the trainer's log-probs moved by "
                f"{logprob_change:.1e} nats. So it still samples with old weights. Check that it is vLLM 0.32 or later with "
                f"VLLM_SERVER_DEV_MODE=1, that no proxy answers in its place, and that it reads {snapshot.directory} and not a copy."
            )


def _mean_difference(logprobs: list[float], others: list[float]) -> float:
    return sum(abs(own - other) for own, other in zip(logprobs, others, strict=True)) / len(logprobs)


def _check_reason(choice: dict) -> str:
    """Return why a completion has ended, `"stop"` or `"length"`. Raises a `ValueError` for an aborted one."""
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"a completion that ended by {choice['finish_reason']!r}")
    return choice["finish_reason"]


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that an answer asks to wait, as a number or as a date; 0 if it names none."""
    wanted = headers.get("retry-after", "")
    with suppress(ValueError, OverflowError):
        date = None if wanted.isdecimal() else parsedate_to_datetime(wanted)
        return float(wanted) if date is None else max(0.0, date.timestamp() - time.time())
    return 0.0


def _short(value: Any) -> str:
    text = without_secrets(str(value))
    return text if len(text) <= 500 else f"{text[:500]}…"


def open_client() -> httpx2.AsyncClient:
    """Make a client without limits of its own, which ignores the proxies that the environment names."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout, plain = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT), {"accept-encoding": "identity"}
    return httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False, headers=plain)
