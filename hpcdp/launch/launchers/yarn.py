"""The launcher ``yarn``: ranks in containers of Hadoop YARN, started by its distributed shell, with live output.

YARN starts processes, but offers no ssh between them. `main`, run as ``python -m hpcdp.launch.launchers.yarn FOLDER
COUNT COMMAND...``, runs in each container. It takes a number from 1 to COUNT, and with it the container's host name for
mpirun: container-1, container-2. The first container runs _COMMAND. Its mpirun starts a daemon on each host through
`start_daemon`, which writes the daemon's command into that container's folder, where `main` reads it.

No ssh and no port is needed: all communication goes through files in a shared folder. A file is written under another
name and renamed, so no reader sees a part of it, and mkdir succeeds for one process only. A network file system shows
new files late, NFS after seconds: that delays the start, not the ranks, whose messages take the network.
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
from ..mpi_library import find_library
from ..process_monitor import adopt, bound, end_orphans
from . import Command, Job, LaunchPlan, batch
from .batch import ERRORS, OUTPUT, STATUS, replace

_COMMAND, _WRITTEN, _ENDED = ".command", ".written", ".ended"
"""Suffixes of a command's files: the command, its output, its status."""

_POLL_S = 0.1
_GATHER_S = 600.0
_BEAT_S, _LOST_S = 2.0, 120.0
_OVER, _HOST = "over", "host"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def container_name(number: int) -> str:
    """Return the name of a container, numbered from 1, as a host of mpirun and as a folder."""
    return f"container-{number}"


def agent_script(folder: Path) -> str:
    """Return the script that mpirun of either family starts instead of ssh."""
    agent = shlex.join([sys.executable, *module("hpcdp.launch.launchers.yarn"), "daemon", str(folder)])
    return f'#!/bin/sh\nexec {agent} "$@"\n'


def main(argv: Sequence[str]) -> int:
    """Run in every container until the job is over, end all processes that it started, and return its exit status."""
    folder, count, *command = argv
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # received in `_pause` only, not while orphans are ended
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
        got="a further container, a replacement for a lost container, whose ranks have ended",
    )


def _lead(folder: Path, count: int, command: Sequence[str]) -> None:
    """Run ``command`` in the first container once all have started, and then tell the others that the job is over."""
    commands, beat = _Commands(folder / container_name(1)), _Beat(folder)
    try:
        with (folder / OUTPUT).open("ab") as output, (folder / ERRORS).open("ab") as errors:
            problem = _wait_for_all(folder, count, beat) or _together(folder, count)
            if problem:
                errors.write(f"hpcdp launch: {problem}\n".encode())
                replace(folder / STATUS, "1")
                return
            runner = [sys.executable, *module("hpcdp.launch.launchers.batch")]
            job = _start([*runner, str(folder), str(os.EX_TEMPFAIL), "inf", *command], output, errors)
        while job.poll() is None:
            beat.give()
            commands.attend()
            _pause()
    finally:
        (folder / _OVER).touch()


def _follow(folder: Path, number: int) -> None:
    """Run daemons in another container until the job is over; raise `LaunchError` when the first one is lost."""
    commands, beat = _Commands(folder / container_name(number)), _Beat(folder)
    while folder.exists() and not (folder / _OVER).exists():
        if beat.is_lost():
            raise LaunchError("run ranks", where=container_name(number), got=f"no sign of {container_name(1)}")
        commands.attend()
        _pause()


def _wait_for_all(folder: Path, count: int, beat: _Beat) -> str | None:
    """Wait for all containers, which YARN starts as they become free; return the reason if not all start in time."""
    deadline = time.monotonic() + _GATHER_S
    places = {folder / container_name(number) / _HOST for number in range(1, count + 1)}
    while (missing := {place for place in places if not place.exists()}) and time.monotonic() < deadline:
        beat.give()
        _pause()
    if not missing:
        return None
    return f"{len(missing)} of {count} containers have not started in {_GATHER_S:g} s: ask for less"


