"""References, schemas and sources of data; what cannot be used is refused with what to do."""

import codecs
import gzip
import json
from io import BytesIO
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from PIL import Image

from lze_trl.data import DataError, Reference, load_mixture, load_prompts, parse_reference
from lze_trl.evaluation.settings import Decoding, EvaluationError
from lze_trl.evaluation.tasks import find_tasks, load_problems
from lze_trl.memory.identity import prompt_id


GSM8K = [
    {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24\n#### 24"},
    {"question": "How many sheep?", "answer": "1,000 + 234\n#### 1,234"},
    {"question": "How many ducks?", "answer": "16 - 3\n#### 13"},
]
MATH = [
    {"problem": "What is $x$?", "level": "Level 2", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."},
    {"problem": "What is $y$?", "level": "Level 5", "type": "Geometry", "solution": r"$\boxed{12}$, or $\boxed{18}$."},
    {"problem": "What is $z$?", "level": "Level 1", "type": "Algebra", "solution": "It has no box."},
]
MATH_500 = [{"problem": "Find $a$.", "solution": r"so \boxed{0.5}", "answer": r"\frac12", "subject": "A", "level": 2}]
DAPO_PROMPT = [{"content": "Solve it: 30 + 4", "role": "user"}]
BLOCKS = [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}], "solution": "4"}]
DAPO = [{"data_source": "dapo", "prompt": DAPO_PROMPT, "reward_model": {"ground_truth": "34", "style": "rule"}}] * 3
AMC = [{"id": 0, "problem": "How far?", "answer": 27.0, "url": "https://example.org", "question": "How far?"}]
TRL = [{"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4", "source": "olympiads"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path):
    """Write rows to a file, whose name gives the format."""

    def to(name, rows):
        path, table = tmp_path / name, Dataset.from_list(rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.startswith(".json"):
            table.to_json(path, lines=path.suffix == ".jsonl")
        else:
            (table.to_parquet if path.suffix == ".parquet" else table.to_csv)(path)
        return str(path)

    return to


def hub(path, **settings):
    return Reference(path, is_local=False, **settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gsm8k", hub("gsm8k")),
        ("https://huggingface.co/datasets/openai/gsm8k/?config=main", hub("openai/gsm8k", config="main")),
        ("a/b?split=test&revision=v1", hub("a/b", split="test", revision="v1")),
        ("https://example.org/a/b.jsonl", Reference("https://example.org/a/b.jsonl", is_local=True)),
        ("hf://datasets/a/b/c.jsonl", Reference("hf://datasets/a/b/c.jsonl", is_local=True)),
        ("a/b?split=train+test", hub("a/b", split="train+test")),
        ("reasoning_gym:ab?size=3", Reference("reasoning_gym:ab?size=3", is_local=True)),
    ],
)
def test_references(text, expected):
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    ("rows", "golds", "others"),
    [
        (GSM8K, ["24", "1,234", "13"], {}),
        (
            MATH,
            [r"\frac{1}{2}", "18", None],
            {"level": ["Level 2", "Level 5", "Level 1"], "type": ["Algebra", "Geometry", "Algebra"]},
        ),
        (MATH_500, [r"\frac12"], {"level": [2], "subject": ["A"]}),
        (DAPO, ["34"] * 3, {"data_source": ["dapo"] * 3}),
        (AMC, ["27"], {"url": ["https://example.org"]}),
        (BLOCKS, ["4"], {}),
        (TRL, ["4"], {"source": ["test/data.jsonl"]}),
        ([{"Problem": "A?", "Answer": 7, "T": ["f(1)"]}], ["7"], {"Answer": [7], "T": [["f(1)"]]}),
        ([{"problem": "A?", "solution": "42"}], ["42"], {}),
    ],
    ids=["gsm8k", "math", "math-500", "dapo", "amc", "blocks", "trl", "capitals", "bare-solution"],
)
def test_schemas_are_recognised_by_their_columns(rows, golds, others, write):
    dataset = load_prompts(write("test/data.jsonl", rows))
    assert dataset["solution"] == golds
    for name, values in others.items():
        assert dataset[name] == values
    for row, original in zip(dataset, rows, strict=True):
        assert row["prompt_id"] == prompt_id(row["prompt"], row["solution"])
        assert row["prompt"][-1]["content"] in str(original)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "data.csv"])
