"""Floor 3: data, virtual data sets of HDF5, which show others: where these are not there HDF5 gives fill values,
silently. Imports: nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]

Source = tuple[str, str]
"""A file and a data set in it, as a virtual one names them: ``%%`` is a %, and ``%b`` stands for numbers."""


def missing_source(
    dataset: h5py.Dataset, opened: Callable[[Path], AbstractContextManager[h5py.File]], seen: set[Source] | None = None
) -> Source | None:
    """The first of what ``dataset`` shows, also through other virtual ones, that is not there; None: all is.

    Args:
        opened: opens a file for reading.
        seen: paths and names of those that were looked at.
    """
    import h5py

    seen = set() if seen is None else seen
    shown: dict[str, set[str]] = {}
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        shown.setdefault(source.file_name, set()).add(source.dset_name)
    for file_name, names in sorted(shown.items()):
        if _is_pattern(file_name):
            continue
        path = _found(file_name, dataset.file.filename)
        if path is None:
            return file_name, min(names)
        with contextlib.nullcontext(dataset.file) if file_name == "." else opened(path) as file:
            for name in sorted(names):
                place = os.path.realpath(path), name
                if place in seen or _is_pattern(name):
                    continue
                seen.add(place)
                found = file.get(_plain(name))
                if not isinstance(found, h5py.Dataset):
                    return file_name, name
                missing = missing_source(found, opened, seen)
                if missing is not None:
                    return missing
    return None


def _found(file_name: str, showing: str) -> Path | None:
    """The file that HDF5 takes for the one that is named so in the file ``showing`` (its ``H5F_prefix_open_file``)."""
    if file_name == ".":
        return Path(showing)
    named = Path(_plain(file_name))
    if named.is_absolute():
        if os.path.isfile(named):
            return named
        named = Path(named.name)
    prefixes = filter(None, os.environ.get("HDF5_VDS_PREFIX", "").split(":"))
    folders = [*prefixes, os.path.dirname(showing), "", os.path.dirname(os.path.realpath(showing))]
    return next((path for folder in folders if os.path.isfile(path := Path(folder, named))), None)


def _is_pattern(name: str) -> bool:
    return "%b" in name.replace("%%", "")


def _plain(name: str) -> str:
    return name.replace("%%", "%")
