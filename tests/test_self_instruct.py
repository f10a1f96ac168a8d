"""Self-instruction by a recipe: what it begins with, and a training on what its generator writes."""

from dataclasses import replace

import pytest
from datasets import Dataset

import tiny
from lze_trl import checkpoint as store
from lze_trl.job.cli import main
from lze_trl.job.parts import make_instruction
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import run as train
from lze_trl.memory.identity import prompt_id


NOUNS = ["apples", "boats", "cats", "dogs", "eggs", "forks", "goats", "hats", "jars", "kites", "lamps", "maps"]
PLACES = ["in the garden", "by the river", "at school", "on a ship", "under the old bridge", "near a small hill"]
SEEDS = tuple(f"Ann counts {i} {noun}. How many {noun} are {i * i} times as many?" for i, noun in enumerate(NOUNS))


def sums(exemplars, rng):
    """A generator for recipes."""
    a, b = rng.integers(10, 99, 2)
    return [f"What is the {NOUNS[a % 12]} sum of {a} and {b} {PLACES[b % 6]}?"]


@pytest.fixture
def recipe(tmp_path):
    seeds = tmp_path / "seeds.jsonl"
    Dataset.from_dict({"problem": SEEDS}).to_json(seeds)
    own = {"output_dir": str(tmp_path / "run"), "model_name_or_path": tiny.save(tmp_path / "model")}
    own |= {"datasets": [str(seeds)], "unlabelled": True, "reward_funcs": ["majority"], "max_completion_length": 4}
    self_play = {"max_tokens": 6, "max_rounds": 2, "requests": 4, "examples": 2, "overlap": 0.9}
    return lambda instruct=False, **keys: tiny.recipe(
        tmp_path, self_play=self_play | {"instruct": instruct}, **own | keys
    )


def test_no_new_problem_may_resemble_one_of_the_evaluation(recipe, tmp_path):
    held_out, problems = str(tmp_path / "held_out.jsonl"), ("Is 7 a prime?", "Which prime is the smallest?")
    Dataset.from_dict({"problem": problems, "answer": ["yes", "2"]}).to_json(held_out)
    script_args, args, _ = parse_recipe(["--config", recipe(probe_datasets=[held_out])])
    assert make_instruction(script_args, args).seeds.references == problems
    system = {"role": "system", "content": "Hm."}
    chats = [[system, {"role": "user", "content": f"{i}?"}] for i in range(9)]
    Dataset.from_dict({"prompt": chats}).to_json(tmp_path / "chats.jsonl")
    seeds = make_instruction(replace(script_args, datasets=[str(tmp_path / "chats.jsonl")]), args).seeds
    assert seeds.problems == tuple(f"{i}?" for i in range(9))
    with pytest.raises(ValueError, match=r"`instruct_generator: nothing.here` cannot be imported"):
        make_instruction(replace(script_args, instruct_generator="nothing.here"), args)


def test_a_recipe_trains_on_what_its_generator_writes(recipe, tmp_path, capsys):
    rewards = ["recipes.self_play.PublishedMajority", "tiny.even_length_reward"]
    own = {"instruct_generator": "test_self_instruct.sums", "prompt_suffix": " Sum:", "max_steps": 3}
    path = recipe(instruct=True, reward_funcs=rewards, max_train_samples=2, **own)  # fewer than a batch takes
    main(["train", path, "--dry_run"])
    assert "written by the model, from 2 seeds" in " ".join(capsys.readouterr().out.split())
    assert train(*parse_recipe(["--config", path]))["rows_rolled_out"] == 3 * 12
    state = store.load(tmp_path / "run", store.STATE_NAME)[0]["instruction"]
    texts = state["text"]
    assert len(texts) == len(state["prompt_ids"]) >= 9
    assert all(text.startswith("What is the") for text in texts)
    assert state["visits"].sum() == 9
    assert prompt_id(texts[0] + " Sum:") == state["prompt_ids"][0]
