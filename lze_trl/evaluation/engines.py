"""Completions of problems, by a model in this process or by vLLM servers."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

import httpx2
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trl.trainer.utils import pad

from ..servers.client import Output, RequestRefusedError, VLLMServer
from ..servers.pool import ServerPool
from ..servers.weights import base_model
from .settings import Decoding, EvaluationError
from .tasks import Problem


logger = logging.getLogger(__name__)

_TAIL = 32  # tokens at the end of a prompt, in which a chat template may begin the thinking
# What vLLM says of a prompt that does not fit
_TOO_LONG = re.compile(r"maximum context(\s|\\n)+length|maximum model length|max_tokens must be at least 1")


@dataclass(frozen=True)
class SampleRequest:
    """One sample of one problem."""

    problem: Problem
    sample: int

    def seed(self, decoding: Decoding) -> int:
        """Compute a seed of 63 bits from the request alone, so that the sample depends neither on the others nor on their order."""
        digest = sha256(f"{decoding.seed}/{self.problem.id}/{self.sample}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


Answered = tuple[SampleRequest, Output]
"""A request with its completion."""


class Sampler(Protocol):
    """Completes requests, and yields each with its output as soon as it is there."""

    name: str

    def generate(self, requests: Iterable[SampleRequest], decoding: Decoding) -> Iterator[Answered]: ...


class TransformersEngine:
    """Generates with a model in this process, `batch_size` completions at a time. Results call the model `name`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, name: str):
        self.model, self.tokenizer, self.batch_size, self.name = model, tokenizer, batch_size, name
        self.synced = False  # whether all processes must take the same number of forward passes
        ends = model.generation_config.eos_token_id
        self.end_ids = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (self.end_ids or [0])[0]

    @classmethod
    def load(cls, model: str, batch_size: int, dtype: str | None = None) -> "TransformersEngine":
        """Load a checkpoint, an adapter or a Hub id. The type defaults to float32 on a CPU, and else to the checkpoint's."""
        on_gpu = torch.cuda.is_available()
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                model,
                dtype=dtype or ("auto" if on_gpu else "float32"),
                device_map="auto" if on_gpu else None,
                trust_remote_code=False,
                use_safetensors=True,  # no pickle
            )
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError, AttributeError, TypeError) as error:  # the last two for a wrong `dtype`
            told = f"The model {model!r} cannot be loaded: {error} Give the folder of a checkpoint with its tokenizer,"
            raise EvaluationError(f"{told} or a Hub id.") from error
        return cls(loaded.eval(), tokenizer, batch_size, model.rstrip("/"))

    def generate(self, requests: Iterable[SampleRequest], decoding: Decoding) -> Iterator[Answered]:
        """Complete requests in batches of similar prompt length, the longest first."""
        prompts = [(request, self._tokens(request.problem)) for request in requests]
        prompts.sort(key=lambda pair: -len(pair[1]))
        for begin in range(0, len(prompts), self.batch_size):
            asked, ids = zip(*prompts[begin : begin + self.batch_size], strict=True)
            outputs = self._complete(ids, [request.seed(decoding) for request in asked], decoding)
            yield from zip(asked, outputs, strict=True)

    def _tokens(self, problem: Problem) -> list[int]:
        if isinstance(problem.prompt, str):
            return self.tokenizer(problem.prompt)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise EvaluationError(f"{self.name!r} has no chat template. Use `--no_chat` for plain prompts.")
        encoded: Any = self.tokenizer.apply_chat_template(problem.prompt, add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"]

    def _complete(self, prompts: Sequence[list[int]], seeds: list[int], decoding: Decoding) -> list[Output]:
        ids = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
        processors = LogitsProcessorList()
        if decoding.temperature > 0:
            processors += [TemperatureLogitsWarper(float(decoding.temperature))]
            processors += [TopKLogitsWarper(decoding.top_k)] if decoding.top_k else []  # each sorts the vocabulary
            processors += [TopPLogitsWarper(decoding.top_p)] if decoding.top_p < 1 else []
            processors += [KeyedSampling(seeds)]
        settings = GenerationConfig(
            do_sample=False,  # `KeyedSampling` leaves one token to choose
            max_new_tokens=decoding.max_tokens,
            eos_token_id=self.end_ids or None,
            pad_token_id=self.pad_id,
        )
        longest = max(map(len, prompts))
        criteria = [StopTexts(self.tokenizer, decoding.stop, longest)] if decoding.stop else []
        with _replaced_settings(settings, self.model), torch.no_grad():
            generate: Any = self.model.generate
            rows = generate(
                input_ids=pad(ids, padding_value=self.pad_id, padding_side="left"),  # (B, longest)
                attention_mask=pad([torch.ones_like(row) for row in ids], padding_value=0, padding_side="left"),
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList(criteria),
                synced_gpus=self.synced,
            )
        ends = [str(self.tokenizer.decode(prompt[-_TAIL:])) for prompt in prompts]
        outputs = [self._read(row, decoding) for row in rows[:, longest:].tolist()]
        return [replace(output, prompt_end=end) for output, end in zip(outputs, ends, strict=True)]

    def _read(self, row: list[int], decoding: Decoding) -> Output:
        """Read a completion up to its padding, or its first stop text."""
        end = next((place for place, token in enumerate(row) if token in self.end_ids or token == self.pad_id), None)
        tokens = len(row) if end is None else end + (row[end] in self.end_ids)
        text = str(self.tokenizer.decode(row[:tokens], skip_special_tokens=True))
        cuts = [text.find(stop) for stop in decoding.stop if stop in text]
        return Output(text[: min(cuts)] if cuts else text, tokens, end is None and not cuts)


class KeyedSampling(LogitsProcessor):
    """Leaves each row one token, sampled with the row's own generator, so that the sample does not depend on the batch."""

    def __init__(self, seeds: list[int]):
        self.generators = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        cumulated = scores.double().softmax(-1).cumsum(-1)  # (B, V)
        drawn = torch.tensor([1.0 - generator.random() for generator in self.generators]).to(cumulated)  # in (0, 1]
        token = (cumulated < drawn[:, None] * cumulated[:, -1:]).sum(-1, keepdim=True)  # (B, 1)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


class StopTexts(StoppingCriteria):
    """Ends a completion at a stop text. The `stop_strings` of transformers may begin in the prompt, those of a server do not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int):
        self.tokenizer, self.stop, self.start = tokenizer, stop, start
        self.most = 1 + max(len(text.encode()) for text in stop)  # tokens that a text may take, and the one before

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        begin = max(self.start, input_ids.shape[1] - self.most)
        texts = self.tokenizer.batch_decode(input_ids[:, begin:], skip_special_tokens=True)
        ended = [any(stop in text for stop in self.stop) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


@contextmanager
def _replaced_settings(settings: GenerationConfig, model: PreTrainedModel) -> Iterator[None]:
    """Replace the model's settings: those, such as a repetition penalty, would fill in what the given ones leave out."""
    # An adapter passes its settings on to the model in it
    own = [(owner, owner.generation_config) for owner in {model, base_model(model)}]
    model.generation_config = settings
    try:
        yield
    finally:
        for owner, before in own:
            owner.generation_config = before


class ServerEngine:
    """Generates with connected vLLM servers of one model. Results call it `name`."""

    def __init__(self, pool: ServerPool, name: str):
        self.pool, self.name = pool, name

    @classmethod
    def connect(
        cls, urls: list[str], max_concurrent_requests: int = 64, recovery_timeout: float = 60.0
    ) -> "ServerEngine":
        """Wait until all servers are up, and check that they serve the same model."""
        pool = ServerPool(urls, max_concurrent_requests, 1800.0, recovery_timeout)
        pool.connect(recovery_timeout)
        served = {server.url: server.model for server in pool.servers}
        if len(set(served.values())) > 1:
            raise EvaluationError(f"The servers serve different models: {served}. Give those of one model.")
        return cls(pool, pool.servers[0].model)

    def generate(self, requests: Iterable[SampleRequest], decoding: Decoding) -> Iterator[Answered]:
        """Complete requests, in whatever order the servers finish."""
        shortest = min(server.max_model_len for server in self.pool.servers)
        if decoding.max_tokens is not None and decoding.max_tokens >= shortest:
            told = f"`max_tokens={decoding.max_tokens}` leaves no room for a prompt in the servers' context of {shortest} tokens."
            raise EvaluationError(f"{told} Lower it, or start the servers with a larger `--max-model-len`.")
        asked = list(requests)
        for place, output in self.pool.stream([partial(_answer, request, decoding) for request in asked]):
            yield asked[place], output


async def _answer(request: SampleRequest, decoding: Decoding, http: httpx2.AsyncClient, server: VLLMServer) -> Output:
    """Ask a server for a sample. A prompt that is too long counts as truncated, without an answer."""
    # All settings are given, because the server takes the others from the model's own
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
