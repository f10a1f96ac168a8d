"""The folder of a profile: a manifest of what its pass rates hold for, and a line of JSON for each prompt that was rolled out."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..redaction import redacted


logger = logging.getLogger(__name__)

MANIFEST, GROUPS, DATA = "manifest.json", "completions.jsonl", "train-00000-of-00001.parquet"
FORMAT = "lze_trl profile"
PREFIX = "profile_"
"""Begins the names of columns where the data have one of the same name."""
_REWARDS = ("pass_reward", "pass_threshold", "reward_range", "alive", "multi_objective_aggregation")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length", "generation_kwargs",
)  # fmt: skip


class ProfileError(ValueError):
    """A profile that cannot be made, continued or read; the message says what to do."""


def described(trainer: Any) -> dict[str, Any]:
    """What decides the pass rates of a trainer's prompts, as JSON gives it back."""
    args, names = trainer.args, {"rewards": _REWARDS, "sampling": _SAMPLING}
    found = {f"{block}.{name}": vars(args)[name] for block, own in names.items() for name in own}
    found |= {"rewards.functions": trainer.reward_func_names, "rewards.weights": trainer.reward_weights.tolist()}
    tools = [tool.__name__ for tool in trainer.tools or ()]
    template = [trainer.chat_template or trainer.processing_class.chat_template, args.chat_template_kwargs, tools]
    found |= {"weights": hash} if (hash := weights_hash(trainer.model)) else {}
    return json.loads(json.dumps(redacted(found | {"template": _hash(template)}), default=str))


def _hash(value: Any) -> str:
    import xxhash  # the app reads profiles without it, and torch

    return xxhash.xxh64(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def weights_hash(model: Any) -> str | None:
    """
    Hash the weights as bfloat16, so that float32 and bfloat16 have one hash, with LoRA adapters merged, so that a new one changes nothing.
    `None` where DeepSpeed or FSDP has sharded the weights, and with adapters of other kinds.
    """
    import torch
    from peft import PeftModel
    from torch.distributed.tensor import DTensor

    from ..fingerprint import hashes_of
    from ..servers.adapters import deltas, merged_parameters

    plain = ((name, weight, None) for name, weight in model.named_parameters(remove_duplicate=False))
    hashes = {}
    try:
        for name, weight, layer in merged_parameters(model) if isinstance(model, PeftModel) else plain:
            if isinstance(weight, DTensor) or "ds_tensor" in vars(weight):
                return None
            merged = weight.detach() if layer is None else sum(deltas(layer), weight.detach())
            hashes[name] = [part.item() for part in hashes_of(merged.to(torch.bfloat16).reshape(-1))]
    except ValueError:  # they cannot be merged
        return None
    return _hash(hashes)


def differences(there: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs from what a manifest says; empty if nothing does."""
    changed = {name: (there.get(name), value) for name, value in now.items() if there.get(name) != value}
    return "; ".join(f"`{name}` is {one!r} there and {other!r} here" for name, (one, other) in changed.items())


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The manifest of a profile; `None` of a folder that holds none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        manifest = json.loads(Path(folder, MANIFEST).read_bytes())
        return manifest if manifest["format"] == FORMAT else None
    return None


def read_groups(folder: Path) -> list[dict[str, Any]]:
    """Read groups in the order of the data, each with the `place` of its line; cut-off lines do not count."""
    groups, place = {}, 0
    if (path := folder / GROUPS).is_file():
        with open(path, "rb") as lines:
            for line in lines:
                with suppress(ValueError, LookupError, TypeError):  # a line that is damaged
                    group = json.loads(line)
                    groups[group["row"]] = group | {"place": place, "completions": None}
                place += len(line)
    return [groups[row] for row in sorted(groups)]


def warn_of_others(folder: Path, trainer: Any):
    """Warn once if a profile that a training begins with is of another model, template, reward or sampling, or of other prompts."""
    if (manifest := read_manifest(folder)) is None:  # the state is that of a run
        return
    told, ids = differences(manifest["settings"], described(trainer)), vars(trainer.passes.stream).get("prompt_ids")
    if ids is not None and (trainer.prompt_state.find(ids) < 0).all():  # those of a stream are not known
        told += "; " * bool(told) + "none of the prompts of this training is among its prompts"
    if told:
        words = "The profile `%s` does not fit this training: %s. Its pass rates may be far off until prompts are visited again."
        logger.warning(f"{words} Profile the recipe of this training, or leave `state_from` unset.", folder, told)
