"""The folder of a run, and how a run goes on from it.

Which folder a run has, and what may be removed from one.

A job takes the lock of the folder's checkpoints before it writes anything else there, so a folder with nothing but that
counts as empty.

The folder that a run leaves behind: who makes it, what lies in it, and what goes wrong with it.

Which run ``--resume`` goes on with, and under which settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ...checkpoint import directory, flatten
from ...checkpoint.inspect import look_at
from ...comm import World
from ...comm.consistency import on_rank_0
from ...errors import ConfigError, DataError, listed, reason
from ..metrics import MetricsLog, Record, read_metrics, replace_file
from ..progress import draw_curves
from .config import AUTO, TrainConfig, load, read_toml, uncollected

RUN_FILES = (
    "config.toml", "metrics.jsonl", "events.out.tfevents.*", "*.png", "*.png.part", "config.toml.part",
    "metrics.jsonl.part",
)  # fmt: skip
"""What a run leaves, or one that was killed while it wrote that, in its folder, and so all that ``overwrite`` may
remove from one, with `CHECKPOINTS`."""

RUNS = "runs"
"""Where new run folders are made."""

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""


def reserve_run_dir(config: TrainConfig) -> TrainConfig:
    """``config`` with a ``run_dir`` that exists and is empty; called by one process of the job.

    Without a ``run_dir`` it is a new ``runs/MODEL-DATA-NNN``. One with results in it is refused, or with ``overwrite``
    emptied of `RUN_FILES`; nothing else is ever removed. One that another job has is a `DataError`, which names it.
    """
    if config.run_dir is None:
        return dataclasses.replace(config, run_dir=str(_new_run_dir(f"{config.model}-{config.data}")))
    folder = Path(config.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_empty(folder):
            _require_free(folder)
            _clear_run_dir(folder, config.overwrite)
    except OSError as error:
        raise _cannot_make(folder, error) from error
    return config


def drop_empty_run_dir(config: TrainConfig) -> None:
    """Removes the reserved run folder of a job that ended before it wrote anything, unless another one has it now."""
    folder = Path(str(config.run_dir))
    with contextlib.suppress(OSError, DataError):
        if _is_empty(folder):
            if (folder / CHECKPOINTS).is_dir():
                _drop_checkpoints(folder / CHECKPOINTS)
            folder.rmdir()


def _require_free(folder: Path) -> None:
    from ...checkpoint.directory import require_free  # not before, as in `_is_empty`

    require_free(folder / CHECKPOINTS)


def _is_empty(folder: Path) -> bool:
    from ...checkpoint.directory import NAME  # not before: NumPy would be loaded for --help, too

    checkpoints = folder / CHECKPOINTS
    inner = {path.name for path in checkpoints.iterdir()} if checkpoints.is_dir() else set()  # it may be a link
    found = {path.name for path in folder.iterdir()}
    return found <= {CHECKPOINTS} and inner <= {NAME} and not checkpoints.is_file()


def _new_run_dir(stem: str) -> Path:
    runs = Path(RUNS)
    try:
        runs.mkdir(exist_ok=True)
    except OSError as error:
        raise _cannot_make(runs, error) from error
    number = 1
    while True:
        folder = runs / f"{stem}-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _cannot_make(folder, error) from error


def _cannot_make(folder: Path, error: OSError) -> ConfigError:
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return ConfigError(
        "make the run folder",
        where=folder,
        got=f"{reason(error)}: {os.path.abspath(there)}",
        remedy="choose another with --run-dir",
    )


def drop_run_files(folder: Path) -> None:
    """Removes `RUN_FILES` from ``folder``; nothing else."""
    for pattern in RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()


def _drop_checkpoints(folder: Path) -> None:
    from ...checkpoint.directory import NAME, WriterLock, remove

    lock = WriterLock(folder)
    try:
        for path in folder.glob("step-*"):
            remove(path)
        (folder / NAME).unlink()
    finally:
        lock.release()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _clear_run_dir(folder: Path, overwrite: bool) -> None:
    if not overwrite:
        raise ConfigError(
            "run folder exists and is not empty", where=folder, remedy="choose another --run-dir, or add --overwrite"
        )
    if not (folder / "config.toml").is_file():
        raise ConfigError(
            "overwrite the run folder",
            where=folder,
            expected="the config.toml of an earlier run in it",
            remedy="choose another --run-dir",
        )
    if (folder / CHECKPOINTS).is_dir():
        _drop_checkpoints(folder / CHECKPOINTS)
    drop_run_files(folder)


_OF_ONE_START: dict[str, Any] = {
    "run_dir": None,
    "resume": None,
    "trace": None,
    "time_limit_s": None,
    "overwrite": False,
}


def make_run_folder(config: TrainConfig, world: World) -> TrainConfig:
    """Make the run folder, which stays empty, unless the run goes on in one; every rank must call.

    Returns the settings with the folder's name, alike on all ranks. A folder that holds another run, or cannot be made,
    is the same `ConfigError` on every rank; one in which another job saves, `DataError`.
    """
    if config.resume is not None:
        return config
    return dataclasses.replace(config, run_dir=on_rank_0(world.comm, lambda: reserve_run_dir(config).run_dir))


def open_run_folder(config: TrainConfig, world: World) -> RunFolder | None:
    """The files of the run folder, on rank 0; None elsewhere. Every rank must call.

    Nothing but the lock of the checkpoints, which is this job's by now, says that no other job writes them. A folder
    that cannot be written is the same `ConfigError` on every rank.
    """
    folder: RunFolder | None = None

    def make() -> None:
        nonlocal folder
        folder = RunFolder(config)

    on_rank_0(world.comm, make)
    return folder


def draw_run(folder: Path, config: TrainConfig | None = None) -> None:
    """Draw ``curves.png`` from the other files of a run folder; nothing where there are no numbers yet.

    Of a run that was killed too. Raises OSError where a file cannot be read or written.

    Args:
        config: the settings of the run; None: those in its folder, which may have become others.
    """
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        return
    config = load(folder / "config.toml") if config is None else config
    ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
    title = f"{config.model} on {config.data}, {ranks}, global batch {config.batch_size}"
    draw_curves(records, folder / "curves.png", title)


class RunFolder:
    """One run's files: ``config.toml``, ``metrics.jsonl``, TensorBoard events and, when closed, ``curves.png``.

    ``config.toml`` leaves out what is said for one start alone, such as ``run_dir`` and ``trace``, so that a run
    repeated from it gets a folder of its own and touches no file outside of it. A resumed run goes on in the files of
    its first start.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(str(config.run_dir))
        self._config = config
        self.failure: OSError | None = None
        """Why the folder is not complete, or None."""
        try:
            settings = dataclasses.replace(config, **_OF_ONE_START).to_toml()
            if config.resume is None:
                (self.path / "config.toml").write_text(settings, encoding="utf-8")
            else:
                replace_file(self.path / "config.toml", settings)
                if not (self.path / "metrics.jsonl").exists():
                    warnings.warn(f"{self.path / 'metrics.jsonl'} is gone: what came before is not shown", stacklevel=2)
            self._log = MetricsLog(self.path, append=config.resume is not None)
        except OSError as error:
            if config.resume is None:
                with contextlib.suppress(OSError):  # half a config.toml would keep the folder from being used again
                    drop_run_files(self.path)
            raise ConfigError(
                "write the run folder", where=self.path, got=error.strerror, remedy="choose another --run-dir"
            ) from error

    def go_on(self, epochs: int, steps: int) -> None:
        """Drop the records of what comes after ``epochs`` whole epochs and ``steps`` steps; a failure is kept in
        `failure`."""
        try:
            self._log.go_on(epochs, steps)
        except (OSError, *_DAMAGE) as error:
            self.failure = _told(error)

    def write(self, record: Record) -> None:
        """Log ``record`` at once; a failure is kept in `failure` and does not raise."""
        self._log.write(record)
        self.failure = self.failure or self._log.failure

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        try:
            with uncollected():
                draw_run(self.path, self._config)
        except (OSError, *_DAMAGE) as failure:
            self.failure = self.failure or _told(failure)


