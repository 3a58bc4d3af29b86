"""Numbers, tables and trees as lines that fit a terminal."""

from __future__ import annotations

import datetime
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable, shortened

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def columns() -> int:
    """The width that lines should fit."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def size(nbytes: float) -> str:
    """Bytes in three digits, decimal."""
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.3g} {_UNITS[unit]}"


def counted(number: int, one: str, several: str | None = None) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def local_time(written: str) -> str:
    """An instant in ISO 8601 as the clock on the wall shows it; as it is where it is none."""
    try:
        return datetime.datetime.fromisoformat(written).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return written


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Lines of a table. Where the first column is too wide, it has a line of its own.

    Args:
        right: which columns end at the right.
    """
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    room = columns() - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, 8))
    for row in lines:
        first, *rest = row
        if len(first) > widths[0]:
            yield first
            first = ""
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip([first, *rest], widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


def fact(name: str, text: str, width: int = 13) -> Iterator[str]:
    """Lines of a name and what there is to say of it."""
    yield from textwrap.wrap(
        printable(text), columns(), initial_indent=f"{name:<{width}}", subsequent_indent=" " * width,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def numbers(values: Mapping[str, float]) -> str:
    """Named numbers on one line."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def shape(sizes: Sequence[int], width: int | None = None) -> str:
    """As Python writes it; where that is longer than ``width``, the first sizes and how many there are."""
    text = str(tuple(sizes))
    if width is None or len(text) <= width:
        return text
    end = f", ... {len(sizes)} sizes)"
    return text[: text.rindex(",", 0, width - len(end) + 1)] + end


def tree(value: Any, indent: int) -> Iterator[str]:
    """Lines of nested dicts and lists, indented; what fits is on one line."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in pairs:
        start = f"{' ' * indent}{printable(str(key))}  "
        if isinstance(each, Mapping | list | tuple) and each:
            inline = repr(each)
            if not _holds_dicts(each) and len(start) + len(inline) <= columns():
                yield start + inline
            elif not isinstance(each, Mapping) and len(each) > 8 and not _holds_dicts(each):
                yield f"{start}{len(each):,} values, {repr(each[0])[:20]} ... {repr(each[-1])[:20]}"
            else:
                yield start.rstrip()
                yield from tree(each, indent + 2)
        else:
            yield start + shortened(repr(each), max(columns() - len(start), 10))


def _holds_dicts(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping) or any(isinstance(each, Mapping) or
                                             (isinstance(each, list | tuple) and _holds_dicts(each))
                                             for each in inner)  # fmt: skip
