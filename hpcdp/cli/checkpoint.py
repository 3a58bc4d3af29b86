"""The command `hpcdp checkpoint`: list, verify, compare, export and remove checkpoints, without MPI."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..core.checks import check_name
from ..core.environment import terminal_columns
from ..errors import ConfigError, DataError, printable, reason, shortened, to_stderr
from ..launch.parser import Parser, add_command, at_least

if TYPE_CHECKING:
    from ..checkpoint.complete_steps import CheckpointSummary, Overview
    from ..checkpoint.flatten import Form
    from ..checkpoint.inspect import TensorStatistics, Writer
    from ..checkpoint.manifest import Manifest, StoredTensor

_EPILOG = """\
PATH is a checkpoint (step-0000000100), a folder of checkpoints, or a run
folder. If there are several checkpoints, the newest is used.

examples:
  hpcdp checkpoint ls runs/lenet-digits-001
  hpcdp checkpoint verify runs/lenet-digits-001
  hpcdp checkpoint show runs/lenet-digits-001 network/0.weight
  hpcdp checkpoint diff runs/a runs/b --rtol 1e-5
  hpcdp checkpoint export runs/a net.pt --name network --best=-test_loss
  hpcdp checkpoint prune runs/a --keep 3 --best=-loss --dry-run

Exit status: 1 for damage (verify) or differences (diff), 2 for wrong
arguments or files that cannot be read, else 0.
"""
_PATH = "a checkpoint, a folder of checkpoints, or a run folder"
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_SUFFIXES = {".npz": "npz", ".safetensors": "safetensors", ".pt": "pt", ".pth": "pt"}


def parser() -> Parser:
    """Return the parser of ``hpcdp checkpoint``."""
    made = Parser(
        prog="hpcdp checkpoint",
        usage="hpcdp checkpoint ls | show | verify | diff | export | prune ...",
        description="List, verify, compare, export and remove checkpoints.",
        epilog=_EPILOG,
    )
    made.set_defaults(run=None)
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", prog="hpcdp checkpoint")

    ls = add_command(commands, "ls", _ls, "list checkpoints, incomplete ones, and the job that saves here")
    ls.add_argument("path", metavar="PATH", type=Path, help=_PATH)
    ls.add_argument("--json", action="store_true", help="print JSON")

    show = add_command(commands, "show", _show, "show the contents of a checkpoint, or statistics of a tensor")
    show.add_argument("path", metavar="PATH", type=Path, help=_PATH)
    show.add_argument("name", metavar="NAME", nargs="?", default="", help="show only this tensor, or entries below it")
    show.add_argument("--step", metavar="N", type=at_least(0), help="use the checkpoint of step N, not the newest")

    verify = add_command(commands, "verify", _verify, "compare every byte with its checksum")
    verify.add_argument("paths", metavar="PATH", type=Path, nargs="+", help=f"{_PATH}, of which all are verified")

    diff = add_command(commands, "diff", _diff, "compare two checkpoints; exit status 1 if they differ")
    diff.add_argument("a", metavar="A", type=Path, help=_PATH)
    diff.add_argument("b", metavar="B", type=Path, help=_PATH)
    for name in ("rtol", "atol"):
        diff.add_argument(f"--{name}", metavar="X", type=at_least(0.0), default=0.0,
                          help="ignore differences up to atol + rtol * |b| (default: 0)")  # fmt: skip

    export = add_command(commands, "export", _export, "write tensors to a file of NumPy, safetensors or PyTorch")
    export.add_argument("path", metavar="PATH", type=Path, help=_PATH)
    export.add_argument("out", metavar="OUT", type=Path, help="the file: .npz, .safetensors or .pt")
    export.add_argument(
        "--name",
        metavar="PREFIX",
        default="",
        help="only entries below this name, e.g. network, without it in their names",
    )
    export.add_argument("--format", metavar="NAME", help="npz, safetensors or pt (default: by the suffix of OUT)")
    export.add_argument("--step", metavar="N", type=at_least(0), help="use the checkpoint of step N, not the newest")
    export.add_argument(
        "--best", metavar="METRIC", help="use the checkpoint with the largest METRIC; --best=-loss: with the smallest"
    )
    export.add_argument("--overwrite", action="store_true", help="replace OUT")

    prune = add_command(commands, "prune", _prune, "remove old checkpoints, never the last good one")
    prune.add_argument("path", metavar="FOLDER", type=Path, help="a folder of checkpoints, or a run folder")
    prune.add_argument("--keep", metavar="N", type=at_least(1), required=True, help="keep the newest N")
    prune.add_argument("--keep-every", metavar="M", type=at_least(1), help="also keep those of every M-th step")
    prune.add_argument(
        "--best", metavar="METRIC", help="also keep the one with the largest METRIC; --best=-loss: with the smallest"
    )
    prune.add_argument("--dry-run", action="store_true", help="print what would be removed")
    return made


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp checkpoint`` with ``argv`` and return its exit status, see the epilog.

    Raises:
        ConfigError: an argument is invalid.
        DataError: a file cannot be read or written.
    """
    if argv and not argv[0].startswith("-"):
        check_name("checkpoint command", argv[0], ("ls", "show", "verify", "diff", "export", "prune"))
    made = parser()
    arguments, more = made.parse_known_args(argv)
    if arguments.run is _show and not arguments.name and more and not more[0].startswith("-"):
        arguments.name = more.pop(0)  # argparse accepts no optional argument after an option
    if more:
        made.refuse(more, arguments)
    if arguments.run is None:
        remedy = "list the commands with hpcdp checkpoint -h"
        raise ConfigError("checkpoint", expected="a command", got="none", remedy=remedy)
    try:
        status: int = arguments.run(arguments)
    except OSError as error:
        if error.filename is None:  # an error of standard output
            raise
        raise DataError(f"checkpoint {argv[0]}", where=error.filename, got=reason(error)) from error
    return status


