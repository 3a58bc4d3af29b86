"""The command `hpcdp slurm`: render batch scripts, submit them and manage their jobs, without MPI."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.checks import check_name
from ..errors import ConfigError, printable, to_stderr
from ..launch.parser import Parser, add_command, at_least

if TYPE_CHECKING:
    from ..launch.slurm_scripts import Script

_EPILOG = """\
Templates: train, train-gpu, sweep, benchmark, interactive.

Without options a job has 1 node, 1 rank on it, and 1 core per rank. The
site's time limit, partition, account, modules and MPI type are in a TOML file:
$HPCDP_SITE, else ./hpcdp-site.toml, else ~/.config/hpcdp/site.toml

examples:
  hpcdp slurm render train --nodes 4 --ranks-per-node 2 -- hpcdp train lenet
  hpcdp slurm submit train --nodes 4 --cpus-per-task 8 -- python train.py
  hpcdp slurm submit sweep --settings lines.txt --at-once 8 -- hpcdp train
  hpcdp slurm render interactive --nodes 2 >session.sh; bash session.sh
  hpcdp slurm status
  hpcdp slurm cancel --save 4711
"""


def parser() -> Parser:
    """Return the parser of ``hpcdp slurm``."""
    made = Parser(
        prog="hpcdp slurm",
        usage="hpcdp slurm render | submit | status | cancel ...",
        description="Render batch scripts for Slurm, submit them, manage their jobs.",
        epilog=_EPILOG,
    )
    made.set_defaults(run=None)
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", prog="hpcdp slurm")
    usage = "hpcdp slurm {} TEMPLATE [options] [-- PROGRAM [ARGUMENT ...]]"
    _add_request(add_command(commands, "render", _render, "print the script of a job", usage=usage.format("render")))
    about = "write the script of a job into runs/, and submit it"
    submit = add_command(commands, "submit", _submit, about, usage=usage.format("submit"))
    submit.add_argument("--dry-run", action="store_true", help="print the script, write and submit nothing")
    _add_request(submit)
    status = add_command(commands, "status", _status, "show jobs: all of yours in the queue, or those given")
    status.add_argument("jobs", metavar="JOB", nargs="*", help="number of a job, 4711, or of a sweep's task, 4711_3")
    cancel = add_command(commands, "cancel", _cancel, "end jobs")
    cancel.add_argument("jobs", metavar="JOB", nargs="+", help="number of a job, 4711, or of a sweep's task, 4711_3")
    cancel.add_argument(
        "--save", action="store_true", help="let the jobs save a checkpoint first, for up to 2.5 minutes"
    )
    return made


def _add_request(made: Parser) -> None:
    positive = at_least(1)
    made.add_argument("template", metavar="TEMPLATE", help="train, train-gpu, sweep, benchmark or interactive")
    made.add_argument("--nodes", metavar="N", type=positive, default=1, help="number of nodes (default: 1)")
    made.add_argument("--ranks-per-node", metavar="N", type=positive, default=1, help="ranks on each node (default: 1)")
    made.add_argument("--cpus-per-task", metavar="N", type=positive, default=1, help="cores of each rank (default: 1)")
    made.add_argument("--time", metavar="TIME", help="time limit, e.g. 04:00:00 (default: the site's)")
    made.add_argument("--partition", metavar="NAME", help="partition (default: the site's)")
    made.add_argument("--account", metavar="NAME", help="account (default: the site's)")
    made.add_argument("--gres", metavar="GRES", help="train-gpu, interactive: GPUs of each node, e.g. gpu:4")
    made.add_argument("--name", metavar="NAME", help="name of the job (default: the template's)")
    made.add_argument(
        "--settings", metavar="FILE", help="sweep: file with the further arguments of each task, one line per task"
    )
    made.add_argument("--at-once", metavar="N", type=positive, help="sweep: at most N tasks run at the same time")
    about = (
        "train, train-gpu, sweep: requeue at most N times after a failure, if a new checkpoint was saved (default: 3)"
    )
    made.add_argument("--requeues", metavar="N", type=at_least(0), help=about)
    made.add_argument("--site", metavar="FILE", help="the site's profile (default: see hpcdp slurm -h)")


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp slurm`` with ``argv`` and return its exit status.

    Raises:
        ConfigError: an argument is invalid, or the site's profile lacks a key.
        LaunchError: Slurm is missing or refuses.
    """
    if argv and not argv[0].startswith("-"):
        check_name("slurm command", argv[0], ("render", "submit", "status", "cancel"))
    options, program = list(argv), []
    if "--" in argv:
        at = options.index("--")
        options, program = options[:at], options[at + 1 :]
    arguments = parser().parse_args(options)
    arguments.program = program
    if arguments.run is None:
        raise ConfigError("slurm", expected="a command", got="none", remedy="list the commands with hpcdp slurm -h")
    status: int = arguments.run(arguments)
    return status


