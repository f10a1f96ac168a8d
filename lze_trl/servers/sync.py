"""A weight sync besides the weights: a shared directory, and tokens to compare the log-probs on."""

import socket
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .client import VLLMServer
from .weights import base_model


try:
    from trl.trainer.utils import add_fused_lm_head
except ImportError:  # before TRL 1.15, which trains through logits
    add_fused_lm_head = None  # type: ignore[assignment]  # its type is a function's

_TEXT = "Natalia sold 48 clips, then half as many: 48+48/2=72. \\boxed{72} costs $1.50 ≠ x²?"
_SPREAD_TOKENS = 16
_MAX_PROBE_TOKENS = 96


def probe_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context_length: int) -> list[int]:
    """Return at least two tokens to compare log-probs on: those of a text, and some from all over the vocabulary."""
    vocabulary = min(model.config.get_text_config().vocab_size, len(tokenizer))
    count = min(_SPREAD_TOKENS, vocabulary, context_length // 2)
    spread = [round(i * (vocabulary - 1) / max(count - 1, 1)) for i in range(count)]
    room = min(_MAX_PROBE_TOKENS, context_length - 1) - count  # the server generates one token after the probe
    return tokenizer(_TEXT, add_special_tokens=False)["input_ids"][:room] + spread


def logprobs(model: nn.Module, token_ids: list[int], device: torch.device) -> list[float]:
    """Compute the model's log-probs of `token_ids[1:]`, in nats. Every process must call it, for a sharded model."""
    # In the way that TRL computes them, at temperature 1: DeepSpeed ZeRO-3 has recorded the order of the modules in training, and
    # does not work with another one
    base = base_model(model)
    forward, training = vars(base).get("forward"), model.training
    ids = torch.tensor([token_ids], device=device)  # (1, N)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model.eval()
    try:
        with torch.no_grad():
            if add_fused_lm_head is None:
                logits = model(**inputs).logits[0, :-1].float()
                return logits.log_softmax(dim=-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
            add_fused_lm_head(base, temperature=1.0)
            return model(**inputs, labels=ids, fused_lm_head=True).log_probs[0].float().tolist()  # (N - 1,)
    finally:
        vars(base).pop("forward", None)
        if forward is not None:
            base.forward = forward
        model.train(training)


def tolerance_for(model: nn.Module, accelerator: Accelerator, servers: list[VLLMServer]) -> float:
    """
    Return the mean absolute difference of log-probs, in nats, that rounding alone may make in the least precise of the types that
    trainer and servers compute in.
    """
    mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    dtypes = {mixed or str(model.dtype).removeprefix("torch."), *(server.dtype for server in servers)}
    return 1e-3 if dtypes <= {"float32", "float64"} else 5e-2


def shared_directory(root: str | None, servers: list[VLLMServer]) -> Path:
    """Make a new directory in `root` that trainer and servers share. The default is shared memory, if every server runs on this host."""
    if root is None:
        here = "localhost", "127.0.0.1", "::1", socket.gethostname().lower()  # as the host of a URL is
        elsewhere = [server.url for server in servers if server.host not in here]
        if elsewhere:
            raise ValueError(
                f"`sync_dir` of `vllm_server_kwargs` is required, because these vLLM servers are not on this host: {elsewhere}. Give a "
                "directory on a file system that the trainer and the servers share, at the same path."
            )
        root = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    Path(root).mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="lze-trl-weights-", dir=root)).resolve()
    if root != "/dev/shm":
        directory.chmod(0o755)  # a server on another host may run as another user
    return directory
