"""All tensors as one HDF5 file."""

import json
import math

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raises import raises
from samples import write_shard

from hpcdp.checkpoint import manifest
from hpcdp.checkpoint.hdf5_file import FilePiece
from hpcdp.checkpoint.manifest import StoredTensor
from hpcdp.errors import DataError


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_are_a_run_in_order(shape, data):
    count = math.prod(shape)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    numbers = np.arange(count).reshape(shape)
    found = [numbers[box].reshape(-1) for box in manifest.boxes(tuple(shape), first, last)]
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("name", ["a", "a/b", "block%2Fweight", "%b", "%", "ü", "a%40b"])
@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 19], [3, 3, 12]])
def test_the_whole_is_seen_through_parts(name, cuts, tmp_path):
    whole = np.random.default_rng(1).standard_normal((4, 5))
    parts = []
    for rank, (first, last) in enumerate(zip([0, *cuts], [*cuts, whole.size], strict=True)):
        piece = FilePiece(name, first, whole.reshape(-1)[first:last], "float64")
        parts += write_shard(tmp_path / f"shard-{rank:05d}.h5", [piece] if last > first else [])[0]
    tensors = {name: StoredTensor((4, 5), "float64", tuple(parts)), "none": StoredTensor((0, 3), "int8", ())}
    manifest.write(tmp_path / manifest.INDEX_NAME, tensors, {"dict": [["step", 5]]}, {"step": 5, "format": "x"})
    with h5py.File(tmp_path / manifest.INDEX_NAME) as file:
        assert np.array_equal(file[name][...], whole)
        assert file["none"].shape == (0, 3) and file["none"].dtype == np.int8
        assert dict(file.attrs) == {"step": 5, "format": "x"}
        assert json.loads(file[manifest.STATE][()]) == {"dict": [["step", 5]]}


def test_a_number_and_what_hdf5_has_no_dtype_for(tmp_path):
    pieces = [FilePiece("x", 0, np.array([2.5]), "float64"), FilePiece("b", 0, np.array([7, 8], np.uint16), "bfloat16")]
    stored = write_shard(tmp_path / "shard-00000.h5", pieces)[0]
    tensors = {"x": StoredTensor((), "float64", (stored[0],)), "b": StoredTensor((2,), "bfloat16", (stored[1],))}
    manifest.write(tmp_path / manifest.INDEX_NAME, tensors, None, {})
    with h5py.File(tmp_path / manifest.INDEX_NAME) as file:
        assert file["x"][()] == 2.5
        assert file["b"].attrs["dtype"] == "bfloat16" and [*file["b"][...]] == [7, 8]


def test_what_cannot_be_written(tmp_path):
    (tmp_path / manifest.INDEX_NAME).mkdir()
    with raises(DataError, operation="save", where=tmp_path / "index.h5"):
        manifest.write(tmp_path / manifest.INDEX_NAME, {}, None, {})
