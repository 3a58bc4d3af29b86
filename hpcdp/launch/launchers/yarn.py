"""Ranks in containers of Hadoop YARN, which its distributed shell starts; their output is shown until they end.

YARN gives processes and no ssh between them: `containers` runs in each and starts the daemons of mpirun there. They
meet in the job's folder, in a file system that all hosts share.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.environment import module
from ...errors import ConfigError, LaunchError, to_stderr
from .. import batch
from ..cleanup import bound
from ..spec import Command, Job, LaunchPlan
from ..yarn_containers import agent_script, container_name

_CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
_JAR = "hadoop-yarn-applications-distributedshell*.jar"
_HOMES = ("HADOOP_YARN_HOME", "HADOOP_HOME")
_LONGEST_MS = 2**31 - 1
"""The client would end an application after ten minutes; this is the longest time that it can be told."""

_RANK_MIB = 2048
_OURS = ("jar", "shell_script", "shell_command", "shell_args", "shell_env", "num_containers")


def plan(job: Job) -> LaunchPlan:
    """The scripts of ``job`` and the client of YARN's distributed shell.

    A container takes ``ranks_per_node`` processes, servers counted, or all of them. Raises `ConfigError` for hosts,
    ``--sync-dst-dir`` and ``--batch-args`` that set what the launcher sets or have a value that cannot be,
    what Hadoop is lacking here is named as it is elsewhere.
    """
    batch.check(job, "yarn")
    folder = batch.folder_of("yarn")
    if ":" in str(folder):
        raise ConfigError("launch --launcher yarn", where=folder, expected="a working folder without : in its name")
    arguments = batch.split(job.batch_args, [f"{dashes}{name}" for dashes in ("-", "--") for name in _OURS])
    batch.check_values("launch --batch-args", batch.of_words(arguments), batch.YARN)
    given = {word.lstrip("-") for word in arguments}
    slots = job.ranks + job.servers
    in_each = min(slots, job.ranks_per_node or slots)
    sizes = [min(in_each, slots - begin) for begin in range(0, slots, in_each)]
    program, jar = _hadoop(os.environ)
    program, jar = program or "yarn", jar or _JAR.replace("*", "")
    argv = [program, "jar", jar, _CLIENT, "-jar", jar, "-shell_script", str(folder / "container.sh")]
    wanted = {"num_containers": len(sizes), "appname": "hpcdp", "timeout": _LONGEST_MS}
    if "container_resources" not in given:
        wanted |= {"container_vcores": in_each, "container_memory": in_each * _RANK_MIB}
    for name, value in wanted.items():
        argv += [] if name in given else [f"-{name}", str(value)]
    # The slots of the containers say how many go into each.
    return LaunchPlan(
        [Command((*argv, *arguments))], _files(dataclasses.replace(job, ranks_per_node=None), folder, sizes)
    )


def run(job: Job) -> int:
    """Runs ``job`` as an application of YARN and returns its exit status; `batch.run` says what signals do.

    Raises as `plan`, and `LaunchError` where Hadoop is not found.
    """
    _check_hadoop(os.environ)
    wanted, folder = plan(job), batch.folder_of("yarn")
    submit = functools.partial(_Application, wanted.commands[0].argv, folder / "client", job.verbose)
    return batch.run(wanted, folder, submit)


def _hadoop(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The program ``yarn``, and the jar of its distributed shell; None for what is not found."""
    homes = [Path(environ[name]) for name in _HOMES if environ.get(name)]
    programs = [str(home / "bin" / "yarn") for home in homes if os.access(home / "bin" / "yarn", os.X_OK)]
    programs += [found] if (found := shutil.which("yarn", path=environ.get("PATH"))) else []
    # Of a release of Apache's, or of a package of a distribution.
    jars = [
        path for home in homes for place in ("share/hadoop/yarn", ".") for path in sorted((home / place).glob(_JAR))
    ]
    jars = [path for path in jars if not re.search("-(tests|sources|javadoc|test-sources)[.]jar$", path.name)]
    return next(iter(programs), None), next(map(str, jars), None)


def _check_hadoop(environ: Mapping[str, str]) -> None:
    program, jar = _hadoop(environ)
    missing = [] if program else ["program yarn"]
    missing += [] if jar else [f"{_JAR} in share/hadoop/yarn"]
    if missing:
        raise LaunchError(
            "launch --launcher yarn",
            where=", ".join(f"{name}={environ.get(name, 'not set')}" for name in _HOMES),
            expected="Hadoop 3 and its distributed shell",
            got=f"no {' and no '.join(missing)}",
            remedy="set HADOOP_YARN_HOME or HADOOP_HOME to where Hadoop is unpacked",
        )


def _files(job: Job, folder: Path, sizes: Sequence[int]) -> dict[Path, str]:
    script = folder / "job.sh"
    hosts = ",".join(f"{container_name(number)}:{size}" for number, size in enumerate(sizes, start=1))
    # Hadoop copies it to where others may read it; what it starts holds the environment, and stays in the folder.
    place = shlex.quote(str(folder))
    container = [
        "#!/bin/bash",
        f"if [ ! -d {place} ]; then",
        f'  echo "hpcdp: $(hostname) does not see" {place}", which must lie in a shared file system" >&2',
        "  exit 1",
        "fi",
        f"exec /bin/bash {shlex.quote(str(script))}",
    ]
    runner = [sys.executable, *module("hpcdp.launch.yarn_containers"), str(folder), str(len(sizes))]
    lines = ["#!/bin/bash", "# Runs in each container of hpcdp launch --launcher yarn."]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit 1", *batch.exports()]
    if len(sizes) > 1:
        lines += [*batch.agent_settings(folder), "export HPCDP_CONTAINERS=1"]
    lines += [
        f"exec {shlex.join(runner)} \\",
        f"  {batch.launch_command(job, folder, hosts if len(sizes) > 1 else None)}",
    ]
    return {
        folder / "container.sh": "\n".join(container) + "\n",
        script: "\n".join(lines) + "\n",
        folder / batch.AGENT: agent_script(folder),
        **batch.variables(job, folder),
    }


class _Application:
    """An application of YARN, by the client that has submitted it and waits for its end."""

    def __init__(self, argv: Sequence[str], log: Path, verbose: bool) -> None:
        self._yarn, self._log, self._verbose = argv[0], log, verbose
        with log.open("wb") as file:
            self._client = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=bound(),
            )

    def has_ended(self) -> bool:
        if self._verbose and (name := self._name()):
            to_stderr(f"hpcdp launch: {name} of YARN")
            self._verbose = False
        return self._client.poll() is not None

    def cancel(self) -> None:
        if name := self._name():
            batch.call([self._yarn, "application", "-kill", name])
        else:
            self._client.terminate()

    def fate(self) -> tuple[int, str]:
        name = self._name()
        self.cancel()  # it may be its client alone that has ended
        said = self._log.read_text(errors="replace")
        diagnostics = [each for each in re.findall(r"appDiagnostics=(.*?), appMasterHost", said, re.DOTALL) if each]
        faults = [line for line in said.splitlines() if re.search("ERROR|Exception|rror:", line)]
        why = batch.one_line([said, *faults[-1:], *diagnostics][-1])
        look = f"; yarn logs -applicationId {name} shows what its containers wrote" if name else ""
        return 1, f"{name or 'the application'} of YARN has ended without a status: {why}{look}"

    def _name(self) -> str | None:
        found = re.search(r"\bapplication_\d+_\d+\b", self._log.read_text(errors="replace"))
        return found[0] if found else None
