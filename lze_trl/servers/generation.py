"""Completions from vLLM servers over plain HTTP, for TRL's trainers."""

import ctypes
import hashlib
import logging
import math
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..fingerprint import fingerprint
from .adapters import only_adapter
from .client import LORA_OPTIONS, Completion, ServerMismatchError, Snapshot
from .pool import PromptRequest, RequestLoop, ServerPool
from .sync import logprobs, probe_tokens, shared_directory, tolerance_for
from .weights import ChangedShare, base_model, export_adapter, export_weights, untied_weights


logger = logging.getLogger(__name__)

# Fields of a request that decide the form of an answer
_RESERVED = (
    "model", "prompt", "n", "logprobs", "prompt_logprobs", "return_token_ids", "seed", "stream", "echo", "use_beam_search",
)  # fmt: skip
# Sampling settings, with the values that leave log-probs as the model computes them
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


PATIENCE = 60.0
"""Seconds that a training waits for a reward function that another thread has called to look ahead."""

Foresight = Callable[[dict[int, tuple[list[int], list[Completion]]]], Sequence[tuple[int, int]]]
"""
Predicts what the next call will ask for: pairs of the place of a prompt and a number of further completions. It gets the prompt
tokens and completions, by place, of the groups of this call that have been completed since it was last called.
"""


