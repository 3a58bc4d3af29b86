"""Batch scripts for Slurm from templates and a site's profile, their submission, and the jobs in the queue.

`Profile` holds a site's settings from a TOML file: partition, account, modules, the start of MPI. `render` fills a
template with a request and a profile, and quotes every value. The queue is accessed through Slurm's commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import re
import shlex
import shutil
import string
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import files
from ..core.checks import check_name, matching, whole_number
from ..core.files import data_folder, require_private
from ..errors import ConfigError, HpcdpError, LaunchError, listed, reason
from .launchers.batch import SLURM

LAUNCHERS = ("srun", "mpirun")
FILE = "hpcdp-site.toml"
"""The name of a profile in the working folder."""

_VALID = {
    "mpi_type": ("(?!none$)[A-Za-z0-9_.]+", "a name such as pmix, with which ranks find each other"),
    "gpu_bind": ("[\\w.:,=*-]+", "a word of --gpu-bind, e.g. none or closest"),
    **SLURM,
}
"""For each key whose values sbatch restricts, the pattern of a valid value and its description."""

_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile("--([a-z][a-z0-9-]*)(=.*)?")
_LISTS = ("modules", "sbatch")
_TAKEN = (
    "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "time", "partition", "account", "qos", "gres",
    "output", "signal", "requeue", "no-requeue", "open-mode", "array", "parsable", "wait", "wrap", "export",
    "test-only",
)  # fmt: skip
"""Options of sbatch that keys, flags or templates set, or that would break the templates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The settings of a site; None and empty values are not set.

    Args:
        launcher: ``"srun"``, or ``"mpirun"`` for `hpcdp launch` inside the job.
        mpi_type: ``--mpi`` of srun: ``"pmix"`` for Open MPI, ``"pmi2"`` for MPICH and Intel MPI.
        time: time limit of a job in Slurm's format: ``"04:00:00"``, ``"2-12"``.
        partition: ``--partition`` of sbatch.
        account: ``--account`` of sbatch.
        qos: ``--qos`` of sbatch.
        gres: the GPUs of a node, for the template ``train-gpu``: ``"gpu:4"``.
        gpu_bind: ``--gpu-bind`` of srun.
        modules: environment modules to load.
        venv: the virtual environment, in a folder that all nodes see; ``~`` is the rendering user's home.
        image: an Apptainer image in which the ranks run; likewise.
        env: variables of the job.
        sbatch: further options of sbatch, such as ``"--constraint=ib"``.

    Raises:
        ConfigError: a value is invalid.
    """

    launcher: str = "srun"
    mpi_type: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    gpu_bind: str = "none"
    modules: tuple[str, ...] = ()
    venv: str | None = None
    image: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, label, text in _texts(self):
            _check(f"site profile: {label}", name, text)
        check_name("launcher", self.launcher, LAUNCHERS)
        for variable in self.env:
            if not _VARIABLE.fullmatch(variable):
                raise _wrong("env", "names of variables", variable)
        for option in self.sbatch:
            match = _OPTION.fullmatch(option)
            if match is None:
                raise _wrong("sbatch", "long options with the value after =, e.g. --constraint=ib", option)
            if any(reserved.startswith(match[1]) for reserved in _TAKEN):  # sbatch accepts --node for --nodes
                raise _wrong("sbatch", "no option that a key, a flag or the template sets", option)
            pattern, expected = SLURM.get(match[1], (".*", ""))
            if not re.fullmatch(pattern, (match[2] or "")[1:]):
                raise _wrong("sbatch", f"for --{match[1]} {expected}", option)

    def with_flags(self, flags: Mapping[str, str]) -> Profile:
        """Return the profile with other values, by key; raise `ConfigError` for an invalid one."""
        for name, text in flags.items():
            _check(f"--{name}", name, text)
        return dataclasses.replace(self, **flags)  # type: ignore[arg-type]

    def require(self, name: str, remedy: str) -> str:
        """Return the value of a key that a template needs; raise `ConfigError` with the ``remedy`` if it is None."""
        value: str | None = getattr(self, name)
        if value is None:
            raise ConfigError("site profile", expected=f"the key {name}", got="none", remedy=remedy)
        return value


def load(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Profile:
    """Load the profile from ``path``, else from ``HPCDP_SITE``, else from the first existing one of `places`.

    A job runs commands from its profile. So a file found in `places` must be writable by this user only, and a named
    one must not be writable by everybody.

    Raises:
        ConfigError: there is none; it cannot be read; others may write it; a key is unknown or a value invalid.
    """
    variable = environ.get("HPCDP_SITE") if path is None else None
    is_named = bool(path or variable)
    if path is None:
        path = variable or next((place for place in places(environ) if os.path.isfile(place)), None)
    if path is None:
        raise ConfigError(
            "site profile", expected=f"a file: {', '.join(map(str, places(environ)))}", got="none",
            remedy='write one with mpi_type = "pmix" and time = "04:00:00", or use --site FILE',
        )  # fmt: skip
    try:
        remedy = "copy it to a folder of yours" if is_named else f"use it with --site {path}"
        require_private("site profile", path, "a file that others may not change", remedy, everybody=is_named)
        settings = files.read_toml(path)
    except HpcdpError:
        raise
    except OSError as error:
        where = f"HPCDP_SITE={variable}" if variable else path
        raise ConfigError("site profile", where=where, expected="a file", got=reason(error)) from error
    except ValueError as error:
        raise ConfigError("site profile", where=path, expected="a TOML file", got=error) from error
    for name in settings:
        check_name("key", name, names(), where=path)
    try:
        return Profile(**{name: _as_kept(name, value) for name, value in settings.items()})
    except ConfigError as error:
        error.where = path
        raise


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the default paths of a profile; the first existing one is used."""
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")) / ".config")
    return [Path(FILE), home / "hpcdp" / "site.toml"]


