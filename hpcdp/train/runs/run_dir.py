"""Which folder a run has, and what may be removed from one.

A job takes the lock of the folder's checkpoints before it writes anything else there, so a folder with nothing but that
counts as empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from ...errors import ConfigError, DataError, reason
from .config import TrainConfig

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
    from ...checkpoint.lock import require_free  # not before, as in `_is_empty`

    require_free(folder / CHECKPOINTS)


def _is_empty(folder: Path) -> bool:
    from ...checkpoint.lock import NAME  # not before: NumPy would be loaded for --help, too

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
    from ...checkpoint.folder import remove
    from ...checkpoint.lock import NAME, WriterLock

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
