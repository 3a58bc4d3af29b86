"""The command ``hpcdp``.

Parses, calls the module that does the work, and turns an error into one line and an exit status: 2 for a wrong
argument or setting, 127 for a program that is missing, 130 after Ctrl-C, 143 after SIGTERM, 1 for the rest.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import hpcdp

from ..core.checks import check_name
from ..errors import ConfigError, DataError, HpcdpError, LaunchError, SaveError

if TYPE_CHECKING:
    from ..launch.checks import Parser
    from ..train.runs.config import TrainConfig

_TRAIN_EXAMPLES = """\
examples:
  hpcdp train lenet --data digits --ranks 2
  hpcdp train lenet --data mnist --data-dir ~/data --epochs 10 --lr 0.1
  hpcdp train --config run.toml --lr 0.1       a flag overrides the file
  mpirun -n 4 hpcdp train mlp --data digits    the ranks that mpirun starts
  hpcdp train lenet --ranks 4 --kv-store dist_async --servers 2
  hpcdp train --resume runs/lenet-digits-001   goes on where that run ended

Exit status 75: stopped early, with a checkpoint (SIGUSR1, --time-limit-s, the
end of the batch job); the same command with --resume auto goes on.

Settings in a TOML file have the names of the flags with underscores:
  batch_size = 256
"""
_FORWARDING = {
    "launch": "start a program as MPI ranks, here or on other machines",
    "bench": "measure messages and collectives",
    "tune": "measure this machine and save which algorithms suit it",
    "checkpoint": "look at checkpoints, check, compare, export, remove them",
    "slurm": "render batch scripts, submit them, look after their jobs",
    "report": "make a page of HTML about runs, side by side",
}
"""Commands whose rooms parse the rest of the line themselves."""
_INFO_EXAMPLES = """\
examples:
  hpcdp info
  hpcdp info --json
  hpcdp launch -n 4 -- hpcdp info    what every rank of a job sees
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of ``hpcdp`` and returns its exit status; under mpirun or srun every rank calls it."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have bytes that are no text, or characters it has not
        has_all = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if has_all else "backslashreplace")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a cache that it cannot write costs a second, and no more
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _main(sys.argv[1:] if argv is None else argv)


def _open_closed_streams() -> None:
    """What a shell has closed (``>&-``) leads nowhere: else a file opened later takes its number, and what is said."""
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
    """Those of hpcdp are for who runs the command: a line, without that of the source; others are for who writes it."""
    text = f"hpcdp: {message}\n" if category is UserWarning else None
    text = text or warnings.formatwarning(message, category, filename, lineno, line)
    with contextlib.suppress(OSError):
        (file or sys.stderr).write(text)


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["train"]:  # first of all: what follows takes seconds
        from ..train import stop_signal

        stop_signal.note()
    try:
        if argv[:1] in (["train"], ["launch"]):
            _require_working_folder(argv[0])
        arguments = _parse(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        status = command(arguments)
        sys.stdout.flush()
        return status
    except (KeyboardInterrupt, OSError) as error:
        from ..launch.mpirun_output import end_early

        return end_early(error, "".join(argv[:1]))
    except HpcdpError as error:
        from ..launch import ProgramMissingError
        from ..launch.mpirun_output import fail

        asked_wrongly = isinstance(error, ConfigError | DataError | LaunchError) and not isinstance(error, SaveError)
        return fail(error, 127 if isinstance(error, ProgramMissingError) else 2 if asked_wrongly else 1)
    except MemoryError as error:  # that of a GPU, too
        from ..launch.mpirun_output import fail

        remedy = "take smaller batches, or fewer ranks a node" if argv[:1] == ["train"] else None
        return fail(HpcdpError("".join(argv[:1]), expected="more memory", got=str(error) or "none", remedy=remedy), 1)


def _require_working_folder(command: str) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(command, expected="a working folder", got=error.strerror, remedy="cd to another") from error


def parser() -> Parser:
    """Return the options of ``hpcdp`` and its commands; those of `_FORWARDING` have parsers of their own."""
    from ..launch.checks import Parser

    made = Parser(prog="hpcdp", description="Data-parallel training of neural networks on MPI.")
    made.add_argument("--version", action="version", version=f"hpcdp {hpcdp.__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", required=True)
    for add in (_add_train, _add_info, _add_doctor):
        add(commands)
    for name, about in _FORWARDING.items():
        _add_command(commands, name, about, run=_forward)
    return made


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and argv[0] in _FORWARDING:
        return argparse.Namespace(command=_forward, name=argv[0], rest=argv[1:])
    made = parser()
    if argv and not argv[0].startswith("-"):
        check_name("command", argv[0], made.commands)
    arguments, unknown = made.parse_known_args(argv)
    if unknown:
        command = made.commands[arguments.command_name]
        if not unknown[0].startswith("-"):
            command.error(f"unexpected argument {unknown[0]!r}")
        options = [option for option in command._option_string_actions if option.startswith("--")]
        check_name(f"{arguments.command_name} option", unknown[0].partition("=")[0], options)
    return arguments


def _add_command(commands: Any, name: str, about: str, *, run: Callable[..., int], **options: Any) -> Parser:
    parser: Parser = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        **options,
    )
    parser.set_defaults(command=run)
    return parser


