"""`lze-trl self-instruct`: a file of problems that a killed command goes on with, and a clear stop where none is acceptable."""

import json
import logging
import random

import numpy as np
import pytest
import yaml

import tiny
from lze_trl import checkpoint as store
from lze_trl.data import PromptStyle, load_prompts
from lze_trl.data.overlap import OverlapIndex
from lze_trl.evaluation.engines import Output
from lze_trl.evaluation.settings import Decoding
from lze_trl.job.cli import main
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.self_instruct import make_filter
from lze_trl.job.train import run as train
from lze_trl.memory.identity import prompt_id
from lze_trl.rewards import MajorityReward
from lze_trl.rewards.majority import REASONS_TO_ABSTAIN
from lze_trl.selfplay.offline import DifficultyFilter, write_file
from lze_trl.selfplay.writer import KNOWN, UNREAD, InstructError, Seeds, Writer
from lze_trl.settings import SelfPlaySettings


NOUNS = ["apples", "boats", "cats", "dogs", "eggs", "forks", "goats", "hats", "jars", "kites", "lamps", "maps"]
PLACES = ["in the garden", "by the river", "at school", "on a ship", "under the old bridge", "near a small hill"]
WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu") for b in ("bin", "dor", "fam", "gul", "hep", "jik")]
SEEDS = tuple(f"Ann counts {i} {noun}. How many {noun} are {i * i} times as many?" for i, noun in enumerate(NOUNS))
SETTINGS = SelfPlaySettings(examples=4, own=2, requests=6, max_rounds=3)


class Author:
    """An engine that writes and answers by the seed of each request alone, in an order of its own, and notes what it was asked."""

    name = "author"

    def __init__(self, budget=10**9, votes=("7", "7", "8")):
        self.budget, self.votes, self.asked = budget, votes, []

    def generate(self, requests, decoding):
        for request in sorted(requests, key=lambda request: request.seed(decoding)):
            if len(self.asked) == self.budget:
                raise KeyboardInterrupt
            self.asked.append((request.problem.id, request.sample))
            yield request, self.answer(request, request.seed(decoding))

    def answer(self, request, number):
        if not request.problem.id.startswith("write"):
            return Output(rf"\boxed{{{self.votes[number % len(self.votes)]}}}", 3, False)
        words = random.Random(number).sample(WORDS, 9) if number % 4 else WORDS[:9]  # one in four is the same
        text = f"How many {' '.join(words)} are there?"
        return Output(("<question>" + text + "</question>") * (number % 5 > 0), 9, False)


def filter_of(votes=8, **majority):
    style = PromptStyle(prompt_suffix=" Box the answer.")
    return DifficultyFilter(
        MajorityReward(labelled="none", **majority), style, Decoding(temperature=1.0, max_tokens=9), votes
    )


def write(output, author, count, **majority):
    """Write with a new command; returns its writer and the lines of the file."""
    writer = Writer(SETTINGS, Seeds(SEEDS), seed=5)
    numbers = list(write_file(writer, filter_of(**majority), output, author, count))
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert numbers == sorted(numbers) and numbers[-1] == len(lines)
    return writer, lines


def test_problems_are_written_voted_on_and_kept(tmp_path):
    author = Author()
    writer, lines = write(tmp_path / "new.jsonl", author, 12)
    assert len(lines) == 12
    assert all(0.2 <= line["share"] <= 0.8 and line["valid"] == 1.0 for line in lines)
    assert {line["majority_answer"] for line in lines} == {"7", "8"}
    assert [line["round"] for line in lines] == sorted(line["round"] for line in lines)
    # No two alike, and none like a seed
    texts = [line["problem"] for line in lines]
    assert (OverlapIndex().among(texts) - np.eye(12)).max() <= 0.7
    assert OverlapIndex(SEEDS).nearest(texts).similarity.max() <= 0.7
    assert writer.rejected[KNOWN] and writer.rejected[UNREAD]
    # All votes were counted: what is neither accepted nor rejected was above the count, in the last round
    voted = {name for name, _ in author.asked if not name.startswith("write")}
    rejected = sum(writer.rejected[reason] for reason in REASONS_TO_ABSTAIN.values())
    assert len(lines) <= len(voted) - rejected <= len(lines) + SETTINGS.requests
    assert len(author.asked) == len(set(author.asked)) == 8 * len(voted) + 6 * writer.rounds
    # Own problems become exemplars in later rounds, by the id that their lines have
    names = {line["id"] for line in lines}
    for line in lines:
        before = {other["id"] for other in lines if other["round"] < line["round"]}
        assert names & set(line["parents"]) <= before
        assert len(line["parents"]) == 4
    assert any(names & set(line["parents"]) for line in lines)


