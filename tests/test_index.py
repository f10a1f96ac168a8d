"""The index of prompt ids: rows in the order in which ids were added, whatever the ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lze_trl.memory.index import RowIndex


@settings(max_examples=60)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_ids_are_found_in_the_row_in_which_they_were_added(ids, cuts, others):
    first, *batches = np.split(np.array(ids, dtype=np.int64), sorted(cuts))
    index = RowIndex(first)
    for batch in batches:
        assert index.add(batch).tolist() == list(range(len(index) - len(batch), len(index)))
    assert len(index) == len(ids)
    rows = dict(zip(ids, range(len(ids)), strict=True))
    wanted = [*ids, *others]
    assert index.find(np.array(wanted, dtype=np.int64)).tolist() == [rows.get(id, -1) for id in wanted]


@pytest.mark.parametrize("shift", [0, 47])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_index_grows(shift, sign):
    ids = sign * (np.arange(1, 40_001, dtype=np.int64) << shift)
    index = RowIndex()
    for part in np.array_split(ids, 97):  # the latest ids are merged many times
        index.add(part)
    np.testing.assert_array_equal(index.find(ids), np.arange(40_000))
    assert (index.find(~ids) == -1).all()  # of the other sign
    assert index.nbytes == 12 * 40_000