def _add_train(commands: Any) -> Parser:
    from ..train.runs.config import TrainConfig, kind_of

    parser = _add_command(
        commands,
        "train",
        "train a network over MPI ranks",
        run=_train,
        usage="hpcdp train [MODEL] [--data NAME] [--ranks N] [options]",
        epilog=_TRAIN_EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
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
    return parser


def _metavar(name: str, kind: type) -> str:
    if name == "trace":
        return "FILE"
    return "DIR" if name.endswith("_dir") or name == "resume" else {int: "N", float: "X", str: "NAME"}[kind]


def _add_info(commands: Any) -> Parser:
    parser = _add_command(
        commands, "info", "show versions, MPI library, cores, memory and devices", run=_info, epilog=_INFO_EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_doctor(commands: Any) -> Parser:
    parser = _add_command(
        commands, "doctor", "look for the usual breakages of an installation and say the remedies", run=_doctor
    )
    parser.add_argument("--slurm", action="store_true", help="of MPI under Slurm instead; in a job it runs steps")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from ..core.environment import launched_ranks
    from ..train.runs import config as runs_config

    atexit.register(gc.freeze)  # what is there at the end goes with the process, and is not looked through before
    given = {
        name: runs_config.parse(name, text) for name, text in vars(arguments).items() if name in runs_config.names()
    }
    path = getattr(arguments, "config", None)
    read = {} if path is None else runs_config.read_toml(path)  # once: it may be a pipe
    config, said = runs_config.merged(read, given, path), read | given
    if launched_ranks() is not None:
        return _train_as_a_rank(config, said)
    return _train_here(config, said)


def _train_here(config: TrainConfig, said: dict[str, Any]) -> int:
    from ..core.environment import module
    from ..launch.launchers import local
    from ..launch.mpirun_output import fail
    from ..launch.spec import Job
    from ..train import stop_signal
    from ..train.runs import run as runs_run
    from ..train.runs import run_dir as runs_run_dir

    if config.resume is not None:
        from ..train.runs.run_dir import settled

        config = settled(said, launched=False)
    ranks, servers = config.ranks or 1, config.servers or 0
    config = config.for_world(ranks, servers)
    runs_run.check(config)
    if config.resume is None:
        config = runs_run_dir.reserve_run_dir(config)
    try:
        program = (sys.executable, *module("hpcdp.cli"), "train", *_as_arguments(config))
        status = local.run(Job(program, ranks, servers), usr1_has_come=stop_signal.has_come)
    finally:
        stop_signal.ignore()
        runs_run_dir.drop_empty_run_dir(config)
    if status == os.EX_TEMPFAIL:  # rank 0 has said how to go on
        return status
    if status:  # ranks that a signal ends have no time to draw what they have written
        _draw_what_there_is(str(config.run_dir))
    if status >= 128:
        if sys.stdout.isatty():  # nor to end the line of the progress and show the cursor again
            with contextlib.suppress(OSError):
                print("\x1b[?25h", flush=True)
        kept = f"; what it had written is in {config.run_dir}" if os.path.exists(str(config.run_dir)) else ""
        return fail(f"{_ended_by(status)}, all ranks have ended{kept}{_how_to_go_on(str(config.run_dir))}", status)
    if status not in (0, 2) and (how := _how_to_go_on(str(config.run_dir))):  # 2: it was asked wrongly
        return fail(f"the run has ended with status {status}{how}", status)
    return status


def _train_as_a_rank(config: TrainConfig, said: dict[str, Any]) -> int:
    from ..core.environment import speaks
    from ..train.runs.config import explained, uncollected

    with uncollected(), explained("importing hpcdp", speaks(os.environ)):
        from ..comm import init
        from ..comm.consistency import on_rank_0, require_same
        from ..train.preemption import STOPPED, StopRequests
        from ..train.runs.run import run
    with StopRequests(config.time_limit_s) as stop:
        comm = init().comm
        settings = dataclasses.asdict(config)
        del settings["run_dir"]  # that of rank 0 counts
        same = [f"{name} = {value}" for name, value in settings.items()]
        require_same(comm, "train", same, "start all ranks with the same settings")
        if config.resume is not None:
            from ..train.runs.config import TrainConfig
            from ..train.runs.run_dir import settled

            config = TrainConfig(**on_rank_0(comm, lambda: dataclasses.asdict(settled(said, launched=True))))
        return STOPPED if run(config, stop)["stopped"] else 0


def _ended_by(status: int) -> str:
    if status == 128 + signal.SIGINT:
        return "interrupted"
    try:
        return f"ended by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"ended with status {status}"


def _how_to_go_on(run_dir: str) -> str:
    """Return the end of a line that says how a run goes on, empty where it has no checkpoint."""
    from ..checkpoint import directory
    from ..checkpoint.directory import require_free
    from ..train.runs.run_dir import CHECKPOINTS

    with contextlib.suppress(OSError, HpcdpError):
        require_free(Path(run_dir) / CHECKPOINTS)  # as below
        if directory.find(Path(run_dir) / CHECKPOINTS):
            return f"; go on with: hpcdp train --resume {shlex.quote(run_dir)}"
    return ""


def _draw_what_there_is(run_dir: str) -> None:
    from ..checkpoint.directory import require_free
    from ..train.runs.run_dir import CHECKPOINTS, draw_run

    with contextlib.suppress(OSError, ValueError, HpcdpError):
        require_free(Path(run_dir) / CHECKPOINTS)  # the folder of another job, which has refused this one
        draw_run(Path(run_dir))


def _as_arguments(config: TrainConfig) -> list[str]:
    """The settings as ranks take them, who may no longer find the file: a run folder's own may be overwritten."""
    values = dataclasses.asdict(config)
    del values["overwrite"]  # its folder is made already
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
    """Every rank of a job calls, and what is wrong is so for all."""
    try:
        room = {"bench": "hpcdp.bench.command", "tune": "hpcdp.bench.tune"}.get(
            arguments.name, f"hpcdp.cli.{arguments.name}"
        )
        main: Callable[[Sequence[str]], int] = importlib.import_module(room).main
        return main(arguments.rest)
    except ConfigError as error:
        from ..launch.mpirun_output import fail

        return fail(error, 2, by_all=True)


def _info(arguments: argparse.Namespace) -> int:
    from ..launch import doctor

    return doctor.show_info(as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from ..launch import doctor

    return doctor.show(doctor.SLURM_CHECKS if arguments.slurm else doctor.CHECKS)
