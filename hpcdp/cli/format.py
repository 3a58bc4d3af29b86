"""Tables, texts and bars on a terminal.

Numbers, tables and trees as lines that fit a terminal.

What `hpcdp checkpoint ls` prints.

What `hpcdp checkpoint show` prints.

How many bytes of long work are done: a bar on a terminal, a line every ten seconds in a log; on standard error.
"""

from __future__ import annotations

import datetime
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..checkpoint import flatten, inspect
from ..checkpoint.inspect import Overview, Seen, TensorStatistics
from ..checkpoint.manifest import Manifest, StoredTensor
from ..errors import ConfigError, printable, shortened, to_stderr
from ..train.progress import terminal_columns

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


def lines(seen: Overview) -> Iterator[str]:
    """A line a checkpoint, and what else is to be said of a folder."""
    rows = [_row(each) for each in seen.checkpoints]
    if rows:
        *made, _ = table(("step", "written", "size", "ranks", "state"), [*rows, ("", "", "", "", "complete")],
                               (0, 2, 3))  # fmt: skip
        yield f"{made[0]}{' ' * (len('complete') - len('state'))}  metrics"
        for line, each in zip(made[1:], seen.checkpoints, strict=True):
            yield from _with_metrics(line, each)
    else:
        yield f"{seen.path}: no complete checkpoint"
    for path, nbytes in seen.left_over.items():
        what = "being written, or left over" if seen.writer else "left over, the next save removes it"
        yield f"{path.name}  {size(nbytes)}, {what}"
    if seen.writer:
        yield f"saving here: {seen.writer}"


def _row(each: Seen) -> tuple[str, ...]:
    found, state = each.manifest, "damaged" if each.damage else "complete"
    if found is None:
        return f"{each.step}", "", size(each.nbytes), "", state
    return (
        f"{each.step}", local_time(found.written), size(each.nbytes), str(found.world.get("size", "?")),
        state,
    )  # fmt: skip


def _with_metrics(line: str, each: Seen) -> Iterator[str]:
    told = numbers(each.manifest.metrics) if each.manifest is not None else ""
    if len(line) + 2 + len(told) <= columns():
        yield f"{line}  {told}".rstrip()
        told = ""
    else:
        yield line
    for more in (told, each.damage or ""):
        yield from textwrap.wrap(more, columns(), initial_indent="    ", subsequent_indent="    ",
                                 break_on_hyphens=False)  # fmt: skip


def as_json(seen: Overview) -> dict[str, Any]:
    """The same for programs: sizes in bytes, ``damage`` null where nothing is seen to be wrong."""
    return {
        "path": str(seen.path),
        "checkpoints": [
            {
                "step": each.step, "path": str(each.path), "nbytes": each.nbytes, "damage": each.damage,
                "written": each.manifest.written if each.manifest else None,
                "world": each.manifest.world if each.manifest else None,
                "metrics": each.manifest.metrics if each.manifest else {},
            }
            for each in seen.checkpoints
        ],
        "left_over": [{"path": str(path), "nbytes": nbytes} for path, nbytes in seen.left_over.items()],
        "writer": seen.writer,
    }  # fmt: skip


_NO_VALUE = object()
_SHAPE_WIDTH = 32


class _Placeholder:
    """So that what stands beside tensors in a list keeps its number."""

    def __repr__(self) -> str:
        return "(tensors)"


_TENSORS = _Placeholder()


def whole(found: Manifest, path: Path) -> Iterator[str]:
    """All there is to say of a checkpoint."""
    nbytes = sum(file.nbytes for file in found.files)
    ranks, nodes = (found.world.get(name, "?") for name in ("size", "num_nodes"))
    yield from fact("checkpoint", str(path))
    yield from fact("step", f"{found.step}, written {local_time(found.written)}")
    yield from fact("world", f"ranks {ranks}, nodes {nodes}")
    tensors, files = counted(len(found.tensors), "tensor"), counted(len(found.files), "file")
    yield from fact("size", f"{size(found.nbytes)} of elements in {tensors}, {size(nbytes)} in {files}")
    yield from fact("versions", ", ".join(f"{name} {' '.join(what.split())}" for name, what in found.versions.items()))
    if found.metrics:
        yield from fact("metrics", numbers(found.metrics))
    yield from _section("config", tree(found.config, 2))
    yield from part(found, "")


