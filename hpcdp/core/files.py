"""Files that are replaced as a whole, TOML, and who may write a path.

hpcdp executes some files that it finds or makes by itself: compiled kernels are unpickled, programs that mpirun calls
are started. It takes them only from folders that no other user may change.

NumPy archives with a header, written whole or not at all, read without pickles.

A .npz file of named arrays, and one entry more that is text: the header in JSON. It names those that are the bits of
bfloat16, which NumPy's files have not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import tempfile
import threading
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, HpcdpError, MissingFileError, reason
from .arrays import BFLOAT16, bits, is_bfloat16, of_bits
from .environment import speaks


def data_folder(name: str) -> Path:
    """Return the folder of data files ``name``: ``"kernels"`` (CUDA sources) or ``"slurm"`` (batch templates).

    A wheel has them inside the package, where `setup.py` copies them. In a clone, also one that is installed as
    editable, they stand beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_data" / name
    return shipped if shipped.is_dir() else package.parent / name


def require_file(operation: str, path: str | Path) -> None:
    """Raises `DataError` unless ``path`` is a file, or a link to one; it says why where the system does."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return
        got = "none"
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(operation, where=path, expected="a file", got="none") from None
    except OSError as error:  # pathlib raises it, too: a folder that may not be searched, a name that is too long
        got = error.strerror or str(error)
    raise DataError(operation, where=path, expected="a file", got=got)


def part_of(path: Path) -> Path:
    """Where what is to be ``path`` is written meanwhile, by one writer at a time."""
    return path.with_name(path.name + ".part")


def own_part_of(path: Path) -> Path:
    """Where this process alone writes it: several may replace one file at a time, and the last has its place."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def replaced(path: Path, part: Callable[[Path], Path] = part_of) -> Iterator[Path]:
    """Yields where to write a file, which takes the place of ``path`` in one go when the block has ended.

    Where the block raises, what it has written is removed and ``path`` stays as it was. Nobody waits for the disk: what
    must outlast a power loss is flushed to it, by fsync, before the block ends.

    Args:
        path: the file; of a link, what it leads to is replaced. A device or a pipe is written to itself.
        part: where it is written, in the same folder; for several writers at a time: `own_part_of`.

    Raises:
        OSError: it cannot take that place.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    written = part(path)
    try:
        yield written
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()  # it may be what fills the disk
        raise


_ROOT = 0
_MOST_LINKS = 40


def who_else_may_write(path: str | Path, *, everybody: bool = False) -> str | None:
    """Return who beside this user and root may change what is at ``path``, in words, or None if nobody may.

    Looks at each folder from the root downwards, follows symbolic links by itself, and looks at the folders on their
    way, too. Of a folder that was found good only this user and root can exchange what is in it, so nothing can change
    between this look and the use of the path. A folder with the sticky bit, such as /tmp, is a good parent but no good
    place: others may not exchange what is in it, but may add to it.

    The group of a folder may write if it is this user's own group, which bears the user's name and has no other
    members. An access control list shows in the bits of the group; a list of NFSv4 is not read. In a user namespace,
    such as a rootless container, owners that it does not map count as root, except of the last folder: root of the
    machine cannot be distinguished from others there.

    Args:
        path: a file or a folder, absolute or relative to the working folder.
        everybody: count only what every user of the machine may write, as befits the working folder: a project's
            group may share it, and whoever owns it may change the programs there anyway.

    Raises:
        OSError: it is not there, so that others might make it; it cannot be looked at.
    """
    left = _parts(path) if os.path.isabs(path) else _parts(path) + _parts(os.getcwd())
    place, is_open, links = "/", False, 0
    while True:
        found = os.lstat(place)
        is_link = stat.S_ISLNK(found.st_mode)
        writer = _writer(
            place, found, is_last=not left and not is_link, any_owner=everybody and not is_open, any_group=everybody
        )
        if writer is not None:
            return writer
        if is_link:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = os.readlink(place)
            left += _parts(target)
            if target.startswith("/"):
                place, is_open = "/", False
            else:
                place = os.path.dirname(place)
        elif left:
            is_open = bool(found.st_mode & stat.S_IWOTH)
        else:
            return None
        if left:
            name = left.pop()
            place = os.path.dirname(place) if name == ".." else os.path.join(place, name)


def require_private(
    operation: str,
    path: str | Path,
    expected: str,
    remedy: str,
    *,
    where: object = None,
    everybody: bool = False,
    error: type[HpcdpError] = ConfigError,
) -> None:
    """Raise ``error`` where somebody beside this user and root may change what is at ``path``.

    Args:
        where: what the error shows in the place of ``path``.
        everybody: see `who_else_may_write`.

    Raises:
        OSError: see `who_else_may_write`.
    """
    writer = who_else_may_write(path, everybody=everybody)
    if writer is not None:
        raise error(operation, where=path if where is None else where, expected=expected, got=writer, remedy=remedy)


def who_else_may_write_file(descriptor: int, path: str | Path) -> str | None:
    """Return who beside this user and root may change an open file, in words, or None if nobody may.

    Args:
        descriptor: of the file, which no other can take the place of.
        path: its name in what is returned.
    """
    return _writer(str(path), os.fstat(descriptor), is_last=True)


def make_private_folder(folder: Path) -> None:
    """Make ``folder`` and the parents that it lacks, for this user alone whatever the umask is.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        if not folder.is_dir():
            raise


