"""`hpcdp launch`: start a program as MPI ranks, here or on other machines. Never starts MPI itself."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from ..errors import ConfigError, check_name
from ..launch import hosts, launchers
from ..launch.arguments import Parser
from ..launch.batch_systems.slurm_allocation import allocation, require_one_component
from ..launch.job import BINDINGS, Job

_MOST_RANKS = 1_000_000
_EPILOG = """\
examples:
  hpcdp launch -n 4 -- python train.py --epochs 3
  hpcdp launch -n 4 -s 2 -- python train.py
  hpcdp launch -n 8 -H node1:4,node2:4 -- python train.py
  hpcdp launch -n 8 -H hosts.txt --interface ib0 --bind core -- python train.py
  hpcdp launch -n 8 -H hosts.txt --sync-dst-dir /scratch/job -- python train.py
  hpcdp launch -n 2 --mpi-args="--report-bindings" -- python train.py

hosts.txt has a host a line, as ssh knows it: node1, node1:4 or node1 slots=4.
"""


def parser() -> Parser:
    """The options of ``hpcdp launch``."""
    made = Parser(
        prog="hpcdp launch",
        usage="hpcdp launch -n N [-s S] [-H HOSTS] [options] -- PROGRAM [ARGUMENT ...]",
        description="Start a program as MPI ranks on this machine or on others.",
        epilog=_EPILOG,
    )
    add = made.add_argument
    add("-n", "--ranks", metavar="N", help="number of ranks (in a Slurm job default: its tasks)")
    add("-s", "--servers", default="0", metavar="S", help="number of servers beside them (default: 0)")
    add("-H", "--hosts", metavar="HOSTS", help="a file of hosts, or hosts: node1:4,node2:4")
    add("--launcher", metavar="NAME", help=f"{', '.join(launchers.LAUNCHERS)} (default: ssh with -H, else local)")
    add("--ranks-per-node", metavar="N", help="at most so many ranks on a host")
    add("--sync-dst-dir", metavar="DIR", help="copy this folder to DIR on every host, and run there")
    add("--env", action="append", default=[], metavar="K=V", help="a variable of every rank; K alone: its value here")
    add("--interface", metavar="IF", help="network interface of all traffic between hosts")
    add("--bind", metavar="TO", help=f"bind each rank to a {', '.join(BINDINGS[1:])}; or none (default)")
    add("--mpi-args", default="", metavar="ARGS", help="further arguments of mpirun, as one string")
    add("--batch-args", default="", metavar="ARGS", help="arguments for the batch system: sge's qsub, yarn's client")
    add("--tag-output", action="store_true", help="lead each line of output by its rank")
    add("--dry-run", action="store_true", help="print files and commands, and do nothing")
    add("-v", "--verbose", action="store_true", help="tell what is done, and where each rank is")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="what every rank runs")
    return made


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for and return the exit status of the job.

    Raises:
        ConfigError: it cannot be asked for.
        LaunchError: it cannot be done.
    """
    given, unknown = parser().parse_known_args(argv)
    _check_options(unknown or given.program[:1])
    name = given.launcher or launchers.usual(given.hosts is not None, os.environ)
    check_name("launcher", name, launchers.LAUNCHERS)
    if name in ("mpi", "slurm") or (given.launcher is None and name == "local"):
        require_one_component()
    job = _job(given)
    if job.batch_args and name not in launchers.WITH_BATCH_ARGS:
        raise ConfigError(
            f"launch --batch-args with --launcher {name}", expected=f"{' or '.join(launchers.WITH_BATCH_ARGS)}",
            got=repr(job.batch_args),
        )  # fmt: skip
    launcher = launchers.launcher(name)
    if given.dry_run:
        print(launcher.plan(job))
        return 0
    return launcher.run(job)


def _check_options(words: Sequence[str]) -> None:
    """Raises `ConfigError` where the first word that is taken for the program's is an option."""
    if words and words[0].startswith("-") and words[0] != "--":
        names = [option for option in parser()._option_string_actions if option.startswith("--")]
        check_name("launch option", words[0].partition("=")[0], names)


def _job(given: argparse.Namespace) -> Job:
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    servers = _number("-s", "servers", given.servers, least=0)
    ranks = _ranks_of_the_job(given, servers) if given.ranks is None else _number("-n", "ranks", given.ranks, least=1)
    per_node = given.ranks_per_node
    if not program:
        raise ConfigError("launch", expected="a program after --", remedy="e.g. hpcdp launch -n 2 -- python train.py")
    if given.bind is not None:
        check_name("--bind", given.bind, BINDINGS)
    return Job(
        tuple(program),
        ranks,
        servers,
        hosts=() if given.hosts is None else hosts.read(given.hosts),
        ranks_per_node=None if per_node is None else _number("--ranks-per-node", "ranks", per_node, least=1),
        env=dict(map(_variable, given.env)),
        interface=given.interface,
        bind=given.bind,
        sync_dst_dir=given.sync_dst_dir,
        mpi_args=given.mpi_args,
        batch_args=given.batch_args,
        tag_output=given.tag_output,
        verbose=given.verbose,
    )


def _ranks_of_the_job(given: argparse.Namespace, servers: int) -> int:
    """As many as the Slurm job has tasks, without those that are servers."""
    allocated = None if given.hosts is not None else allocation()
    if allocated is None:
        parser().error("the following arguments are required: -n/--ranks")
    if allocated.tasks <= servers:
        raise ConfigError("launch -s", expected=f"fewer than the {allocated.tasks} tasks of the job", got=servers)
    return allocated.tasks - servers


def _number(option: str, what: str, text: str, *, least: int) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or not least <= int(text) <= _MOST_RANKS:
        raise ConfigError(
            f"launch {option}", expected=f"a number of {what}, {least} to {_MOST_RANKS:,}", got=repr(text)
        )
    return int(text)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError("launch --env", expected="NAME=VALUE, or the NAME of a variable here", got=repr(text))
    if not equals and name not in os.environ:
        raise ConfigError("launch --env", expected=f"{name}=VALUE, as it is not set here", got=repr(text))
    if not equals:
        value = os.environ[name]
    if name == "PATH" and not value:
        raise ConfigError("launch --env", expected="a PATH with folders, in which programs are found", got=repr(text))
    return name, value
