"""A stand-in for a vLLM server that fails on command, for tests of what happens when servers fail."""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from lze_trl import LZEGRPOConfig
from lze_trl.settings import ServerSettings


DAMAGED = "cut off"  # faults besides a status code: an answer that ends in the middle of its JSON,
RESET = "reset"  # a connection that is closed without an answer,
SLOW = "slow"  # an answer that takes longer than the client waits,
SHORT = "short"  # an answer with a completion too few,
EMPTY = b""  # an answer without a body,
OTHER = b'{"data": []}'  # an answer of another form, as any other bytes are,
SILENT_503 = "silent"  # status 503 without a body, as vLLM's health check has it when its engine has died


@dataclass
class Reply:
    """A fault: any answer, byte for byte. `promised` is the length that its header names, by default the true one."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    promised: int | None = None


# vLLM's words for a dead engine
DEAD_ENGINE = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def http_settings(urls, **changes) -> SimpleNamespace:
    """Settings for generation over HTTP: the defaults of the config, without a config's effects on the process."""
    defaults = {field.name: field.default for field in fields(LZEGRPOConfig)}
    assert changes.keys() <= defaults.keys()
    changes["vllm_server_kwargs"] = asdict(ServerSettings(**changes.get("vllm_server_kwargs", {})))
    return SimpleNamespace(**(defaults | {"vllm_server_urls": urls} | changes))


