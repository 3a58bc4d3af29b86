"""Files: atomic replacement, who may write a path, the kernel cache, TOML, and NumPy archives with a header.

hpcdp executes some files that it finds or makes itself: it unpickles compiled kernels and starts programs that mpirun
calls. It takes them only from folders that no other user may change.

An archive is a .npz file of named arrays and one text entry, the header in JSON. It is written whole or not at all, and
read without pickles. The header names the arrays that are bits of bfloat16, which NumPy's files lack.
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
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DataError, HpcdpError, MissingFileError, reason
from .environment import speaks

if TYPE_CHECKING:
    import numpy as np


def data_folder(name: str) -> Path:
    """Return the folder of data files ``name``: ``"kernels"`` (CUDA sources) or ``"slurm"`` (batch templates).

    A wheel has it inside the package, where `setup.py` copies it. In a clone, also in an editable install, it is beside
    the package.
    """
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_data" / name
    return shipped if shipped.is_dir() else package.parent / name


def require_file(operation: str, path: str | Path) -> None:
    """Raise `DataError` unless ``path`` is a regular file or a link to one.

    Raises:
        MissingFileError: there is nothing of that name.
        DataError: it is no regular file, or the system gives another reason.
    """
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return
        got = "none"
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(operation, where=path, expected="a file", got="none") from None
    except OSError as error:  # such as a folder without permission to search, or a name that is too long
        got = reason(error)
    raise DataError(operation, where=path, expected="a file", got=got)


def part_of(path: Path) -> Path:
    """Return the temporary name under which one writer at a time writes ``path``."""
    return path.with_name(path.name + ".part")


def own_part_of(path: Path) -> Path:
    """Return a temporary name for this process alone: if several replace one file, the last one's stays."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def replaced(path: Path, part: Callable[[Path], Path] = part_of) -> Iterator[Path]:
    """Yield the path to which to write a file that replaces ``path`` atomically when the block ends.

    If the block raises, the partial file is removed and ``path`` stays as it was. Nothing waits for the disk: call
    fsync in the block for what must survive a power loss.

    Args:
        path: the file; if it is a link, its target is replaced. A device or a pipe is written directly.
        part: names the temporary file, in the same folder; `own_part_of` for several writers at a time.

    Raises:
        OSError: the file cannot be replaced.
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
    """Return which other users may change what is at ``path``, in words; None if only this user and root may.

    Checks each folder from the root downwards, follows symbolic links itself, and checks the folders on their way too.
    Only this user and root can exchange what is in a folder that passed, so nothing can change between this check and
    the use of the path. A folder with the sticky bit, such as /tmp, passes as a parent but not as the last folder:
    others may not exchange what is in it, but may add to it.

    The group of a folder may write if it is this user's own group, which bears the user's name and has no other
    members. An access control list shows in the group's bits; NFSv4 lists are not read. In a user namespace, such as a
    rootless container, owners that it does not map count as root, except for the last folder: the machine's root cannot
    be distinguished from other users there.

    Args:
        path: a file or a folder, absolute or relative to the working folder.
        everybody: count only what every user of the machine may write. This suits the working folder: a project's group
            may share it, and its owner may change the programs in it anyway.

    Raises:
        OSError: the path does not exist, so that others might create it, or cannot be checked.
    """
    left = _parts(path) if os.path.isabs(path) else _parts(path) + _parts(os.getcwd())
    place, is_open, links = "/", False, 0
    while True:
        status = os.lstat(place)
        is_link = stat.S_ISLNK(status.st_mode)
        writer = _writer(
            place, status, is_last=not left and not is_link, any_owner=everybody and not is_open, any_group=everybody
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
            is_open = bool(status.st_mode & stat.S_IWOTH)
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
    """Raise ``error`` if another user than this one and root may change what is at ``path``; see `who_else_may_write`.

    The error shows ``where`` in place of ``path``, if given.

    Raises:
        OSError: see `who_else_may_write`.
    """
    writer = who_else_may_write(path, everybody=everybody)
    if writer is not None:
        raise error(operation, where=path if where is None else where, expected=expected, got=writer, remedy=remedy)


def who_else_may_write_file(descriptor: int, path: str | Path) -> str | None:
    """Return which other users may change an open file, in words; None if only this user and root may.

    It takes a descriptor, so that the check and the use are of the same file; ``path`` is its name in the text.
    """
    return _writer(str(path), os.fstat(descriptor), is_last=True)


def make_private_folder(folder: Path) -> None:
    """Make ``folder`` and its missing parents, for this user alone whatever the umask is.

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
    """Split ``path`` into its parts, the last one first."""
    return [part for part in reversed(str(path).split("/")) if part not in ("", ".")]


