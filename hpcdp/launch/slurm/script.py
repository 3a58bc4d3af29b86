"""Filling a template in: what is asked for and what the site wants become one script, with every value quoted."""

from __future__ import annotations

import contextlib
import re
import shlex
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.checks import check_name, matching
from ...core.files import data_folder, require_private
from ...errors import ConfigError, whole_number
from .profile import Profile

TEMPLATES = {
    "train": "train.sbatch",
    "train-gpu": "train-gpu.sbatch",
    "sweep": "sweep.sbatch",
    "benchmark": "benchmark.sbatch",
    "interactive": "interactive.sh",
}
PROGRAMS = {"benchmark": ("hpcdp", "bench", "allreduce"), "interactive": ("bash",)}
"""What runs where nothing was said; elsewhere `hpcdp train`."""

REQUEUES = 3
"""So many times a job comes back after faults, if nothing else was asked for."""
_TRAINING = ("train", "train-gpu", "sweep")
_RUNS = "runs"
_TRAIN = ("hpcdp", "train")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_TASKS = 100_000
_MOST = 1_000_000
_LEAD_S = 120
_COUNTS = ("nodes", "ranks_per_node", "cpus_per_task", "at_once", "requeues")


class _Template(string.Template):
    """With ``@@name``: bash has its own meaning for ``$``."""

    delimiter = "@@"


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """What a script is to do.

    Args:
        template: a key of `TEMPLATES`.
        program: with its arguments; empty for the template's own.
        nodes: how many.
        ranks_per_node: on each of them.
        cpus_per_task: cores of a rank.
        name: of the job, None for the template's.
        settings: of a sweep, the further arguments of each task.
        at_once: of a sweep, so many tasks run at a time; None for as many as fit.
        requeues: of what trains, so many times a job comes back after faults; None for `REQUEUES`.
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
        for argument in (*self.program, *(each for line in self.settings for each in line)):
            if "\n" in argument or "\0" in argument:
                raise ConfigError("program", expected="arguments of one line", got=repr(argument))
        if self.template == "sweep" and not 0 < len(self.settings) <= _MOST_TASKS:
            raise ConfigError(
                "sweep", expected=f"a file of 1 to {_MOST_TASKS:,} lines of settings", got=len(self.settings),
                remedy="--settings FILE names it",
            )  # fmt: skip
        if self.template != "sweep" and (self.settings or self.at_once):
            raise ConfigError(self.template, expected="no settings of a sweep", got="some", remedy="that is sweep")
        if self.requeues is not None and self.template not in _TRAINING:
            raise ConfigError("--requeues", expected=f"the template {', '.join(_TRAINING)}", got=self.template)


@dataclass(frozen=True)
class Script:
    """A script, and the folder where it and its output lie: that of the run."""

    text: str
    name: str
    folder: Path


def render(request: ScriptRequest, profile: Profile) -> Script:
    """The script for ``request`` at a site.

    Raises:
        ConfigError: the profile lacks something, or the program cannot be run in that way.
    """
    name = request.name or request.template
    time = profile.require("time", 'say it with --time, or in the profile: time = "04:00:00"')
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
        parts["gres"] = _quoted(profile.require("gres", 'say it with --gres, or in the profile: gres = "gpu:4"'))
    if request.template == "sweep":
        throttle = f"%{request.at_once}" if request.at_once else ""
        parts["array"] = f"1-{len(request.settings)}{throttle}"
        parts["settings"] = "\n".join(
            f"  {number}) settings=({shlex.join(line)}) ;;" for number, line in enumerate(request.settings, 1)
        )
    parts["ranks"] = _filled("ranks.sh", parts).rstrip("\n")
    return Script(_filled(TEMPLATES[request.template], parts), name, folder)


def read_settings(path: str | Path) -> tuple[tuple[str, ...], ...]:
    """The lines of a sweep's file, each as the arguments that it adds; without blank ones and comments (``#``).

    Raises:
        ConfigError: the file cannot be read, or a line has a quote that is not closed.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # some editors begin it with a mark
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("sweep", where=path, expected="a file of settings, one line a task", got=got) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError("sweep", where=f"{path}, line {number}", expected="closed quotes", got=line) from error
        if words:
            found.append(tuple(words))
    return tuple(found)


def _filled(file: str, parts: dict[str, str]) -> str:
    text = (data_folder("slurm") / file).read_text(encoding="utf-8")
    return re.sub("\n{3,}", "\n\n", _Template(text).substitute(parts))