_DAMAGE = (ValueError, LookupError, TypeError, RecursionError)
"""What reading numbers raises that no run has written."""


def _told(error: BaseException) -> OSError:
    return error if isinstance(error, OSError) else OSError(0, f"metrics.jsonl is damaged: {error}")


_MAY_DIFFER = (
    "ranks", "servers", "work_load", "owner", "device", "hybridize", "threads", "eval_batch_size", "data_dir",
    "run_dir", "overwrite", "resume", "trace", "checkpoint_every", "keep", "keep_every", "time_limit_s",
    "early_stopping",
)  # fmt: skip
"""Settings that may be others when a run goes on: they decide how fast it is, what it leaves, and after which epoch it
ends, not what it computes, but for rounding. So may ``epochs``, unless the learning rate follows them."""


def settled(said: Mapping[str, Any], launched: bool) -> TrainConfig:
    """The settings of a run for which ``resume`` was said; one process of the job calls it.

    Where there is a checkpoint to go on from, ``resume`` and ``run_dir`` are its run's folder, and what was not said is
    as it was. Without a ``run_dir`` that is the newest run in `RUNS` that is not at its end and has these settings.
    Else ``resume`` is None, and the run starts anew: in ``run_dir``, over what a start without a checkpoint has left
    there, or in a new folder.

    Args:
        said: settings by name, of a file or flags; without those that were not said.
        launched: whether ranks run already, whose number is then not that of before.

    Raises:
        ConfigError: there is no checkpoint in the folder that was named, or settings differ that would change the run.
        DataError: the run still goes on: another job saves there, which is named.
    """
    config = load(None, said)
    try:
        folder = _find(config, said, launched)
    except OSError as error:
        raise ConfigError("resume", where=error.filename, expected="a run folder", got=error.strerror) from error
    if folder is None:
        left = config.run_dir is not None and (Path(config.run_dir) / "config.toml").is_file()
        return dataclasses.replace(config, resume=None, overwrite=left)
    directory.require_free(folder / CHECKPOINTS)
    return _settled_in(folder, said, launched)