def test_a_killed_command_goes_on_with_its_file(tmp_path):
    output, budget, done = tmp_path / "killed.jsonl", 100, []
    while len(done) < 12:
        try:
            _, done = write(output, Author(budget), 12)
        except KeyboardInterrupt:
            kept = output.read_text()
            assert kept.startswith("".join(json.dumps(line) + "\n" for line in done))
            done = [json.loads(line) for line in kept.splitlines()]
            with output.open("a") as file:  # the next line is half written
                file.write('{"problem": "Hälf a li')
    texts = [line["problem"] for line in done]
    assert len(done) == 12 and (OverlapIndex().among(texts) - np.eye(12)).max() <= 0.7
    author = Author()
    _, more = write(output, author, 14)
    assert more[:12] == done and min(line["round"] for line in more[12:]) > done[-1]["round"]
    assert write(output, Author(budget=0), 14)[1] == more


@pytest.mark.parametrize(
    ("votes", "reason"),
    [
        (("7",), "answers agree"),
        (tuple("1234567"), "answers disagree"),
        (("",), "too few answers"),
        (("7", "8"), "no clear winner"),
    ],
)
def test_a_generator_without_acceptable_problems_stops_with_the_reasons(tmp_path, votes, reason):
    bounds = (0.5, 0.9) if reason == "answers disagree" else (0.2, 0.9)
    with pytest.raises(InstructError, match=rf"3 rounds in a row gave no .* after 0 of 5.*\d+ {reason}"):
        write(tmp_path / "new.jsonl", Author(votes=votes), 5, bounds=bounds, margin=7)
    assert (tmp_path / "new.jsonl").read_text() == ""


def test_truncated_votes_do_not_count():
    votes = [Output(r"\boxed{7}", 3, i > 1) for i in range(8)]
    assert filter_of().judge(votes)[0] == "too few answers"


# ---- The command ----


def sums(exemplars, rng):
    """A generator for recipes."""
    a, b = rng.integers(10, 99, 2)
    return [f"What is the {NOUNS[a % 12]} sum of {a} and {b} {PLACES[b % 6]}?"]


@pytest.fixture
def recipe(tmp_path):
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("".join(json.dumps({"problem": text}) + "\n" for text in SEEDS))
    settings = {
        "output_dir": str(tmp_path / "run"),
        "model_name_or_path": tiny.save(tmp_path / "model"),
        "datasets": [str(seeds)],
        "unlabelled": True,
        "conversational": False,
        "reward_funcs": ["majority"],
        "majority_bounds": [0.1, 0.9],
        "max_completion_length": 4,
        "self_play": {"max_tokens": 6, "max_rounds": 2, "requests": 4, "examples": 2},
        "use_cpu": True,
        "bf16": False,
    }

    def write(**changes):
        path = tmp_path / "recipe.yaml"
        changes["self_play"] = settings["self_play"] | changes.get("self_play", {})
        path.write_text(yaml.safe_dump(settings | changes))
        return [str(path), "--output", str(tmp_path / "new.jsonl")]

    return write


def test_the_command_tells_what_was_rejected_and_stops(recipe, capsys, tmp_path):
    # An untrained model writes no problem, and boxes no answer to those of a generator
    with pytest.raises(SystemExit, match=r"error: 2 rounds in a row .* 8 no problem in the answer\. Use other seeds"):
        main(["self-instruct", *recipe(), "--count", "3"])
    shown = capsys.readouterr().out
    assert "in the file" in shown and "no problem in the answer" in shown and "problems of 2 rounds" in shown
    with pytest.raises(SystemExit, match=r"\d too few answers"):
        main(["self-instruct", *recipe(instruct_generator="test_self_instruct.sums"), "--count", "3", "--votes", "4"])
    with pytest.raises(SystemExit, match=r"`instruct_generator: nothing.here` cannot be imported"):
        main(["self-instruct", *recipe(instruct_generator="nothing.here"), "--count", "3"])


