"""Ranks in containers of Hadoop YARN, which its distributed shell starts; their output is shown until they end.

YARN gives processes and no ssh between them: `main` runs in each and starts the daemons of mpirun there. They
meet in the job's folder, in a file system that all hosts share.

What runs in every container of a batch system that gives processes and no way from one to another, such as YARN.

``python -m hpcdp.launch.launchers.yarn FOLDER COUNT COMMAND...`` takes a number, 1 to COUNT, which is the
container's name as a host of mpirun: container-1, container-2. The first one runs COMMAND. Its mpirun starts a daemon
on each host by an agent, `container_agent`, that leaves the daemon's command in the folder of that container, where
this finds it.

[Note: no ssh, no port] All goes through files in a folder that all containers see. A file is written under another name
and renamed, so none is read half, and making a folder succeeds for one process alone. A file system of the network
shows new files late, NFS after seconds: that delays the start, not the ranks, whose messages take the network.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ...core.environment import module
from ...errors import ConfigError, LaunchError, listed, to_stderr
from .. import batch
from ..batch import ERRORS, OUTPUT, STATUS, replace
from ..mpi_library import find_library
from ..process_monitor import adopt, bound, end_orphans
from ..spec import Command, Job, LaunchPlan

COMMAND, WRITTEN, ENDED = ".command", ".written", ".ended"
"""What the names of a command's files end in: itself, what it writes, its status."""

_POLL_S = 0.1
_GATHER_S = 600.0
_BEAT_S, _LOST_S = 2.0, 120.0
_OVER, _HOST = "over", "host"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def container_name(number: int) -> str:
    """The name of a container, numbered from 1, as a host of mpirun and as a folder."""
    return f"container-{number}"


def agent_script(folder: Path) -> str:
    """The program that mpirun of either family calls as it would call ssh."""
    agent = shlex.join([sys.executable, *module("hpcdp.launch.container_agent"), str(folder)])
    return f'#!/bin/sh\nexec {agent} "$@"\n'


def main(argv: Sequence[str]) -> int:
    """Every container calls, and ends with what it has started. Returns its status: 0 once the job is over."""
    folder, count, *command = argv
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # taken by `_pause`: none comes while orphans are ended
    adopt()
    try:
        number = _take_number(Path(folder), int(count))
        if number == 1:
            _lead(Path(folder), int(count), command)
        else:
            _follow(Path(folder), number)
    except LaunchError as error:
        to_stderr(f"hpcdp: {error}")
        return 1
    finally:
        end_orphans()
    return 0


def _take_number(folder: Path, count: int) -> int:
    for number in range(1, count + 1):
        try:
            (folder / container_name(number)).mkdir()
        except FileExistsError:
            continue
        replace(folder / container_name(number) / _HOST, socket.gethostname())
        return number
    raise LaunchError(
        "start a container",
        where=socket.gethostname(),
        expected=f"one of {count}",
        got="one more, in the place of one that was lost, whose ranks have ended",
    )


def _lead(folder: Path, count: int, command: Sequence[str]) -> None:
    """The first container: runs ``command`` once all are there, and tells the others when it is over."""
    commands, beat = _Commands(folder / container_name(1)), _Beat(folder)
    try:
        with (folder / OUTPUT).open("ab") as output, (folder / ERRORS).open("ab") as errors:
            wrong = _wait_for_all(folder, count, beat) or _together(folder, count)
            if wrong:
                errors.write(f"hpcdp launch: {wrong}\n".encode())
                replace(folder / STATUS, "1")
                return
            runner = [sys.executable, *module("hpcdp.launch.batch")]
            job = _start([*runner, str(folder), str(os.EX_TEMPFAIL), "inf", *command], output, errors)
        while job.poll() is None:
            beat.give()
            commands.attend()
            _pause()
    finally:
        (folder / _OVER).touch()


def _follow(folder: Path, number: int) -> None:
    """The other containers: until the job is over, or the first one is not heard of any more."""
    commands, beat = _Commands(folder / container_name(number)), _Beat(folder)
    while folder.exists() and not (folder / _OVER).exists():
        if beat.is_lost():
            raise LaunchError("run ranks", where=container_name(number), got=f"no sign of {container_name(1)}")
        commands.attend()
        _pause()


def _wait_for_all(folder: Path, count: int, beat: _Beat) -> str | None:
    """Why the job cannot start: not all containers have come in time. YARN gives them as they become free."""
    deadline = time.monotonic() + _GATHER_S
    places = {folder / container_name(number) / _HOST for number in range(1, count + 1)}
    while (missing := {place for place in places if not place.exists()}) and time.monotonic() < deadline:
        beat.give()
        _pause()
    if not missing:
        return None
    return f"{len(missing)} of {count} containers have not started in {_GATHER_S:g} s: ask for less"


def _together(folder: Path, count: int) -> str | None:
    """Why the job cannot start: ranks of Open MPI in two containers of one machine would wait for each other for ever.

    Each takes the other for one of another machine, and their connection to the same address never comes to be used.
    """
    hosts = [(folder / container_name(number) / _HOST).read_text() for number in range(1, count + 1)]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not twice or find_library().family != "openmpi":
        return None
    return f"Open MPI needs one container a machine, got several on {listed(twice)}: give each more --ranks-per-node"


class _Beat:
    """The sign of life of the first container: a file whose content changes. Clocks of hosts differ."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "beat"
        self._last, self._at_s = "0", time.monotonic()

    def give(self) -> None:
        """The first container calls, over and over."""
        if time.monotonic() >= self._at_s:
            self._last, self._at_s = str(int(self._last) + 1), time.monotonic() + _BEAT_S
            replace(self._path, self._last)

    def is_lost(self) -> bool:
        """The others call."""
        try:
            now = self._path.read_text()
        except FileNotFoundError:  # not yet, or no more
            now = self._last
        if now != self._last:
            self._last, self._at_s = now, time.monotonic()
        return time.monotonic() > self._at_s + _LOST_S


class _Commands:
    """Runs the commands that are left in a container's folder, and leaves their status beside them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._started: dict[Path, subprocess.Popen[bytes]] = {}

    def attend(self) -> None:
        """To be called over and over."""
        for path in self._place.glob(f"*{COMMAND}"):
            if path not in self._started:
                with path.with_suffix(WRITTEN).open("ab") as written:
                    self._started[path] = _start(["/bin/bash", "-c", path.read_text()], written, written)
        for path, process in self._started.items():
            ended = path.with_suffix(ENDED)
            if process.poll() is not None and not ended.exists():
                replace(ended, str(process.returncode if process.returncode >= 0 else 128 - process.returncode))


def _pause() -> None:
    """Until the next look; a signal to end ends this container."""
    received = signal.sigtimedwait(_ENDING, _POLL_S)
    if received is not None:
        sys.exit(128 + received.si_signo)


def _start(argv: Sequence[str], output: BinaryIO, errors: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, preexec_fn=bound())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


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
    runner = [sys.executable, *module("hpcdp.launch.launchers.yarn"), str(folder), str(len(sizes))]
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
