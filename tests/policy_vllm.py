"""A stand-in for a vLLM server that samples from a real model: with the weights that it has loaded, or with adapters that PEFT reads."""

import copy
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file

import tiny
from fake_vllm import FakeVLLM


EOS = 1


def load_weights(directory) -> dict[str, torch.Tensor]:
    return {n: t for file in Path(directory).glob("*.safetensors") for n, t in load_file(file).items()}


class PolicyVLLM(FakeVLLM):
    """
    Computes in a precision; if `deaf`, it loads no weights. With every `restart_every`-th request for completions it loses all that it
    was sent.
    """

    def __init__(
        self, model, dtype: torch.dtype = torch.float32, deaf: bool = False, restart_every: int = 0, **kwargs
    ):
        self.base, self.deaf, self.restart_every = copy.deepcopy(model).to(dtype).eval(), deaf, restart_every
        # Name, prompt and count of each request for completions
        self.asked: list[tuple[str, tuple[int, ...], int]] = []
        super().__init__(vocab_size=len(tiny.tokenizer()), dtype=dtype, **kwargs)

    def start(self):
        self.policies = {"fake": copy.deepcopy(self.base)}
        super().start()

    def _outcome(self, path, body, fault):
        if path == "/v1/completions" and "prompt_logprobs" not in body:
            self.asked.append((body["model"], tuple(body["prompt"]), body.get("n", 1)))
            if self.restart_every and len(self.asked) % self.restart_every == 0:
                self.adapters, self.version, self.policies = {}, "default", {"fake": copy.deepcopy(self.base)}
        status, content = super()._outcome(path, body, fault)
        if status == 200:
            if path == "/collective_rpc" and not self.deaf:
                self.policies["fake"].load_state_dict(load_weights(body["kwargs"]["weights_path"]))
            if path == "/v1/load_lora_adapter":
                policy = PeftModel.from_pretrained(copy.deepcopy(self.base), body["lora_path"])
                self.policies[body["lora_name"]] = self.base if self.deaf else policy.to(self.base.dtype).eval()
        return status, content

    def _scores(self, name, ids):
        with torch.no_grad():
            return self.policies[name](torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def _complete(self, body, fault):
        prompt, name = body["prompt"], body["model"]
        if "prompt_logprobs" in body:
            scores = self._scores(name, prompt)
            entries = [{str(token): {"logprob": float(scores[i, token])}} for i, token in enumerate(prompt[1:])]
            return 200, {"choices": [{"index": 0, "prompt_logprobs": [None, *entries]}]}
        return 200, {"choices": [self._choice(body, name, prompt, i) for i in range(body["n"])]}

    def _choice(self, body, name, prompt, i):
        rng, ids, logprobs = torch.Generator().manual_seed(body["seed"] // 7 + i), [], []
        while len(ids) < body["max_tokens"] and EOS not in ids:
            scores = self._scores(name, prompt + ids)[-1].double()
            sums = scores.exp().cumsum(0)
            token = int(torch.searchsorted(sums, sums[-1] * torch.rand(1, generator=rng, dtype=torch.float64)))
            ids.append(token)
            logprobs.append(float(scores[token]))
        reason = "stop" if EOS in ids else "length"
        return {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