def test_the_filter_votes_as_the_reward_of_the_recipe_does(recipe):
    def judged(text, *rewards, agree=10):
        parsed = parse_recipe(["--config", recipe(reward_funcs=list(rewards), majority_bounds=None)[0]])
        made = make_filter(*parsed[:2], PromptStyle(), votes=16)
        answers = ["7"] * agree + [str(i) for i in range(10, 26 - agree)]
        reason, vote = made.judge(Output(text.replace("7", answer), 3, False) for answer in answers)
        return reason or vote["majority_answer"]

    assert judged(r"\boxed{7}", "accuracy", "majority") == "7"
    assert judged("7", "majority") == "too few answers"
    assert judged("7", "accuracy", "recipes.self_play.PublishedMajority") == "7"
    assert judged("7", "recipes.self_play.PublishedMajority", agree=6) == "7"
    assert judged("7", "recipes.self_play.StrictMajority", agree=6) == "answers disagree"
    marked = "recipes.self_play.MarkedMajority"
    assert judged("5+2=9\n#### 9\n5+2=7\n#### 7", marked) == "7"
    assert judged("5+2=7", marked) == judged("5+2=7\n#### ", marked) == "too few answers"


def test_evaluation_problems_among_the_seeds_are_counted_and_refused_on_request(recipe, tmp_path, caplog):
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"problem": SEEDS[3], "answer": "9"}, {"problem": "What is the smallest prime number?", "answer": "2"}]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = r"1 of 2 evaluation problems resemble a seed.*'Ann counts 3 dogs.*\(1\.00\)"
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit, match="rounds in a row"):
        main(["self-instruct", *recipe(eval_datasets=[str(held_out)]), "--count", "1"])
    assert "1 of 2 evaluation problems resemble a seed" in caplog.text
    with pytest.raises(SystemExit, match=found):
        main(
            ["self-instruct", *recipe(self_play={"refuse_overlap": True}), "--against", str(held_out), "--count", "1"]
        )
    with pytest.raises(SystemExit, match=found):
        probed = recipe(self_play={"refuse_overlap": True}, probe_datasets=[str(held_out)])
        main(["self-instruct", *probed, "--count", "1"])


def test_what_was_written_is_a_training_set(tmp_path):
    write(tmp_path / "new.jsonl", Author(), 4)
    table = load_prompts(str(tmp_path / "new.jsonl"), unlabelled=True)
    assert table["solution"] == [None] * 4  # `majority_answer` is told, and is no gold answer


def test_a_recipe_trains_on_what_its_generator_writes(recipe, tmp_path, capsys):
    settings = {
        "self_play": {"instruct": True, "overlap": 0.9},
        "instruct_generator": "test_self_instruct.sums",
        "reward_funcs": ["recipes.self_play.PublishedMajority", "tiny.even_length_reward"],
        "majority_bounds": None,
        "prompt_suffix": " Sum:",
        "max_steps": 3,
        "num_generations": 4,
        "per_device_train_batch_size": 12,
        "max_train_samples": 2,  # fewer than a batch takes
        "report_to": "none",
        "save_strategy": "no",
        "telemetry": False,
        "disable_tqdm": True,
    }
    path = recipe(**settings)[0]
    main(["train", path, "--dry_run"])
    assert "written by the model, from 2 seeds" in " ".join(capsys.readouterr().out.split())
    assert train(*parse_recipe(["--config", path]))["rows_rolled_out"] == 3 * 12
    arrays, meta = store.load(tmp_path / "run", store.STATE_NAME)
    texts = meta["parts"]["instruction"]["text"]
    assert len(texts) == len(arrays["instruction/prompt_ids"]) >= 9
    assert all(text.startswith("What is the") for text in texts)
    assert arrays["instruction/visits"].sum() == 9
    assert prompt_id(texts[0] + " Sum:") == arrays["instruction/prompt_ids"][0]
