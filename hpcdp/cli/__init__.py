"""The command ``hpcdp``.

It parses arguments, calls the module of a command, and turns errors into one line and an exit status: 2 for a wrong
argument or setting, 127 for a missing program, 130 after Ctrl-C, 143 after SIGTERM, 1 for others.
"""

from __future__ import annotations

import argparse
import atexit
import codecs
import contextlib
import dataclasses
import gc
import importlib
import io
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import hpcdp

from ..core.checks import check_name
from ..errors import ConfigError, DataError, HpcdpError, LaunchError, SaveError

if TYPE_CHECKING:
    from ..launch.parser import Parser
    from ..train.runs.config import TrainConfig

_TRAIN_EXAMPLES = """\
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
_FORWARDING = {
    "launch": "start a program as MPI ranks, here or on other machines",
    "bench": "measure messages and collectives",
    "tune": "measure collectives and save the fastest algorithms",
    "checkpoint": "list, verify, compare, export and remove checkpoints",
    "slurm": "render batch scripts, submit them, manage their jobs",
    "report": "write an HTML page that shows or compares runs",
    "completion": "print the completion script of bash or zsh",
}
"""Commands whose modules parse the rest of the line, with their descriptions."""
_INFO_EXAMPLES = """\
examples:
  hpcdp info
  hpcdp info --json
  hpcdp launch -n 4 -- hpcdp info    also node and cores of each rank
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hpcdp`` and return its exit status; under mpirun or srun every rank must call."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("hpcdp", _encode)
        sys.stdout.reconfigure(errors="hpcdp")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no warning about a cache that cannot be written
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _main(sys.argv[1:] if argv is None else argv)