def _script(arguments: argparse.Namespace) -> Script:
    from ..launch import slurm_scripts

    check_name("template", arguments.template, slurm_scripts.TEMPLATES)
    if arguments.template == "sweep" and arguments.settings is None:
        raise ConfigError(
            "sweep", expected="--settings FILE, a line of further arguments for each task", got="none",
            remedy="write lines such as --lr 0.1 and --lr 0.2 into a file: "
            "hpcdp slurm submit sweep --settings lines.txt -- hpcdp train",
        )  # fmt: skip
    if arguments.gres is not None and arguments.template not in ("train-gpu", "interactive"):
        raise ConfigError("--gres", expected="the template train-gpu or interactive", got=arguments.template)
    flags = {name: getattr(arguments, name) for name in ("time", "partition", "account", "gres")}
    site = slurm_scripts.load(arguments.site).with_flags(
        {name: text for name, text in flags.items() if text is not None}
    )
    request = slurm_scripts.ScriptRequest(
        template=arguments.template,
        program=tuple(arguments.program),
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        cpus_per_task=arguments.cpus_per_task,
        name=arguments.name,
        settings=slurm_scripts.read_settings(arguments.settings) if arguments.settings is not None else (),
        at_once=arguments.at_once,
        requeues=arguments.requeues,
    )
    return slurm_scripts.render(request, site)


def _render(arguments: argparse.Namespace) -> int:
    print(_script(arguments).text, end="")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from ..launch import slurm_scripts

    if arguments.template == "interactive":
        raise ConfigError(
            "slurm submit", expected="a template of a batch job", got="interactive",
            remedy="run hpcdp slurm render interactive >session.sh; bash session.sh",
        )  # fmt: skip
    script = _script(arguments)
    if arguments.dry_run:
        print(script.text, end="")
        print(f"# would be written to {os.path.join(script.folder, script.name)}-TIME.sbatch")
        _print_requested(script)
        return 0
    path = slurm_scripts.write(script)
    try:
        number = slurm_scripts.submit(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _print_requested(script)
    print(number)
    return 0


def _print_requested(script: Script) -> None:
    """Print what the job requests, and the options that change it, to stderr: stdout has the job's number alone."""
    for line in _aligned([("requested", "change it with"), *script.requested]):
        to_stderr(line)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each row, with its cells in columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _status(arguments: argparse.Namespace) -> int:
    from ..launch import slurm_scripts

    jobs, unknown = slurm_scripts.jobs(arguments.jobs) if arguments.jobs else (slurm_scripts.own_jobs(), [])
    rows = [(job.number, job.state, job.took, job.where, job.name) for job in jobs]
    if jobs:
        print("\n".join(_aligned([("JOB", "STATE", "TIME", "WHERE", "NAME"), *rows])))
    elif not arguments.jobs:
        print("no job of yours is in the queue")
    slurm_scripts.refuse_unknown(unknown)
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    from ..launch import slurm_scripts

    for line in slurm_scripts.cancel(arguments.jobs, arguments.save):
        print(line)
    return 0
