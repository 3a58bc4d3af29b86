"""What leads from a data set of HDF5 to others and to other files: links, external storage, virtual data sets.

Where those that a virtual data set shows are not there HDF5 gives fill values, silently.
"""

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


_MOST_SOFT_LINKS = 16
"""On the way to an object: HDF5 follows no more."""


def outside(file: h5py.File, name: str, seen: set[str] | None = None) -> str | None:
    """Return what of the data set ``name`` lies in another file, in words; None: nothing does.

    No file is opened for it. Numbered sources count as another file, since HDF5 looks for any number of them.

    Args:
        file: an open file.
        name: of the data set; if there is none, nothing lies elsewhere.
        seen: names that were looked at, as virtual data sets may show each other.
    """
    import h5py

    seen = set() if seen is None else seen
    if name in seen:
        return None
    seen.add(name)
    if (link := _external_link(file, name)) is not None:
        return f"a link to the file {link}"
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        return None
    if dataset.external:
        return f"elements in the file {dataset.external[0][0]}"
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if source.file_name != ".":
            return f"a view of the file {source.file_name}"
        if _is_pattern(source.dset_name):
            return f"a view of numbered data sets {source.dset_name}"
        if (found := outside(file, _plain(source.dset_name), seen)) is not None:
            return found
    return None


def _external_link(file: h5py.File, name: str) -> str | None:
    """Return the file that a link on the way to an object names; `in` and `get` of h5py would open it."""
    from h5py import h5g, h5l, h5o

    root = group = file.id
    left, soft = name.encode("utf-8", "surrogateescape").split(b"/"), 0
    while left:
        part = left.pop(0)
        if part in (b"", b"."):
            continue
        if not isinstance(group, h5g.GroupID) or not group.links.exists(part):
            return None
        kind = group.links.get_info(part).type
        if kind == h5l.TYPE_HARD:
            group = h5o.open(group, part)
            continue
        soft += 1
        if kind != h5l.TYPE_SOFT:
            return os.fsdecode(group.links.get_val(part)[0]) if kind == h5l.TYPE_EXTERNAL else "of a kind of its own"
        if soft > _MOST_SOFT_LINKS:
            return None
        target = group.links.get_val(part)
        group = root if target.startswith(b"/") else group
        left = target.split(b"/") + left
    return None


def missing_source(
    dataset: h5py.Dataset,
    opened: Callable[[Path, list[str]], AbstractContextManager[h5py.File]],
    seen: set[Source] | None = None,
) -> Source | None:
    """The first of what ``dataset`` shows, also through other virtual ones, that is not there; None: all is.

    Args:
        opened: opens a file to read data sets of these names.
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
        plain = sorted(_plain(name) for name in names if not _is_pattern(name))
        with contextlib.nullcontext(dataset.file) if file_name == "." else opened(path, plain) as file:
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