class HTTPGeneration:
    """
    Generates with one or several vLLM servers, and sends them the weights of the model in training.

    Does for `vllm_mode="http"` what [`~trl.generation.vllm_generation.VLLMGeneration`] does for TRL's modes, and has its
    methods. The weights go through a file system, so that neither vLLM nor CUDA is needed where the trainer runs. Every process
    must call every method; only the main process talks to the servers.
    """

    class Begun(Exception):  # noqa: N818 - not an error
        """Raised in place of completions by a call that only begins its requests."""

    def __init__(
        self, model: nn.Module, accelerator: Accelerator, processing_class: PreTrainedTokenizerBase, args: Any
    ):
        self.model, self.accelerator, self.processing_class, self.args = model, accelerator, processing_class, args
        self.batches = Counter(train=0, eval=0)  # generated so far, by mode; part of the seeds
        self._syncs = 0
        self._changed_share = ChangedShare()
        self._last_changed = math.nan  # share of the weights that the last sync of whole weights has moved
        self._base: tuple[list[int], list[float]] | None = None  # fingerprint and log-probs without the adapter
        self._adapter_name = ""  # by which requests ask for the adapter that the servers have
        self.before_sync: Callable[[], None] = lambda: None  # called before the servers get other weights
        # Called for each row with the tokens of its prompt and completion, whether it is truncated, and why it has none
        self.note: Callable[[list[int], list[int], bool, str | None], None] = lambda *row: None
        self._foresight: Foresight | None = None  # of the present call
        self._begins = False  # whether calls only begin their requests
        self._may_look_ahead = True  # False once a reward function had to be stopped
        self._foresight_began: float | None = None  # when its running call began, in monotonic seconds
        self._surplus = 0  # rows at the end of this process's next call that are not completed
        # On the main process, by seed and number of completions: requests of the next call, and of the call after it
        self._under_way: dict[tuple[int, int], Future] = {}
        self._looked_ahead: dict[tuple[int, int], Future] = {}
        self._loop: RequestLoop | None = None
        self._lookahead_thread: threading.Thread | None = None
        given = args.generation_kwargs or {}
        if reserved := [name for name in _RESERVED if name in given]:
            raise ValueError(f"`generation_kwargs` must not hold {reserved}, which the trainer sets. Leave them out.")
        self._body = {name: getattr(args, name) for name in _NEUTRAL}
        self._body |= {"min_p": args.min_p or 0.0, "max_tokens": args.max_completion_length}
        if args.vllm_structured_outputs_regex is not None:
            self._body["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
        self._body |= given
        kwargs = args.vllm_server_kwargs
        limits = kwargs["max_concurrent_requests"], kwargs["request_timeout"], kwargs["recovery_timeout"]
        if (untied := untied_weights(model)) is not None:
            raise ValueError(
                f"The config ties {untied[0]!r} to {untied[1]!r} (`tie_word_embeddings`), and adapters train them apart, which a vLLM "
                "server cannot serve. Leave both out of `target_modules` and `modules_to_save`; or list both in `modules_to_save` with "
                "`ensure_weight_tying=True`."
            )
        self.pool = ServerPool(args.vllm_server_urls, *limits)
        self._vocabulary = base_model(model).config.get_text_config().vocab_size
        connected = self._on_main_process(self._connect)
        self._probe, self._dtype, self.context_length, self._adapter, self._payload = connected
        in_bfloat16 = torch.bfloat16 in (self._dtype, base_model(model).dtype) or accelerator.mixed_precision == "bf16"
        self._precision = torch.bfloat16 if in_bfloat16 else self._dtype

    def _connect(self) -> tuple[list[int], torch.dtype, int, str | None, str]:
        """Wait for the servers. Returns the probe, their type, their context length, the adapter and the payload in words."""
        base = base_model(self.model)
        self.pool.connect(self.args.vllm_server_timeout, trains=True)
        servers = self.pool.servers
        is_processed = all(server.logprobs_mode == "processed_logprobs" for server in servers)
        if not is_processed and self._body | _NEUTRAL != self._body:
            logger.warning(
                "The vLLM servers return log-probs that are not those that they sample with, which biases the importance "
                "sampling correction. Start them with `--logprobs-mode processed_logprobs`, or set "
                "`vllm_importance_sampling_correction=False`."
            )
        self._directory = shared_directory(self.args.vllm_server_kwargs["sync_dir"], servers)
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)  # with the trainer, or the program
        context_length = min(server.max_model_len for server in servers)
        probe = probe_tokens(base, self.processing_class, context_length)
        return probe, getattr(torch, servers[0].dtype), context_length, *self._choose_payload()

    def _choose_payload(self) -> tuple[str | None, str]:
        """Return the name of the adapter if it can be sent alone, and in words what a sync sends."""
        try:
            if self.args.vllm_server_kwargs["sync"] == "merged":
                raise ValueError("`sync` is `merged`")
            adapter, rank = only_adapter(self.model)
            for server in self.pool.servers:
                if rank > server.max_lora_rank:
                    raise ValueError(
                        f"the vLLM server {server.url} takes no adapter of rank {rank} (`--max-lora-rank`)"
                    )
        except ValueError as error:
            return None, self._whole_weights(str(error))
        return adapter, "the LoRA adapter alone"

    def _whole_weights(self, why: str) -> str:
        """Return in words that whole weights are sent, and why; a [`ServerMismatchError`] if the user asked for the adapter alone."""
        if self.args.vllm_server_kwargs["sync"] == "adapter":
            raise ServerMismatchError(
                f"`sync: adapter` of `vllm_server_kwargs` is not possible: {why.rstrip('.')}. Start each vLLM server with {LORA_OPTIONS}, on the base "
                "model that is trained; or leave `sync` out, and whole weights are sent where an adapter cannot be."
            )
        return f"whole weights, because {why.rstrip('.')}"

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs to go on with the same seeds."""
        return dict(self.batches)

    def load_state_dict(self, state: dict[str, int]):
        self.batches = Counter(state)

    def sync_weights(self):
        """
        Send every server the weights of the model as they are now, and check that it computes with them. A server that is
        down gets the weights when it returns.
        """
        self.before_sync()
        self.give_up()  # requests still under way would mix two versions
        if self._adapter is not None:
            why = "the weights of its base model have changed" if self._base_has_changed() else self._send()
            if why is None:
                return
            self._payload = self._whole_weights(why)
            self._adapter = self._base = None
            self._adapter_name = ""
        self._send()

    def _base_has_changed(self) -> bool:
        """Return whether the model without its adapter has changed since the first sync, on any process."""
        own = fingerprint(self.model, without=".lora_")
        if self._base is None:
            model: Any = self.model
            with model.disable_adapter():
                self._base = own, logprobs(self.model, self._probe, self.accelerator.device)
        return any(gather_object([own != self._base[0]]))

    def _send(self) -> str | None:
        """Send every server the adapter, or whole weights. Returns why the servers cannot have the adapter, if they cannot."""
        directory = self._on_main_process(self._next_directory)
        failure, size = self._export(directory)
        reference = logprobs(self.model, self._probe, self.accelerator.device)

        def load() -> tuple[str | None, float]:
            if failure is not None:
                raise failure
            try:
                self.pool.load(self._snapshot(directory, reference))
            except ServerMismatchError as error:
                if self._adapter is None:
                    raise
                return str(error), math.nan
            self._log_payload(size)
            return None, self._changed_share.share(self._precision)

        why, self._last_changed = self._on_main_process(load)
        if failure is not None:  # on this process alone
            raise failure
        self._adapter_name = directory.name if self._adapter else ""
        return why

    def _export(self, directory: Path) -> tuple[Exception | None, int]:
        """Write what is sent. Returns the error of this process, which the others may not have, and the bytes."""
        model: Any = self.model
        try:
            if self._adapter is not None:
                return None, export_adapter(model, self._adapter, self.accelerator, directory, self._dtype)
            return None, export_weights(model, self.accelerator, directory, self._dtype, changes=self._changed_share)
        except Exception as error:
            error.add_note(f"If `{directory}` is full, give another one: `vllm_server_kwargs={{'sync_dir': ...}}`.")
            return error, 0

    def _snapshot(self, directory: Path, reference: list[float]) -> Snapshot:
        tolerance = self.args.vllm_server_kwargs["sync_tolerance"]
        if tolerance is None:
            tolerance = tolerance_for(self.model, self.accelerator, self.pool.servers)
        # A change far below the rounding of a usual weight, as of a bias near zero, moves no log-prob
        changed = math.nan if self._adapter else self._changed_share.share(self._dtype, noise=1 / 16)
        changed = 1.0 if math.isnan(changed) else changed
        base = self._base[1] if self._base else None
        return Snapshot(directory.name, str(directory), self._probe, reference, tolerance, changed, base)

    def _log_payload(self, size: int):
        """Log once what a sync sends: a warning where whole weights are sent for an adapter, and the user did not ask for that."""
        if self._payload:
            is_peft, sync = is_peft_model(self.model), self.args.vllm_server_kwargs["sync"]
            level = logging.WARNING if is_peft and self._adapter is None and sync is None else logging.INFO
            logger.log(level, "A weight sync sends %.2f MB: %s.", size / 1e6, self._payload)
            self._payload = ""

    def weights_changed(self) -> tuple[float, bool]:
        """
        Return the share of the weights that the last sync has changed, in the type that they are computed with, and whether that type
        is bfloat16. The share is NaN after a sync of an adapter, after the first sync, and after another call for the same sync.
        """
        changed, self._last_changed = self._last_changed, math.nan
        return changed, self._precision == torch.bfloat16

    def _next_directory(self) -> Path:
        """
        Return where to write the next weights, and delete the last ones, which a server that has restarted may have needed until now:
        there is never more than one copy. The last adapter stays for one more sync, because a cancelled request may still need it.
        """
        for old in self._directory.iterdir():
            if old.name != self._adapter_name:
                shutil.rmtree(old)
        self._syncs += 1
        return self._directory / f"{self._directory.name}-{self._syncs}"

    def generate(self, prompts: list[list[int]], images: list | None, num_generations: int, profiler=None) -> tuple:
        """
        Complete the prompts of this process's rows. Over all processes, each prompt is there `num_generations` times in a
        row; a group may begin on one process and end on another. Surplus rows get any completion.

        Returns, for the rows of this process, prompt ids, completion ids, and log-probs with a last dimension of 1, as TRL does.
        """
        if images is not None and any(image is not None for image in images):
            raise ValueError("Images are not supported with `vllm_mode='http'`. Use `vllm_mode='server'` for them.")
        surplus, self._surplus = self._surplus, 0
        wanted = prompts[: len(prompts) - surplus]
        sizes, rows = gather_object([len(wanted)]), gather_object(wanted)
        unique = rows[::num_generations]
        if rows != [prompt for prompt in unique for _ in range(num_generations)]:
            raise ValueError(
                f"Every prompt must be there `num_generations={num_generations}` times in a row over all processes. Use a "
                "sampler that repeats prompts, such as `trl.trainer.utils.RepeatSampler`."
            )
        with profiler or nullcontext():
            groups = self.generate_groups(unique, [num_generations] * len(unique))
        completions = [completion for group in groups for completion in group]
        begin = sum(sizes[: self.accelerator.process_index])
        local = completions[begin : begin + len(wanted)] + completions[-1:] * surplus
        for prompt, completion in zip(prompts, local, strict=True):
            self.note(prompt, completion.token_ids, completion.truncated, completion.failure)
        logprobs_of_rows = [[[logprob] for logprob in completion.logprobs] for completion in local]
        return prompts, [completion.token_ids for completion in local], logprobs_of_rows, None

    def generate_groups(self, prompts: list[list[int]], counts: list[int]) -> list[list[Completion]]:
        """
        Complete each prompt as often as `counts` says, at least once. Every process gives the same arguments, and gets all groups. If no server
        can complete a prompt, and they have completed others, its completions are one token each and have a `failure`.
        """
        mode = "train" if self.model.training else "eval"  # an evaluation changes nothing of the training
        groups = self._requests_of(prompts, counts, f"{mode}/{self.batches[mode]}")
        if self._begins:
            self._on_main_process(lambda: self._begin(groups))
            raise self.Begun
        self.batches[mode] += 1
        return self._on_main_process(lambda: self._complete(groups))

    @contextmanager
    def looking_ahead(self, foresight: Foresight | None, begins: bool = False, surplus: int = 0) -> Iterator[None]:
        """
        Within this block, ask for the completions that the next call will want, by `foresight`, as soon as groups of this call are
        complete. A wrong prediction costs time and changes no result: a call gets what it asks for, under way or not. With `begins`,
        calls only begin their requests and raise [`HTTPGeneration.Begun`]; the same call later finds them under way. The last
        `surplus` rows of this process's next call are not completed.
        """
        self._foresight, self._begins = foresight if self._may_look_ahead else None, begins
        self._surplus = surplus
        try:
            yield
        finally:
            self._foresight, self._begins, self._surplus = None, False, 0

    def give_up(self):
        """Cancel the requests that are under way, for this call or the next one."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        self._join_lookahead()
        self._under_way, self._looked_ahead = {}, {}

    def _begin(self, groups: list[PromptRequest]):
        self.give_up()
        loop, results = self._submit(groups)
        self._under_way.update(zip(map(_key, groups), results, strict=True))
        arguments = loop, groups, results, self._foresight, self.batches["train"] + 1
        self._lookahead_thread = threading.Thread(target=self._collect, args=arguments, daemon=True)
        self._lookahead_thread.start()

    def _complete(self, groups: list[PromptRequest]) -> list[list[Completion]]:
        """Return the completions of requests, and keep those of the next call that are under way."""
        self._join_lookahead()
        completed = False
        try:
            loop, results = self._submit(groups)
            self._collect(loop, groups, results, self._foresight, self.batches["train"])
            if loop.finished.done():
                loop.finished.result()
            self._under_way, self._looked_ahead = self._looked_ahead, {}
            completed = True
            return [self._completions(group, result) for group, result in zip(groups, results, strict=True)]
        finally:
            if not (completed and self._under_way):
                self.give_up()

    def _join_lookahead(self):
        """Wait for the thread that looks ahead. If a reward function does not let it end, stop both, and look ahead no more."""
        thread, self._lookahead_thread = self._lookahead_thread, None
        begin = time.monotonic()
        while thread is not None and thread.is_alive():
            thread.join(0.1)
            if self._foresight_began is not None and time.monotonic() - max(begin, self._foresight_began) > PATIENCE:
                logger.warning(
                    "Groups wait for the slowest completion of each round from here on, which costs time and changes no result: a reward "
                    "has been computing for %d s in another thread. Limit its time in every thread; TRL's `accuracy_reward` and "
                    "math-verify do so in the main thread only, where SIGALRM can be used.",
                    PATIENCE,
                )
                thread_id = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(SystemExit))
                self._foresight, self._may_look_ahead = None, False
                return

    def _completions(self, group: PromptRequest, result: Future) -> list[Completion]:
        """Return the completions of a request; if it has failed, completions of one token with a `failure`."""
        if (failure := result.exception()) is None:
            return result.result()
        if not any(server.answered for server in self.pool.servers):
            text = self.processing_class.decode(group.prompt)
            raise type(failure)(f"{failure} The prompt is {text[:80]!r}.") from failure
        return [Completion([self.processing_class.pad_token_id], [0.0], failure=str(failure))] * group.count

    def _submit(self, groups: list[PromptRequest]) -> tuple[RequestLoop, list[Future]]:
        """Submit the requests that are not under way yet. Returns the loop that works on them, and their future results."""
        loop = self._loop = self._loop or self.pool.start()
        under_way = self._under_way
        return loop, [under_way.pop(_key(g)) if _key(g) in under_way else loop.submit(g) for g in groups]

    def _collect(
        self,
        loop: RequestLoop,
        groups: list[PromptRequest],
        results: list[Future],
        foresight: Foresight | None,
        next_batch: int,
    ):
        """Wait for results, or for the end of the loop, and meanwhile submit what the next call will ask for."""
        waiting = {result: place for place, result in enumerate(results)}
        next_requests = self._requests_of([group.prompt for group in groups], [0] * len(groups), f"train/{next_batch}")
        while waiting:
            done, _ = wait([*waiting, loop.finished], return_when=FIRST_COMPLETED)
            if loop.finished in done:
                return
            places = sorted(waiting.pop(result) for result in done)  # small batches, in the order of the prompts
            if foresight is None:
                continue
            completed = [place for place in places if results[place].exception() is None]
            arrived = {place: (groups[place].prompt, results[place].result()) for place in completed}
            self._foresight_began = time.monotonic()
            predicted = foresight(arrived)
            self._foresight_began = None
            for place, count in predicted:
                group = replace(next_requests[place], count=count)
                self._looked_ahead[_key(group)] = loop.submit(group)

    def _requests_of(self, prompts: list[list[int]], counts: list[int], batch: str) -> list[PromptRequest]:
        """Make the requests of a call. Each has a seed that depends on the name of the batch, and on neither server nor time."""
        groups, repetitions = [], Counter[str]()
        adapter = {"model": self._adapter_name} if self._adapter_name else {}
        for prompt, count in zip(prompts, counts, strict=True):
            text = ",".join(map(str, prompt))
            digest = hashlib.sha256(f"{self.args.seed}/{batch}/{repetitions[text]}/{text}".encode()).digest()
            repetitions[text] += 1
            seed = int.from_bytes(digest[:8], "big") >> 1  # vLLM takes signed 64-bit seeds
            room = max(1, self.context_length - len(prompt))  # vLLM refuses a request for more
            own = {"seed": seed, "max_tokens": min(self._body["max_tokens"], room)}
            body = self._body | adapter | own
            groups.append(PromptRequest(prompt, count, body, self._vocabulary))
        return groups

    def _on_main_process(self, function: Callable[[], Any]) -> Any:
        """Run a function on the main process, and return its result on every process. If it fails, every process raises."""
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


def _key(group: PromptRequest) -> tuple[int, int]:
    return group.body["seed"], group.count