def _encode(error: UnicodeError) -> tuple[str | bytes, int]:
    """Print undecodable bytes of a path unchanged, so that a printed command works, and escape unknown characters."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    error.end = error.start + 1
    is_byte = "\udc80" <= error.object[error.start] <= "\udcff"
    return codecs.lookup_error("surrogateescape" if is_byte else "backslashreplace")(error)


def _open_closed_streams() -> None:
    """Redirect outputs that a shell has closed (``>&-``) to /dev/null, so that no later file gets their numbers."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            from ..launch.mpirun_output import lead_nowhere

            lead_nowhere(number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print hpcdp's warnings, which concern the user, without their source line; print others as usual."""
    text = f"hpcdp: {message}\n" if category is UserWarning else None
    text = text or warnings.formatwarning(message, category, filename, lineno, line)
    with contextlib.suppress(OSError):
        (file or sys.stderr).write(text)


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["train"]:  # before imports that take seconds
        from ..train import stop_signal

        stop_signal.note()
    try:
        if argv[:1] in (["train"], ["launch"]):
            _require_working_folder(argv[0])
        arguments = _parse(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except HpcdpError as error:
        from ..launch import ProgramMissingError
        from ..launch.mpirun_output import fail

        asked_wrongly = isinstance(error, ConfigError | DataError | LaunchError) and not isinstance(error, SaveError)
        return fail(error, 127 if isinstance(error, ProgramMissingError) else 2 if asked_wrongly else 1)
    except (KeyboardInterrupt, OSError) as error:
        from ..launch.mpirun_output import end_early

        return end_early(error, "".join(argv[:1]))
    except MemoryError as error:  # also a GPU's
        from ..launch.mpirun_output import fail

        remedy = "use smaller batches, or fewer ranks a node" if argv[:1] == ["train"] else None
        return fail(HpcdpError("".join(argv[:1]), expected="more memory", got=str(error) or "none", remedy=remedy), 1)


def _require_working_folder(command: str) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(command, expected="a working folder", got=error.strerror, remedy="cd to another") from error


def parser() -> Parser:
    """Return the parser of ``hpcdp`` and its commands; those of `_FORWARDING` have parsers in their modules."""
    from ..launch.parser import Parser, add_command

    made = Parser(prog="hpcdp", description="Data-parallel training of neural networks on MPI.")
    made.add_argument("--version", action="version", version=f"hpcdp {hpcdp.__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", required=True)
    usage = "hpcdp train [MODEL] [--data NAME] [--ranks N] [options]"
    train = add_command(commands, "train", _train, "train a network over MPI ranks", usage=usage,
                        epilog=_TRAIN_EXAMPLES, argument_default=argparse.SUPPRESS)  # fmt: skip
    _add_settings(train)
    about = "show versions, MPI library, cores, memory and devices"
    info = add_command(commands, "info", _info, about, epilog=_INFO_EXAMPLES)
    info.add_argument("--json", action="store_true", help="print JSON")
    doctor = add_command(commands, "doctor", _doctor, "check an installation and print remedies")
    doctor.add_argument("--slurm", action="store_true", help="check MPI under Slurm; in a job it starts job steps")
    for name, about in _FORWARDING.items():
        add_command(commands, name, _forward, about)
    return made


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and argv[0] in _FORWARDING:
        return argparse.Namespace(run=_forward, name=argv[0], rest=argv[1:])
    made = parser()
    if argv and not argv[0].startswith("-"):
        check_name("command", argv[0], made.commands)
    arguments: argparse.Namespace = made.parse_args(argv)
    return arguments


def complete_parser() -> Parser:
    """Return the parser of ``hpcdp`` with the options of every command."""
    made = parser()
    action = next(action for action in made._actions if isinstance(action, argparse._SubParsersAction))
    for name in _FORWARDING:
        action.choices[name] = _module_of(name).parser()
    return made


def _add_settings(parser: Parser) -> None:
    from ..train.runs.config import TrainConfig, kind_of

    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    for field in dataclasses.fields(TrainConfig):
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
    from ..core.environment import launched_ranks
    from ..train.runs import config as runs_config

    atexit.register(gc.freeze)  # no garbage collection at the exit of the process
    flags = {
        name: runs_config.parse(name, text) for name, text in vars(arguments).items() if name in runs_config.names()
    }
    path = getattr(arguments, "config", None)
    file_settings = {} if path is None else runs_config.read_toml(path)  # read once, as it may be a pipe
    config, settings = runs_config.merged(file_settings, flags, path), file_settings | flags
    return (_train_here if launched_ranks() is None else _train_as_a_rank)(config, settings)


def _train_here(config: TrainConfig, settings: dict[str, Any]) -> int:
    from ..core.environment import module
    from ..launch.launchers import local
    from ..launch.mpirun_output import fail
    from ..launch.spec import Job
    from ..train import stop_signal
    from ..train.runs import run, run_dir

    if config.resume is not None:
        config = run_dir.settled(settings, launched=False)
    ranks, servers = config.ranks or 1, config.servers or 0
    config = config.for_world(ranks, servers)
    run.check(config)
    if config.resume is None:
        config = run_dir.reserve_run_dir(config)
    try:
        program = (sys.executable, *module("hpcdp.cli"), "train", *_as_arguments(config))
        status = local.run(Job(program, ranks, servers), usr1_has_come=stop_signal.has_come)
    finally:
        stop_signal.ignore()
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
        kept = f"; its files are in {folder}" if os.path.exists(folder) else ""
        return fail(f"{_ended_by(status)}, all ranks have ended{kept}{_how_to_go_on(folder)}", status)
    if status not in (0, 2) and (how := _how_to_go_on(folder)):  # 2: a wrong argument
        return fail(f"the run has ended with status {status}{how}", status)
    return status


def _train_as_a_rank(config: TrainConfig, settings: dict[str, Any]) -> int:
    from ..core.environment import explained, speaks
    from ..train.runs.config import uncollected

    with uncollected(), explained("importing hpcdp", speaks(os.environ)):
        from ..comm import init
        from ..comm.consistency import on_rank_0, require_same
        from ..train.preemption import STOPPED, StopRequests
        from ..train.runs.run import run
    with StopRequests(config.time_limit_s) as stop:
        comm = init().comm
        same = [f"{name} = {value}" for name, value in dataclasses.asdict(config).items() if name != "run_dir"]
        require_same(comm, "train", same, "start all ranks with the same settings")  # rank 0 chooses run_dir
        if config.resume is not None:
            from ..train.runs.config import TrainConfig
            from ..train.runs.run_dir import settled

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
    from ..checkpoint import directory
    from ..train.runs.run_dir import CHECKPOINTS

    with contextlib.suppress(OSError, HpcdpError):
        directory.require_free(Path(run_dir) / CHECKPOINTS)  # as below
        if directory.find(Path(run_dir) / CHECKPOINTS):
            return f"; resume with: hpcdp train --resume {shlex.quote(run_dir)}"
    return ""


def _draw_what_there_is(run_dir: str) -> None:
    from ..checkpoint.directory import require_free
    from ..train.runs.run_dir import CHECKPOINTS, draw_run

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


def _forward(arguments: argparse.Namespace) -> int:
    """Run a command of `_FORWARDING`; every rank of a job calls, and a wrong argument is wrong for all."""
    try:
        status: int = _module_of(arguments.name).main(arguments.rest)
        return status
    except ConfigError as error:
        from ..launch.mpirun_output import fail

        return fail(error, 2, by_all=True)


def _module_of(name: str) -> Any:
    """Return the module of a command of `_FORWARDING`, with its functions ``parser`` and ``main``."""
    names = {"bench": "hpcdp.bench.command", "tune": "hpcdp.bench.tune"}
    return importlib.import_module(names.get(name, f"hpcdp.cli.{name}"))


def _info(arguments: argparse.Namespace) -> int:
    from ..launch import doctor

    return doctor.show_info(as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from ..launch import doctor

    return doctor.show(doctor.SLURM_CHECKS if arguments.slurm else doctor.CHECKS)