def is_finished(config: TrainConfig) -> bool:
    """Whether the run to be resumed is at its end already: its newest checkpoint says so, which looks undamaged."""
    found = directory.find(Path(str(config.resume)) / CHECKPOINTS)
    newest = look_at(found[max(found)], max(found)) if found else None
    if newest is None or newest.manifest is None or newest.damage is not None:
        return False
    next_epoch, ended = (flatten.below(newest.manifest.state, f"position/{name}") for name in ("epoch", "ended"))
    return isinstance(next_epoch, int) and max(next_epoch - 1, ended or 0) >= config.epochs


def _settled_in(folder: Path, said: Mapping[str, Any], launched: bool) -> TrainConfig:
    before = read_toml(folder / "config.toml")
    others = ("ranks", "servers") if launched else ()
    kept = {name: value for name, value in before.items() if name not in others}
    config = load(None, kept | dict(said) | {"run_dir": str(folder), "resume": str(folder)})
    _refuse_others(config, load(None, before), folder)
    return config


def _find(config: TrainConfig, said: Mapping[str, Any], launched: bool) -> Path | None:
    """The folder of the run that goes on."""
    if config.resume != AUTO:
        folder = Path(str(config.resume))
        if folder.name == CHECKPOINTS and _has_checkpoint(folder.parent):
            folder = folder.parent
        if directory.is_named(folder):
            raise ConfigError(
                "resume", where=folder, expected="the folder of a run", got="one of its checkpoints",
                remedy=f"--resume {folder.parent.parent} goes on from its newest one",
            )  # fmt: skip
        if not _has_checkpoint(folder):
            got = "no config.toml beside it" if directory.find(folder / CHECKPOINTS) else "none"
            raise ConfigError(
                "resume", where=folder, expected=f"a checkpoint in {folder / CHECKPOINTS}", got=got,
                remedy="name another run folder, or leave --resume out",
            )  # fmt: skip
        return folder
    if config.run_dir is not None:
        folder = Path(config.run_dir)
        return folder if _has_checkpoint(folder) else None
    stem = re.escape(f"{config.model}-{config.data}")
    numbered = {
        int(match[1]): path for path in Path(RUNS).glob("*") if (match := re.fullmatch(f"{stem}-([0-9]+)", path.name))
    }
    newest_first = (numbered[number] for number in sorted(numbered, reverse=True))
    return next((folder for folder in newest_first if _can_go_on(folder, said, launched)), None)


def _can_go_on(folder: Path, said: Mapping[str, Any], launched: bool) -> bool:
    try:
        return _has_checkpoint(folder) and not is_finished(_settled_in(folder, said, launched))
    except (ConfigError, OSError):  # another run than the one that was asked for, or somebody else's
        return False


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and bool(directory.find(folder / CHECKPOINTS))


def _refuse_others(config: TrainConfig, before: TrainConfig, folder: Path) -> None:
    free = (*_MAY_DIFFER, *(() if config.schedule == before.schedule == "cosine" else ("epochs",)))
    names = [field.name for field in dataclasses.fields(config) if field.name not in free]
    odd = [name for name in names if getattr(config, name) != getattr(before, name)]
    if odd:
        raise ConfigError(
            "resume", where=folder,
            expected=listed([f"{name} = {getattr(before, name)}" for name in odd]),
            got=listed([f"{name} = {getattr(config, name)}" for name in odd]),
            remedy="leave out what would change the run, or start another one without --resume",
        )  # fmt: skip
