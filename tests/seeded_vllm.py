"""A stand-in for a vLLM server whose completions follow from weights, prompt and seed, and take any time."""

import hashlib
import random
import sys
import threading
import time
from pathlib import Path

import tiny
from fake_vllm import FakeVLLM


EOS = 1


class SeededVLLM(FakeVLLM):
    """
    Completions follow from the weights that are loaded, the prompt, the seed and the place in the group. `delays` are the
    shortest and longest seconds that a request takes; with every `restart_every`-th request it loses its weights. With `by_loads`, the number
    of loads stands for the weights: two processes have those of one up to rounding.
    """

    def __init__(self, delays=(0.0, 0.0), restart_every: int = 0, by_loads: bool = False, **kwargs):
        kwargs |= {"vocab_size": len(tiny.tokenizer())}
        self.delays, self.restart_every, self.by_loads = delays, restart_every, by_loads
        self.weights, self.versions = "", []  # content hash; of each request for completions
        self.order: list[tuple[str, int]] = []  # ("begun" or "ended", n) of each request
        self._rng, self._guard = random.Random(), threading.Lock()
        super().__init__(**kwargs)

    def _outcome(self, path, body, fault):
        if path == "/collective_rpc":
            files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
            self.weights = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        status, content = super()._outcome(path, body, fault)
        if path == "/collective_rpc" and self.by_loads:
            self.weights = str(self.loads)
        return status, content

    def _complete(self, body, fault):
        if "prompt_logprobs" in body:
            return super()._complete(body, fault)
        with self._guard:
            self.versions.append((self.weights, tuple(body["prompt"]), body["n"]))
            self.order.append(("begun", body["n"]))
            again = self.restart_every and len(self.versions) % self.restart_every == 0
            if again:
                self.version, self.weights = "default", ""
            weights = self.weights
        # Prompts with one answer take longest
        time.sleep(self.delays[1] if body["prompt"][0] % 2 else self._rng.uniform(*self.delays))
        if not weights or weights != self.weights:  # a restart ends all requests
            return 500, {"error": {"message": "restarted"}}
        with self._guard:
            self.order.append(("ended", body["n"]))
        return 200, {"choices": [self._choice(body, weights, i) for i in range(body["n"])]}

    def _choice(self, body, weights, i):
        digest = hashlib.sha256(f"{weights}|{body['prompt']}|{body['seed']}|{i}".encode()).digest()
        length = 1 + digest[0] % body["max_tokens"]
        ids = [4 + byte % (self.vocab_size - 4) for byte in digest[1 : 1 + length]]
        if body["prompt"][0] % 2:  # half of the prompts have one answer
            ids = [5, 6][: len(ids)]
        stops = len(ids) < body["max_tokens"]
        ids += [EOS] * stops
        logprobs = [-(1 + byte % 8) / 8 for byte in digest[-len(ids) :]]
        reason = "stop" if stops else "length"
        return {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}


if __name__ == "__main__":  # python tests/seeded_vllm.py HOST PORT
    SeededVLLM(host=sys.argv[1], port=int(sys.argv[2]))
    threading.Event().wait()
