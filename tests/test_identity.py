"""Identity: the same prompt and answer is the same prompt, wherever and however often it stands in the data."""

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.memory.identity import ID_COLUMN, add_prompt_ids, distinct_ids, prompt_id


def ids(dataset: Dataset | IterableDataset) -> list[int]:
    return [row[ID_COLUMN] for row in dataset]


def test_ids_are_fixed():
    # xxh64 of '["1+1=",null]', '["1+1=","2"]', '[[{"content":"1+1=","role":"user"}],"2"]' and '["1+1=","2",{"task":"sum"}]'. A
    # change of these numbers makes every saved state foreign
    messages, others = [{"role": "user", "content": "1+1="}], {"task": "sum", "tests": None}
    rows = ("1+1=",), ("1+1=", "2"), (messages, "2"), ("1+1=", "2", others)
    fixed = [-2210457467158200026, 7432352952038806773, 5087488713049359233, 299388217633230076]
    assert [prompt_id(*row) for row in rows] == fixed


def test_what_makes_a_prompt():
    question = [{"role": "user", "content": "1+1="}]
    assert prompt_id(question) == prompt_id([{"content": "1+1=", "role": "user"}])  # the order of keys is no content
    system = [{"role": "system", "content": "1+1="}]
    rows = ("1+1=",), ("1+1=", "2"), ("1+1=", 2), ("1+1=2",), (question,), (system,), (question * 2,)
    assert len({prompt_id(*row) for row in rows}) == 7


def test_keys_without_a_value_are_no_content():
    # Arrow gives every message of a table the same keys: a merge with data that has names or tool calls adds empty ones
    plain = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]]})
    named = Dataset.from_dict({"prompt": [[{"role": "user", "content": "2+2=", "name": "Ada"}]]})
    merged = Dataset.from_list([*plain, *named])
    assert merged[0]["prompt"] == [{"role": "user", "content": "1+1=", "name": None}]
    assert ids(add_prompt_ids(merged))[0] == ids(add_prompt_ids(plain))[0]


def test_a_prompt_that_the_file_repeats_is_one_prompt():
    dataset = Dataset.from_dict({"prompt": ["b", "a", "b", "c", "a", "b"], "solution": ["1", "2", "1", "3", "0", "1"]})
    unique = add_prompt_ids(dataset)
    # The first of each, in the order of the file; "a" with another answer is another prompt
    expected = [("b", "1"), ("a", "2"), ("c", "3"), ("a", "0")]
    assert [(row["prompt"], row["solution"]) for row in unique] == expected
    assert ids(unique) == [prompt_id(*row) for row in expected]


@pytest.mark.parametrize("column", ["solution", "answer", "ground_truth"])
def test_the_answer_is_part_of_the_identity(column):
    dataset = Dataset.from_dict({"prompt": ["a", "a"], column: ["1", "2"]})
    assert ids(add_prompt_ids(dataset)) == [prompt_id("a", "1"), prompt_id("a", "2")]
    both = Dataset.from_dict({"prompt": ["a"], "ground_truth": ["z"], "solution": ["x"]})
    assert ids(add_prompt_ids(both)) == [prompt_id("a", "x", {"ground_truth": "z"})]


def test_all_that_a_reward_can_read_is_part_of_the_identity():
    def kept(**columns):
        rows = {"prompt": ["a"] * 3, "solution": ["1"] * 3} | columns
        return len(add_prompt_ids(Dataset.from_dict(rows)))

    assert kept(task=["sum", "code", "sum"]) == 2
    assert kept(tests=[["x"], ["x", "y"], []]) == 3
    assert kept(vector=[np.arange(3), np.arange(3), np.arange(1, 4)]) == 2
    # What reward functions are not given, and columns without a value
    assert kept(completion=["p", "q", "r"], level=[None] * 3) == 1
    one = Dataset.from_dict({"prompt": ["a"], "solution": ["1"]})
    assert ids(add_prompt_ids(one.add_column("level", [None]))) == ids(add_prompt_ids(one))


def test_a_users_prompt_id_wins():
    dataset = Dataset.from_dict({"prompt": ["a", "a", "b"], "prompt_id": [7, -8, 2**62]})
    assert ids(add_prompt_ids(dataset)) == [7, -8, 2**62]  # integers are taken as they are
    dataset = Dataset.from_dict({"prompt": ["a", "b", "c"], "prompt_id": np.array([5, 2**63, 6], dtype=np.uint64)})
    assert [-(2**63) <= value < 2**63 for value in ids(add_prompt_ids(dataset))] == [True] * 3
    dataset = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"], "prompt_id": [7, None]})
    assert ids(add_prompt_ids(dataset)) == [7, prompt_id("b", "2")]
    dataset = Dataset.from_dict({"prompt": ["a", "a", "b"], "prompt_id": ["x/1", "x/2", "x/1"]})
    unique = add_prompt_ids(dataset)
    assert unique["prompt"] == ["a", "a"]  # and decide what a duplicate is
    assert len(set(ids(unique))) == 2


def test_rows_that_repeat_a_prompt_can_be_kept_as_prompts_of_their_own():
    dataset = Dataset.from_dict({"prompt": ["a", "b", "a", "a"]})
    kept = ids(add_prompt_ids(dataset, deduplicate=False))
    assert kept[:2] == [prompt_id("a"), prompt_id("b")]
    assert len(set(kept)) == 4
    assert kept == ids(add_prompt_ids(dataset, deduplicate=False))  # a resumed run knows them again


def test_a_stream_gets_ids_and_keeps_its_duplicates():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "a", "answer": "1"}]
    known, unknown = Dataset.from_list(rows).to_iterable_dataset(), IterableDataset.from_generator(lambda: iter(rows))
    for stream in (known, unknown):  # whether its columns are known
        assert ids(add_prompt_ids(stream)) == [prompt_id("a", "1"), prompt_id("b", "2"), prompt_id("a", "1")]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8).flatmap(lambda ids: st.permutations(ids + ids[:3])))
def test_distinct_ids_are_those_given_where_they_come_first(given_ids):
    given_ids = np.array(given_ids, dtype=np.int64)
    apart = distinct_ids(given_ids)
    assert len(np.unique(apart)) == len(given_ids)
    _, first = np.unique(given_ids, return_index=True)
    assert (apart[first] == given_ids[first]).all()


def test_what_has_no_identity_is_refused():
    with pytest.raises(ValueError, match=r"The training set is empty\. Check the split"):
        add_prompt_ids(Dataset.from_dict({"prompt": []}))
    with pytest.raises(TypeError, match="Give each row a `prompt_id`, or remove the column"):
        prompt_id("1+1=", {2})
