"""Which run ``--resume`` goes on with, and under which settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint import folder as checkpoint_folder
from ...checkpoint import lock, tree
from ...checkpoint.overview import look_at
from ...errors import ConfigError, listed
from .config import AUTO, TrainConfig, load, read_toml
from .run_dir import CHECKPOINTS, RUNS

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
    lock.require_free(folder / CHECKPOINTS)
    return _settled_in(folder, said, launched)


def is_finished(config: TrainConfig) -> bool:
    """Whether the run to be resumed is at its end already: its newest checkpoint says so, which looks undamaged."""
    found = checkpoint_folder.find(Path(str(config.resume)) / CHECKPOINTS)
    newest = look_at(found[max(found)], max(found)) if found else None
    if newest is None or newest.manifest is None or newest.damage is not None:
        return False
    next_epoch, ended = (tree.below(newest.manifest.state, f"position/{name}") for name in ("epoch", "ended"))
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
        if checkpoint_folder.is_named(folder):
            raise ConfigError(
                "resume", where=folder, expected="the folder of a run", got="one of its checkpoints",
                remedy=f"--resume {folder.parent.parent} goes on from its newest one",
            )  # fmt: skip
        if not _has_checkpoint(folder):
            got = "no config.toml beside it" if checkpoint_folder.find(folder / CHECKPOINTS) else "none"
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
    return (folder / "config.toml").is_file() and bool(checkpoint_folder.find(folder / CHECKPOINTS))


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
