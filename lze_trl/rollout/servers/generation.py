"""Completions from vLLM servers over plain HTTP, for TRL's trainers."""

import atexit
import hashlib
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.extras.profiling import ProfilingContext

from .client import Completion, Snapshot
from .pool import Group, ServerPool
from .sync import (
    SyncDirectory,
    SyncReport,
    identity_of,
    logprobs,
    probe_tokens,
    tolerance_for,
)
from .weights import export_weights


logger = logging.getLogger(__name__)

# Fields of a request that decide what an answer looks like
_RESERVED = (
    "model",
    "prompt",
    "n",
    "logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "stream",
    "echo",
    "use_beam_search",
)

Result = TypeVar("Result")


class HTTPGeneration:
    """
    Generates with one or several vLLM servers, and keeps their weights those of the model in training.

    Does for `vllm_mode="http"` what [`~trl.generation.vllm_generation.VLLMGeneration`] does for TRL's modes, and has
    its methods. Everything goes over HTTP, the weights through a file system, so that neither vLLM nor CUDA is needed
    where the trainer runs. Only the main process talks to the servers.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model in training.
        accelerator ([`~accelerate.Accelerator`]):
            The processes.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        urls (`list[str]`):
            Base URLs of the servers, such as `["http://127.0.0.1:8000"]`.

        > Parameters of the servers

        sync_dir (`str`, *optional*):
            Directory on a file system that trainer and servers share. Defaults to shared memory if every server runs on
            this host.
        tolerance (`float`, *optional*):
            Largest mean absolute difference between a server's and the trainer's log-probs after a sync, in nats.
            Defaults to 1e-3 where both compute in float32, and to 0.05 otherwise.
        max_concurrent_requests (`int`, *optional*, defaults to `64`):
            Prompts that one server completes at a time.
        server_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds to wait for the servers to be up at the start.
        request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds after which a request is given up and sent again.
        recovery_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds to wait for a server to return when none is left.

        > Parameters of generation

        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature. 0 decodes greedily.
        top_p (`float`, *optional*, defaults to `1.0`):
            Probability mass of the tokens to sample from.
        top_k (`int`, *optional*, defaults to `0`):
            Number of the tokens to sample from; 0 for all.
        min_p (`float`, *optional*):
            Smallest probability of a token to sample, relative to that of the likeliest.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that are there already; 1.0 for none.
        max_completion_length (`int`, *optional*, defaults to `256`):
            C, the largest number of tokens of a completion.
        structured_outputs_regex (`str`, *optional*):
            Regular expression that completions must match.
        generation_kwargs (`dict`, *optional*):
            Further fields of vLLM's requests, such as `stop`. They win over the parameters above.
        seed (`int`, *optional*):
            Makes sampling repeatable: every group of every batch has a seed of its own, whichever server completes it.

    Raises:
        `ConnectionError`: If a server is not up in time.
        [`ServerMismatchError`]: If a server has another model, tokenizer or context length.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        processing_class: PreTrainedTokenizerBase,
        urls: list[str],
        sync_dir: str | None = None,
        tolerance: float | None = None,
        max_concurrent_requests: int = 64,
        server_timeout: float = 240.0,
        request_timeout: float = 1800.0,
        recovery_timeout: float = 600.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        max_completion_length: int = 256,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
    ):
        self.model = model
        self.accelerator = accelerator
        self.processing_class = processing_class
        self.tolerance = tolerance
        self.seed = seed
        self.batches = 0  # batches generated so far; part of the seeds, so restore it when a run resumes
        self.last_sync: SyncReport | None = None
        self.max_completion_length = max_completion_length
        self._body = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": 0.0 if min_p is None else min_p,
            "repetition_penalty": repetition_penalty,
            "max_tokens": max_completion_length,
        }
        if structured_outputs_regex is not None:
            self._body["structured_outputs"] = {"regex": structured_outputs_regex}
        reserved = [name for name in _RESERVED if name in (generation_kwargs or {})]
        if reserved:
            raise ValueError(f"`generation_kwargs` must not hold {reserved}, which the trainer sets. Leave them out.")
        self._body |= generation_kwargs or {}
        self.pool = ServerPool(urls, max_concurrent_requests, request_timeout, recovery_timeout)
        self._probe, self._dtype = self._on_main_process(lambda: self._connect(sync_dir, server_timeout))

    def _connect(self, sync_dir: str | None, server_timeout: float) -> tuple[list[int], torch.dtype]:
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        # The prompt takes at least one token
        identity = identity_of(base, self.processing_class, context_length=self.max_completion_length + 1)
        self.pool.connect(identity, server_timeout)
        servers = self.pool.servers
        dtypes = {server.url: server.dtype for server in servers}
        if len(set(dtypes.values())) != 1:
            raise ValueError(
                f"The vLLM servers compute in different types: {dtypes}. Start all with the same `--dtype`."
            )
        self._warn_about_logprobs()
        self._context_length = min(server.max_model_len for server in servers)
        self._directory = SyncDirectory(sync_dir, servers)
        atexit.register(self._directory.remove)
        probe = probe_tokens(base, self.processing_class, self._context_length)
        return probe, getattr(torch, servers[0].dtype)

    def _warn_about_logprobs(self):
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        for server in self.pool.servers:
            if server.logprobs_mode != "processed_logprobs" and self._body | plain != self._body:
                logger.warning(
                    "The vLLM server %s runs with `--logprobs-mode %s`: its log-probs are not those that it sampled with, "
                    "which biases the importance sampling correction. Restart it with `--logprobs-mode "
                    "processed_logprobs`, or set `vllm_importance_sampling_correction=False`.",
                    server.url,
                    server.logprobs_mode,
                )

    def sync_weights(self):
        """
        Give every server the weights of the model as they are now, and check that it computes with them.

        Collective: every process must call it. A server that is down gets the weights when it returns.

        Raises:
            [`ServerMismatchError`]: If a server does not compute the trainer's log-probs.
            `ConnectionError`: If no server is left and none returns in time.
            `OSError`: If the weights cannot be written.
        """
        begin = time.perf_counter()
        version, directory = self._on_main_process(lambda: self._directory.next())
        size, failure = 0, None
        try:
            size = export_weights(self.model, self.accelerator, directory, dtype=self._dtype)
        except Exception as error:  # perhaps on the main process alone, while the others go on
            failure = error
        reference = logprobs(self.model, self._probe, self.accelerator.device)
        exported = time.perf_counter()

        def load():
            if failure is not None:
                raise failure
            tolerance = self.tolerance
            if tolerance is None:
                tolerance = tolerance_for(self.model, self.accelerator, self.pool.servers)
            held = self.pool.load(Snapshot(version, str(directory), self._probe, reference, tolerance))
            differences = {server.url: server.difference for server in held}
            return SyncReport(version, size, exported - begin, time.perf_counter() - exported, differences)

        report = self._on_main_process(load)
        if failure is not None:  # on this process alone
            raise failure
        self.last_sync = report
        logger.debug("Synced the vLLM servers: %s", self.last_sync)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: ProfilingContext | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """
        Complete prompts. Collective: every process calls it with its own rows.

        Args:
            prompts (`list[list[int]]`):
                Token ids of the rows of this process. Over all processes, each prompt is there `num_generations` times
                in a row; a group may begin on one process and end on another.
            images (`list`, *optional*):
                Must hold no image.
            num_generations (`int`):
                G, completions of each prompt.
            profiler ([`~trl.extras.profiling.ProfilingContext`], *optional*):
                Context to generate in.

        Returns:
            `tuple`: For the rows of this process, prompt ids, completion ids, log-probs and the tokens these are of. The
            latter two have a last dimension of 1, as TRL's have.
        """
        if images is not None and any(image is not None for image in images):
            raise ValueError("Images are not supported with `vllm_mode='http'`. Use `vllm_mode='server'` for them.")
        sizes = gather_object([len(prompts)])
        rows = gather_object(prompts)
        unique = _first_of_each_group(rows, num_generations)
        with profiler or nullcontext():
            groups = self.generate_groups(unique, [num_generations] * len(unique))
        completions = [completion for group in groups for completion in group]
        begin = sum(sizes[: self.accelerator.process_index])
        local = completions[begin : begin + len(prompts)]
        return (
            prompts,
            [completion.token_ids for completion in local],
            [[[logprob] for logprob in completion.logprobs] for completion in local],
            [[[token] for token in completion.token_ids] for completion in local],
        )

    def generate_groups(self, prompts: list[list[int]], counts: list[int]) -> list[list[Completion]]:
        """
        Complete each prompt as often as asked. Collective: every process calls it with the same arguments.

        Args:
            prompts (`list[list[int]]` of length P):
                Token ids of the prompts.
            counts (`list[int]` of length P):
                Completions of each prompt, at least 1.

        Returns:
            `list[list[Completion]]` of length P: The groups, the same on every process, each of exactly its size.
        """
        groups = [
            Group(prompt, count, self._seeded(index))
            for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        self.batches += 1
        return self._on_main_process(lambda: self._complete(groups))

    def close(self):
        """Remove the weights from the sync directory."""
        if self.accelerator.is_main_process:
            self._directory.remove()

    def _complete(self, groups: list[Group]) -> list[list[Completion]]:
        longest = max((len(group.prompt) for group in groups), default=0)
        if longest >= self._context_length:
            raise ValueError(
                f"A prompt has {longest} tokens, and the context of the vLLM servers is {self._context_length}. Start them "
                "with a larger `--max-model-len`, or leave such prompts out of the dataset."
            )
        if longest + self.max_completion_length > self._context_length:
            warnings.warn(
                f"The context of the vLLM servers ({self._context_length} tokens) cuts completions of the longest prompts "
                f"short of `max_completion_length={self.max_completion_length}`. Start them with a larger "
                "`--max-model-len`.",
                stacklevel=2,
            )
        return self.pool.complete(groups)

    def _seeded(self, index: int) -> dict[str, Any]:
        if self.seed is None:
            return self._body
        digest = hashlib.sha256(f"{self.seed}/{self.batches}/{index}".encode()).digest()
        return {"seed": int.from_bytes(digest[:8], "big") >> 1} | self._body  # vLLM takes signed 64-bit seeds

    def _on_main_process(self, function: Callable[[], Result]) -> Result:
        """Run a function on the main process. Every process gets its result, or fails with it instead of waiting."""
        result, failure = None, None
        if self.accelerator.is_main_process:
            try:
                result = function()
            except Exception as error:
                failure = error
        shared = [result, None if failure is None else f"{type(failure).__name__}: {failure}"]
        broadcast_object_list(shared, from_process=0)
        if failure is not None:
            raise failure
        if shared[1] is not None:
            raise RuntimeError(f"The main process, which talks to the vLLM servers, failed. {shared[1]}")
        return shared[0]


def _first_of_each_group(rows: list[list[int]], num_generations: int) -> list[list[int]]:
    """One prompt of each group; all of a group must be the same, for the server completes one prompt G times."""
    groups = [rows[begin : begin + num_generations] for begin in range(0, len(rows), num_generations)]
    for index, group in enumerate(groups):
        if len(group) != num_generations or any(prompt != group[0] for prompt in group):
            raise ValueError(
                f"Every prompt must be there `num_generations={num_generations}` times in a row over all processes; group "
                f"{index} is not. Use a sampler that repeats prompts, such as `trl.trainer.utils.RepeatSampler`."
            )
    return [group[0] for group in groups]