class FakeVLLM:
    """
    Serves what the client uses, on a free port.

    A completion's tokens are the number of loads so far and its place in the group, so that a test sees which weights
    made it. Log-probs are -1 for weights that were loaded, up to a rounding that each load changes, and -2 for those it started with.
    """

    max_model_len = 32

    def __init__(
        self,
        port: int = 0,
        vocab_size: int = 10**6,
        host: str = "127.0.0.1",
        dtype: object = "torch.float32",
        lora: int = 0,
    ):
        self.vocab_size, self.dtype = vocab_size, str(dtype)
        self.lora = lora  # the highest rank of adapters that it loads
        self.faults: dict[str, list] = {}  # by path, used up one a request
        # The fault of a request that has none of these
        self.always: Callable[[str, dict], object] = lambda path, body: None
        self.times: list[tuple[str, float]] = []  # of each request, its path and when it came
        self.requests: Counter = Counter()
        self.bodies: list[dict] = []
        self.delay = 0.0
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        self._port, self._host = port, host
        self.start()

    def start(self):
        """Start, also again after `stop`: with the weights of the beginning then."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def setup(self):
                super().setup()
                fake.connections.add(self.connection)

            def do_POST(self):
                length = int(self.headers.get("content-length", 0))
                fake.answer(self, json.loads(self.rfile.read(length) or "{}"))

            do_GET = do_POST  # noqa: N815

        self.version, self.loads, self.engine_dead = "default", 0, False  # a dead engine fails every request
        self.adapters: dict[str, str] = {}  # name and directory
        self.connections: set[socket.socket] = set()
        self._http = ThreadingHTTPServer((self._host, self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def stop(self):
        """Die: connections are cut, new ones refused."""
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self.connections):
            _cut(connection)

    def answer(self, handler: BaseHTTPRequestHandler, body: dict):
        path = handler.path.split("?")[0]
        with self._lock:
            self.requests[path] += 1
            self.times.append((path, time.time()))
            fault = self.faults[path].pop(0) if self.faults.get(path) else self.always(path, body)
            self.running += path == "/v1/completions"
            self.most_running = max(self.most_running, self.running)
        try:
            if path == "/v1/completions":
                self.bodies.append(body)
                time.sleep(self.delay)
            self._respond(handler, *self._outcome(path, body, fault), fault)
        except OSError:
            handler.close_connection = True  # the client, or this server, has gone
        finally:
            with self._lock:
                self.running -= path == "/v1/completions"

    def _outcome(self, path: str, body: dict, fault) -> tuple[int, dict | str | None]:
        if fault == SILENT_503 or (self.engine_dead and path == "/health"):
            return 503, None
        if self.engine_dead:
            return 500, {"error": {"message": DEAD_ENGINE}}
        if isinstance(fault, Reply):
            return fault.status, None
        if isinstance(fault, int):
            return fault, {"error": {"message": f"fault {fault} on command"}}
        config = {"dtype": self.dtype, "logprobs_mode": "processed_logprobs"}
        cards = [{"id": "fake", "max_model_len": self.max_model_len, "parent": None}]
        cards += [{"id": name, "max_model_len": None, "parent": "fake"} for name in self.adapters]
        match path:
            case "/v1/completions" if body.get("model", "") not in ("", "fake", *self.adapters):
                return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
            case "/v1/completions":
                return self._complete(body, fault)
            case "/v1/load_lora_adapter" if self.lora:
                if body["lora_name"] in self.adapters:
                    return 400, {"error": {"message": f"{body['lora_name']} has already been loaded."}}
                self.adapters[body["lora_name"]] = body["lora_path"]
                self.loads += 1
                return 200, "Success: added."
            case "/v1/unload_lora_adapter" if self.lora:
                known = self.adapters.pop(body["lora_name"], None) is not None
                return (200, "Success: removed.") if known else (404, {"error": {"message": "cannot be found"}})
            case "/collective_rpc":
                self.loads += 1
            case "/update_weight_version":
                self.version = body["new_version"]
        own = {"model_config": config, "lora_config": {"max_lora_rank": self.lora} if self.lora else None}
        info = {"vllm_config": own, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": bool(self.lora)}}
        answers = {"/v1/models": {"data": cards}, "/server_info": info}
        answers |= {"/weight_info": {"weight_version": self.version}, "/collective_rpc": {"results": [None]}}
        answers |= {"/reset_prefix_cache": {"success": fault != "busy"}, "/update_weight_version": {}, "/health": {}}
        return (200, answers[path]) if path in answers else (404, {"error": {"message": "no such path"}})

    def _complete(self, body: dict, fault) -> tuple[int, dict]:
        if "prompt_logprobs" in body:
            logprob = -1.0 - 1e-12 * self.loads if self.loads else -2.0
            entries = [None, *({str(token): {"logprob": logprob}} for token in body["prompt"][1:])]
            return 200, {"choices": [{"index": 0, "prompt_logprobs": entries}]}
        if max(body["prompt"]) >= self.vocab_size:
            return 400, {"error": {"message": "out of vocabulary"}}
        scores = {"token_logprobs": [-0.5, -0.25]}
        choices = [
            {"index": i, "token_ids": [self.loads, i], "logprobs": dict(scores), "finish_reason": "stop"}
            for i in range(body["n"])
        ]
        if callable(fault):  # any change of the last completion
            fault(choices[-1])
        return 200, {"choices": choices[::-1][fault == SHORT :]}  # any order: the client has to look at the index

    def _respond(self, handler: BaseHTTPRequestHandler, status: int, content: dict | str | None, fault):
        data = (content if isinstance(content, str) else json.dumps(content)).encode() if content else b""
        if fault == RESET:
            handler.close_connection = True
            _cut(handler.connection)
            return
        if fault == SLOW:
            time.sleep(2.0)
        if fault == DAMAGED:
            data = data[: len(data) // 2]
        if isinstance(fault, bytes):
            data = fault
        reply = fault if isinstance(fault, Reply) else Reply(body=data)
        handler.send_response(status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(reply.body) if reply.promised is None else reply.promised))
        handler.end_headers()
        handler.wfile.write(reply.body)
        if reply.promised is not None:
            handler.close_connection = True
            _cut(handler.connection)


def _cut(connection: socket.socket):
    with contextlib.suppress(OSError):  # cut already
        connection.shutdown(socket.SHUT_RDWR)
