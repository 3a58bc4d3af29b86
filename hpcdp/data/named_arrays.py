"""Arrays by name in one HDF5 file, such as the parameters of an exported network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..arrays import BFLOAT16, bits, is_bfloat16, of_bits
from ..errors import DataError
from ..replacing import own_part_of, replaced
from .hdf5 import open_hdf5
from .visiting import trust

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype."""


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` to an HDF5 file, a data set for each, that replaces ``path`` when it is complete.

    Several processes may write one file at a time: it is that of the last.

    Raises:
        DataError: it cannot be written; what was there stays.
    """
    import h5py  # type: ignore[import-untyped]

    path = Path(path)
    try:
        with replaced(path, own_part_of) as part, h5py.File(part, "w", locking=False) as file:
            for name, values in arrays.items():
                file.create_dataset(name, data=bits(values))
                if is_bfloat16(values):  # as in checkpoints
                    file[name].attrs["dtype"] = BFLOAT16
        trust(path)
    except (OSError, ValueError) as error:
        raise DataError("write HDF5", where=path, expected="a file that can be written", got=error) from error


def read_arrays(path: str | Path, expected: Mapping[str, Kind]) -> dict[str, np.ndarray]:
    """The arrays of those names from a file of `write_arrays`; nothing is read unless shapes and dtypes are those.

    Raises:
        DataError: the file is missing or damaged, or an array is missing, in another file, or of another kind.
    """
    import h5py

    found = {}
    with open_hdf5(path, list(expected)) as file:
        for name, (shape, dtype) in expected.items():
            dataset = file.get(name)
            where, wanted = f"{path}:{name}", f"{dtype} of shape {tuple(shape)}"
            if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual:
                raise DataError("read HDF5", where=where, expected=wanted, got="none in this file")
            there = str(dataset.dtype)
            if there == "uint16" and dataset.attrs.get("dtype") == BFLOAT16:
                there = BFLOAT16
            if tuple(dataset.shape) != tuple(shape) or there != dtype:
                raise DataError("read HDF5", where=where, expected=wanted, got=f"{there} of {dataset.shape}")
            found[name] = of_bits(np.asarray(dataset[()]), dtype)
    return found
