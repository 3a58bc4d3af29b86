"""What a site wants of every job, in a TOML file: partition, account, modules, and how MPI is started there."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..train.config import check_name

LAUNCHERS = ("srun", "mpirun")
FILE = "hpcdp-site.toml"
"""The name of a profile in the working folder."""

_TIME = re.compile(r"[0-9]+(-[0-9]+(:[0-9]+){0,2}|(:[0-9]+){1,2})?")
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile("--([a-z][a-z0-9-]*)(=.*)?")
_LISTS = ("modules", "sbatch")
_TAKEN = (
    "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "time", "partition", "account", "qos", "gres",
    "output", "signal", "requeue", "no-requeue", "open-mode", "array", "parsable", "wait", "wrap", "export",
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
        venv: the virtual environment, in a folder that all nodes see.
        image: an Apptainer image in which the ranks run.
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
        for name, text in _texts(self):
            if not isinstance(text, str) or not text.strip() or not text.isprintable():
                raise _wrong(name, "text on one line", text)
        check_name("launcher", self.launcher, LAUNCHERS)
        if self.mpi_type is not None and not re.fullmatch("[A-Za-z0-9_.]+", self.mpi_type):
            raise _wrong("mpi_type", "a name such as pmix", self.mpi_type)
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise _wrong("time", "a time as Slurm writes it, e.g. 04:00:00 or 2-12", self.time)
        for variable in self.env:
            if not _VARIABLE.fullmatch(variable):
                raise _wrong("env", "names of variables", variable)
        for option in self.sbatch:
            found = _OPTION.fullmatch(option)
            if found is None:
                raise _wrong("sbatch", "long options with the value behind =, e.g. --constraint=ib", option)
            if found[1] in _TAKEN:
                raise _wrong("sbatch", "no option that a key, a flag or the template sets", option)

    def require(self, name: str, remedy: str) -> str:
        """The value of a key that a template cannot do without; `ConfigError` with the ``remedy`` where it is None."""
        value: str | None = getattr(self, name)
        if value is None:
            raise ConfigError("site profile", expected=f"the key {name}", got="none", remedy=remedy)
        return value


def load(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Profile:
    """The profile in ``path``, else of the first that is there: see `places`.

    Raises:
        ConfigError: there is none; it cannot be read; a key is unknown, or a value wrong.
    """
    if path is None:
        path = next((place for place in places(environ) if place.is_file()), None)
        if path is None or (environ.get("HPCDP_SITE") and path != Path(environ["HPCDP_SITE"])):
            raise ConfigError(
                "site profile", expected=f"a file: {', '.join(map(str, places(environ)))}", got="none",
                remedy='write one, e.g. with the line mpi_type = "pmix", or name one with --site FILE',
            )  # fmt: skip
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("site profile", where=path, got=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("site profile", where=path, expected="a TOML file", got=error) from error
    for name in given:
        check_name("key", name, names(), where=path)
    try:
        return Profile(**{name: _as_kept(name, value) for name, value in given.items()})
    except ConfigError as error:
        error.where = path
        raise


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where a profile is looked for: the first one counts; one that ``HPCDP_SITE`` names must be there."""
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")) / ".config")
    said = [Path(environ["HPCDP_SITE"])] if environ.get("HPCDP_SITE") else []
    return [*said, Path(FILE), home / "hpcdp" / "site.toml"]


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


def _texts(profile: Profile) -> Iterator[tuple[str, Any]]:
    """Every text in a profile, with the name of its key."""
    for name in names():
        value = getattr(profile, name)
        if name == "env":
            yield from ((name, text) for text in value.values() if text != "")
        elif name in _LISTS:
            yield from ((name, text) for text in value)
        elif value is not None:
            yield name, value


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"site profile: {name}", expected=expected, got=repr(got))
