"""The folder that a run leaves behind: who makes it, what lies in it, and what goes wrong with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType

from hpcdp.comm import World
from hpcdp.errors import ConfigError

from .agreement import on_rank_0
from .config import TrainConfig, reserve_run_dir
from .metrics import MetricsLog, Record
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

    run_dir = on_rank_0(world, reserve)
    return dataclasses.replace(config, run_dir=run_dir), folder


class RunFolder:
    """One run's files: ``config.toml``, ``metrics.jsonl``, TensorBoard events and, when closed, ``curves.png``.

    ``config.toml`` leaves out ``run_dir`` and ``overwrite``, so that a run repeated from it gets a folder of its own.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(str(config.run_dir))
        self._config = config
        self._records: list[Record] = []
        try:
            settings = dataclasses.replace(config, run_dir=None, overwrite=False).to_toml()
            (self.path / "config.toml").write_text(settings, encoding="utf-8")
            self._log = MetricsLog(self.path)
        except OSError as error:
            raise ConfigError(
                "write the run folder", where=self.path, got=error.strerror, remedy="choose another --run-dir"
            ) from error

    @property
    def failure(self) -> OSError | None:
        """Why the folder is not complete, or None."""
        return self._log.failure

    def write(self, record: Record) -> None:
        """Log ``record`` at once; a failure is kept in `failure` and does not raise."""
        self._records.append(record)
        self._log.write(record)

    def draw(self) -> None:
        """Draw ``curves.png`` from the records so far; a failure is kept in `failure` and does not raise."""
        config = self._config
        ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
        title = f"{config.model} on {config.data}, {ranks}, global batch {config.batch_size}"
        try:
            draw_curves(self._records, self.path / "curves.png", title)
        except OSError as error:
            self._log.failure = self._log.failure or error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        if self._records:
            self.draw()
