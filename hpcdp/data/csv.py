"""Floor 3: data, tables of numbers as text. Imports: errors."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import ConfigError, DataError
from .datasets import ArrayDataset


def read_csv(
    path: str | Path,
    label_column: int = -1,
    sample_shape: tuple[int, ...] | None = None,
    skip_rows: int = 0,
    delimiter: str = ",",
    num_parts: int = 1,
    part_index: int = 0,
) -> ArrayDataset:
    """A table with one sample a row, of which one column is the label.

    Args:
        path: the file, plain or compressed (.gz, .bz2, .xz).
        label_column: number of the column with the labels; negative numbers count from the last.
        sample_shape: the shape of a sample, whose size is the number of the other columns; None keeps them as one axis.
        skip_rows: rows to skip at the start, such as the column names.
        delimiter: what separates two fields.
        num_parts: into how many parts of about as many bytes the file is cut, between rows; of a file that is not
            compressed. A part may have no rows.
        part_index: the one that is read, and nothing else of the file; usually the rank.

    Returns:
        Samples of shape ``(n, *sample_shape)``, float32; labels of shape ``(n,)``, int64 if all of them are whole
        numbers, else float32; of a part those of its own.

    Raises:
        ConfigError: a part that there is not, or parts of a compressed file.
        DataError: the file is missing, empty, has rows of different length or fields that are no numbers (the row is
            named), lacks the label's column, or does not fit ``sample_shape``.
    """
    if not Path(path).is_file():
        raise DataError("read csv", where=path, expected="a file", got="none")
    if not 0 <= part_index < num_parts or (num_parts > 1 and Path(path).suffix in (".gz", ".bz2", ".xz")):
        expected = "0 <= part_index < num_parts, and one part of a compressed file"
        raise ConfigError("read csv", where=path, expected=expected, got=f"part {part_index} of {num_parts}")
    try:
        source: Any = Path(path)
        if num_parts > 1:
            source, skip_rows = _rows_of_part(source, skip_rows, num_parts, part_index), 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            table = np.loadtxt(source, np.float64, delimiter=delimiter, skiprows=skip_rows, ndmin=2, comments=None)
    except (OSError, EOFError, ValueError) as error:
        raise DataError("read csv", where=path, expected="rows of as many numbers each", got=error) from error
    rows, columns = table.shape
    if rows == 0 and num_parts > 1:
        return ArrayDataset(np.empty((0, *(sample_shape or (0,))), np.float32), np.empty(0, np.int64))
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


def _rows_of_part(path: Path, skip_rows: int, num_parts: int, part_index: int) -> list[str]:
    """The rows that begin in one of ``num_parts`` runs of bytes; every row begins in one of them alone."""
    with open(path, "rb") as file:
        for _ in range(skip_rows):
            file.readline()
        start, end = file.tell(), os.fstat(file.fileno()).st_size
        first, last = (
            _next_row(file, start + (end - start) * part // num_parts, start) for part in (part_index, part_index + 1)
        )
        file.seek(first)
        return file.read(last - first).decode("utf-8").splitlines()


def _next_row(file: BinaryIO, place: int, start: int) -> int:
    """Where the first row begins that does not begin before ``place``."""
    if place <= start:
        return start
    file.seek(place - 1)
    file.readline()
    return file.tell()