def test_local_formats_give_the_same(name, write):
    dataset = load_prompts(write(name, GSM8K))
    assert dataset["solution"] == ["24", "1,234", "13"]
    assert dataset["prompt"][1] == [{"role": "user", "content": "How many sheep?"}]
    assert dataset["source"][0].endswith(name)


def test_folders(write, tmp_path):
    write("set/train.jsonl", GSM8K)
    write("set/test.jsonl", GSM8K[:1])
    assert len(load_prompts(str(tmp_path / "set"))) == 3
    assert len(load_prompts(f"{tmp_path / 'set'}?split=test")) == 1
    assert len(load_prompts(f"{tmp_path / 'set'}?split=train[:2]")) == 2


def test_system_prompt_and_suffix(write):
    dapo = write("dapo.jsonl", DAPO)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    old = {"role": "system", "content": "Old"}
    chat = write("chat.jsonl", [{"prompt": [old, *turns, turns[0]], "answer": "4"}])
    style = {"system_prompt": "Think.", "prompt_suffix": "\nBox it."}
    think = {"role": "system", "content": "Think."}
    for path, before, text in ((dapo, [], "Solve it: 30 + 4"), (chat, turns, "2+2?")):
        whole = [think, *before, {"role": "user", "content": f"{text}\nBox it."}]
        assert load_prompts(path, **style)["prompt"][0] == whole
    assert load_prompts(chat)["prompt"][0][0] == old
    assert load_prompts(dapo, conversational=False, prompt_suffix=" =")["prompt"][0] == "Solve it: 30 + 4 ="
    with pytest.raises(DataError, match="prompts of 4 messages"):
        load_prompts(chat, conversational=False)
    with pytest.raises(DataError, match="needs a chat"):
        load_prompts(dapo, conversational=False, system_prompt="Think.")


def test_columns_by_name_and_ids_of_the_rows(write):
    row = {"task": "1+1", "meta": {"gold": r"\boxed{2}"}, "note": "n"}
    path = write("own.jsonl", [row | {"prompt_id": 7}, row | {"prompt_id": 8}])  # an id that a row has is kept
    dataset = load_prompts(path, prompt_column="task", answer_column="meta.gold")
    assert dataset["solution"] == ["2"] * 2
    assert (dataset["note"], dataset["prompt_id"]) == (["n"] * 2, [7, 8])


def test_a_limited_mixture(write, caplog):
    own = [{"problem": "B?", "answer": "1", "id": "x", "url": ["x"]}]  # a list here, a text in another set
    names = {"a/math.jsonl": MATH, "b/math_500.jsonl": MATH_500, "c/amc.jsonl": AMC, "d/own.jsonl": own}
    dataset = load_mixture([write(name, rows) for name, rows in names.items()], limit=2)
    assert dataset["source"] == ["a/math.jsonl", *names]
    assert dataset["level"] == ["Level 2", "Level 5", "2", None, None]  # a number in one set and text in another
    assert dataset["id"] == [None, None, None, "0", "x"]
    assert "url" not in dataset.column_names and "The columns ['url'] are left out" in caplog.text
    assert dataset["prompt"][4] == [{"role": "user", "content": "B?"}]
    assert load_mixture([write(f"{n}.jsonl", [own[0] | {"tests": n * ["f"]}]) for n in (0, 1)])["tests"] == [[], ["f"]]
    with pytest.raises(ValueError, match="`limit` must be at least 1, got 0"):
        load_mixture([write("own.jsonl", own)], limit=0)


def test_rows_without_a_problem_are_dropped_and_reported(write, caplog):
    path = write("data.jsonl", [{"problem": text, "answer": "1"} for text in ("A?", "", None, "  ")])
    assert len(load_prompts(path)) == 1
    assert "dropped 3 of 4 rows" in caplog.text


