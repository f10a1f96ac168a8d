"""Prompts hold the whole problem: context before the question, lettered options after it."""

import json

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from lze_trl.data import DataError, load_prompts
from lze_trl.data.audit import audit
from lze_trl.rewards import accuracy_reward


BODY = "Sam has 3 red and 4 blue marbles"
FOUR = ["6", "7", "8", "12"]
LETTERED = "How many?\nA. 6\nB. 7\nC. 8\nD. 12"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def load(tmp_path):
    """Write rows to a file and read it as prompts."""

    def read(*rows, name="data.jsonl", features=None, **settings):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            Dataset.from_list(list(rows), features=features).to_parquet(path)
        return load_prompts(str(path), **{"conversational": False} | settings)

    return read


# ---- Context ----


@pytest.mark.parametrize(
    ("row", "prompt", "gold"),
    [
        ({"Body": BODY, "Question": "How many?", "Answer": 7.0, "Type": "Sum"}, f"{BODY}. How many?", "7"),
        ({"body": f"{BODY}.", "question": "How many?", "answer": "7 (marbles)"}, f"{BODY}. How many?", "7"),
        ({"body": f"{BODY}.", "question": f"{BODY}.  How many?", "answer": "7"}, f"{BODY}.  How many?", "7"),
        ({"passage": BODY, "question": "How many?", "answer": "7"}, f"{BODY}\n\nHow many?", "7"),
        ({"question": "How many?", "article": BODY, "answer": "7"}, f"{BODY}\n\nHow many?", "7"),
        ({"context": ["Three red.", "Four blue."], "problem": "?", "answer": 7}, "Three red.\nFour blue.\n\n?", "7"),
        (
            {"question": "?", "table_title": "Marbles", "table": "red | 3\nblue | 4", "answer": "7"},
            "Marbles\n\nred | 3\nblue | 4\n\n?",
            "7",
        ),
        (
            {
                "table": {"header": ["colour", "count"], "rows": [["red", "3"], ["blue", "4"]]},
                "question": "?",
                "answer": 7,
            },
            "colour | count\nred | 3\nblue | 4\n\n?",
            "7",
        ),
        (
            {"pre_text": ["Counts:"], "post_text": ["End."], "table": [["red", "3"]], "question": "?", "answer": "7"},
            "Counts:\n\nred | 3\n\nEnd.\n\n?",
            "7",
        ),
        ({"context": None, "passage": " ", "question": "How many?", "answer": "7"}, "How many?", "7"),
    ],
    ids=["svamp", "asdiv", "joined", "passage", "article", "paragraphs", "tabmwp", "wiki-table", "finqa", "empty"],
)
def test_context_stands_before_the_question(row, prompt, gold, load):
    dataset = load(row)
    assert dataset["prompt"] == [prompt]
    assert dataset["solution"] == [gold]


def test_units_in_brackets_are_cut_from_word_problems_only(load):
    assert load({"question": "?", "answer": "5 (mod 7)"})["solution"] == ["5 (mod 7)"]


def test_context_goes_into_the_last_message(load):
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "How many?"}]
    dataset = load({"prompt": messages, "passage": BODY, "answer": "7"}, conversational=True)
    assert dataset["prompt"] == [[messages[0], {"role": "user", "content": f"{BODY}\n\nHow many?"}]]


def test_context_columns_by_name(load):
    row = {"question": "?", "context": "Unrelated.", "facts": {"first": "1 + 1"}, "hint": "Add.", "answer": "2"}
    assert load(row)["prompt"] == ["Unrelated.\n\n?"]
    assert load(row, context_columns=["facts.first", "hint"])["prompt"] == ["1 + 1\n\nAdd.\n\n?"]
    assert load(row, context_columns=[])["prompt"] == ["?"]
    assert load(row, prompt_column="facts.first", context_columns=[])["prompt"] == ["1 + 1"]