def names() -> list[str]:
    """Return the keys of a profile."""
    return [field.name for field in dataclasses.fields(Profile)]


def _as_kept(name: str, value: Any) -> Any:
    if name in _LISTS:
        if not isinstance(value, list):
            raise _wrong(name, 'a list, e.g. ["a", "b"]', value)
        return tuple(value)
    if name == "env":
        if not isinstance(value, dict):
            raise _wrong(name, "a table [env] of variables", value)
        return {variable: str(text) if type(text) is int else text for variable, text in value.items()}
    return value


def _texts(profile: Profile) -> Iterator[tuple[str, str, Any]]:
    """Yield the key, the full key such as ``env.HOME``, and the value of every text in a profile."""
    for name in names():
        value = getattr(profile, name)
        if name == "env":
            yield from ((name, f"env.{variable}", text) for variable, text in value.items() if text != "")
        elif name in _LISTS:
            yield from ((name, name, text) for text in value)
        elif value is not None:
            yield name, name, value


def _check(operation: str, name: str, text: Any) -> None:
    pattern, expected = _VALID.get(name, (".*", "text on one line"))
    if isinstance(text, bool | int | float | datetime.time | datetime.date):
        got = str(text).lower() if isinstance(text, bool) else str(text)
        raise ConfigError(operation, expected=f"{expected}, in quotes", got=got, remedy=f'write "{got}"')
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise ConfigError(operation, expected="text on one line", got=repr(text))
    matching(operation, text, pattern, expected)


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"site profile: {name}", expected=expected, got=repr(got))


TEMPLATES = {
    "train": "train.sbatch",
    "train-gpu": "train-gpu.sbatch",
    "sweep": "sweep.sbatch",
    "benchmark": "benchmark.sbatch",
    "interactive": "interactive.sh",
}
PROGRAMS = {"benchmark": ("hpcdp", "bench", "allreduce"), "interactive": ("bash",)}
"""The default programs of templates; that of the others is `hpcdp train`."""

REQUEUES = 3
"""Default number of requeues after faults."""
_TRAINING = ("train", "train-gpu", "sweep")
_RUNS = "runs"
_TRAIN = ("hpcdp", "train")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_TASKS = 100_000
_MOST = 1_000_000
_LEAD_S = 120
_COUNTS = ("nodes", "ranks_per_node", "cpus_per_task", "at_once", "requeues")


