"""The commands `hpcdp train` and `hpcdp report`.

`hpcdp train` starts its ranks on this machine, or is one of them; `hpcdp report` writes a page about runs, without MPI.
This module loads neither NumPy nor MPI before the options have been checked.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import gc
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from ..core import environment
from ..core.checks import file_name
from ..core.environment import explained, fail, launched_ranks, module, speaks
from ..errors import ConfigError, HpcdpError, printable, reason
from ..launch.parser import Parser, add_command
from ..train import config as runs_config
from ..train.config import CHECKPOINTS, TrainConfig, kind_of, uncollected

_EXAMPLES = """\
examples:
  hpcdp train lenet --data digits --ranks 2
  hpcdp train lenet --data mnist --data-dir ~/data --epochs 10 --lr 0.1
  hpcdp train --config run.toml --lr 0.1       a flag overrides the file
  mpirun -n 4 hpcdp train mlp --data digits    the ranks that mpirun starts
  hpcdp train lenet --ranks 4 --kv-store dist_async --servers 2
  hpcdp train --resume runs/lenet-digits-001   continues that run

Exit status 75: stopped early, with a checkpoint (SIGUSR1, --time-limit-s, the
end of the batch job). The same command with --resume auto continues.

Settings in a TOML file have the names of the flags with underscores:
  batch_size = 256
"""
_REPORT_EXAMPLES = """\
The page contains its pictures, and needs no network.

examples:
  hpcdp report runs/lenet-digits-001             writes report.html into it
  hpcdp report runs/lenet-* --output all.html    compares runs
  hpcdp report runs/lenet-digits-001 --png figs  also writes pictures
