"""Rolls out every prompt of a trainer's training set, and goes on where that was ended."""

import json
import logging
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset
from tqdm.auto import tqdm

from ..batch import Batch
from ..claim import NAME as CLAIM
from ..claim import claimed
from ..engine import TRLAdapter
from ..files import write_atomically
from ..forecast.probe import refuse_processes
from ..plan.passes import Plan
from ..record.numbers import number
from ..record.tables import plain_text
from ..redaction import without_secrets
from ..seeding import keyed_rng
from . import folder as store
from .results import NUMBERS, write_results


logger = logging.getLogger(__name__)

_TOLD_AFTER = 100  # completions, from which the costs of all are told
_ON_SERVERS = 1024  # completions that servers work on at a time


def profile(trainer: Any, folder: Path, num_completions: int = 8, keep: tuple[float, float] | None = None) -> str:
    """
    Roll out every prompt of a trainer's training set by its own engine, template and rewards, and write what is found
    into a folder; a profile that was ended goes on. `keep` are the lowest and highest pass rate of the prompts in
    `folder/kept`. Returns a summary. Raises [`ProfileError`] if the folder holds another profile, or the prompts do not
    fit.
    """
    args = trainer.args
    refuse_processes(trainer.accelerator, "profile")
    reads = isinstance(trainer.train_dataset, Dataset) and trainer.prompt_state.recurring
    for applies, told in (
        (num_completions < 2, f"`num_completions` must be at least 2, got {num_completions}. Use 8."),
        (not reads or args.self_play["instruct"], "A profile needs a `train_dataset` of prompts that come again. Give one without streaming and self-play."),
    ):  # fmt: skip
        if applies:
            raise store.ProfileError(told)
    ids, config = trainer.passes.stream.prompt_ids, trainer.model.config
    if len(ids) < 2:
        raise store.ProfileError(
            f"A profile needs two prompts or more, and the training set has {len(ids)}. Give more."
        )
    settings = store.described(trainer) | {"num_completions": num_completions, "seed": args.seed}
    settings["engine"] = args.vllm_mode if args.use_vllm else "transformers"
    settings |= {"prompts": len(ids), "prompt_ids": xxhash.xxh64(ids.tobytes()).hexdigest()}
    with claimed(folder):
        if (manifest := store.read_manifest(folder)) is None:
            if any(path.name != CLAIM for path in folder.iterdir()):
                raise store.ProfileError(f"`{folder}` holds something else. Give another `--output`.")
            versions = {name: version(name) for name in ("lze-trl", "trl", "transformers", "torch", "datasets")}
            manifest = {"format": store.FORMAT, "model": without_secrets(config._name_or_path or config.model_type)}
            manifest |= {"settings": settings, "versions": versions}
            write_atomically(folder / store.MANIFEST, json.dumps(manifest, indent=1).encode())
        elif told := store.differences(manifest["settings"], settings):
            raise store.ProfileError(f"`{folder}` has other settings: {told}. Give them, or another `--output`.")
        _roll_out(trainer, folder, num_completions, len(ids))
        return write_results(trainer, folder, keep)


def _roll_out(trainer: Any, folder: Path, size: int, count: int):
    """Append the groups of the prompts that the folder lacks, a batch at a time."""
    groups, args = store.read_groups(folder), trainer.args
    order = keyed_rng(args.seed, 0, "profile").permutation(count)
    left = order[~np.isin(order, [group["row"] for group in groups])]
    at_once = max(1, max(_ON_SERVERS if args.over_http else 0, args.generation_batch_size) // size)
    # Whole groups are drawn, whatever the controller of the recipe, and nothing is trained on
    own = {"num_generations": size, "controller": "uniform", "controller_kwargs": {}, "selector": "all"}
    own |= {"selection_ratio": 1.0, "telemetry": False, "overlap": "none"}
    logger.info("To roll out: %d of %d prompts, %d completions each.", len(left), count, size)
    drawn, tokens, begun = 0, 0, time.monotonic()
    # None: on a terminal
    bar = tqdm(None, "Profile", count, initial=count - len(left), unit=" prompts", disable=args.disable_tqdm or None)
    with bar, trainer.side_effect_free_copy(**own) as view, trainer.accelerator.autocast():
        rounds, engine = view.generation_step.rounds, TRLAdapter(view)
        rounds.passes.variable_group_size = True
        for place in range(0, len(left), at_once):
            rows, start = left[place : place + at_once], time.monotonic()
            # Keyed by its first prompt: a batch has the same completions however often a profile was ended before
            torch.manual_seed(int(keyed_rng(args.seed, int(rows[0]), "profile").integers(2**62)))
            batch = rounds.finish(rounds.begin(Plan(len(rows), 0, rows=rows), engine, place, len(rows)), engine)
            try:
                with open(folder / store.GROUPS, "ab") as file:
                    file.write(_lines(batch, rows, (time.monotonic() - start) / len(rows)))
            except OSError as error:
                told = f"`{folder / store.GROUPS}` cannot be written: {error.strerror}. Make room, and start it again: it goes on."
                raise store.ProfileError(told) from error
            bar.update(len(rows))
            before, drawn, tokens = drawn, drawn + batch.num_rows, tokens + batch.completion_tokens.sum()
            if before < _TOLD_AFTER <= drawn:
                share = (place + len(rows)) / len(left)
                costs = [number(cost / share) for cost in (drawn, tokens, time.monotonic() - begun)]
                logger.info("It will take about %s completions with %s tokens, %s seconds.", *costs)


def _lines(batch: Batch, rows: np.ndarray, seconds: float) -> bytes:
    """A line for each group of a batch, which took so many `seconds` each."""
    groups, of_groups = [], np.split(np.arange(batch.num_rows), np.cumsum(batch.sizes)[:-1])
    for row, prompt_id, own in zip(rows.tolist(), batch.prompt_ids.tolist(), of_groups, strict=True):
        values = {name: getattr(batch, name)[own] for name in NUMBERS}
        # JSON lacks NaN
        group = {name: np.where(np.isnan(v), np.array(None), v).tolist() for name, v in values.items()}
        texts = [plain_text(batch.held["completion"][place]) for place in batch.place[own]]
        groups.append({"row": row, "prompt_id": prompt_id, "seconds": seconds, **group, "completions": texts})
    # A line that was cut off ends here, and those that follow are whole
    return "".join(f"\n{json.dumps(group)}" for group in groups).encode() + b"\n"