def test_a_saved_dataset(tmp_path):
    Dataset.from_list(GSM8K).save_to_disk(str(tmp_path / "saved"))
    assert load_prompts(str(tmp_path / "saved"))["solution"] == ["24", "1,234", "13"]
    with pytest.raises(DataError, match=r"has the splits \['train'\] and none is called 'test'"):
        load_prompts(f"{tmp_path / 'saved'}?split=test")


def test_pictures_are_kept(write):
    picture = BytesIO()
    Image.effect_noise((64, 64), 99).save(picture, "JPEG", quality=99)
    rows = [
        {"problem": "What is it?", "answer": "a cat", "image": Image.open(picture), "images": [Image.open(picture)]}
    ]
    path = write("pictures.parquet", rows)
    dataset = load_prompts(path)
    assert dataset[0]["image"].size == dataset[0]["images"][0].size == (64, 64)
    stored, read = (one.with_format("arrow")[:] for one in (Dataset.from_parquet(path), dataset))
    assert read["image"] == stored["image"] and read["images"] == stored["images"]  # they are not compressed once more
    rows += [rows[0] | {"image": Image.new("RGB", (2, 2))}]
    assert len(set(load_prompts(write("two.parquet", rows))["prompt_id"])) == 2
    assert dataset["solution"] == ["a cat"]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"Body": "Sam has 3.", "Question": "How many?", "Answer": 3.0}, {}, "Sam has 3.\n\nHow many?"),
        ({"body": "S.", "question": "S. How many?", "answer": "3"}, {}, "S. How many?"),
        ({"passage": "P.", "table": "a | b", "question": "Q?", "answer": "1"}, {}, "P.\n\na | b\n\nQ?"),
        ({"passage": "P.", "question": "Q?", "answer": "1"}, {"context_columns": []}, "Q?"),
        ({"hint": "H.", "question": "Q?", "answer": "1"}, {"context_columns": ["hint"]}, "H.\n\nQ?"),
    ],
)
def test_contexts_come_before_the_problem(write, row, settings, expected):
    dataset = load_prompts(write("data.jsonl", [row]), conversational=False, **settings)
    assert dataset["prompt"] == [expected]


CHOICES = {
    "letters": {"options": ["3", "4"], "answer": "(b)"},
    "texts": {"options": ["3", "4"], "answer": "4"},
    "numbers": {"choices": ["three", "four"], "answer": 1},
    "labels": {"choices": {"text": ["3", "4"], "label": ["x", "Y"]}, "answerKey": "Y"},
    "mapping": {"options": {"p": "3", "q": "4", "r": None}, "answer": "q"},
    "labelled": {"choices": [{"label": "1", "text": "3"}, {"label": "2", "text": "4"}], "answer": "2"},
    "numbers from 1": {"choices": ["three", "four"], "answer": 2},
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_gold_answer_is_the_letter_of_the_right_option(write, name):
    dataset = load_prompts(write("data.jsonl", [{"question": "2+2?"} | CHOICES[name]]), conversational=False)
    texts = ("three", "four") if name.startswith("numbers") else ("3", "4")
    assert dataset["prompt"] == [f"2+2?\nA. {texts[0]}\nB. {texts[1]}"]
    assert dataset["solution"] == ["B"]


def test_a_set_may_lack_gold_answers(write):
    rows = [{"problem": "A?", "answer": "1"}, {"problem": "B?", "answer": None}]
    dataset = load_prompts(write("some.jsonl", rows), unlabelled=True)
    assert dataset["solution"] == ["1", None]
    games = load_prompts(write("none.jsonl", [{"problem": "A?", "secret": word} for word in "xy"]), unlabelled=True)
    assert games["solution"] == [None, None] and len(set(games["prompt_id"])) == 2


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"text": "A?", "answer": "1"}], {}, r"problem: wanted one of prompt.*found \['answer', 'text'\]"),
        ([{"problem": "A?", "text": "1"}], {}, "gold answer: wanted one of answer.*`answer_column`"),
        (GSM8K, {"answer_column": "gold"}, "no column 'gold'"),
        ([{"problem": "A?", "answer": ["1", "2"]}], {}, "'answer': A gold answer must be text, a number"),
        ([{"problem": "", "answer": "1"}], {}, "no row has text in 'problem'"),
        ([{"problem": "A?", "options": ["1", "2"], "answer": "7"}], {}, "most gold answers in 'answer' name none"),
        ([{"problem": "A?", "options": "1 or 2", "answer": "1"}], {}, "options must be a list of at most 26 texts"),
        (
            [{"problem": "A?", "context": ["B", "C"], "answer": "1"}],
            {},
            "'context': a context must be text, got .*'B'",
        ),
    ],
)
def test_tables_that_are_refused(rows, settings, message, write):
    with pytest.raises(DataError, match=message):
        load_prompts(write("data.jsonl", rows), **settings)


