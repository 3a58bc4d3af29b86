"""What leads from a data set of HDF5 to others and to other files: links, external storage, virtual data sets.

Where those that a virtual data set shows are not there HDF5 gives fill values, silently.
"""

from __future__ import annotations

import contextlib
import itertools
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
    """Return what of the data set ``name`` is in another file, in words; None: nothing does.

    No file is opened for it. Numbered sources count as another file, since HDF5 looks for any number of them.

    Args:
        file: an open file.
        name: of the data set; if there is none, nothing is elsewhere.
        seen: names that were looked at, as virtual data sets may show each other.
    """
    import h5py

    seen = set() if seen is None else seen
    if name in seen:
        return None
    seen.add(name)
    if (link := _external_link(file, name)) is not None:
        return f"a link to the file {link[0]}"
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


def special_file(file: h5py.File, name: str, seen: set[Source] | None = None) -> Path | None:
    """Return a file that HDF5 would open for the data set ``name`` and that is no regular one, or None.

    Whoever opens a FIFO waits for a writer, and a device may have no end. Regular files are opened, to look for links
    in them.

    Args:
        file: an open file.
        name: of the data set.
        seen: files and names of those that were looked at.
    """
    import h5py

    seen = set() if seen is None else seen
    if (place := (os.path.realpath(file.filename), name)) in seen:
        return None
    seen.add(place)
    if (link := _external_link(file, name)) is not None:
        sources = [(link[0].replace("%", "%%"), link[1].replace("%", "%%"), "HDF5_EXT_PREFIX")]
    else:
        dataset = file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            return None
        folder = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", os.path.dirname(file.filename))
        for storage in {Path(folder, os.fsdecode(each[0])) for each in dataset.external or ()}:
            if storage.exists() and not storage.is_file():
                return storage
        shown = dataset.virtual_sources() if dataset.is_virtual else ()
        sources = [(each.file_name, each.dset_name, "HDF5_VDS_PREFIX") for each in shown]
    for file_name, source, prefixes in sources:
        numbered = _is_pattern(file_name) or _is_pattern(source)
        for number in itertools.count() if numbered else (0,):
            path = _found(_with_number(file_name, number), file.filename, prefixes)
            if path is None:
                break
            if not path.is_file():
                return path
            opened = contextlib.nullcontext(file) if file_name == "." else h5py.File(path, "r", locking=False)
            with opened as other:
                plain = _plain(_with_number(source, number))
                if _external_link(other, plain) is None and plain not in other:
                    break
                if (special := special_file(other, plain, seen)) is not None:
                    return special
    return None


def _external_link(file: h5py.File, name: str) -> tuple[str, str] | None:
    """Return the file that a link on the way to an object names, and the object in it.

    `in` and `get` of h5py would open the file.
    """
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
            if kind != h5l.TYPE_EXTERNAL:
                return "of a kind of its own", ""
            path, target = group.links.get_val(part)
            return os.fsdecode(path), b"/".join([target, *left]).decode("utf-8", "surrogateescape")
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
        path = _found(file_name, dataset.file.filename, "HDF5_VDS_PREFIX")
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


def _found(file_name: str, showing: str, prefixes: str) -> Path | None:
    """Return the file that HDF5 opens for a name in the file ``showing`` (its ``H5F_prefix_open_file``), or None.

    Args:
        file_name: as `Source` writes it.
        showing: path of the file that names it.
        prefixes: the environment variable of folders that are searched first.
    """
    if file_name == ".":
        return Path(showing)
    named = Path(_plain(file_name))
    if named.is_absolute():
        if _can_be_opened(named):
            return named
        named = Path(named.name)
    first = filter(None, os.environ.get(prefixes, "").split(":"))
    folders = [*first, os.path.dirname(showing), "", os.path.dirname(os.path.realpath(showing))]
    return next((path for folder in folders if _can_be_opened(path := Path(folder, named))), None)


def _can_be_opened(path: Path) -> bool:
    return path.exists() and not path.is_dir()


def _is_pattern(name: str) -> bool:
    return "%b" in name.replace("%%", "")


def _plain(name: str) -> str:
    return name.replace("%%", "%")


def _with_number(name: str, number: int) -> str:
    return "%%".join(part.replace("%b", str(number)) for part in name.split("%%"))
