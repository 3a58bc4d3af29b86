"""Floor 3: data, files from the net, checked and whole. Imports: replacing, errors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError, reason
from ..replacing import replaced

_MAX_NBYTES = 1 << 30
_OF_DISKS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS
"""Errors that no address has."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and holds its lock, so that of all processes that want a file only one fetches it.

    Raises:
        DataError: the folder cannot be made or written, or its file system has no locks.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(folder / ".lock", "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                "data folder", where=folder, expected="a writeable folder, of a file system that has locks",
                got=reason(error), remedy="set HPCDP_DATA_DIR to one",
            ) from error  # fmt: skip
        yield


def check_md5(path: Path, md5: str) -> None:
    """Compares a file with its published checksum; MD5 is what is published; it finds damage, not malice.

    Raises:
        DataError: it differs, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            got = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError("checksum", where=path, expected="a file that can be read", got=error.strerror) from error
    if got != md5:
        raise DataError(
            "checksum", where=path, expected=f"MD5 {md5}", got=got, remedy="delete the file to fetch it again"
        )


def fetch(urls: tuple[str, ...], path: Path, md5: str, timeout_s: float = 30.0) -> None:
    """Fetches the first of several addresses that works into ``path``; does nothing if the file is there.

    The file appears whole and checked, or not at all. Any number of processes may call it at the same time. Proxies are
    those that urllib takes from the environment.

    Args:
        urls: addresses of the same file.
        path: where it goes; its folder is made.
        md5: its checksum.
        timeout_s: seconds without an answer after which the next address is tried.

    Raises:
        DataError: no address works (the line names each reason and where to put the file by hand), or the folder cannot
            be written, or has no room.
    """
    if os.path.exists(path):
        return
    import http.client  # most find the file, and need no network
    import urllib.error

    with folder_lock(path.parent):
        if os.path.exists(path):
            return
        reasons = []
        for url in urls:
            try:
                with replaced(path) as part:
                    _receive(url, part, timeout_s)
                    check_md5(part, md5)
                return
            except DataError as error:
                reasons.append(f"{_host_of(url)}: {error.operation} {error.got} instead of {error.expected}")
            except urllib.error.HTTPError as error:
                reasons.append(f"{_host_of(url)}: HTTP {error.code} {error.reason}")
            except urllib.error.URLError as error:
                reasons.append(f"{_host_of(url)}: no network ({error.reason})")
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OF_DISKS:
                    raise DataError(
                        "download", where=path, expected="room for a file that can be written", got=error.strerror,
                        remedy="set HPCDP_DATA_DIR to a folder that has it",
                    ) from error  # fmt: skip
                reasons.append(f"{_host_of(url)}: {type(error).__name__} {error}")
    raise DataError(
        "download",
        where=path.name,
        expected="an answer",
        got="; ".join(reasons),
        remedy=f"put it into {path.parent} by hand, or set HPCDP_DATA_DIR to the folder above one that has it",
    )


def _host_of(url: str) -> str:
    return url.split("/")[2]


def _receive(url: str, part: Path, timeout_s: float) -> None:
    import urllib.request

    with urllib.request.urlopen(url, timeout=timeout_s) as answer, open(part, "wb") as file:
        nbytes = 0
        while block := answer.read(1 << 20):
            nbytes += len(block)
            if nbytes > _MAX_NBYTES:
                raise DataError("length", expected=f"at most {_MAX_NBYTES} bytes", got="more")
            file.write(block)
        announced = answer.headers.get("Content-Length")
        if announced is not None and announced.isdigit() and nbytes != int(announced):
            raise DataError("length", expected=f"{announced} bytes", got=f"{nbytes} bytes")