def _writer(
    path: str, status: os.stat_result, *, is_last: bool, any_owner: bool = False, any_group: bool = False
) -> str | None:
    user, mode = os.geteuid(), status.st_mode
    is_ours = status.st_uid in (user, _ROOT) or (not is_last and _stands_for_root(status.st_uid))
    if not is_ours and not any_owner:
        return f"{path}, which belongs to {_user_name(status.st_uid)}"
    if stat.S_ISLNK(mode):  # the mode of a link has no effect
        return None
    if is_ours and not is_last and stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"{path}, which every user may write"
    if mode & stat.S_IWGRP and not any_group and not _is_own_group(user, status.st_gid, path):
        return f"{path}, which the group {_group_name(status.st_gid)} may write"
    return None


def _stands_for_root(uid: int) -> bool:
    """Return whether ``uid`` is the one that stands for owners whom this user namespace does not map."""
    try:
        with open("/proc/self/uid_map") as mapped, open("/proc/sys/kernel/overflowuid") as unmapped:
            return mapped.read().split() != ["0", "0", "4294967295"] and uid == int(unmapped.read())
    except (OSError, ValueError):
        return False


def _is_own_group(user: int, gid: int, path: str) -> bool:
    """Return whether a group is the user's own, as many systems give each user one, and no access list names others."""
    import grp  # late: seldom needed
    import pwd

    if user == _ROOT:
        return False
    try:
        entry, group = pwd.getpwuid(user), grp.getgrgid(gid)
    except KeyError:
        return False
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError:  # the path has no access list
        return gid == entry.pw_gid and group.gr_name == entry.pw_name and {*group.gr_mem} <= {entry.pw_name}
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
"""Folders that passed `refuse_what_others_may_write`."""
_warned = False


def cache_dir() -> Path:
    """Return the folder of compiled kernels: ``HPCDP_CACHE_DIR``, ``$XDG_CACHE_HOME/hpcdp`` or ``~/.cache/hpcdp``.

    A user who may change it, or a folder on its path, can have this user run code. If a default folder cannot be
    written, or others may write it, a private temporary folder replaces it after one warning on rank 0.

    Raises:
        ConfigError: ``HPCDP_CACHE_DIR`` cannot be written, or others may write it or the temporary folder.
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
    with contextlib.suppress(OSError):  # a full disk
        refuse_what_others_may_write("kernel cache", fallback, fallback, "set HPCDP_CACHE_DIR to a folder of yours")
    warn_of_cache_once(f"kernel cache {problem}; {fallback} is used, set HPCDP_CACHE_DIR to a lasting folder")
    return fallback


def _problem(folder: Path) -> str | None:
    """Make ``folder`` if need be; return why code cannot be kept there, or None.

    A full disk is no reason: earlier kernels can be read, and training need not stop for the rest.
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
    """Refuse code in a ``folder`` that other users could change; a folder that passed is not checked again.

    Raises:
        ConfigError: others may write it, or a folder on its path.
        OSError: it does not exist.
    """
    if str(folder) in _private:
        return
    require_private(operation, folder, _PRIVATE, remedy, where=where)
    _private.add(str(folder))


