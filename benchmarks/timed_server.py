"""
A server that answers like vLLM and takes the time that vLLM takes: real HTTP, continuous batching on the clock, no model.

    python -m benchmarks.timed_server [--port 8010] [--places 256] [--scale 0.03] …

At most `places` sequences are decoded at a time, the others wait in order. A step gives each of them one token and takes
max(`floor`, `per_sequence` · sequences) seconds; a prompt is prefilled once, in `prefill` seconds a token. All times are multiplied
by `scale`. Lengths are log-normal with the given `median`: σ within a group, σ/2 between prompts. Whether a completion passes follows
from its prompt's pass rate, of a Beta distribution that makes most groups dead. Both follow from prompt and seed alone, so that the order
of requests changes nothing. Completions have two tokens, whatever time they took: `PASS` or `FAIL`, and the end.
"""

import argparse
import asyncio
import hashlib
import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields

import numpy as np
import uvicorn
from rich.console import Console
from scipy.stats import beta, norm
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


PASS, FAIL = 5, 6


@dataclass(frozen=True)
class Timing:
    """What completions take, in seconds before `scale`, and how long they are, in tokens."""

    places: int = 256
    floor: float = 0.010
    per_sequence: float = 0.010 / 64
    prefill: float = 2e-6
    median: float = 500.0
    sigma: float = 0.5
    spread: float = (
        0.1  # both parameters of the Beta distribution of pass rates; 0.1: three groups of 8 in four are dead
    )
    scale: float = 1.0

    def step(self, sequences: int) -> float:
        """Return the seconds of a step of so many sequences."""
        return self.scale * max(self.floor, self.per_sequence * sequences)

    def lengths(self, prompt: list[int], seed: int, count: int) -> list[int]:
        """Return the lengths of some completions."""
        return [self.completion(prompt, seed, i)[0] for i in range(count)]

    def completion(self, prompt: list[int], seed: int, index: int) -> tuple[int, bool, float]:
        """Return the length, whether it passes, and the log-probability of that."""
        of_prompt, passes = _uniform(f"{prompt}"), _uniform(f"{seed}/{index}/pass")
        rate = float(beta.ppf(_uniform(f"{prompt}/rate"), self.spread, self.spread))
        deviation = self.sigma * (norm.ppf(_uniform(f"{seed}/{index}")) + norm.ppf(of_prompt) / 2)
        passed = passes < rate
        return (
            max(1, round(self.median * math.exp(deviation))),
            passed,
            math.log(max(rate if passed else 1.0 - rate, 1e-4)),
        )


def _uniform(text: str) -> float:
    digest = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(digest[:8], "big") + 0.5) / 2**64


def on_paper(
    timing: Timing, requests: Sequence[Sequence[int]], then: Mapping[int, Sequence[int]] | None = None
) -> float:
    """
    Return the seconds that requests take which all come at once, without a clock: each is the lengths of its sequences. When the first sequence of
    a request in `then` has ended, its further sequences come.
    """
    waiting = deque((length, -1 if j else i) for i, lengths in enumerate(requests) for j, length in enumerate(lengths))
    active: list[tuple[float, int]] = []
    further, place, seconds = dict(then or {}), 0.0, 0.0
    while waiting or active:
        while waiting and len(active) < timing.places:
            length, request = waiting.popleft()
            heapq.heappush(active, (place + length, request))
        pace = timing.step(len(active))
        end, request = heapq.heappop(active)
        seconds, place = seconds + (end - place) * pace, end
        waiting.extend((length, -1) for length in further.pop(request, ()))
    return seconds


