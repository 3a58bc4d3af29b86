"""Floor 0: permissions, who else may change a file or a folder. Imports: nothing.

hpcdp executes some files that it finds or makes by itself: compiled kernels are unpickled, programs that mpirun calls
are started. It takes them only from folders that no other user may change.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
