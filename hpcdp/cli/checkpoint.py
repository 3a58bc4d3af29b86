"""The command `hpcdp checkpoint`: list, verify, compare, export and remove checkpoints, without MPI."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.checks import check_name
from ..errors import ConfigError, DataError, printable, reason
from ..launch.parser import Parser, add_command, at_least

if TYPE_CHECKING:
    from ..checkpoint.inspect import Writer

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
    from ..checkpoint.directory import overview
    from . import format

    folder = overview(arguments.path)
    _say(*(json.dumps(format.as_json(folder), indent=2).splitlines() if arguments.json else format.lines(folder)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..checkpoint import directory, inspect, manifest
    from . import format

    path, name = directory.chosen(arguments.path, arguments.step), arguments.name.strip("/")
    with directory.offering_another(arguments.path, path):
        contents = manifest.read(path)
        tensor = format.tensor_called(contents, name) if name else None
        if tensor is None:
            lines = format.part(contents, name) if name else format.whole(contents, path)
            _say(*itertools.dropwhile(lambda line: not line, lines))
        else:
            with format.BytesBar(name, tensor.nbytes) as bar:
                statistics = inspect.statistics(path, tensor, bar.tell)
            _say(*format.one(name, tensor, statistics))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ..checkpoint import directory, inspect
    from . import format

    paths: list[Path] = []
    for path in arguments.paths:
        is_one = directory.is_checkpoint(path)
        checkpoints = [path] if is_one else [seen.path for seen in directory.overview(path).checkpoints]
        if not checkpoints:
            raise DataError("verify", where=path, expected="checkpoints", got="none")
        paths += checkpoints
    good: list[Path] = []
    num_removed = 0
    for path in paths:
        nbytes, began_s = directory.size_of(path), time.monotonic()
        with format.BytesBar(path.name, nbytes) as bar:
            faults = list(inspect.faults(path, bar.tell))
        took_s = time.monotonic() - began_s
        if not os.path.lexists(path):
            _say(f"{path}: removed meanwhile")
            num_removed += 1
            continue
        result = format.counted(len(faults), "fault") if faults else "good"
        _say(f"{path}: {result}, {format.size(nbytes)} in {took_s:.1f} s", *(f"  {fault}" for fault in faults))
        good += [] if faults else [path]
    if len(paths) > 1:
        newest = max((path for path in good if directory.is_named(path)), key=directory.step_of, default=None)
        _say(f"newest good: {newest or 'none'}")
    return 0 if good and len(good) + num_removed == len(paths) else 1


def _diff(arguments: argparse.Namespace) -> int:
    from ..checkpoint import directory, inspect, manifest
    from . import format

    a, b = directory.chosen(arguments.a), directory.chosen(arguments.b)
    contents = manifest.read(a)
    _say(f"A  {a}", f"B  {b}")
    with format.BytesBar("compared", contents.nbytes) as bar:
        differences = list(inspect.differences(a, b, arguments.rtol, arguments.atol, bar.tell))
    for difference in inspect.folded(differences):
        _say(f"{difference.name or 'the state'}: {difference.what}")
    same = f"no difference in {format.counted(len(contents.tensors), 'tensor')} and all values"
    _say(format.counted(len(differences), "difference") if differences else same)
    return 1 if differences else 0


def _export(arguments: argparse.Namespace) -> int:
    from ..checkpoint import directory, inspect
    from . import format

    kind = arguments.format or _SUFFIXES.get(arguments.out.suffix)
    if kind is None:
        raise ConfigError("export", where=arguments.out, expected=f"a name that ends in {', '.join(_SUFFIXES)}",
                          got=arguments.out.suffix or "no suffix", remedy="rename it, or use --format")  # fmt: skip
    check_name("format", kind, [*inspect.WRITERS, "pt"])
    path = directory.chosen(arguments.path, arguments.step, arguments.best)
    with directory.offering_another(arguments.path, path):
        chosen = inspect.choose_tensors(path, arguments.name)
        writer = _torch_writer() if kind == "pt" else inspect.WRITERS[kind]
        with format.BytesBar(arguments.out.name, chosen.nbytes) as bar:
            nbytes = inspect.export(chosen, arguments.out, writer, arguments.overwrite, bar.tell)
    line = (
        f"{arguments.out}: {format.counted(len(chosen.tensors), 'tensor')} of step {chosen.step}, {format.size(nbytes)}"
    )
    left_out = [] if kind == "pt" or not chosen.others else [format.counted(len(chosen.others), "value")]
    if chosen.per_rank:
        left_out.append(format.counted(len(chosen.per_rank), "per-rank entry", "per-rank entries"))
    _say(line + (f"; left out: {', '.join(left_out)}" if left_out else ""))
    return 0


def _torch_writer() -> Writer:
    from ..torch import checkpoint_adapters

    return checkpoint_adapters.write


def _prune(arguments: argparse.Namespace) -> int:
    from ..checkpoint import directory, inspect
    from . import format

    path = directory.checkpoints_folder(arguments.path)
    with format.BytesBar("verify what stays", directory.size_of(path)) as bar:
        done = inspect.prune(path, arguments.keep, arguments.keep_every, arguments.best, arguments.dry_run, bar.tell)
    for step, fault in done.damaged.items():
        _say(f"step {step} stays, but is damaged: {fault}")
    verb = "would remove" if arguments.dry_run else "removed"
    for file, nbytes in done.left_over.items():
        _say(f"{verb} {file.name}, left over: {format.size(nbytes)}")
    for step, nbytes in done.steps.items():
        _say(f"{verb} step {step}: {format.size(nbytes)}")
    nbytes = sum(done.steps.values()) + sum(done.left_over.values())
    stays = f"; step {done.good} stays and is good" if done.good is not None else ""
    _say(f"{verb} {format.size(nbytes)} in all{stays}" if done.steps or done.left_over else "nothing to remove")
    return 0