@pytest.mark.parametrize(
    ("reference", "content", "message"),
    [
        ("a/b?spilt=test", None, r"unknown settings \['spilt'\]"),
        ("a/b?test", None, r"unknown settings \['test'\]"),
        ("", None, "There is no file or folder ''"),
        ("data/train.jsonl", None, "There is no file or folder 'data/train.jsonl'"),
        ("empty.jsonl", b"", "cannot be read|has no rows"),
        ("rows.csv", b"problem,answer\n", "cannot be read|has no rows"),
        ("cut.jsonl", b'{"problem": "A?", "answer": "1"}\n{"problem": "B?", "ans', "cannot be read"),
        ("cut.parquet", b"PAR1\x00\x00", "cannot be read"),
        ("data.xlsx", b"PK", "unknown format '.xlsx'"),
    ],
)
def test_references_that_cannot_be_read(reference, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(reference).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(reference)


def lines(*rows: dict) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def late(first, last, padding: int = 0) -> bytes:
    """A file whose answers are of one kind in the first 1,500 rows, or 15 MB, and then of another one."""
    rows = [{"problem": f"{i}? {'x' * padding}", "answer": first} for i in range(1500)]
    rows += [{"problem": f"Late {i}?", "answer": last} for i in range(20)]
    return lines(*({name: value for name, value in row.items() if value != "absent"} for row in rows))


@pytest.mark.parametrize("padding", [0, 10_000])
@pytest.mark.parametrize(("first", "last"), [(None, "12"), ("absent", "12"), (1, "x+1"), (1, 2.5)])
def test_answers_may_come_late_and_change_their_type(first, last, padding, tmp_path):
    path = tmp_path / "late.jsonl"
    path.write_bytes(late(first, last, padding))
    solutions = load_prompts(str(path))["solution"]
    assert (solutions[0], solutions[-1]) == ("1" if first == 1 else None, str(last))


def test_golds_that_are_missing_say_nothing_of_the_others(write):
    rows = [{"problem": f"{i}?", "solution": None} for i in range(6)]
    rows += [{"problem": f"Late {i}?", "solution": f"So \\boxed{{{i}}}."} for i in range(3)]
    assert load_prompts(write("few.jsonl", [*rows, MATH[2]]))["solution"][-2:] == ["2", None]


ROW = {"problem": "Wo ist das Café?", "answer": "1"}


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", lines(ROW)), ("a.csv", "problem,answer\nWo ist das Café?,1\n".encode())]
)
def test_files_may_be_compressed_or_begin_with_a_mark(name, content, end, tmp_path):
    path = tmp_path / (name + end)
    path.write_bytes(gzip.compress(content) if end else codecs.BOM_UTF8 + content)
    (row,) = load_prompts(str(path))
    assert (row["prompt"][0]["content"], row["solution"]) == ("Wo ist das Café?", "1")