def _together(folder: Path, count: int) -> str | None:
    """Return why ranks of Open MPI in two containers of one machine cannot run: they would wait forever.

    Each takes the other for a process of another machine, but their connection has the same address at both ends.
    """
    hosts = [(folder / container_name(number) / _HOST).read_text() for number in range(1, count + 1)]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not twice or find_library().family != "openmpi":
        return None
    return f"Open MPI needs one container a machine, got several on {listed(twice)}: give each more --ranks-per-node"


class _Beat:
    """The heartbeat of the first container: a file whose content changes, since clocks of hosts differ."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "beat"
        self._last, self._at_s = "0", time.monotonic()

    def give(self) -> None:
        """Write the next heartbeat when it is due; the first container calls this in its loop."""
        if time.monotonic() >= self._at_s:
            self._last, self._at_s = str(int(self._last) + 1), time.monotonic() + _BEAT_S
            replace(self._path, self._last)

    def is_lost(self) -> bool:
        """Return whether the heartbeat has stopped; the other containers call this in their loops."""
        try:
            content = self._path.read_text()
        except FileNotFoundError:  # not written yet, or removed
            content = self._last
        if content != self._last:
            self._last, self._at_s = content, time.monotonic()
        return time.monotonic() > self._at_s + _LOST_S


class _Commands:
    """A runner of the commands in a container's folder, which writes their status beside them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._started: dict[Path, subprocess.Popen[bytes]] = {}

    def attend(self) -> None:
        """Start new commands and record the status of ended ones; called in the container's loop."""
        for path in self._place.glob(f"*{_COMMAND}"):
            if path not in self._started:
                with path.with_suffix(_WRITTEN).open("ab") as written:
                    self._started[path] = _start(["/bin/bash", "-c", path.read_text()], written, written)
        for path, process in self._started.items():
            ended = path.with_suffix(_ENDED)
            if process.poll() is not None and not ended.exists():
                replace(ended, str(process.returncode if process.returncode >= 0 else 128 - process.returncode))


def _pause() -> None:
    """Sleep for one poll interval; exit at a signal that ends the container."""
    received = signal.sigtimedwait(_ENDING, _POLL_S)
    if received is not None:
        sys.exit(128 + received.si_signo)


def _start(argv: Sequence[str], output: BinaryIO, errors: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, preexec_fn=bound())


_CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
_JAR = "hadoop-yarn-applications-distributedshell*.jar"
_HOMES = ("HADOOP_YARN_HOME", "HADOOP_HOME")
_LONGEST_MS = 2**31 - 1
"""The greatest time limit of the client, which otherwise ends an application after ten minutes."""

_RANK_MIB = 2048
_OURS = ("jar", "shell_script", "shell_command", "shell_args", "shell_env", "num_containers")


def plan_yarn(job: Job) -> LaunchPlan:
    """Return the scripts of ``job`` and the client of YARN's distributed shell.

    A container has ``ranks_per_node`` processes including servers, or all of them. Where Hadoop is missing, the plan
    has its usual names.

    Raises:
        ConfigError: the job has hosts or a ``sync_dst_dir``; ``batch_args`` set an option of the launcher's, or have an
            invalid value.
    """
    batch.check(job, "yarn")
    folder = batch.folder_of("yarn")
    if ":" in str(folder):
        raise ConfigError("launch --launcher yarn", where=folder, expected="a working folder without : in its name")
    arguments = batch.split(job.batch_args, [f"{dashes}{name}" for dashes in ("-", "--") for name in _OURS])
    batch.check_values("launch --batch-args", batch.of_words(arguments), batch.YARN)
    user_options = {word.lstrip("-") for word in arguments}
    slots = job.ranks + job.servers
    in_each = min(slots, job.ranks_per_node or slots)
    sizes = [min(in_each, slots - begin) for begin in range(0, slots, in_each)]
    program, jar = _hadoop(os.environ)
    program, jar = program or "yarn", jar or _JAR.replace("*", "")
    argv = [program, "jar", jar, _CLIENT, "-jar", jar, "-shell_script", str(folder / "container.sh")]
    options = {"num_containers": len(sizes), "appname": "hpcdp", "timeout": _LONGEST_MS}
    if "container_resources" not in user_options:
        options |= {"container_vcores": in_each, "container_memory": in_each * _RANK_MIB}
    for name, value in options.items():
        argv += [] if name in user_options else [f"-{name}", str(value)]
    # The slots of the containers replace ranks_per_node.
    return LaunchPlan(
        [Command((*argv, *arguments))], _files(dataclasses.replace(job, ranks_per_node=None), folder, sizes)
    )