def _say(*lines: str) -> None:
    """Print lines and flush; escape line breaks and control characters in names."""
    print("\n".join(map(printable, lines)), flush=True)


def _ls(arguments: argparse.Namespace) -> int:
    from ..checkpoint.complete_steps import overview

    folder = overview(arguments.path)
    _say(*(json.dumps(_as_json(folder), indent=2).splitlines() if arguments.json else _folder_lines(folder)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..checkpoint import complete_steps, inspect, manifest

    path, name = complete_steps.chosen(arguments.path, arguments.step), arguments.name.strip("/")
    with complete_steps.offering_another(arguments.path, path):
        contents = manifest.read(path)
        tensor = _tensor_called(contents, name) if name else None
        if tensor is None:
            lines = _entry_lines(contents, name) if name else _checkpoint_lines(contents, path)
            _say(*itertools.dropwhile(lambda line: not line, lines))
        else:
            with BytesBar(name, tensor.nbytes) as bar:
                statistics = inspect.statistics(path, tensor, bar.tell)
            _say(*_tensor_lines(name, tensor, statistics))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ..checkpoint import complete_steps, inspect

    paths: list[Path] = []
    for path in arguments.paths:
        is_one = complete_steps.is_checkpoint(path)
        checkpoints = [path] if is_one else [seen.path for seen in complete_steps.overview(path).checkpoints]
        if not checkpoints:
            raise DataError("verify", where=path, expected="checkpoints", got="none")
        paths += checkpoints
    good: list[Path] = []
    num_removed = 0
    for path in paths:
        nbytes, began_s = complete_steps.size_of(path), time.monotonic()
        with BytesBar(path.name, nbytes) as bar:
            faults = list(inspect.faults(path, bar.tell))
        took_s = time.monotonic() - began_s
        if not os.path.lexists(path):
            _say(f"{path}: removed meanwhile")
            num_removed += 1
            continue
        result = _counted(len(faults), "fault") if faults else "good"
        _say(f"{path}: {result}, {_size(nbytes)} in {took_s:.1f} s", *(f"  {fault}" for fault in faults))
        good += [] if faults else [path]
    if len(paths) > 1:
        newest = max((path for path in good if complete_steps.is_named(path)), key=complete_steps.step_of, default=None)
        _say(f"newest good: {newest or 'none'}")
    return 0 if good and len(good) + num_removed == len(paths) else 1


def _diff(arguments: argparse.Namespace) -> int:
    from ..checkpoint import complete_steps, inspect, manifest

    a, b = complete_steps.chosen(arguments.a), complete_steps.chosen(arguments.b)
    contents = manifest.read(a)
    _say(f"A  {a}", f"B  {b}")
    with BytesBar("compared", contents.nbytes) as bar:
        differences = list(inspect.differences(a, b, arguments.rtol, arguments.atol, bar.tell))
    for difference in inspect.folded(differences):
        _say(f"{difference.name or 'the state'}: {difference.what}")
    same = f"no difference in {_counted(len(contents.tensors), 'tensor')} and all values"
    _say(_counted(len(differences), "difference") if differences else same)
    return 1 if differences else 0


def _export(arguments: argparse.Namespace) -> int:
    from ..checkpoint import complete_steps, inspect

    kind = arguments.format or _SUFFIXES.get(arguments.out.suffix)
    if kind is None:
        raise ConfigError("export", where=arguments.out, expected=f"a name that ends in {', '.join(_SUFFIXES)}",
                          got=arguments.out.suffix or "no suffix", remedy="rename it, or use --format")  # fmt: skip
    check_name("format", kind, [*inspect.WRITERS, "pt"])
    path = complete_steps.chosen(arguments.path, arguments.step, arguments.best)
    with complete_steps.offering_another(arguments.path, path):
        chosen = inspect.choose_tensors(path, arguments.name)
        writer = _torch_writer() if kind == "pt" else inspect.WRITERS[kind]
        with BytesBar(arguments.out.name, chosen.nbytes) as bar:
            nbytes = inspect.export(chosen, arguments.out, writer, arguments.overwrite, bar.tell)
    line = f"{arguments.out}: {_counted(len(chosen.tensors), 'tensor')} of step {chosen.step}, {_size(nbytes)}"
    left_out = [] if kind == "pt" or not chosen.others else [_counted(len(chosen.others), "value")]
    if chosen.per_rank:
        left_out.append(_counted(len(chosen.per_rank), "per-rank entry", "per-rank entries"))
    _say(line + (f"; left out: {', '.join(left_out)}" if left_out else ""))
    return 0


def _torch_writer() -> Writer:
    from ..torch import checkpoint_adapters

    return checkpoint_adapters.write


def _prune(arguments: argparse.Namespace) -> int:
    from ..checkpoint import complete_steps, inspect

    path = complete_steps.checkpoints_folder(arguments.path)
    with BytesBar("verify what stays", complete_steps.size_of(path)) as bar:
        done = inspect.prune(path, arguments.keep, arguments.keep_every, arguments.best, arguments.dry_run, bar.tell)
    for step, fault in done.damaged.items():
        _say(f"step {step} stays, but is damaged: {fault}")
    verb = "would remove" if arguments.dry_run else "removed"
    for file, nbytes in done.left_over.items():
        _say(f"{verb} {file.name}, left over: {_size(nbytes)}")
    for step, nbytes in done.steps.items():
        _say(f"{verb} step {step}: {_size(nbytes)}")
    nbytes = sum(done.steps.values()) + sum(done.left_over.values())
    stays = f"; step {done.good} stays and is good" if done.good is not None else ""
    _say(f"{verb} {_size(nbytes)} in all{stays}" if done.steps or done.left_over else "nothing to remove")
    return 0


def _columns() -> int:
    """Return the width of the terminal, at least 40."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _size(nbytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit."""
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.3g} {_UNITS[unit]}"


def _counted(number: int, one: str, several: str | None = None) -> str:
    """Format a number with its noun: "1 file", "2 files"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _local_time(written: str) -> str:
    """Format an ISO 8601 instant in local time; return other texts unchanged."""
    try:
        return datetime.datetime.fromisoformat(written).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return written


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines of a table; a first cell that is too wide has its own line.

    Args:
        head: the titles of the columns.
        rows: the cells of each row.
        right: indices of the right-aligned columns.
    """
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    rest_width = _columns() - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(rest_width, 8))
    for row in lines:
        first, *rest = row
        if len(first) > widths[0]:
            yield first
            first = ""
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip([first, *rest], widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


def _fact(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a name and a wrapped text."""
    yield from textwrap.wrap(
        printable(text), _columns(), initial_indent=f"{name:<13}", subsequent_indent=" " * 13,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _numbers(values: Mapping[str, float]) -> str:
    """Format named numbers on one line."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def _shape(sizes: Sequence[int], width: int | None = None) -> str:
    """Format a shape as Python does; if it is longer than ``width``, its first sizes and their number."""
    text = str(tuple(sizes))
    if width is None or len(text) <= width:
        return text
    end = f", ... {len(sizes)} sizes)"
    return text[: text.rindex(",", 0, width - len(end) + 1)] + end


def _tree(value: Any, indent: int) -> Iterator[str]:
    """Yield the lines of nested dicts and lists, indented; values that fit are on one line."""
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        start = f"{' ' * indent}{printable(str(key))}  "
        if isinstance(item, Mapping | list | tuple) and item:
            inline = repr(item)
            if not _holds_dicts(item) and len(start) + len(inline) <= _columns():
                yield start + inline
            elif len(item) > 8 and not _holds_dicts(item):
                yield f"{start}{len(item):,} values, {repr(item[0])[:20]} ... {repr(item[-1])[:20]}"
            else:
                yield start.rstrip()
                yield from _tree(item, indent + 2)
        else:
            yield start + shortened(repr(item), max(_columns() - len(start), 10))


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_holds_dicts, value)))