def warn_of_cache_once(text: str) -> None:
    """Warn of the cache once, if this process is rank 0 or not a rank."""
    global _warned
    if not _warned and speaks():
        warnings.warn(text, stacklevel=3)
    _warned = True


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no TOML, is nested too deeply, or has an integer of more than 64 bits. Python could not print
            one of more than 4,300 digits, not even in an error.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"a file that is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"a syntax error: {error}") from error
    except ValueError as error:
        raise ValueError("an integer of more than 64 bits") from error
    except RecursionError as error:
        raise ValueError("tables or lists that are nested too deeply") from error
    left: list[Any] = [table]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("an integer of more than 64 bits")
    return table


# NumPy parses an array's header with ast, whose recursion depth all threads of a process share in CPython 3.11
# (python/cpython#106905): two threads that read at once may end with a SystemError.
_reading = threading.Lock()


def write(operation: str, path: Path, name: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` and a ``header`` called ``name`` to a file that replaces ``path`` when it is complete.

    Raises:
        DataError: it cannot be written; the previous file stays.
    """
    import numpy as np

    from .arrays import BFLOAT16, bits, is_bfloat16

    bfloat16 = [key for key, array in arrays.items() if is_bfloat16(array)]
    text = json.dumps({**header, BFLOAT16: bfloat16} if bfloat16 else header)
    stored = {key: bits(array) for key, array in arrays.items()}
    try:
        with replaced(path) as part, open(part, "wb") as file:
            np.savez(file, **{name: np.array(text)}, **stored)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(operation, where=path, expected="a file that can be written", got=error) from error


def read(
    operation: str, path: Path, name: str, fields: Mapping[str, type], writer: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the header called ``name``, whose ``fields`` have these types, and the arrays of a file.

    Raises:
        DataError: it is missing, damaged, or not written by ``writer``.
    """
    import numpy as np

    from .arrays import BFLOAT16, of_bits

    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a FIFO would wait for a writer
            raise ValueError("no regular file")
        with _reading, open(path, "rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("a file of another kind")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                _require_as_written(file.zip, os.fstat(opened.fileno()).st_size)
                header = json.loads(str(file[name][()]))
                bfloat16 = header.pop(BFLOAT16, ()) if isinstance(header, dict) else ()
                names = [key for key in file.files if key != name]
                arrays = {key: of_bits(file[key], BFLOAT16 if key in bfloat16 else "") for key in names}
        if not all(type(header[field]) is kind for field, kind in fields.items()):
            raise ValueError(f"the header {header!r}")
    except FileNotFoundError:
        raise MissingFileError(operation, where=path, expected=f"a file of {writer}", got="none") from None
    except Exception as error:  # zipfile, ast, tokenize, json and NumPy raise a dozen classes for damaged files
        got = (isinstance(error, OSError) and reason(error)) or str(error) or type(error).__name__
        raise DataError(operation, where=path, expected=f"a file of {writer}", got=got) from error
    return header, arrays


def _require_as_written(file: zipfile.ZipFile, nbytes: int) -> None:
    """Raise ValueError unless all arrays are uncompressed and of the sizes that their headers state.

    NumPy allocates memory by the header before it reads an array. ``nbytes`` is the size of the whole file.
    """
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    members = file.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("compressed arrays")
    if sum(member.file_size for member in members) > nbytes:
        raise ValueError(f"arrays of more bytes than the {nbytes} of the file")
    for member in members:
        with file.open(member) as stream:
            try:  # NumPy's own message advises allow_pickle=True, which is unsafe for files of others
                shape, _, dtype = readers[npy.read_magic(stream)](stream)
            except Exception as error:
                raise ValueError(f"a damaged NumPy header of {member.filename!r}") from error
            if dtype.hasobject or min(shape, default=0) < 0:
                raise ValueError(f"{member.filename!r} of shape {shape} and dtype {dtype}")
            stored = member.file_size - stream.tell()
            if stored != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{stored} bytes for {member.filename!r} of shape {shape} and dtype {dtype}")
