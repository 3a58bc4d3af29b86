"""Which rank writes what."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdp.checkpoint.flatten import HeldTensor
from hpcdp.checkpoint.hdf5_file import WHOLE_NBYTES, described, own_pieces
from hpcdp.core.state import Part


def held(name, values, copies=1, copy=0, first=0, shape=None):
    shape = values.shape if shape is None else shape
    part = Part(first, values.reshape(-1))
    return HeldTensor(name, shape, values.dtype.name, values.dtype, (part,), copies, copy)


@settings(max_examples=40)
@given(
    st.sampled_from([0, 1, 5, WHOLE_NBYTES // 8 - 1, WHOLE_NBYTES // 8, WHOLE_NBYTES // 8 + 1, 200_003]),
    st.integers(1, 9),
    st.text(min_size=1, max_size=3),
)
def test_all_copies_together_write_each_element_once(count, copies, name):
    values = np.arange(count, dtype=np.float64)
    pieces = [piece for copy in range(copies) for piece in own_pieces([held(name, values, copies, copy)])]
    pieces.sort(key=lambda piece: piece.first)
    assert [piece.first for piece in pieces] == [0, *np.cumsum([piece.values.size for piece in pieces])[:-1]][
        : len(pieces)
    ]
    assert np.array_equal(np.concatenate([np.empty(0), *(piece.values for piece in pieces)]), values)
    if values.nbytes < WHOLE_NBYTES:
        assert len(pieces) == (count > 0)  # one rank writes it all
    else:
        sizes = [piece.values.size for piece in pieces]
        assert len(pieces) == copies and max(sizes) - min(sizes) <= 16
    assert len({piece.dataset for piece in pieces}) == len(pieces)


def test_short_tensors_are_spread_over_ranks():
    writers = [
        copy for at in range(200) for copy in range(4) if [*own_pieces([held(f"layer{at}", np.zeros(3), 4, copy)])]
    ]
    assert len(writers) == 200 and min(writers.count(copy) for copy in range(4)) > 20


def test_parts_are_called_by_where_they_begin():
    parts = (Part(0, np.zeros(2)), Part(7, np.zeros(3)), Part(7, np.zeros(0)))
    one = HeldTensor("a", (10,), "float64", np.dtype("f8"), parts, 1, 0)
    assert [(piece.dataset, piece.first, piece.values.size) for piece in own_pieces([one])] == [
        ("a", 0, 2),
        ("a@7", 7, 3),
    ]


def test_values_that_should_be_alike_are_compared():
    values = np.arange(10_000.0)
    line = described([held("a", values, 4)], 4)
    for at in (0, 100, 9999):
        other = values.copy()
        other[at] += 1
        assert described([held("a", other, 4)], 4) != line
    assert described([held("a", values * 2, 2)], 4) == described([held("a", values, 2)], 4)
    own = HeldTensor("b", (3,), "int8", np.dtype("i1"), (), 1, 0, is_own=True)
    assert described([own], 4) == []
