"""Arrays by name in an HDF5 file: what comes back, and that no file comes through as what it is not."""

import h5py
import numpy as np
import pytest
from raises import raises

from hpcdp.core.arrays import dtype_of
from hpcdp.core.hdf5 import read_arrays, write_arrays
from hpcdp.errors import DataError

ARRAYS = {"a": np.arange(8.0, dtype="f4").reshape(2, 4), "b": np.arange(3, dtype="i8"), "c": np.float64(5.0)}


def test_every_array_comes_back_in_its_dtype(tmp_path):
    arrays = {**ARRAYS, "half": ARRAYS["a"].astype("f2"), "brain": ARRAYS["a"].astype(dtype_of("bfloat16"))}
    arrays["c"] = np.array(arrays["c"])
    write_arrays(tmp_path / "file.h5", arrays)
    found = read_arrays(tmp_path / "file.h5", {name: (each.shape, each.dtype.name) for name, each in arrays.items()})
    for name, each in arrays.items():
        assert found[name].dtype == each.dtype
        np.testing.assert_array_equal(found[name], each)


@pytest.mark.parametrize(
    ("stored", "says", "expected"),
    [("f4", "bfloat16", "bfloat16"), ("i1", "float32", "float32"), ("u2", None, "bfloat16"), ("u2", "f4", "bfloat16")],
)
def test_a_dtype_that_the_file_only_claims_is_refused(stored, says, expected, tmp_path):
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["v"] = np.ones((2, 4), stored)
        if says is not None:
            file["v"].attrs["dtype"] = says
    with raises(
        DataError, operation="read HDF5", where=f"{tmp_path}/file.h5:v", expected=[expected, (2, 4)], got=(2, 4)
    ):
        read_arrays(tmp_path / "file.h5", {"v": ((2, 4), expected)})