class _Template(string.Template):
    """A template with ``@@name``, as ``$`` has a meaning in bash."""

    delimiter = "@@"


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """The settings of one script.

    Args:
        template: a key of `TEMPLATES`.
        program: the program and its arguments; empty for the template's default.
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        cpus_per_task: number of cores of a rank.
        name: name of the job; None for the template's.
        settings: further arguments of each task of a sweep.
        at_once: greatest number of concurrent tasks of a sweep; None for no limit.
        requeues: greatest number of requeues after faults of a training job; None for `REQUEUES`.

    Raises:
        ConfigError: a value is invalid, or has no meaning for the template.
    """

    template: str
    program: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_task: int = 1
    name: str | None = None
    settings: tuple[tuple[str, ...], ...] = ()
    at_once: int | None = None
    requeues: int | None = None

    def __post_init__(self) -> None:
        check_name("template", self.template, TEMPLATES)
        for count in _COUNTS:
            flag = f"--{count.replace('_', '-')}"
            whole_number(flag, None, getattr(self, count) or 0, None, _MOST, expected=f"at most {_MOST:,}")
        if self.name is not None:
            matching("--name", self.name, _NAME, "letters, digits and _.-")
        for argument in itertools.chain(self.program, *self.settings):
            if "\n" in argument or "\0" in argument:
                raise ConfigError("program", expected="arguments of one line", got=repr(argument))
        if self.template == "sweep" and not 0 < len(self.settings) <= _MOST_TASKS:
            raise ConfigError(
                "sweep", expected=f"a file of 1 to {_MOST_TASKS:,} lines of settings", got=len(self.settings),
                remedy="use --settings FILE",
            )  # fmt: skip
        if self.template != "sweep" and (self.settings or self.at_once):
            raise ConfigError(
                self.template, expected="no settings of a sweep", got="some", remedy="use the template sweep"
            )
        if self.requeues is not None and self.template not in _TRAINING:
            raise ConfigError("--requeues", expected=f"the template {', '.join(_TRAINING)}", got=self.template)


@dataclass(frozen=True)
class Script:
    """A script, the folder for it and its output, that of the run, and what it requests by option."""

    text: str
    name: str
    folder: Path
    requested: tuple[tuple[str, str], ...]


def render(request: ScriptRequest, profile: Profile) -> Script:
    """Render the script for ``request`` at a site.

    Raises:
        ConfigError: the profile lacks a required key, or the program's arguments conflict with the template.
    """
    name = request.name or request.template
    time = profile.require("time", 'use --time, or in the profile: time = "04:00:00"')
    program, run, checkpoints, folder = _program(request, name)
    interactive = request.template == "interactive"
    options = list(_options(request, profile, name, time, folder))
    parts = {
        "shebang": "#!/bin/bash -l" if profile.modules else "#!/bin/bash",
        "environment": "\n".join(_environment(request, profile)),
        "program": " ".join([*_container(request, profile), *program]),
        "run": run,
        "checkpoints": checkpoints,
        "requeues": str(REQUEUES if request.requeues is None else request.requeues),
        "launch": "" if interactive else " ".join(_launch(request, profile)),
    }
    if interactive:
        parts["options"] = "\n".join(f"  {shlex.quote(option)}" for option in options)
    else:
        parts["directives"] = "\n".join(f"#SBATCH {_directive(option)}" for option in options)
        parts["signal"] = f"USR1@{_lead_s(time)}"
    if request.template == "train-gpu":
        parts["gres"] = _quoted(profile.require("gres", 'use --gres, or in the profile: gres = "gpu:4"'))
    if request.template == "sweep":
        throttle = f"%{request.at_once}" if request.at_once else ""
        parts["array"] = f"1-{len(request.settings)}{throttle}"
        parts["settings"] = "\n".join(
            f"  {number}) settings=({shlex.join(line)}) ;;" for number, line in enumerate(request.settings, 1)
        )
    parts["ranks"] = _filled("ranks.sh", parts).rstrip("\n")
    return Script(_filled(TEMPLATES[request.template], parts), name, folder, tuple(_requested(request, profile, time)))