def part(found: Manifest, name: str) -> Iterator[str]:
    """The tensors and values that lie below a name; "": all."""
    form = flatten.below(found.state, name) if name else found.state
    named = [(each, node["tensor"]) for each, node in flatten.entries(form, name)
             if isinstance(node, dict) and "tensor" in node]  # fmt: skip
    tensors = [(each, found.tensors[key]) for each, key in named]
    if tensors:
        yield from [""] if not name else []
        rows = [
            (each or "state", shape(of.shape, _SHAPE_WIDTH), of.dtype, f"{of.nbytes:,}", f"{len(of.parts)}")
            for each, of in tensors
        ]
        yield from table(("tensor", "shape", "dtype", "bytes", "parts"), rows, (3, 4))
    values = _values(form)
    if isinstance(values, dict):
        yield from _section("values", tree(values, 2))
    elif values is not _NO_VALUE:
        yield from _section("values", tree({name.rpartition("/")[2] or "state": values}, 2))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    made = list(lines)
    if made:
        yield from ["", title, *made]


def _values(form: flatten.Form) -> Any:
    """The nested values of a form, without tensors and what holds nothing else; of what is per rank, rank 0's."""
    if not isinstance(form, dict):
        return form
    ((tag, content), *_) = form.items()
    if tag == "tensor":
        return _NO_VALUE
    if tag == "float":
        return float(content)
    if tag == "ranks":
        first = _values(content[0]) if content else _NO_VALUE
        return first if first is _NO_VALUE else {f"rank 0 of {len(content)}": first}
    if tag == "dict":
        kept = {key: _values(node) for key, node in content}
        kept = {key: value for key, value in kept.items() if value is not _NO_VALUE}
        return kept if kept or not content else _NO_VALUE
    listed = [*map(_values, content)]
    if content and all(value is _NO_VALUE for value in listed):
        return _NO_VALUE
    return (tuple if tag == "tuple" else list)(_TENSORS if value is _NO_VALUE else value for value in listed)


def tensor_called(found: Manifest, name: str) -> StoredTensor | None:
    """The tensor of that name, None where other things lie below it.

    Raises:
        ConfigError: there is nothing of that name.
    """
    nodes = dict(flatten.entries(found.state))
    if name in nodes:
        node = nodes[name]
        return found.tensors[node["tensor"]] if isinstance(node, dict) and "tensor" in node else None
    if any(each.startswith(f"{name}/") for each in nodes):
        return None
    raise ConfigError("show", expected="a name of the state", got=repr(name),
                      remedy=inspect.remedy(found.state, name) or "without a name it shows all")  # fmt: skip


def one(name: str, tensor: StoredTensor, of: TensorStatistics) -> Iterator[str]:
    """One tensor and its statistics."""
    yield from fact("tensor", name)
    yield from fact("shape", f"{shape(tensor.shape)} {tensor.dtype}, {size(tensor.nbytes)}")
    files = [f"{part.file} {part.dataset} ({part.count:,} elements)" for part in tensor.parts]
    more = [f"and {len(files) - 4} more"] if len(files) > 4 else []
    for number, file in enumerate([*files[:4], *more]):
        yield from fact("" if number else "parts", file)
    if of.count:
        about = " of absolute values" if tensor.dtype.startswith("complex") else ""
        yield from fact("range", f"{of.smallest:.6g} to {of.largest:.6g}{about}")
        yield from fact("mean", f"{of.mean:.6g}, standard deviation {of.deviation:.6g}")
        yield from fact("zeros", f"{of.zeros:,} of {tensor.count:,}")
    yield from fact("NaNs", f"{of.nans:,}, infinities {of.infinities:,}")


_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0


class BytesBar:
    """Shows progress inside a ``with`` statement; nothing stays of the bar.

    Args:
        what: is being done.
        total: bytes in all.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._shown = time.monotonic()
        self._bars: Any = None

    def __enter__(self) -> BytesBar:
        columns = terminal_columns(sys.stderr)
        if columns:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            console = Console(file=sys.stderr, width=columns - 1, force_terminal=True, highlight=False)
            cut_off = Column(no_wrap=True, overflow="crop")  # not every terminal has rich's ellipsis
            # Refreshed by hand: rich's own refresh is a thread.
            self._bars = Progress(
                TextColumn("{task.description}", markup=False, table_column=cut_off), BarColumn(),
                DownloadColumn(table_column=cut_off), TimeRemainingColumn(table_column=cut_off),
                console=console, auto_refresh=False, transient=True,
            )  # fmt: skip
            self._task = self._bars.add_task(self._what, total=self._total)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def tell(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._shown < (_LOG_EVERY_S if self._bars is None else _REFRESH_S):
            return
        self._shown = now
        if self._bars is None:
            to_stderr(f"{self._what}: {size(self._done)} of {size(self._total)}")
        else:
            self._bars.update(self._task, completed=self._done)
            self._bars.refresh()