def _folder_lines(folder: Overview) -> Iterator[str]:
    """Yield a line for each checkpoint of a folder, and lines for left-over files and the writing process."""
    rows = [_row(seen) for seen in folder.checkpoints]
    if rows:
        titles, filler = ("step", "written", "size", "ranks", "state"), ("", "", "", "", "complete")
        head, *body, _ = _table(titles, [*rows, filler], (0, 2, 3))
        yield f"{head}{' ' * (len('complete') - len('state'))}  metrics"
        for line, seen in zip(body, folder.checkpoints, strict=True):
            yield from _with_metrics(line, seen)
    else:
        yield f"{folder.path}: no complete checkpoint"
    for path, nbytes in folder.left_over.items():
        state = "being written, or left over" if folder.writer else "left over, the next save removes it"
        yield f"{path.name}  {_size(nbytes)}, {state}"
    if folder.writer:
        yield f"saving here: {folder.writer}"


def _row(seen: CheckpointSummary) -> tuple[str, ...]:
    manifest, state = seen.manifest, "damaged" if seen.damage else "complete"
    written = "" if manifest is None else _local_time(manifest.written)
    ranks = "" if manifest is None else str(manifest.world.get("size", "?"))
    return f"{seen.step}", written, _size(seen.nbytes), ranks, state