def _requested(request: ScriptRequest, profile: Profile, time: str) -> Iterator[tuple[str, str]]:
    """Yield the resources of a job, each with the option that changes it."""
    if request.template == "sweep":
        yield f"{len(request.settings)} tasks, each with", "--settings FILE"
    counts = (
        (request.nodes, "node", "", "--nodes N"),
        (request.ranks_per_node, "rank", " on each node", "--ranks-per-node N"),
        (request.cpus_per_task, "core", " for each rank", "--cpus-per-task N"),
    )
    for number, noun, where, option in counts:
        yield f"{number} {noun}{'' if number == 1 else 's'}{where}", option
    if request.template == "train-gpu":
        yield f"{profile.gres} on each node", "--gres GRES"
    yield f"time limit {time}", "--time TIME"


def read_settings(path: str | Path) -> tuple[tuple[str, ...], ...]:
    """Read the arguments of each task from a sweep's file, without blank lines and comments (``#``).

    Raises:
        ConfigError: the file cannot be read, or a line has an open quote.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # some editors write a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        got = reason(error) if isinstance(error, OSError) else error
        raise ConfigError("sweep", where=path, expected="a file of settings, one line a task", got=got) from error
    tasks = []
    for number, line in enumerate(lines, 1):
        try:
            tasks.append(tuple(shlex.split(line, comments=True)))
        except ValueError as error:
            raise ConfigError("sweep", where=f"{path}, line {number}", expected="closed quotes", got=line) from error
    return tuple(filter(None, tasks))


def _filled(file: str, parts: dict[str, str]) -> str:
    text = (data_folder("slurm") / file).read_text(encoding="utf-8")
    return re.sub("\n{3,}", "\n\n", _Template(text).substitute(parts))


def _program(request: ScriptRequest, name: str) -> tuple[list[str], str, str, Path]:
    """Return the program in bash syntax, the values of ``run`` and ``checkpoints``, and the script's folder.

    `hpcdp train` resumes in a run folder of the job, or in one named by the script's argument or in the program; in the
    last case ``run`` is empty. For other programs the checkpoints are unknown, and ``checkpoints`` is empty.
    """
    program = request.program or PROGRAMS.get(request.template, _TRAIN)
    words = [shlex.quote(word) for word in program]
    sweep = request.template == "sweep"
    if sweep:
        words.append('"${settings[@]}"')
    if program[:2] != _TRAIN or request.template not in _TRAINING:
        return words, "''", "''", Path(_RUNS)
    argument_lists = [program, *request.settings]
    if any(_value(arguments, "--overwrite") is not None for arguments in argument_lists):
        raise ConfigError(
            "hpcdp train", expected="no --overwrite, as the job is resumed", got="--overwrite",
            remedy="use another --run-dir, or none: each job has a folder of its own",
        )  # fmt: skip
    run_dirs = (_value(arguments, "--run-dir") for arguments in argument_lists)
    run_dir = next((path for path in run_dirs if path is not None), None)
    if sweep and run_dir is not None:
        remedy = "leave it out: each task has a folder of its own"
        raise ConfigError("sweep", expected="no --run-dir", got=run_dir, remedy=remedy)
    run, folder = "''", shlex.quote(run_dir or "")
    if run_dir is None:
        run = f"${{1:-{_RUNS}/{name}-{'$SLURM_ARRAY_JOB_ID' if sweep else '$job'}}}"
        folder = "$run/$SLURM_ARRAY_TASK_ID" if sweep else "$run"
        words += ["--run-dir", f'"{folder}"']
    if not any(_value(arguments, "--resume") is not None for arguments in argument_lists):
        words += ["--resume", "auto"]
    return words, run, f"{folder}/checkpoints", Path(_RUNS) if run_dir is None else Path(run_dir).parent


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag; empty where none follows, None where the flag is missing."""
    value = None
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        elif word == flag:
            value = following
    return value


