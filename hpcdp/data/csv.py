"""Floor 3: data, tables of numbers as text. Imports: errors."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from ..errors import DataError
from .datasets import ArrayDataset


def read_csv(
    path: str | Path,
    label_column: int = -1,
    sample_shape: tuple[int, ...] | None = None,
    skip_rows: int = 0,
    delimiter: str = ",",
) -> ArrayDataset:
    """A table with one sample a row, of which one column is the label.

    Args:
        path: the file, plain or compressed (.gz, .bz2, .xz).
        label_column: number of the column with the labels; negative numbers count from the last.
        sample_shape: the shape of a sample, whose size is the number of the other columns; None keeps them as one axis.
        skip_rows: rows to skip at the start, such as the column names.
        delimiter: what separates two fields.

    Returns:
        Samples of shape ``(n, *sample_shape)``, float32; labels of shape ``(n,)``, int64 if all of them are whole
        numbers, else float32.

    Raises:
        DataError: the file is missing, empty, has rows of different length or fields that are no numbers (the row is
            named), lacks the label's column, or does not fit ``sample_shape``.
    """
    if not Path(path).is_file():
        raise DataError("read csv", where=path, expected="a file", got="none")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            table = np.loadtxt(Path(path), np.float64, delimiter=delimiter, skiprows=skip_rows, ndmin=2, comments=None)
    except (OSError, EOFError, ValueError) as error:
        raise DataError("read csv", where=path, expected="rows of as many numbers each", got=error) from error
    rows, columns = table.shape
    if rows == 0:
        raise DataError("read csv", where=path, expected="at least one row", got="none")
    if not -columns <= label_column < columns or columns < 2:
        raise DataError("read csv", where=path, expected=f"a label in column {label_column}", got=f"{columns} columns")
    labels = table[:, label_column]
    samples = np.delete(table, label_column, axis=1).astype(np.float32)
    if sample_shape is not None:
        if int(np.prod(sample_shape)) != columns - 1 or min(sample_shape, default=1) < 1:
            raise DataError(
                "read csv",
                where=path,
                expected=f"{int(np.prod(sample_shape))} values a sample for {sample_shape}",
                got=columns - 1,
            )
        samples = samples.reshape(rows, *sample_shape)
    whole = np.isfinite(labels).all() and (labels == np.floor(labels)).all() and np.abs(labels).max() < 2**53
    return ArrayDataset(samples, labels.astype(np.int64 if whole else np.float32))