def _parts(path: str | Path) -> list[str]:
    """Split ``path``, the last part first."""
    return [part for part in reversed(str(path).split("/")) if part not in ("", ".")]


def _writer(
    path: str, found: os.stat_result, *, is_last: bool, any_owner: bool = False, any_group: bool = False
) -> str | None:
    user, mode = os.geteuid(), found.st_mode
    is_ours = found.st_uid in (user, _ROOT) or (not is_last and _stands_for_root(found.st_uid))
    if not is_ours and not any_owner:
        return f"{path}, which belongs to {_user_name(found.st_uid)}"
    if stat.S_ISLNK(mode):  # whose mode says nothing
        return None
    if is_ours and not is_last and stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"{path}, which every user may write"
    if mode & stat.S_IWGRP and not any_group and not _is_own_group(user, found.st_gid, path):
        return f"{path}, which the group {_group_name(found.st_gid)} may write"
    return None


def _stands_for_root(uid: int) -> bool:
    """Tell whether ``uid`` is that of owners whom this process's user namespace does not map."""
    try:
        with open("/proc/self/uid_map") as mapped, open("/proc/sys/kernel/overflowuid") as unmapped:
            return mapped.read().split() != ["0", "0", "4294967295"] and uid == int(unmapped.read())
    except (OSError, ValueError):
        return False


def _is_own_group(user: int, gid: int, path: str) -> bool:
    """Tell whether a group is that of this user alone, as many systems give one to each, and no list names others."""
    import grp  # not before: this takes time, and is seldom needed
    import pwd

    if user == _ROOT:
        return False
    try:
        own, group = pwd.getpwuid(user), grp.getgrgid(gid)
    except KeyError:
        return False
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError:  # there is none
        return gid == own.pw_gid and group.gr_name == own.pw_name and {*group.gr_mem} <= {own.pw_name}
    return False


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


_PRIVATE = "a folder that this user alone may write"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_private: set[str] = set()
"""Folders that no other user may change."""
_warned = False


def cache_dir() -> Path:
    """The folder of compiled kernels: ``HPCDP_CACHE_DIR``, else ``$XDG_CACHE_HOME/hpcdp``, else ``~/.cache/hpcdp``.

    Whoever may change it, or a folder on the way to it, can have this user run code. So one of the latter that cannot
    be written, or that others may write, is replaced by a private temporary folder, after one warning on rank 0.

    Raises:
        ConfigError: ``HPCDP_CACHE_DIR`` cannot be written, or others may write it, or the temporary folder.
    """
    chosen = os.environ.get("HPCDP_CACHE_DIR")
    if chosen:
        problem = _problem(Path(chosen))
        if problem:
            raise ConfigError(
                "kernel cache", where=f"HPCDP_CACHE_DIR={chosen}", expected=_PRIVATE,
                got=problem, remedy="unset it, or name a folder of yours",
            )  # fmt: skip
        return Path(chosen)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcdp"
        problem = _problem(folder)
        if not problem:
            return folder
        problem = f"[{folder}]: {problem}"
    except RuntimeError as error:
        problem = f": {error}"
    fallback = Path(tempfile.gettempdir()) / f"hpcdp-{os.getuid()}"
    _problem(fallback)
    with contextlib.suppress(OSError):  # on a full disk it cannot be made
        refuse_what_others_may_write("kernel cache", fallback, fallback, "set HPCDP_CACHE_DIR to a folder of yours")
    warn_of_cache_once(f"kernel cache {problem}; {fallback} is used, set HPCDP_CACHE_DIR to a lasting folder")
    return fallback