def _with_metrics(line: str, seen: CheckpointSummary) -> Iterator[str]:
    metrics = _numbers(seen.manifest.metrics) if seen.manifest is not None else ""
    if len(line) + 2 + len(metrics) <= _columns():
        yield f"{line}  {metrics}".rstrip()
        metrics = ""
    else:
        yield line
    for text in (metrics, seen.damage or ""):
        yield from textwrap.wrap(text, _columns(), initial_indent="    ", subsequent_indent="    ",
                                 break_on_hyphens=False)  # fmt: skip


def _as_json(folder: Overview) -> dict[str, Any]:
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


def _checkpoint_lines(manifest: Manifest, path: Path) -> Iterator[str]:
    """Yield the lines of a whole checkpoint."""
    nbytes = sum(file.nbytes for file in manifest.files)
    ranks, nodes = (manifest.world.get(name, "?") for name in ("size", "num_nodes"))
    yield from _fact("checkpoint", str(path))
    yield from _fact("step", f"{manifest.step}, written {_local_time(manifest.written)}")
    yield from _fact("world", f"ranks {ranks}, nodes {nodes}")
    tensors, files = _counted(len(manifest.tensors), "tensor"), _counted(len(manifest.files), "file")
    yield from _fact("size", f"{_size(manifest.nbytes)} of elements in {tensors}, {_size(nbytes)} in {files}")
    yield from _fact(
        "versions", ", ".join(f"{name} {' '.join(what.split())}" for name, what in manifest.versions.items())
    )
    if manifest.metrics:
        yield from _fact("metrics", _numbers(manifest.metrics))
    yield from _section("config", _tree(manifest.config, 2))
    yield from _entry_lines(manifest, "")


