"""Lines and bars for a terminal: numbers, tables, trees, and the output of `hpcdp checkpoint ls` and `show`."""

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
from ..checkpoint.directory import Overview, Seen
from ..checkpoint.inspect import TensorStatistics
from ..checkpoint.manifest import Manifest, StoredTensor
from ..core.environment import terminal_columns
from ..errors import printable, shortened, to_stderr

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def columns() -> int:
    """Return the width of the terminal, at least 40."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def size(nbytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit."""
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.3g} {_UNITS[unit]}"


def counted(number: int, one: str, several: str | None = None) -> str:
    """Format a number with its noun: "1 file", "2 files"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def local_time(written: str) -> str:
    """Format an ISO 8601 instant in local time; return other texts unchanged."""
    try:
        return datetime.datetime.fromisoformat(written).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return written


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines of a table; a first cell that is too wide has its own line.

    Args:
        head: the titles of the columns.
        rows: the cells of each row.
        right: indices of the right-aligned columns.
    """
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    rest_width = columns() - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(rest_width, 8))
    for row in lines:
        first, *rest = row
        if len(first) > widths[0]:
            yield first
            first = ""
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip([first, *rest], widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


def fact(name: str, text: str, width: int = 13) -> Iterator[str]:
    """Yield the lines of a name and a wrapped text."""
    yield from textwrap.wrap(
        printable(text), columns(), initial_indent=f"{name:<{width}}", subsequent_indent=" " * width,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def numbers(values: Mapping[str, float]) -> str:
    """Format named numbers on one line."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def shape(sizes: Sequence[int], width: int | None = None) -> str:
    """Format a shape as Python does; if it is longer than ``width``, its first sizes and their number."""
    text = str(tuple(sizes))
    if width is None or len(text) <= width:
        return text
    end = f", ... {len(sizes)} sizes)"
    return text[: text.rindex(",", 0, width - len(end) + 1)] + end


def tree(value: Any, indent: int) -> Iterator[str]:
    """Yield the lines of nested dicts and lists, indented; values that fit are on one line."""
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        start = f"{' ' * indent}{printable(str(key))}  "
        if isinstance(item, Mapping | list | tuple) and item:
            inline = repr(item)
            if not _holds_dicts(item) and len(start) + len(inline) <= columns():
                yield start + inline
            elif len(item) > 8 and not _holds_dicts(item):
                yield f"{start}{len(item):,} values, {repr(item[0])[:20]} ... {repr(item[-1])[:20]}"
            else:
                yield start.rstrip()
                yield from tree(item, indent + 2)
        else:
            yield start + shortened(repr(item), max(columns() - len(start), 10))


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_holds_dicts, value)))


def lines(folder: Overview) -> Iterator[str]:
    """Yield a line for each checkpoint of a folder, and lines for left-over files and the writing process."""
    rows = [_row(seen) for seen in folder.checkpoints]
    if rows:
        titles, filler = ("step", "written", "size", "ranks", "state"), ("", "", "", "", "complete")
        head, *body, _ = table(titles, [*rows, filler], (0, 2, 3))
        yield f"{head}{' ' * (len('complete') - len('state'))}  metrics"
        for line, seen in zip(body, folder.checkpoints, strict=True):
            yield from _with_metrics(line, seen)
    else:
        yield f"{folder.path}: no complete checkpoint"
    for path, nbytes in folder.left_over.items():
        state = "being written, or left over" if folder.writer else "left over, the next save removes it"
        yield f"{path.name}  {size(nbytes)}, {state}"
    if folder.writer:
        yield f"saving here: {folder.writer}"


def _row(seen: Seen) -> tuple[str, ...]:
    manifest, state = seen.manifest, "damaged" if seen.damage else "complete"
    written = "" if manifest is None else local_time(manifest.written)
    ranks = "" if manifest is None else str(manifest.world.get("size", "?"))
    return f"{seen.step}", written, size(seen.nbytes), ranks, state


def _with_metrics(line: str, seen: Seen) -> Iterator[str]:
    metrics = numbers(seen.manifest.metrics) if seen.manifest is not None else ""
    if len(line) + 2 + len(metrics) <= columns():
        yield f"{line}  {metrics}".rstrip()
        metrics = ""
    else:
        yield line
    for text in (metrics, seen.damage or ""):
        yield from textwrap.wrap(text, columns(), initial_indent="    ", subsequent_indent="    ",
                                 break_on_hyphens=False)  # fmt: skip


def as_json(folder: Overview) -> dict[str, Any]:
    """Return the content of `lines` for programs: sizes in bytes, ``damage`` None where none was found."""
    return {
        "path": str(folder.path),
        "checkpoints": [
            {
                "step": seen.step, "path": str(seen.path), "nbytes": seen.nbytes, "damage": seen.damage,
                "written": seen.manifest.written if seen.manifest else None,
                "world": seen.manifest.world if seen.manifest else None,
                "metrics": seen.manifest.metrics if seen.manifest else {},
            }
            for seen in folder.checkpoints
        ],
        "left_over": [{"path": str(path), "nbytes": nbytes} for path, nbytes in folder.left_over.items()],
        "writer": folder.writer,
    }  # fmt: skip


_NO_VALUE = object()
_SHAPE_WIDTH = 32


class _Placeholder:
    """A placeholder for tensors in a list, so that the other items keep their numbers."""

    def __repr__(self) -> str:
        return "(tensors)"


_TENSORS = _Placeholder()


def whole(manifest: Manifest, path: Path) -> Iterator[str]:
    """Yield the lines of a whole checkpoint."""
    nbytes = sum(file.nbytes for file in manifest.files)
    ranks, nodes = (manifest.world.get(name, "?") for name in ("size", "num_nodes"))
    yield from fact("checkpoint", str(path))
    yield from fact("step", f"{manifest.step}, written {local_time(manifest.written)}")
    yield from fact("world", f"ranks {ranks}, nodes {nodes}")
    tensors, files = counted(len(manifest.tensors), "tensor"), counted(len(manifest.files), "file")
    yield from fact("size", f"{size(manifest.nbytes)} of elements in {tensors}, {size(nbytes)} in {files}")
    yield from fact(
        "versions", ", ".join(f"{name} {' '.join(what.split())}" for name, what in manifest.versions.items())
    )
    if manifest.metrics:
        yield from fact("metrics", numbers(manifest.metrics))
    yield from _section("config", tree(manifest.config, 2))
    yield from part(manifest, "")


def part(manifest: Manifest, name: str) -> Iterator[str]:
    """Yield the lines of the tensors and values below a name; ``""`` for all."""
    form = flatten.below(manifest.state, name) if name else manifest.state
    tensors = [(path, manifest.tensors[node["tensor"]]) for path, node in flatten.entries(form, name)
               if isinstance(node, dict) and "tensor" in node]  # fmt: skip
    if tensors:
        yield from [""] if not name else []
        rows = [
            (path or "state", shape(tensor.shape, _SHAPE_WIDTH), tensor.dtype, f"{tensor.nbytes:,}",
             f"{len(tensor.parts)}")
            for path, tensor in tensors
        ]  # fmt: skip
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
    """Return the nested values of a form, without tensors and containers of tensors only; rank 0's of each rank."""
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
        values = {key: _values(node) for key, node in content}
        values = {key: value for key, value in values.items() if value is not _NO_VALUE}
        return values if values or not content else _NO_VALUE
    listed = [*map(_values, content)]
    if content and all(value is _NO_VALUE for value in listed):
        return _NO_VALUE
    return (tuple if tag == "tuple" else list)(_TENSORS if value is _NO_VALUE else value for value in listed)


def tensor_called(manifest: Manifest, name: str) -> StoredTensor | None:
    """Return the tensor of that name; None for the name of a container.

    Raises:
        ConfigError: the name is unknown.
    """
    nodes = dict(flatten.entries(manifest.state))
    if name in nodes:
        node = nodes[name]
        return manifest.tensors[node["tensor"]] if isinstance(node, dict) and "tensor" in node else None
    if any(path.startswith(f"{name}/") for path in nodes):
        return None
    raise inspect.no_such_name("show", manifest.state, name)


def one(name: str, tensor: StoredTensor, of: TensorStatistics) -> Iterator[str]:
    """Yield the lines of one tensor and its statistics."""
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
    """A context that shows progress on stderr: a transient bar on a terminal, elsewhere a line every ten seconds.

    Args:
        what: label of the work.
        total: total number of bytes.
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
            cut_off = Column(no_wrap=True, overflow="crop")  # not every terminal can show rich's ellipsis
            # Refresh in this thread: rich's own refresh is another thread.
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
        """Add ``nbytes`` to the bytes that are done."""
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