def run_yarn(job: Job) -> int:
    """Run ``job`` as an application of YARN and return its exit status; `batch.run` forwards signals.

    Raises:
        LaunchError: Hadoop is missing.
        ConfigError: as `plan_yarn`.
    """
    _check_hadoop(os.environ)
    plan, folder = plan_yarn(job), batch.folder_of("yarn")
    submit = functools.partial(_Application, plan.commands[0].argv, folder / "client", job.verbose)
    return batch.run(plan, folder, submit)


def _hadoop(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the program ``yarn`` and the jar of its distributed shell; None for a missing one."""
    homes = [Path(environ[name]) for name in _HOMES if environ.get(name)]
    programs = [str(home / "bin" / "yarn") for home in homes if os.access(home / "bin" / "yarn", os.X_OK)]
    programs += [on_path] if (on_path := shutil.which("yarn", path=environ.get("PATH"))) else []
    # In an Apache release, or in a distribution's package.
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
            remedy="set HADOOP_YARN_HOME or HADOOP_HOME to the folder of Hadoop",
        )


def _files(job: Job, folder: Path, sizes: Sequence[int]) -> dict[Path, str]:
    script = folder / "job.sh"
    hosts = ",".join(f"{container_name(number)}:{size}" for number, size in enumerate(sizes, start=1))
    # Hadoop copies container.sh to where others may read it, so the environment is in job.sh, which stays here.
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
    """An application of YARN, through the client that submits it and waits for its end."""

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
        self.cancel()  # perhaps only the client has ended
        log = self._log.read_text(errors="replace")
        diagnostics = [text for text in re.findall(r"appDiagnostics=(.*?), appMasterHost", log, re.DOTALL) if text]
        faults = [line for line in log.splitlines() if re.search("ERROR|Exception|rror:", line)]
        why = batch.one_line([log, *faults[-1:], *diagnostics][-1])
        hint = f"; yarn logs -applicationId {name} shows the output of its containers" if name else ""
        return 1, f"{name or 'the application'} of YARN has ended without a status: {why}{hint}"

    def _name(self) -> str | None:
        name = re.search(r"\bapplication_\d+_\d+\b", self._log.read_text(errors="replace"))
        return name[0] if name else None


def start_daemon(argv: Sequence[str]) -> int:
    """Run a command in a container and return its exit status; mpirun calls this instead of ssh to start a daemon.

    Args:
        argv: the shared folder, options of ssh, a `container_name`, and the words of a shell command, as ssh takes
            them.
    """
    folder, *words = argv
    while words[:1] and words[0].startswith("-"):
        del words[0]
    if not words or not (place := Path(folder, words[0])).is_dir():
        to_stderr(f"hpcdp: start a daemon of mpirun [{' '.join(words[:1])}]: no such container")
        return 255
    name = f"{socket.gethostname()}-{os.getpid()}"  # daemons start daemons, so this runs on several hosts
    replace(place / f"{name}{_COMMAND}", " ".join(words[1:]))
    ended = place / f"{name}{_ENDED}"
    while not ended.exists():
        if not place.exists():
            return 255
        time.sleep(_POLL_S)
    sys.stderr.write((place / f"{name}{_WRITTEN}").read_text(errors="replace"))
    return int(ended.read_text())


if __name__ == "__main__":
    sys.exit(start_daemon(sys.argv[2:]) if sys.argv[1] == "daemon" else main(sys.argv[1:]))
