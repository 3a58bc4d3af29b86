"""The folder that a run leaves behind: who makes it, what lies in it, and what goes wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from ...comm import World
from ...comm.agreement import on_rank_0
from ...errors import ConfigError
from ..metrics import MetricsLog, Record, read_metrics, replace_file
from ..plots import draw_curves
from .config import TrainConfig, load
from .run_dir import drop_run_files, reserve_run_dir
from .uncollected import uncollected

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