"""


def add_train(commands: Any) -> None:
    """Add ``hpcdp train`` to the commands of the parser of ``hpcdp``."""
    usage = "hpcdp train [MODEL] [--data NAME] [--ranks N] [options]"
    train = add_command(commands, "train", _train, "train a network over MPI ranks", usage=usage,
                        epilog=_EXAMPLES, argument_default=argparse.SUPPRESS)  # fmt: skip
    train.add_argument("--config", metavar="FILE", help="TOML file of settings")
    for field in dataclasses.fields(TrainConfig):
        _add_setting(train, field)


def _add_setting(parser: Parser, field: dataclasses.Field[Any]) -> None:
    kind = kind_of(field.name)
    about = field.metadata["help"]
    if field.metadata["choices"]:
        about += f": {', '.join(field.metadata['choices'])}"
    if field.default is not None and kind is not bool:
        about += f" (default: {field.default})"
    short = {"servers": ["-s"], "verbose": ["-v"]}.get(field.name, [])
    flags = [*short, "--" + field.name.replace("_", "-")]
    if field.name == "model":
        parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    elif kind is bool:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        parser.add_argument(*flags, action=action, help=about)
    else:
        parser.add_argument(*flags, metavar=_metavar(field.name, kind), help=about)


def _metavar(name: str, kind: type) -> str:
    if name == "trace":
        return "FILE"
    return "DIR" if name.endswith("_dir") or name == "resume" else {int: "N", float: "X", str: "NAME"}[kind]


def _train(arguments: argparse.Namespace) -> int:
    atexit.register(gc.freeze)  # no garbage collection at the exit of the process
    flags = {
        name: runs_config.parse(name, text) for name, text in vars(arguments).items() if name in runs_config.names()
    }
    path = getattr(arguments, "config", None)
    file_settings = {} if path is None else runs_config.read_toml(path)  # read once, as it may be a pipe
    config, settings = runs_config.merged(file_settings, flags, path), file_settings | flags
    return (_train_here if launched_ranks() is None else _train_as_a_rank)(config, settings)


def _train_here(config: TrainConfig, settings: dict[str, Any]) -> int:
    config.check_folders()  # before imports that take seconds
    from ..launch.launchers import Job, mpirun
    from ..train import run, run_dir

    if config.resume is not None:
        config = run_dir.settled(settings, launched=False)
    ranks, servers = config.ranks or 1, config.servers or 0
    config = config.for_world(ranks, servers)
    run.check(config)
    if config.resume is None:
        config = run_dir.reserve_run_dir(config)
    try:
        program = (sys.executable, *module("hpcdp.cli"), "train", *_as_arguments(config))
        status = mpirun.run_local(Job(program, ranks, servers), usr1_has_come=environment.usr1_has_come)
    finally:
        environment.ignore_usr1()
        run_dir.drop_empty_run_dir(config)
    if status == os.EX_TEMPFAIL:  # rank 0 has printed how to resume
        return status
    folder = str(config.run_dir)
    if status:  # ranks that a signal ends have no time to draw
        _draw_what_there_is(folder)
    if status >= 128:
        if sys.stdout.isatty():  # end the line of the progress bar, and show the cursor again
            with contextlib.suppress(OSError):
                print("\x1b[?25h", flush=True)
        files = f"; its files are in {folder}" if os.path.exists(folder) else ""
        return fail(f"{_ended_by(status)}, all ranks have ended{files}{_how_to_go_on(folder)}", status)
    if status not in (0, 2) and (how := _how_to_go_on(folder)):  # 2: a wrong argument
        return fail(f"the run has ended with status {status}{how}", status)
    return status


def _train_as_a_rank(config: TrainConfig, settings: dict[str, Any]) -> int:
    with uncollected(), explained("importing hpcdp", speaks(os.environ)):
        from ..comm import init
        from ..comm.consistency import on_rank_0, require_same
        from ..train.checkpoints import STOPPED, StopRequests
        from ..train.run import run
    with StopRequests(config.time_limit_s) as stop:
        comm = init().comm
        same = [f"{name} = {value}" for name, value in dataclasses.asdict(config).items() if name != "run_dir"]
        require_same(comm, "train", same, "start all ranks with the same settings")  # rank 0 chooses run_dir
        if config.resume is not None:
            from ..train.run_dir import settled

            config = TrainConfig(**on_rank_0(comm, lambda: dataclasses.asdict(settled(settings, launched=True))))
        return STOPPED if run(config, stop)["stopped"] else 0


def _ended_by(status: int) -> str:
    if status == 128 + signal.SIGINT:
        return "interrupted"
    try:
        return f"ended by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"ended with status {status}"


def _how_to_go_on(run_dir: str) -> str:
    """Return the hint how to resume a run; empty where it has no checkpoint."""
    from ..checkpoint import complete_steps

    with contextlib.suppress(OSError, HpcdpError):
        complete_steps.require_free(Path(run_dir) / CHECKPOINTS)  # as below
        if complete_steps.find(Path(run_dir) / CHECKPOINTS):
            return f"; resume with: hpcdp train --resume {shlex.quote(run_dir)}"
    return ""


def _draw_what_there_is(run_dir: str) -> None:
    from ..checkpoint.complete_steps import require_free
    from ..train.run_dir import draw_run

    with contextlib.suppress(OSError, ValueError, HpcdpError):
        require_free(Path(run_dir) / CHECKPOINTS)  # not the folder of another running job
        draw_run(Path(run_dir))


def _as_arguments(config: TrainConfig) -> list[str]:
    """Return the settings as arguments of ranks, since the file with them may be in an overwritten run folder."""
    values = dataclasses.asdict(config)
    del values["overwrite"]  # the run folder exists already
    arguments = [values.pop("model")]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is False and getattr(type(config), name) is not False:
            arguments.append(f"--no{flag[1:]}")
        elif value is not None and value is not False:
            arguments.append(f"{flag}={value}")
    return arguments


def add_report(commands: Any) -> None:
    """Add ``hpcdp report`` to the commands of the parser of ``hpcdp``."""
    about = "write an HTML page that shows or compares runs"
    report = add_command(commands, "report", _report, about, epilog=_REPORT_EXAMPLES)
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    about = "the page (default: report.html, in the folder of a single run)"
    report.add_argument("-o", "--output", metavar="FILE", type=Path, help=about)
    report.add_argument("--png", metavar="DIR", type=Path, help="also write the pictures into this folder")


def _report(arguments: argparse.Namespace) -> int:
    from ..train import report  # loads matplotlib, which other commands do not need

    runs = report.read_runs(arguments.runs)
    output = arguments.output or (arguments.runs[0] if len(runs) == 1 else Path()) / "report.html"
    file_name("report", "--output", output, (".html", ".htm"))
    if arguments.png is not None:
        file_name("report", "--png", arguments.png)
    with explained("drawing", True, sys.stderr):
        figures = report.draw_all(runs)
    page = report.page(runs, figures)
    _write(output, page)
    print(f"report    {printable(str(output))}, {len(page) / 1e3:.0f} kB")
    if arguments.png is not None:
        for heading, png in figures.items():
            name = heading.lower().replace(",", "").replace(" ", "-")
            path = arguments.png / f"{name}.png"
            _write(path, png)
            print(f"picture   {printable(str(path))}")
    return 0


def _write(path: Path, content: str | bytes) -> None:
    from ..train.metrics import replace_file

    try:
        path.parent.mkdir(exist_ok=True)  # the folder of the pictures
        replace_file(path, content)
    except OSError as error:
        raise ConfigError("report", where=path, expected="a writable path", got=reason(error)) from error
