"""The folder that a run leaves behind: who makes it, what lies in it, and what goes wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import TracebackType

from hpcdp.comm import World
from hpcdp.comm.agreement import on_rank_0
from hpcdp.errors import ConfigError

from .config import TrainConfig, drop_empty_run_dir, drop_run_files, load, reserve_run_dir
from .metrics import MetricsLog, Record, read_metrics
from .plots import draw_curves


def open_run_folder(config: TrainConfig, world: World) -> tuple[TrainConfig, RunFolder | None]:
    """Make the run folder; every rank must call.

    Returns the settings with the folder's name, alike on all ranks, and the open folder on rank 0, None elsewhere.
    A folder that holds another run, or cannot be written, is the same `ConfigError` on every rank.
    """
    folder: RunFolder | None = None

    def reserve() -> str:
        nonlocal folder
        reserved = reserve_run_dir(config)
        folder = RunFolder(reserved)
        return str(reserved.run_dir)

    run_dir = on_rank_0(world.comm, reserve)
    return dataclasses.replace(config, run_dir=run_dir), folder


def draw_run(folder: Path) -> None:
    """Draw ``curves.png`` from the other files of a run folder; nothing where there are no numbers yet.

    Of a run that was killed too. Raises OSError where a file cannot be read or written.
    """
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        return
    config = load(folder / "config.toml")
    ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
    title = f"{config.model} on {config.data}, {ranks}, global batch {config.batch_size}"
    draw_curves(records, folder / "curves.png", title)


class RunFolder:
    """One run's files: ``config.toml``, ``metrics.jsonl``, TensorBoard events and, when closed, ``curves.png``.

    ``config.toml`` leaves out ``run_dir``, ``overwrite`` and ``trace``, so that a run repeated from it gets a folder of
    its own and touches no file outside of it.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(str(config.run_dir))
        self.failure: OSError | None = None
        """Why the folder is not complete, or None."""
        try:
            settings = dataclasses.replace(config, run_dir=None, overwrite=False, trace=None).to_toml()
            (self.path / "config.toml").write_text(settings, encoding="utf-8")
            self._log = MetricsLog(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):  # half a config.toml would keep the folder from being used again
                drop_run_files(self.path)
            drop_empty_run_dir(config)
            raise ConfigError(
                "write the run folder", where=self.path, got=error.strerror, remedy="choose another --run-dir"
            ) from error

    def write(self, record: Record) -> None:
        """Log ``record`` at once; a failure is kept in `failure` and does not raise."""
        self._log.write(record)
        self.failure = self._log.failure

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        try:
            draw_run(self.path)
        except OSError as failure:
            self.failure = self.failure or failure