def _entry_lines(manifest: Manifest, name: str) -> Iterator[str]:
    """Yield the lines of the tensors and values below a name; ``""`` for all."""
    from ..checkpoint import flatten

    form = flatten.below(manifest.state, name) if name else manifest.state
    tensors = [(path, manifest.tensors[node["tensor"]]) for path, node in flatten.entries(form, name)
               if isinstance(node, dict) and "tensor" in node]  # fmt: skip
    if tensors:
        yield from [""] if not name else []
        rows = [
            (path or "state", _shape(tensor.shape, _SHAPE_WIDTH), tensor.dtype, f"{tensor.nbytes:,}",
             f"{len(tensor.parts)}")
            for path, tensor in tensors
        ]  # fmt: skip
        yield from _table(("tensor", "shape", "dtype", "bytes", "parts"), rows, (3, 4))
    values = _values(form)
    if isinstance(values, dict):
        yield from _section("values", _tree(values, 2))
    elif values is not _NO_VALUE:
        yield from _section("values", _tree({name.rpartition("/")[2] or "state": values}, 2))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    made = list(lines)
    if made:
        yield from ["", title, *made]


def _values(form: Form) -> Any:
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


def _tensor_called(manifest: Manifest, name: str) -> StoredTensor | None:
    """Return the tensor of that name; None for the name of a container.

    Raises:
        ConfigError: the name is unknown.
    """
    from ..checkpoint import flatten, inspect

    nodes = dict(flatten.entries(manifest.state))
    if name in nodes:
        node = nodes[name]
        return manifest.tensors[node["tensor"]] if isinstance(node, dict) and "tensor" in node else None
    if any(path.startswith(f"{name}/") for path in nodes):
        return None
    raise inspect.no_such_name("show", manifest.state, name)


def _tensor_lines(name: str, tensor: StoredTensor, of: TensorStatistics) -> Iterator[str]:
    """Yield the lines of one tensor and its statistics."""
    yield from _fact("tensor", name)
    yield from _fact("shape", f"{_shape(tensor.shape)} {tensor.dtype}, {_size(tensor.nbytes)}")
    files = [f"{part.file} {part.dataset} ({part.count:,} elements)" for part in tensor.parts]
    more = [f"and {len(files) - 4} more"] if len(files) > 4 else []
    for number, file in enumerate([*files[:4], *more]):
        yield from _fact("" if number else "parts", file)
    if of.count:
        about = " of absolute values" if tensor.dtype.startswith("complex") else ""
        yield from _fact("range", f"{of.smallest:.6g} to {of.largest:.6g}{about}")
        yield from _fact("mean", f"{of.mean:.6g}, standard deviation {of.deviation:.6g}")
        yield from _fact("zeros", f"{of.zeros:,} of {tensor.count:,}")
    yield from _fact("NaNs", f"{of.nans:,}, infinities {of.infinities:,}")


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
            to_stderr(f"{self._what}: {_size(self._done)} of {_size(self._total)}")
        else:
            self._bars.update(self._task, completed=self._done)
            self._bars.refresh()