def _options(request: ScriptRequest, profile: Profile, name: str, time: str, folder: Path) -> Iterator[str]:
    """Yield the options of sbatch; ``--ntasks`` with ``--nodes`` alone would place 4 ranks on 2 nodes as 3 and 1."""
    yield f"--job-name={name}"
    yield f"--nodes={request.nodes}"
    yield f"--ntasks-per-node={request.ranks_per_node}"
    yield f"--cpus-per-task={request.cpus_per_task}"
    yield f"--time={time}"
    for key in ("partition", "account", "qos"):
        if (value := getattr(profile, key)) is not None:
            yield f"--{key}={value}"
    if request.template != "interactive":
        numbers = "%A_%a" if request.template == "sweep" else "%j"
        yield f"--output={str(folder / name).replace('%', '%%')}-{numbers}.out"
    elif profile.gres is not None:
        yield f"--gres={profile.gres}"
    yield from profile.sbatch


def _lead_s(time: str) -> int:
    """Return the seconds before a limit in Slurm's format at which a job stops: 120, but not in its first half."""
    days, has_days, clock = time.rpartition("-")
    if not clock.replace(":", "").isdecimal():  # UNLIMITED
        return _LEAD_S
    numbers = [int(number) for number in clock.split(":")]
    if has_days:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:  # M, M:S, H:M:S
        hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    limit_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return min(_LEAD_S, limit_s // 2) or _LEAD_S  # 0: no limit


def _environment(request: ScriptRequest, profile: Profile) -> Iterator[str]:
    if profile.modules:
        yield f"module load {shlex.join(profile.modules)} || exit 1"
    if profile.venv is not None:
        yield "# shellcheck source=/dev/null"
        yield f"source {shlex.quote(str(_path('venv', profile.venv, 'bin', 'activate')))} || exit 1"
    cores = str(request.cpus_per_task)
    if request.template != "interactive":
        cores = f'"${{SLURM_CPUS_PER_TASK:-{cores}}}"'
    yield f"export SRUN_CPUS_PER_TASK={cores}  # srun does not inherit it from the job"
    yield f"export OMP_NUM_THREADS={cores}"
    if profile.launcher == "srun" and str(profile.mpi_type).startswith("pmix"):
        yield "export PMIX_MCA_psec=native  # otherwise Open MPI prints that it found no munge"
    for variable, text in profile.env.items():
        yield f"export {variable}={shlex.quote(text)}"


def _path(key: str, text: str, *inside: str) -> Path:
    try:
        path = Path(text, *inside).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"site profile: {key}", expected="a home folder for its ~", got=repr(text)) from error
    expected, remedy = "a path that not everybody may change", "move it to a folder of yours"
    with contextlib.suppress(OSError):  # it may exist on the nodes only
        require_private(f"site profile: {key}", path, expected, remedy, everybody=True)
    return path


def _launch(request: ScriptRequest, profile: Profile) -> Iterator[str]:
    if profile.launcher == "mpirun":
        yield f"hpcdp launch --launcher mpi -n {request.nodes * request.ranks_per_node} --"
    else:
        remedy = 'set mpi_type = "pmix" for Open MPI, "pmi2" for MPICH (see srun --mpi=list), or launcher = "mpirun"'
        mpi_type = profile.require("mpi_type", remedy)
        if any(":" in line for line in (request.program, *request.settings)):
            raise ConfigError(
                "program", expected="no argument that is a lone colon, where srun begins another program", got="':'",
                remedy="pass it in a script",
            )  # fmt: skip
        yield f"srun --mpi={mpi_type}"
        # Else ranks could wait forever for a dead one, even during MPI_Init; an immediate end would hide a status 75.
        yield "--wait=30"
        if request.template == "train-gpu":
            yield f"--gpu-bind={shlex.quote(profile.gpu_bind)}"


def _container(request: ScriptRequest, profile: Profile) -> Iterator[str]:
    if profile.image is not None and request.template != "interactive":
        yield "apptainer exec --nv" if request.template == "train-gpu" else "apptainer exec"
        yield shlex.quote(str(_path("image", profile.image)))


def _directive(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}{equals}{_quoted(value)}" if equals else name


