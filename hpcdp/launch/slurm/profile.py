"""What a site wants of every job, in a TOML file: partition, account, modules, and how MPI is started there."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core import files
from ...core.checks import check_name, matching
from ...core.files import require_private
from ...errors import ConfigError
from ..batch import SLURM

LAUNCHERS = ("srun", "mpirun")
FILE = "hpcdp-site.toml"
"""The name of a profile in the working folder."""

_VALID = {
    "mpi_type": ("(?!none$)[A-Za-z0-9_.]+", "a name such as pmix, with which ranks find each other"),
    "gpu_bind": ("[\\w.:,=*-]+", "a word of --gpu-bind, e.g. none or closest"),
    **SLURM,
}
"""What a value of a key must be, and how that is said, where sbatch would refuse any other."""

_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile("--([a-z][a-z0-9-]*)(=.*)?")
_LISTS = ("modules", "sbatch")
_TAKEN = (
    "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "time", "partition", "account", "qos", "gres",
    "output", "signal", "requeue", "no-requeue", "open-mode", "array", "parsable", "wait", "wrap", "export",
    "test-only",
)  # fmt: skip
"""Options of sbatch that other keys, flags or templates set, or that would undo what templates do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A site; None and empty: not said. A value that is wrong raises `ConfigError`, which names key and value.

    Args:
        launcher: what starts the ranks: ``"srun"``, or ``"mpirun"``, which is `hpcdp launch` inside the job.
        mpi_type: ``--mpi`` of srun: ``"pmix"`` for Open MPI, ``"pmi2"`` for MPICH and Intel MPI.
        time: of a job, as Slurm writes it: ``"04:00:00"``, ``"2-12"``.
        partition, account, qos: as sbatch takes them.
        gres: the GPUs of a node, for the template ``train-gpu``: ``"gpu:4"``.
        gpu_bind: ``--gpu-bind`` of srun.
        modules: environment modules that are loaded.
        venv: the virtual environment, in a folder that all nodes see; ``~`` is the home of who renders.
        image: an Apptainer image in which the ranks run; likewise.
        env: variables of the job.
        sbatch: further options of sbatch, such as ``"--constraint=ib"``.
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
            found = _OPTION.fullmatch(option)
            if found is None:
                raise _wrong("sbatch", "long options with the value behind =, e.g. --constraint=ib", option)
            if any(taken.startswith(found[1]) for taken in _TAKEN):  # sbatch takes --node for --nodes
                raise _wrong("sbatch", "no option that a key, a flag or the template sets", option)
            pattern, expected = SLURM.get(found[1], (".*", ""))
            if not re.fullmatch(pattern, (found[2] or "")[1:]):
                raise _wrong("sbatch", f"for --{found[1]} {expected}", option)

    def with_flags(self, said: Mapping[str, str]) -> Profile:
        """The same with other values, by key, for one job. A wrong one is a `ConfigError` that names the flag."""
        for name, text in said.items():
            _check(f"--{name}", name, text)
        return dataclasses.replace(self, **said)  # type: ignore[arg-type]

    def require(self, name: str, remedy: str) -> str:
        """The value of a key that a template cannot do without; `ConfigError` with the ``remedy`` where it is None."""
        value: str | None = getattr(self, name)
        if value is None:
            raise ConfigError("site profile", expected=f"the key {name}", got="none", remedy=remedy)
        return value


def load(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Profile:
    """The profile in ``path``, else in what ``HPCDP_SITE`` names, else in the first that is there of `places`.

    A job runs what its profile says, so one that was not named must be this user's alone, and one that was named must
    not be everybody's.

    Raises:
        ConfigError: there is none; it cannot be read; others may write it; a key is unknown, or a value wrong.
    """
    said = environ.get("HPCDP_SITE") if path is None else None
    is_named = bool(path or said)
    if path is None:
        path = said or next((place for place in places(environ) if os.path.isfile(place)), None)
    if path is None:
        raise ConfigError(
            "site profile", expected=f"a file: {', '.join(map(str, places(environ)))}", got="none",
            remedy='write one, e.g. with the line mpi_type = "pmix", or name one with --site FILE',
        )  # fmt: skip
    try:
        remedy = "copy it to a folder of yours" if is_named else f"name it with --site {path} to use it"
        require_private("site profile", path, "a file that others may not change", remedy, everybody=is_named)
        given = files.read_toml(path)
    except OSError as error:
        where = f"HPCDP_SITE={said}" if said else path
        raise ConfigError("site profile", where=where, expected="a file", got=error.strerror) from error
    except ValueError as error:
        raise ConfigError("site profile", where=path, expected="a TOML file", got=error) from error
    for name in given:
        check_name("key", name, names(), where=path)
    try:
        return Profile(**{name: _as_kept(name, value) for name, value in given.items()})
    except ConfigError as error:
        error.where = path
        raise


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where a profile is looked for that is not named: the first one counts."""
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")) / ".config")
    return [Path(FILE), home / "hpcdp" / "site.toml"]


def names() -> list[str]:
    """The keys of a profile."""
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
    """Every text in a profile, after the name of its key and how that is written: ``env.HOME``."""
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
        said = str(text).lower() if isinstance(text, bool) else str(text)
        raise ConfigError(operation, expected=f"{expected}, in quotes", got=said, remedy=f'write "{said}"')
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise ConfigError(operation, expected="text on one line", got=repr(text))
    matching(operation, text, pattern, expected)


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"site profile: {name}", expected=expected, got=repr(got))
