"""The folder of a run: its creation, its files, and the resumption of a run from it.

A job locks the folder's checkpoints before it writes anything else there, so a folder with only a lock counts as empty.
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

from ..checkpoint import complete_steps, flatten
from ..checkpoint.complete_steps import summary_of
from ..comm import World
from ..comm.consistency import on_rank_0
from ..core.environment import explained
from ..errors import ConfigError, DataError, HpcdpError, listed, reason
from .config import (
    AUTO,
    CHECKPOINTS,
    TrainConfig,
    has_results,
    load,
    no_checkpoint,
    read_toml,
    uncollected,
)
from .metrics import MetricsLog, Record, read_metrics, replace_file
from .report import draw_curves

RUN_FILES = (
    "config.toml", "metrics.jsonl", "events.out.tfevents.*", "*.png", "*.png.part", "config.toml.part",
    "metrics.jsonl.part",
)  # fmt: skip
"""The files of a complete or killed run. ``overwrite`` removes only these and `CHECKPOINTS`."""

RUNS = "runs"
"""The folder of new run folders."""


def reserve_run_dir(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with a ``run_dir`` that exists and is empty; one process of the job calls it.

    Without a ``run_dir`` it creates ``runs/MODEL-DATA-NNN``. With ``overwrite`` it removes `RUN_FILES` and checkpoints
    from the folder, and nothing else.

    Raises:
        ConfigError: the folder has results, or cannot be created.
        DataError: another job uses the folder.
    """
    if config.run_dir is None:
        return dataclasses.replace(config, run_dir=str(_new_run_dir(f"{config.model}-{config.data}")))
    folder = Path(config.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_empty(folder):
            complete_steps.require_free(folder / CHECKPOINTS)
            _clear_run_dir(folder, config.overwrite)
    except OSError as error:
        raise _cannot_make(folder, error) from error
    return config


def drop_empty_run_dir(config: TrainConfig) -> None:
    """Remove the reserved run folder of a job that ended before it wrote anything, unless another job uses it."""
    folder = Path(str(config.run_dir))
    with contextlib.suppress(OSError, DataError):
        if _is_empty(folder):
            if (folder / CHECKPOINTS).is_dir():
                _drop_checkpoints(folder / CHECKPOINTS)
            folder.rmdir()


def _is_empty(folder: Path) -> bool:
    checkpoints = folder / CHECKPOINTS
    inner = {path.name for path in checkpoints.iterdir()} if checkpoints.is_dir() else set()  # it may be a link
    names = {path.name for path in folder.iterdir()}
    return names <= {CHECKPOINTS} and inner <= {complete_steps.NAME} and not checkpoints.is_file()


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
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return ConfigError(
        "make the run folder", where=folder, got=f"{reason(error)}: {os.path.abspath(existing)}",
        remedy="choose another folder with --run-dir",
    )  # fmt: skip


def drop_run_files(folder: Path) -> None:
    """Remove `RUN_FILES` from ``folder``."""
    for pattern in RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()


def _drop_checkpoints(folder: Path) -> None:
    lock = complete_steps.WriterLock(folder)
    try:
        for path in folder.glob("step-*"):
            complete_steps.remove(path)
        (folder / complete_steps.NAME).unlink()
    finally:
        lock.release()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _clear_run_dir(folder: Path, overwrite: bool) -> None:
    if not overwrite:
        raise has_results(folder)
    if not (folder / "config.toml").is_file():
        raise ConfigError(
            "overwrite the run folder", where=folder, expected="the config.toml of an earlier run in it",
            remedy="choose another --run-dir",
        )  # fmt: skip
    if (folder / CHECKPOINTS).is_dir():
        _drop_checkpoints(folder / CHECKPOINTS)
    drop_run_files(folder)


_OF_ONE_START: dict[str, Any] = {
    "run_dir": None, "resume": None, "trace": None, "time_limit_s": None, "overwrite": False, "verbose": False,
}  # fmt: skip
"""Settings of a single start, which ``config.toml`` does not keep, and their defaults."""


def make_run_folder(config: TrainConfig, world: World) -> TrainConfig:
    """Create the empty run folder of a new run, and return the settings with its name; every rank must call.

    Raises:
        ConfigError: the folder has another run, or cannot be created; on every rank.
        DataError: another job saves in the folder; on every rank.
    """
    if config.resume is not None:
        return config
    return dataclasses.replace(config, run_dir=on_rank_0(world.comm, lambda: reserve_run_dir(config).run_dir))


def open_run_folder(config: TrainConfig, world: World) -> RunFolder | None:
    """Open the files of the run folder on rank 0, and return None elsewhere; every rank must call.

    The job must hold the lock of the checkpoints, which alone keeps other jobs from writing the files.

    Raises:
        ConfigError: the folder cannot be written; on every rank.
    """
    folder: RunFolder | None = None

    def make() -> None:
        nonlocal folder
        folder = RunFolder(config)

    on_rank_0(world.comm, make)
    return folder


def draw_run(folder: Path, config: TrainConfig | None = None) -> None:
    """Draw ``curves.png`` from the other files of a run folder, also of a killed run; nothing without records.

    Args:
        folder: the run folder.
        config: the settings of the run; None: those in its folder, which may have changed.

    Raises:
        OSError: a file cannot be read or written.
    """
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        return
    config = load(folder / "config.toml") if config is None else config
    ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
    title = f"{config.model} on {config.data}, {ranks}, global batch {config.batch_size}"
    draw_curves(records, folder / "curves.png", title)


class RunFolder:
    """The files of one run: ``config.toml``, ``metrics.jsonl``, TensorBoard events and, when closed, ``curves.png``.

    ``config.toml`` omits the settings of a single start, such as ``run_dir`` and ``trace``, so a run repeated from it
    gets its own folder and writes no file outside of it. A resumed run continues the files of its first start.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(str(config.run_dir))
        self._config = config
        self.failure: OSError | None = None
        """The error that left the folder incomplete, or None."""
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
                with contextlib.suppress(OSError):  # a partial config.toml would keep later runs from the folder
                    drop_run_files(self.path)
            raise ConfigError(
                "write the run folder", where=self.path, got=reason(error), remedy="choose another --run-dir"
            ) from error

    def go_on(self, epochs: int, steps: int) -> None:
        """Drop the records after a checkpoint, see `MetricsLog.go_on`; an error is kept in `failure`."""
        try:
            self._log.go_on(epochs, steps)
        except HpcdpError:
            raise
        except (OSError, *_DAMAGE) as error:
            self.failure = _as_os_error(error)

    def write(self, record: Record) -> None:
        """Log ``record`` at once; an error is kept in `failure` and not raised."""
        self._log.write(record)
        self.failure = self.failure or self._log.failure

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        try:
            with uncollected(), explained("drawing curves.png", speaks=True):
                draw_run(self.path, self._config)
        except HpcdpError:
            raise
        except (OSError, *_DAMAGE) as failure:
            self.failure = self.failure or _as_os_error(failure)


_DAMAGE = (ValueError, LookupError, TypeError, RecursionError)
"""Exceptions from reading a damaged ``metrics.jsonl``."""


def _as_os_error(error: BaseException) -> OSError:
    return error if isinstance(error, OSError) else OSError(0, f"metrics.jsonl is damaged: {error}")


_MAY_DIFFER = (
    "ranks", "servers", "work_load", "owner", "device", "hybridize", "threads", "eval_batch_size", "data_dir",
    "run_dir", "overwrite", "resume", "trace", "checkpoint_every", "keep", "keep_every", "time_limit_s",
    "early_stopping", "verbose",
)  # fmt: skip
"""Settings that may change when a run resumes. They affect its speed, its files and its last epoch, and its results
only by rounding. ``epochs`` may change too, unless the learning rate depends on it."""


def settled(settings: Mapping[str, Any], launched: bool) -> TrainConfig:
    """Return the settings of a run with ``resume``; one process of the job calls it.

    If there is a checkpoint to resume from, ``resume`` and ``run_dir`` are its run's folder, and the other settings
    default to those of the run. Without a ``run_dir`` it is the newest incomplete run in `RUNS` with these settings.
    Otherwise ``resume`` is None, and a new run starts: in ``run_dir``, over the files of a start without a checkpoint,
    or in a new folder.

    Args:
        settings: explicit settings by name, from a file or flags.
        launched: whether ranks run already, so that their number may differ from that of the first start.

    Raises:
        ConfigError: the named folder has no checkpoint, or a setting differs that would change the run.
        DataError: the run is still active: another job saves in its folder.
    """
    config = load(None, settings)
    try:
        folder = _find(config, settings, launched)
    except OSError as error:
        raise ConfigError("resume", where=error.filename, expected="a run folder", got=reason(error)) from error
    if folder is None:
        left = config.run_dir is not None and (Path(config.run_dir) / "config.toml").is_file()
        return dataclasses.replace(config, resume=None, overwrite=left)
    complete_steps.require_free(folder / CHECKPOINTS)
    return _settled_in(folder, settings, launched)


def is_finished(config: TrainConfig) -> bool:
    """Return whether the run to resume is complete, according to its newest checkpoint, if that looks undamaged."""
    paths = complete_steps.find(Path(str(config.resume)) / CHECKPOINTS)
    newest = summary_of(paths[max(paths)], max(paths)) if paths else None
    if newest is None or newest.manifest is None or newest.damage is not None:
        return False
    next_epoch, ended = (flatten.below(newest.manifest.state, f"position/{name}") for name in ("epoch", "ended"))
    return isinstance(next_epoch, int) and max(next_epoch - 1, ended or 0) >= config.epochs


def _settled_in(folder: Path, settings: Mapping[str, Any], launched: bool) -> TrainConfig:
    before = read_toml(folder / "config.toml")
    of_launch = ("ranks", "servers") if launched else ()
    recorded = {name: value for name, value in before.items() if name not in of_launch}
    config = load(None, recorded | dict(settings) | {"run_dir": str(folder), "resume": str(folder)})
    _refuse_others(config, load(None, before), folder)
    return config


def _find(config: TrainConfig, settings: Mapping[str, Any], launched: bool) -> Path | None:
    """Return the folder of the run to resume, None if there is none with ``resume="auto"``."""
    if config.resume != AUTO:
        folder = Path(str(config.resume))
        if folder.name == CHECKPOINTS and _has_checkpoint(folder.parent):
            folder = folder.parent
        if complete_steps.is_named(folder):
            raise ConfigError(
                "resume", where=folder, expected="the folder of a run", got="one of its checkpoints",
                remedy=f"pass --resume {folder.parent.parent}, which resumes from its newest one",
            )  # fmt: skip
        if not _has_checkpoint(folder):
            got = "no config.toml beside it" if complete_steps.find(folder / CHECKPOINTS) else "none"
            raise no_checkpoint(folder, got)
        return folder
    if config.run_dir is not None:
        folder = Path(config.run_dir)
        return folder if _has_checkpoint(folder) else None
    stem = re.escape(f"{config.model}-{config.data}")
    numbered = {
        int(match[1]): path for path in Path(RUNS).glob("*") if (match := re.fullmatch(f"{stem}-([0-9]+)", path.name))
    }
    newest_first = (numbered[number] for number in sorted(numbered, reverse=True))
    return next((folder for folder in newest_first if _can_go_on(folder, settings, launched)), None)


def _can_go_on(folder: Path, settings: Mapping[str, Any], launched: bool) -> bool:
    try:
        return _has_checkpoint(folder) and not is_finished(_settled_in(folder, settings, launched))
    except (ConfigError, OSError):  # a run with other settings, or of another user
        return False


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and bool(complete_steps.find(folder / CHECKPOINTS))


def _refuse_others(config: TrainConfig, before: TrainConfig, folder: Path) -> None:
    free = (*_MAY_DIFFER, *(() if config.schedule == before.schedule == "cosine" else ("epochs",)))
    names = [field.name for field in dataclasses.fields(config) if field.name not in free]
    odd = [name for name in names if getattr(config, name) != getattr(before, name)]
    if odd:
        remedy = "omit these settings, or start a new run without --resume"
        if odd == ["epochs"]:
            remedy = f"omit it, because the cosine schedule ends with the epochs, or {remedy.partition('or ')[2]}"
        raise ConfigError(
            "resume", where=folder,
            expected=listed([f"{name} = {getattr(before, name)}" for name in odd]),
            got=listed([f"{name} = {getattr(config, name)}" for name in odd]),
            remedy=remedy,
        )  # fmt: skip