def _quoted(value: str) -> str:
    """Quote a value for a line of ``#SBATCH``, where a backslash escapes within any quotes."""
    if re.fullmatch(r"[A-Za-z0-9_.,:/=+%@\[\]-]+", value):
        return value
    return '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


SAVE_LIMIT_S = 150.0
"""Seconds in which a job must save and end after the signal, slightly more than the signal leaves it."""

_LIMIT_S = 60.0
_POLL_S = 2.0
_JOB = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
_UNKNOWN = re.compile("invalid job id|no job|not found", re.IGNORECASE)


@dataclass(frozen=True)
class QueuedJob:
    """A job or a task of an array, as Slurm reports it; unknown values are empty.

    Args:
        number: ``"4711"``, of a task ``"4711_3"``, of waiting tasks ``"4711_[4-9]"``.
        name: name of the job.
        state: ``"RUNNING"``, ``"PENDING"``, ``"COMPLETED"``, ...
        took: wall time since the last start.
        where: the hosts, the reason of waiting, or the exit status.
    """

    number: str
    name: str
    state: str
    took: str
    where: str

    @property
    def family(self) -> str:
        """Return the number without that of the task."""
        return self.number.partition("_")[0]


def write(script: Script) -> Path:
    """Write the script under a new name into its folder, which is made if missing, readable by this user only.

    Raises:
        LaunchError: it cannot be written, or every user may write to its folder.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = script.folder / f"{script.name}-{stamp}.sbatch"
    try:
        script.folder.mkdir(parents=True, exist_ok=True)
        require_private(  # others could replace the script before sbatch reads it
            "write the script", script.folder, "a folder that not everybody may change",
            "submit from a folder of yours", everybody=True, error=LaunchError,
        )  # fmt: skip
        number = 1
        while True:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileExistsError:
                number += 1
                path = script.folder / f"{script.name}-{stamp}-{number}.sbatch"
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(script.text)
    except OSError as error:
        raise LaunchError("write the script", where=path, got=reason(error)) from error
    return path


def submit(path: Path) -> str:
    """Submit a script and return the number of its job; raise `LaunchError` with sbatch's reason for a refusal."""
    done = _run(["sbatch", "--parsable", str(path)])
    number = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise LaunchError("sbatch", where=path, got=_said(done))
    return number


def own_jobs() -> list[QueuedJob]:
    """Return this user's jobs in the queue; raise `LaunchError` if Slurm is missing or does not answer."""
    return _queued([f"--user={os.getuid()}"])


def jobs(numbers: Sequence[str]) -> tuple[list[QueuedJob], list[str]]:
    """Return the jobs of these numbers, in order, and the unknown numbers.

    A job that has left the queue is looked up in the accounts (sacct), else in the controller's memory.

    Raises:
        LaunchError: Slurm is missing or does not answer; a number is malformed.
    """
    check_numbers(numbers)
    known = {
        number: _queued([f"--jobs={number}"]) or _accounted(number) or _remembered(number)
        for number in dict.fromkeys(numbers)
    }
    return [job for jobs in known.values() for job in jobs], [number for number, jobs in known.items() if not jobs]


def refuse_unknown(unknown: Sequence[str]) -> None:
    """Raise `LaunchError` if any number is unknown."""
    if unknown:
        queued = listed(sorted({job.number for job in own_jobs()})) or "none"
        raise LaunchError("Slurm job", expected=f"your jobs in the queue ({queued})", got=listed(unknown))


def check_numbers(numbers: Sequence[str]) -> None:
    """Raise `LaunchError` for the first malformed number of a job."""
    for number in numbers:
        if not _JOB.fullmatch(number):
            raise LaunchError("Slurm job", expected="a number such as 4711, or 4711_3 for a task", got=repr(number))