def test_a_stream_holds_the_same_problems(load):
    rows = [{"body": BODY, "question": "How many?", "options": FOUR, "answer": n} for n in (1, 0, 3)]
    stream = load(*rows, streaming=True)
    assert [(row["prompt"], row["solution"]) for row in stream] == [
        (f"{BODY}. {LETTERED}", letter) for letter in ("B", "A", "D")
    ]


# ---- Options ----


@pytest.mark.parametrize(
    "row",
    [
        {"choices": FOUR, "answer": "B"},
        {"choices": FOUR, "answer": "(b)"},
        {"choices": [6, 7, 8, 12], "answer": 7},
        {"options": FOUR, "answer": 1},
        {"options": FOUR, "answer": r"So $\boxed{B}$."},
        {"options": ["A)6", "B)7", "C)8", "D)12"], "correct": "B"},
        {"options": "a ) 6 , b ) 7 , c ) 8 , d ) 12", "correct": "b"},
        {"choices": {"text": FOUR, "label": ["A", "B", "C", "D"]}, "answerKey": "B"},
        {"choices": {"text": FOUR, "label": ["1", "2", "3", "4"]}, "answerKey": "2"},
        {"options": {"A": "6", "B": "7", "C": "8", "D": "12"}, "answer": "7", "answer_idx": "B"},
        {"options": {"A": "6", "B": "7", "C": "8", "D": "12", "E": None}, "answer": "B"},
        {"options": str(FOUR), "answer": "B"},
        {"A": "6", "B": "7", "C": "8", "D": "12", "answer": "B"},
        {"A": 6, "B": 7, "C": 8, "D": 12, "answer": "B"},
        {"option1": "6", "option2": "7", "option3": "8", "option4": "12", "answer": "2"},
    ],
    ids=str,
)
def test_options_get_letters_and_the_gold_answer_is_one(row, load):
    dataset = load({"question": "How many?"} | row)
    assert dataset["prompt"] == [LETTERED]
    assert dataset["solution"] == ["B"]
    assert accuracy_reward([r"7, so \boxed{B}", r"6, so \boxed{A}"], [*dataset["solution"]] * 2) == [1.0, 0.0]


def test_class_labels_name_the_options(load):
    features = Features(
        {
            "question": Value("string"),
            "choices": List(Value("string")),
            "answer": ClassLabel(names=["A", "B", "C", "D"]),
        }
    )
    dataset = load({"question": "How many?", "choices": FOUR, "answer": 1}, name="data.parquet", features=features)
    assert (dataset["prompt"], dataset["solution"]) == ([LETTERED], ["B"])
    features = Features({"question": Value("string"), "answer": ClassLabel(names=["even", "odd"])})
    rows = [{"question": f"Is {n} even?", "answer": n % 2} for n in (2, 3)]
    assert load(*rows, name="words.parquet", features=features)["solution"] == ["even", "odd"]


def test_the_whole_dataset_tells_whether_options_count_from_0_or_1(load):
    from_one = [{"question": f"{n}?", "options": ["w", "x", "y", "z"], "answer": n} for n in (1, 2, 3, 4)]
    from_zero = [row | {"answer": row["answer"] - 1} for row in from_one]
    for rows in (from_one, from_zero):
        assert load(*rows)["solution"] == ["A", "B", "C", "D"]
        assert load(*rows, limit=2)["solution"] == ["A", "B"]
    # Texts that are numbers themselves are numbers of options where all of them can be
    rows = [{"question": "1+1?", "options": FOUR, "answer": "8"}, {"question": "?", "options": FOUR, "answer": "12"}]
    assert load(*rows)["solution"] == ["C", "D"]


def test_options_of_some_rows(load):
    rows = [
        {"question": "How many?", "choices": FOUR, "answer": "7"},
        {"question": "How many of six?", "choices": None, "answer": "6"},
        {"question": "How many of ten?", "choices": [], "answer": "10"},
    ]
    dataset = load(*rows)
    assert dataset["prompt"] == [LETTERED, "How many of six?", "How many of ten?"]
    assert dataset["solution"] == ["B", "6", "10"]