def _program(request: ScriptRequest, name: str) -> tuple[list[str], str, str, Path]:
    """The program as words of bash, the values of ``run`` and ``checkpoints`` there, and the folder of the script and
    its output.

    `hpcdp train` goes on in a run folder that is the job's own, unless another is named: by the script's argument, or
    in the program, where ``run`` is empty. Where other programs save is not known, and ``checkpoints`` empty.
    """
    given = request.program or PROGRAMS.get(request.template, _TRAIN)
    words = [shlex.quote(word) for word in given]
    sweep = request.template == "sweep"
    if sweep:
        words.append('"${settings[@]}"')
    if given[:2] != _TRAIN or request.template not in _TRAINING:
        return words, "''", "''", Path(_RUNS)
    said = [given, *request.settings]
    if any(_value(line, "--overwrite") is not None for line in said):
        raise ConfigError(
            "hpcdp train --overwrite", expected="none in a job that is resumed", got="it",
            remedy="name another --run-dir, or leave it out: each job has a folder of its own",
        )  # fmt: skip
    run_dir = next((each for line in said if (each := _value(line, "--run-dir")) is not None), None)
    if sweep and run_dir is not None:
        raise ConfigError(
            "sweep", expected="no --run-dir", got=run_dir, remedy="each task has a folder of its own"
        )  # fmt: skip
    run, folder = "''", shlex.quote(run_dir or "")
    if run_dir is None:
        run = f"${{1:-{_RUNS}/{name}-{'$SLURM_ARRAY_JOB_ID' if sweep else '$job'}}}"
        folder = "$run/$SLURM_ARRAY_TASK_ID" if sweep else "$run"
        words += ["--run-dir", f'"{folder}"']
    if not any(_value(line, "--resume") is not None for line in said):
        words += ["--resume", "auto"]
    return words, run, f"{folder}/checkpoints", Path(_RUNS) if run_dir is None else Path(run_dir).parent


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """What a flag is given, the last time; empty where nothing follows, None where it is not there."""
    found = None
    for position, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag:
            found = arguments[position + 1] if position + 1 < len(arguments) else ""
    return found


def _options(request: ScriptRequest, profile: Profile, name: str, time: str, folder: Path) -> Iterator[str]:
    """Never ``--ntasks`` with ``--nodes`` alone, which places 4 ranks on 2 nodes as 3 and 1."""
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
    """So many seconds before a limit, as Slurm writes it, a job stops early: two minutes, but not in its first half."""
    days, has_days, rest = time.rpartition("-")
    if not rest.replace(":", "").isdecimal():  # UNLIMITED
        return _LEAD_S
    numbers = [int(number) for number in rest.split(":")]
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
    yield f"export SRUN_CPUS_PER_TASK={cores}  # srun does not take it from the job"
    yield f"export OMP_NUM_THREADS={cores}"
    if profile.launcher == "srun" and str(profile.mpi_type).startswith("pmix"):
        yield "export PMIX_MCA_psec=native  # or Open MPI says that it found no munge"
    for variable, text in profile.env.items():
        yield f"export {variable}={shlex.quote(text)}"


def _path(key: str, text: str, *inside: str) -> Path:
    try:
        path = Path(text, *inside).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"site profile: {key}", expected="a home folder for its ~", got=repr(text)) from error
    expected, remedy = "what not everybody may change", "move it to a folder of yours"
    with contextlib.suppress(OSError):  # it may be there on the nodes alone
        require_private(f"site profile: {key}", path, expected, remedy, everybody=True)
    return path


def _launch(request: ScriptRequest, profile: Profile) -> Iterator[str]:
    if profile.launcher == "mpirun":
        yield f"hpcdp launch --launcher mpi -n {request.nodes * request.ranks_per_node} --"
    else:
        remedy = 'mpi_type = "pmix" for Open MPI, "pmi2" for MPICH, or launcher = "mpirun"; srun --mpi=list lists them'
        mpi_type = profile.require("mpi_type", remedy)
        if any(":" in line for line in (request.program, *request.settings)):
            raise ConfigError(
                "program", expected="no argument : alone, where srun begins another program", got="one",
                remedy="a script of its own can give it",
            )  # fmt: skip
        yield f"srun --mpi={mpi_type}"
        # Others of a rank that has died, also before MPI was up, may wait for ever; an end at once would hide a 75.
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
    """As a line of ``#SBATCH`` takes it, where a backslash counts within any quotes."""
    if re.fullmatch(r"[A-Za-z0-9_.,:/=+%@\[\]-]+", value):
        return value
    return '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'
