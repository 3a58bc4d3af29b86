"""Which folder a run has, and what may be removed from one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path

from hpcdp.errors import ConfigError

from .config import TrainConfig

RUN_FILES = ("config.toml", "metrics.jsonl", "events.out.tfevents.*", "*.png")
"""What a run leaves in its folder, and so all that ``overwrite`` may remove from one, with `CHECKPOINTS`."""

RUNS = "runs"
"""Where new run folders are made."""

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""


def reserve_run_dir(config: TrainConfig) -> TrainConfig:
    """``config`` with a ``run_dir`` that exists and is empty; called by one process of the job.

    Without a ``run_dir`` it is a new ``runs/MODEL-DATA-NNN``. One with results in it is refused, or with ``overwrite``
    emptied of `RUN_FILES`; nothing else is ever removed.
    """
    if config.run_dir is None:
        return dataclasses.replace(config, run_dir=str(_new_run_dir(f"{config.model}-{config.data}")))
    folder = Path(config.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            _clear_run_dir(folder, config.overwrite)
    except OSError as error:
        raise _cannot_make(folder, error) from error
    return config


def drop_empty_run_dir(config: TrainConfig) -> None:
    """Removes the reserved run folder of a job that ended before it wrote anything."""
    with contextlib.suppress(OSError):
        Path(str(config.run_dir)).rmdir()


def _new_run_dir(stem: str) -> Path:
    runs = Path(RUNS)
    number = 1
    while True:
        folder = runs / f"{stem}-{number:03d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _cannot_make(folder, error) from error


def _cannot_make(folder: Path, error: OSError) -> ConfigError:
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return ConfigError(
        "make the run folder",
        where=folder,
        got=f"{error.strerror}: {os.path.abspath(there)}",
        remedy="choose another with --run-dir",
    )


def drop_run_files(folder: Path) -> None:
    """Removes `RUN_FILES` and checkpoints from ``folder``; nothing else."""
    for pattern in RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()
    for path in (folder / CHECKPOINTS).glob("step-*"):
        shutil.rmtree(path)
    with contextlib.suppress(OSError):
        (folder / CHECKPOINTS).rmdir()


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
    drop_run_files(folder)