def test_options_that_the_problem_lists_are_not_repeated(load):
    for question in (LETTERED, r"How many? $\textbf{(A)}\ 6 \qquad \textbf{(B)}\ 7 \qquad (C) 8 \qquad (D) 12$"):
        dataset = load({"question": question, "options": FOUR, "answer": "7"})
        assert (dataset["prompt"], dataset["solution"]) == ([question], ["B"])


def test_option_columns_by_name(load):
    row = {"question": "How many?", "right": "7", "w1": "6", "w2": "8", "options": ["x", "y"]}
    named = load(row, option_columns=["w1", "right", "w2"], answer_column="right")
    assert (named["prompt"], named["solution"]) == (["How many?\nA. 6\nB. 7\nC. 8"], ["B"])
    without = load(row, option_columns=[], answer_column="right")
    assert (without["prompt"], without["solution"]) == (["How many?"], ["7"])


def test_columns_that_only_look_like_options_are_no_options(load):
    dataset = load({"question": "3+4?", "A": 3, "B": 4, "a": 3, "b": 4, "c": 0, "answer": 7})
    assert (dataset["prompt"], dataset["solution"]) == (["3+4?"], ["7"])


def test_a_gold_answer_that_names_no_option_is_counted_as_missing(load, tmp_path):
    rows = [{"question": f"{n}?", "options": FOUR, "answer": gold} for n, gold in enumerate(("6", "7", "9"))]
    assert load(*rows)["solution"] == ["A", "B", None]
    (entry,) = audit([str(tmp_path / "data.jsonl")])
    assert entry.counts["none"] == 1
    assert "options from options, gold answer from answer (texts of options, read as the letter)" in entry.description


# ---- What is refused ----


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": 5, "answer": "1"},
            r"column 'prompt': a problem must be text.*\['answer', 'prompt'\].*`prompt_column`",
        ),
        ({"prompt": ["a", "b"], "answer": "1"}, "column 'prompt': a problem must be text, or a list of messages"),
        (
            {"conversations": [{"from": "human", "value": "?"}], "meta": {"gold": "1"}},
            r"found \['conversations', 'meta.gold'\]. Name it with `prompt_column` \(in a recipe, `dataset_prompt_col",
        ),
        ({"question": "?", "answer": {"a": 1, "b": 2}}, r"'answer': A gold answer must be text.*with `answer_column`"),
        (
            {"question": "?", "context": {"title": ["a"], "sentences": [["b"]]}, "answer": "1"},
            r"column 'context': A context must be text.*`dataset_context_columns`\), or give `\[\]`",
        ),
        ({"question": "?", "table": [{"a": 1}], "answer": "1"}, "column 'table': A context must be text"),
        (
            {"question": "?", "options": "six or seven", "answer": "A"},
            r"column 'options': Options must be a list.*`dataset_option_columns`\), or give `\[\]`",
        ),
        ({"question": "?", "options": [[1], [2]], "answer": "A"}, "column 'options': Options must be a list of texts"),
        ({"question": "?", "options": [*map(str, range(30))], "answer": "A"}, "letters for 26 options, got 30"),
        (
            {"question": "?", "options": FOUR, "answer": "9"},
            r"1 of 1 gold answers in 'answer' name none of them, such as '9' for \['6', '7', '8', '12'\].*`answer_column`",
        ),
        ({"question": "?", "image": "a.png", "answer": "1"}, "has pictures or sounds in column 'image'"),
    ],
)
def test_problems_that_cannot_be_written_are_refused(row, message, load):
    with pytest.raises(DataError, match=message):
        load(row)


def test_pictures_can_be_left_out_by_name(load):
    assert load({"question": "?", "image": "a.png", "answer": "1"}, context_columns=[])["prompt"] == ["?"]
    assert load({"question": "?", "image": None, "answer": "1"})["prompt"] == ["?"]