class TimedEngine:
    """Sequences that are decoded together. All of them advance at the same pace, so that only arrivals and ends need to be seen."""

    def __init__(self, timing: Timing):
        self.timing = timing
        self.busy = 0.0  # seconds with at least one sequence
        self.tokens = 0
        self._waiting: deque[tuple[int, int, asyncio.Future]] = deque()  # tokens, prompt tokens, end
        self._active: list[tuple[float, int, asyncio.Future]] = []  # by the place at which they end
        self._place = 0.0  # tokens that a sequence would have got since the start
        self._number = itertools.count()
        self._arrived = asyncio.Event()

    async def decode(self, lengths: list[int], prompt_tokens: int):
        """Wait until as many sequences of one prompt are complete."""
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in lengths]
        for first, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            self._waiting.append((length, 0 if first else prompt_tokens, end))
        self._arrived.set()
        await asyncio.gather(*ends)
        self.tokens += sum(lengths)

    async def run(self):
        """Decode, without an end."""
        before = time.monotonic()
        while True:
            stall = 0.0
            while self._waiting and len(self._active) < self.timing.places:
                length, prompt_tokens, end = self._waiting.popleft()
                heapq.heappush(self._active, (self._place + length, next(self._number), end))
                stall += self.timing.scale * self.timing.prefill * prompt_tokens
            self._arrived.clear()
            if not self._active:
                await self._arrived.wait()
                before = time.monotonic()
                continue
            pace = self.timing.step(len(self._active))
            wait = (self._active[0][0] - self._place) * pace + stall - (time.monotonic() - before)
            full = len(self._active) == self.timing.places  # an arrival changes nothing
            with suppress(TimeoutError):
                await (
                    asyncio.sleep(max(wait, 0.0)) if full else asyncio.wait_for(self._arrived.wait(), max(wait, 0.0))
                )
            now = time.monotonic()
            self.busy += now - before
            self._place += max(now - before - stall, 0.0) / pace
            before = now
            while self._active and self._active[0][0] <= self._place + 1e-6:
                end = heapq.heappop(self._active)[2]
                if not end.done():
                    end.set_result(None)


def application(engine: TimedEngine) -> Starlette:
    """Return the part of vLLM's HTTP interface that training uses."""
    state = {"version": "default"}

    async def answer(request: Request) -> JSONResponse:
        body = await request.json() if request.method == "POST" else {}
        match request.url.path:
            case "/v1/models":
                return JSONResponse({"data": [{"id": "timed", "max_model_len": 2**20, "parent": None}]})
            case "/server_info":
                config = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
                return JSONResponse({"vllm_config": {"model_config": config}})
            case "/weight_info":
                return JSONResponse({"weight_version": state["version"]})
            case "/update_weight_version":
                state["version"] = body["new_version"]
            case "/v1/completions":
                return JSONResponse({"choices": await complete(body)})
        return JSONResponse({"success": True})

    async def complete(body: dict) -> list[dict]:
        if "prompt_logprobs" in body:
            entries = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
            return [{"index": 0, "prompt_logprobs": entries}]
        drawn = [engine.timing.completion(body["prompt"], body["seed"], i) for i in range(body["n"])]
        await engine.decode([length for length, *_ in drawn], len(body["prompt"]))
        return [
            {
                "index": i,
                "token_ids": [PASS if passed else FAIL, 1],
                "logprobs": {"token_logprobs": [logprob, 0.0]},
                "finish_reason": "stop",
            }
            for i, (_, passed, logprob) in enumerate(drawn)
        ]

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


@contextmanager
def serving(timing: Timing, port: int = 0) -> Iterator[tuple[str, TimedEngine]]:
    """Serve on 127.0.0.1, on a thread of its own; gives the URL and the engine."""
    engine = TimedEngine(timing)
    config = uvicorn.Config(application(engine), host="127.0.0.1", port=port, log_level="error", access_log=False)
    server = uvicorn.Server(config)

    async def serve():
        decoding = asyncio.create_task(engine.run())
        await server.serve()
        decoding.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    bound = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{bound}", engine
    finally:
        server.should_exit = True
        thread.join()


def dead_share(timing: Timing, group_size: int) -> float:
    """Return the expected share of groups without a gradient."""
    rates = beta.ppf((np.arange(10_000) + 0.5) / 10_000, timing.spread, timing.spread)
    return float((rates**group_size + (1 - rates) ** group_size).mean())


def main():
    """Run `python -m benchmarks.timed_server`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timed_server", description=__doc__.splitlines()[1])
    parser.add_argument("--port", type=int, default=8010)
    for field in fields(Timing):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    with serving(Timing(**{f.name: given[f.name] for f in fields(Timing)}), given["port"]) as (
        url,
        _,
    ):
        Console().print(url)
        threading.Event().wait()


if __name__ == "__main__":
    main()