def _problem(folder: Path) -> str | None:
    """Return why code cannot be kept in ``folder``, which is made if need be, or None.

    A full disk is no reason: what was kept earlier can be read, and training need not stop for the rest.
    """
    try:
        make_private_folder(folder)
        writer = who_else_may_write(folder)
    except OSError as error:
        return None if error.errno in _FULL else reason(error)
    if writer is not None:
        return writer
    return None if os.access(folder, os.W_OK | os.X_OK) else "no permission to write"


def refuse_what_others_may_write(operation: str, folder: str | Path, where: object, remedy: str) -> None:
    """Refuse code in ``folder`` that other users could change; one that was found good is not looked at again.

    Raises:
        ConfigError: others may write it, or a folder on the way to it.
        OSError: it is not there.
    """
    if str(folder) in _private:
        return
    require_private(operation, folder, _PRIVATE, remedy, where=where)
    _private.add(str(folder))


def warn_of_cache_once(text: str) -> None:
    """Warn of the cache if this process is rank 0 or no rank, and has not yet done so."""
    global _warned
    if not _warned and speaks():
        warnings.warn(text, stacklevel=3)
    _warned = True


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no TOML, is nested too deeply, or has an integer of more than 64 bits. Python would not show
            one of more than 4,300 digits, not even in an error.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin it with a mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError("an integer of more than 64 bits") from error
    except RecursionError as error:
        raise ValueError("tables or lists that are nested too deeply") from error
    left: list[Any] = [found]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("an integer of more than 64 bits")
    return found


# NumPy parses an array's header with ast, whose count of its depth the threads of a process share in CPython 3.11
# (python/cpython#106905): two that read at once may end with a SystemError.
_reading = threading.Lock()
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def write(operation: str, path: Path, name: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` and a ``header`` called ``name`` to a file that replaces ``path`` when it is complete.

    Raises:
        DataError: it cannot be written; what was there stays.
    """
    of_16_bits = [each for each, array in arrays.items() if is_bfloat16(array)]
    text = json.dumps({**header, BFLOAT16: of_16_bits} if of_16_bits else header)
    kept = {each: bits(array) for each, array in arrays.items()}
    try:
        with replaced(path) as part, open(part, "wb") as file:
            np.savez(file, **{name: np.array(text)}, **kept)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(operation, where=path, expected="a file that can be written", got=error) from error


def read(
    operation: str, path: Path, name: str, fields: Mapping[str, type], writer: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header called ``name``, an object that has ``fields`` of these types, and the arrays of a file.

    Raises:
        DataError: it is missing, damaged, or none of ``writer``'s.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # who opens a FIFO waits for a writer
            raise ValueError("no regular file")
        with _reading, open(path, "rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("a file of another kind")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                _require_as_written(file.zip, os.fstat(opened.fileno()).st_size)
                header = json.loads(str(file[name][()]))
                of_16_bits = header.pop(BFLOAT16, ()) if isinstance(header, dict) else ()
                names = [each for each in file.files if each != name]
                arrays = {each: of_bits(file[each], BFLOAT16 if each in of_16_bits else "") for each in names}
        if not all(type(header[field]) is kind for field, kind in fields.items()):
            raise ValueError(f"the header {header!r}")
    except Exception as error:  # of a damaged file zipfile, ast, tokenize, json and NumPy raise a dozen kinds
        got = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(operation, where=path, expected=f"a file of {writer}", got=got) from error
    return header, arrays


def _require_as_written(file: zipfile.ZipFile, nbytes: int) -> None:
    """Raise ValueError unless arrays have as many bytes as their headers say, none compressed: memory for them is
    allocated before they are read.

    Args:
        nbytes: of the whole file.
    """
    members = file.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise ValueError("compressed arrays")
    if sum(each.file_size for each in members) > nbytes:
        raise ValueError(f"arrays of more bytes than the {nbytes} of the file")
    for each in members:
        with file.open(each) as stream:
            try:  # what NumPy says advises to read files of others with allow_pickle=True
                shape, _, dtype = _READ_HEADER[np.lib.format.read_magic(stream)](stream)
            except Exception as error:
                raise ValueError(f"a damaged NumPy header of {each.filename!r}") from error
            if dtype.hasobject or min(shape, default=0) < 0:
                raise ValueError(f"{each.filename!r} of shape {shape} and dtype {dtype}")
            expected, found = math.prod(shape) * dtype.itemsize, each.file_size - stream.tell()
            if expected != found:
                raise ValueError(f"{found} bytes for {each.filename!r} of shape {shape} and dtype {dtype}")
