"""The command `hpcdp launch`: start a program as MPI ranks, here or on other machines, without initializing MPI."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..core.checks import check_name
from ..errors import ConfigError, reason, shortened, type_named
from ..launch import hosts, launchers
from ..launch.hosts import allocation, require_one_component
from ..launch.launchers import BINDINGS, Job
from ..launch.parser import Parser

_MOST_RANKS = 1_000_000
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_ENV = "set a variable on every rank; K alone copies its value; @FILE reads a JSON object"
_EPILOG = """\
examples:
  hpcdp launch -n 4 -- python train.py --epochs 3
  hpcdp launch -n 4 -s 2 -- python train.py
  hpcdp launch -n 8 -H node1:4,node2:4 -- python train.py
  hpcdp launch -n 8 -H hosts.txt --interface ib0 --bind core -- python train.py
  hpcdp launch -n 8 -H hosts.txt --sync-dst-dir /scratch/job -- python train.py
  hpcdp launch -n 2 --mpi-args="--report-bindings" -- python train.py

hosts.txt has one host per line: node1, node1:4 or node1 slots=4.
"""


def parser() -> Parser:
    """Return the parser of ``hpcdp launch``."""
    made = Parser(
        prog="hpcdp launch",
        usage="hpcdp launch -n N [-s S] [-H HOSTS] [options] -- PROGRAM [ARGUMENT ...]",
        description="Start a program as MPI ranks on this machine or on others.",
        epilog=_EPILOG,
    )
    add = made.add_argument
    add("-n", "-np", "--ranks", metavar="N", help="number of ranks (default in a Slurm job: its tasks)")
    add(
        "-s",
        "--servers",
        default="0",
        metavar="S",
        help="number of servers of key-value stores, besides the ranks (default: 0)",
    )
    add("-H", "--hosts", metavar="HOSTS", help="hosts with ranks, node1:4,node2:4, or a file of hosts")
    usual = "default: mpi in a batch job, else ssh with -H, else local"
    add("--launcher", metavar="NAME", help=f"{', '.join(launchers.LAUNCHERS)} ({usual})")
    add("--ranks-per-node", metavar="N", help="at most N ranks on each host")
    add("--sync-dst-dir", metavar="DIR", help="copy the working folder to DIR on every host, and run there")
    add("--env", action="append", default=[], metavar="K=V", help=_ENV)
    add("--interface", metavar="IF", help="use only this network interface between hosts")
    add("--bind", metavar="TO", help=f"bind each rank to one {', '.join(BINDINGS[1:])} or none (default: none)")
    add("--mpi-args", default="", metavar="ARGS", help="further arguments of mpirun, as one string")
    add("--batch-args", default="", metavar="ARGS", help="options of the batch system (sge, yarn), as one string")
    add("--tag-output", action="store_true", help="print the rank before each line of output")
    add("--dry-run", action="store_true", help="print the files and commands, start nothing")
    add("-v", "--verbose", action="store_true", help="print each rank's host, pid and cores, and actions on hosts")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="the program of every rank")
    return made


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp launch`` with ``argv`` and return the exit status of the job.

    Raises:
        ConfigError: an argument is invalid.
        LaunchError: the job cannot be started.
    """
    made = parser()
    arguments, unknown = made.parse_known_args(argv)
    words = unknown or arguments.program[:1]
    if words and words[0].startswith("-") and words[0] != "--":
        made.refuse(words, arguments)
    name = arguments.launcher or launchers.usual(arguments.hosts is not None, os.environ)
    check_name("launcher", name, launchers.LAUNCHERS)
    if name in ("mpi", "slurm") or (arguments.launcher is None and name == "local"):
        require_one_component()
    job = _job(arguments)
    if job.batch_args and name not in launchers.WITH_BATCH_ARGS:
        raise ConfigError(
            f"launch --batch-args with --launcher {name}", expected=f"{' or '.join(launchers.WITH_BATCH_ARGS)}",
            got=repr(job.batch_args),
        )  # fmt: skip
    launcher = launchers.launcher(name)
    if arguments.dry_run:
        print(launcher.plan(job))
        return 0
    return launcher.run(job)