def cancel(numbers: Sequence[str], save: bool) -> list[str]:
    """Cancel jobs; with ``save`` first let them stop with a checkpoint, without a requeue.

    Returns:
        With ``save`` a line for each job: its script's message on how to resume, or the reason for none.

    Raises:
        LaunchError: as `jobs`; a job is unknown or has ended, before any is canceled; Slurm refuses.
    """
    check_numbers(numbers)
    queued = {number: _queued([f"--jobs={number}"]) for number in dict.fromkeys(numbers)}
    if missing := [number for number, its_jobs in queued.items() if not its_jobs]:
        ended, unknown = jobs(missing)
        refuse_unknown(unknown)
        raise LaunchError("cancel", where=ended[0].number, expected="a job in the queue", got=ended[0].state)
    messages = []
    if save:
        all_jobs = [job for its_jobs in queued.values() for job in its_jobs]
        running = [job.number for job in all_jobs if job.state == "RUNNING"]
        for number in running:
            _do(["scontrol", "update", f"JobId={number}", "Requeue=0"])
            _do(["scancel", "--batch", "--signal=USR1", number])
        deadline = time.monotonic() + SAVE_LIMIT_S
        while _are_running(running) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        messages = [_last_words(job.number) if job.number in running else _idle(job) for job in all_jobs]
    _do(["scancel", *queued])
    return messages


def _are_running(numbers: Sequence[str]) -> bool:
    states = {job.state for number in numbers for job in _queued([f"--jobs={number}"])}
    return bool(states & {"RUNNING", "COMPLETING"})


def _idle(job: QueuedJob) -> str:
    return f"job {job.number} was {job.state}: it had nothing to save"


def _last_words(number: str) -> str:
    """Return the last message of a job's script on its checkpoint, or the path of its output."""
    path = re.search(r"^ *StdOut=(.*)$", _run(["scontrol", "show", "job", number]).stdout, re.MULTILINE)
    lines: list[str] = []
    if path is not None:
        with contextlib.suppress(OSError):
            lines = Path(path[1]).read_text(encoding="utf-8", errors="replace").splitlines()
    messages = [line for line in lines if line.startswith(f"hpcdp: job {number} ")]
    if not messages:
        return f"job {number} has reported no checkpoint: see {path[1] if path else 'its output'}"
    return messages[-1].removeprefix("hpcdp: ")


def _queued(which: Sequence[str]) -> list[QueuedJob]:
    done = _run(["squeue", "--noheader", "--format=%i|%T|%M|%R|%j", *which])
    if done.returncode:
        if _UNKNOWN.search(done.stderr):
            return []
        raise LaunchError("squeue", got=_said(done))
    rows = [line.split("|", 4) for line in done.stdout.splitlines() if line.count("|") >= 4]
    return [QueuedJob(number, name, state, took, where) for number, state, took, where, name in rows]


def _accounted(number: str) -> list[QueuedJob]:
    if shutil.which("sacct") is None:
        return []
    columns = "--format=JobID,State,Elapsed,ExitCode,JobName"
    done = _run(["sacct", "--noheader", "--parsable2", "--allocations", columns, f"--jobs={number}"])
    if done.returncode:  # usually because this Slurm keeps no accounts
        return []
    rows = [line.split("|", 4) for line in done.stdout.splitlines() if line.count("|") >= 4]
    return [QueuedJob(job, name, state, took, f"exit {code}") for job, state, took, code, name in rows]


def _remembered(number: str) -> list[QueuedJob]:
    done = _run(["scontrol", "--oneliner", "show", "job", number])
    if done.returncode:
        return []
    jobs = []
    for line in done.stdout.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" in facts:
            array = facts.get("ArrayJobId")
            task = f"{array}_{facts['ArrayTaskId']}" if array and "ArrayTaskId" in facts else facts["JobId"]
            code = f"exit {facts.get('ExitCode', '')}"
            jobs.append(QueuedJob(task, facts.get("JobName", ""), facts["JobState"], facts.get("RunTime", ""), code))
    return jobs


def _do(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise LaunchError(command[0], where=shlex.join(command[1:]), got=_said(done))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        remedy = "run this on a login node of the cluster"
        raise LaunchError(command[0], expected="Slurm's commands on PATH", got="none", remedy=remedy)
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        remedy = "see whether Slurm's controller is up: scontrol ping"
        raise LaunchError(command[0], got=f"no answer in {_LIMIT_S:g} s", remedy=remedy) from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"status {done.returncode}"