def test_what_a_csv_calls_none_is_text(tmp_path):
    (path := tmp_path / "folder" / "a.csv").parent.mkdir()
    path.write_text("problem,Answer,level\nA?,None,1\nB?,,2\nC?,007,3\n")
    for source in (path, path.parent):
        rows = load_prompts(str(source))
        assert rows["solution"] == ["None", None, "007"] and rows["level"] == [1, 2, 3]
    path.write_text(f"problem,answer\nA?,1.50\nB?,{'9' * 30}\nC?,007\nD?,\n")
    assert load_prompts(str(path))["solution"] == ["1.50", "9" * 30, "007", None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines({"problem": "A?", "answer": "1"}) + '{"problem": "Café?"'.encode("latin-1"), r"a\.jsonl, line 2 has a byte 0xe9"),
        ("a.json", json.dumps([ROW], ensure_ascii=False).encode("latin-1"), r"a\.json, line 1 has a byte 0xe9.*iconv"),
        ("a.csv", "problem,answer\nA?,1\nCafé?,2\n".encode("latin-1"), r"a\.csv, line 3 has a byte 0xe9"),
        ("a.jsonl", lines(ROW).decode().encode("utf-16"), r"a\.jsonl, line 1 has a byte 0xff, which is not UTF-8"),
        ("a.jsonl", lines(ROW) + b'{"problem": \n' + lines(ROW), r"a\.jsonl, line 2 is no JSON: Expecting value"),
        ("a.jsonl", b'"A?"\n', 'line 1 is no JSON object: "A\\?"'),
        ("a.jsonl", b"\n\n", r"a\.jsonl is empty"),
        ("folder/a.jsonl", lines(ROW) + '{"problem": "Café?"}'.encode("latin-1"), r"a\.jsonl, line 2 has a byte 0xe9"),
        ("a.jsonl", lines({"prompt": 0, "answer": "1"}), r"column 'prompt', row 0 \(from 0\) holds 0\. A prompt is a text"),
        ("a.csv", b"prompt,answer\n1,2\n", r"column 'prompt', row 0 \(from 0\) holds 1\."),
        ("a.csv", b"question,answer,source\nIn 1,000 m?,1,mine\n", "has rows with more fields than its first line"),
        ("folder/a.csv", b"question,answer\nA?,1,\n", "has rows with more fields than its first line"),
        ("a.jsonl", lines({"problem": "A?", "answer": [3**50]}), r"7\.178979876918526e\+23 was read as a float, and may have lost"),
        ("a.jsonl", lines({"prompt": ["hi"], "answer": "1"}), r"row 0 \(from 0\) holds \['hi'\]"),
        ("a.jsonl", lines(*TRL, {"prompt": [{"role": "user", "text": "2?"}], "solution": "4"}), r"row 1 \(from 0\) holds .*'text': '2\?'"),
        ("a.jsonl", lines({"problem": "A?", "answer": None}), r"found \['answer', 'problem'\], of which \['answer'\] hold nothing in any row"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_with_its_place(name, content, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for read in (load_prompts, lambda reference: load_problems(find_tasks([reference])[0], Decoding())):
        with pytest.raises((DataError, EvaluationError), match=message):
            read(str(path if path.parent == tmp_path else path.parent))


def test_messages_keep_their_tool_calls(write, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "2", "name": "add"}]
    (tmp_path / "calls.jsonl").write_bytes(lines({"prompt": turns, "solution": "2"}, *TRL, *TRL))
    dataset = load_prompts(str(tmp_path / "calls.jsonl"))
    assert dataset["prompt"][:2] == [[turns[0], {**turns[1], "content": ""}, turns[2]], TRL[0]["prompt"]]
    both = load_mixture([str(tmp_path / "calls.jsonl"), write("plain.jsonl", TRL)])
    assert both["prompt"][:] == [*dataset["prompt"], TRL[0]["prompt"]]
    assert both["prompt_id"][1] == both["prompt_id"][-1]


def test_a_set_in_configurations_is_that_of_the_default_or_all_of_them(write, tmp_path):
    for names, wanted in ((("main", "socratic"), ["24"]), (("algebra", "geometry"), ["24", "1,234"])):
        card = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in names)
        for name, row in zip(names, GSM8K, strict=False):
            write(f"{names[0]}/{name}.jsonl", [row])
        folder = tmp_path / names[0]
        (folder / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
        assert load_prompts(str(folder))["solution"] == wanted
        assert load_prompts(f"{folder}?config={names[1]}")["solution"] == ["1,234"]