def _job(arguments: argparse.Namespace) -> Job:
    env = dict(pair for text in arguments.env for pair in _variables(text))
    program = _words(arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program, env.get("PATH"))
    servers = _number("-s", "servers", arguments.servers, least=0)
    ranks = (
        _ranks_of_the_job(arguments, servers)
        if arguments.ranks is None
        else _number("-n", "ranks", arguments.ranks, least=1)
    )
    per_node = arguments.ranks_per_node
    if not program:
        remedy = "add it, e.g. hpcdp launch -n 2 -- python train.py"
        raise ConfigError("launch", expected="a program after --", remedy=remedy)
    if arguments.bind is not None:
        check_name("--bind", arguments.bind, BINDINGS)
    return Job(
        tuple(program),
        ranks,
        servers,
        hosts=() if arguments.hosts is None else hosts.read(arguments.hosts),
        ranks_per_node=None if per_node is None else _number("--ranks-per-node", "ranks", per_node, least=1),
        env=env,
        interface=arguments.interface,
        bind=arguments.bind,
        sync_dst_dir=arguments.sync_dst_dir,
        mpi_args=arguments.mpi_args,
        batch_args=arguments.batch_args,
        tag_output=arguments.tag_output,
        verbose=arguments.verbose,
    )


def _ranks_of_the_job(arguments: argparse.Namespace, servers: int) -> int:
    """Return the number of tasks of the Slurm job, without the servers."""
    allocated = None if arguments.hosts is not None else allocation()
    if allocated is None:
        parser().error("the following arguments are required: -n/--ranks")
    if allocated.tasks <= servers:
        raise ConfigError("launch -s", expected=f"fewer than the {allocated.tasks} tasks of the job", got=servers)
    return allocated.tasks - servers


def _number(option: str, noun: str, text: str, *, least: int) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or not least <= int(text) <= _MOST_RANKS:
        raise ConfigError(
            f"launch {option}", expected=f"a number of {noun}, {least} to {_MOST_RANKS:,}", got=repr(text)
        )
    return int(text)


def _words(program: Sequence[str], path: str | None) -> list[str]:
    """Return the words of a program.

    A first word with blanks that names no file is split as a shell does: launchers of key-value stores accept a program
    and its arguments as one word, ``"python dist.py"``.
    """
    first, *arguments = program or [""]
    if not re.search(r"\s", first) or os.path.exists(first) or shutil.which(first, path=path) is not None:
        return [*program]
    try:
        return [*shlex.split(first), *arguments]
    except ValueError as error:
        raise ConfigError(
            "launch", expected="a program, or a program and its arguments as one word in shell syntax",
            got=f"{first!r}: {error}",
        ) from error  # fmt: skip


def _variables(text: str) -> list[tuple[str, str]]:
    """Return the variables of one ``--env`` and their values."""
    if not text.startswith("@"):
        return [_variable(text)]
    valid = 'an object of strings, such as {"KEY": "value"}'
    try:
        variables = json.loads(Path(text[1:]).read_bytes())
    except OSError as error:
        raise ConfigError("launch --env", where=text[1:], expected="a file of variables", got=reason(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("launch --env", where=text[1:], expected=valid, got="no JSON") from error
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise ConfigError(
            "launch --env", where=text[1:], expected=valid, got=f"{type_named(variables)} of another content"
        )
    return [_checked(name, value) for name, value in variables.items()]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ and _NAME.fullmatch(name):
        raise ConfigError("launch --env", expected=f"{name}=VALUE, as it is not set here", got=repr(text))
    return _checked(name, value if equals else os.environ.get(name, ""))


def _checked(name: str, value: str) -> tuple[str, str]:
    """Return both after checking them; no message shows the value, which may be a secret."""
    if not _NAME.fullmatch(name):
        expected = "NAME=VALUE, the NAME of a variable of this shell, or @FILE"
        raise ConfigError("launch --env", expected=expected, got=repr(shortened(name, 80)))
    if "\0" in value:
        raise ConfigError("launch --env", where=name, expected="a value without zero bytes", got="a zero byte")
    if name == "PATH" and not value:
        raise ConfigError("launch --env", expected="a PATH with folders of programs", got="PATH=")
    return name, value
