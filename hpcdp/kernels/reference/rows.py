"""Additions to some rows of a table in plain array operations, the specification.

What is added to one row is added in the order in which it is given, so that the same run has the same bits again.
"""

from __future__ import annotations

from typing import Any

from ...core.arrays import Array, array_namespace


def add_rows(table: Array, rows: Array, values: Array) -> None:
    """``table[rows[k]] += values[k]`` for each k, in that order; ``table`` is changed.

    Args:
        table: ``(number, features)``.
        rows: integers from 0 to ``number - 1``, shape ``(count,)``.
        values: ``(count, features)``.
    """
    add_at(table, rows, values)


def add_at(table: Array, key: Any, values: Array) -> None:
    """``table[key] += values``, where an element that ``key`` names several times gets all that is there for it.

    Args:
        key: of arrays of integers, masks, slices and what else an index may have.
        values: of the shape of ``table[key]``.
    """
    array_namespace(table, values).add.at(table, key, values)
