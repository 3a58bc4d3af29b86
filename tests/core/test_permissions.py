"""Who else may change a file: by owner, mode, group, parents and symbolic links."""

import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdp.core import files
from hpcdp.core.files import make_private_folder, who_else_may_write

OTHER = 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root may")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own" / "below"
    make_private_folder(folder)
    return folder


@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o700, None), (0o755, None), (0o757, "every user may"), (0o777, "every user may"), (0o1777, "every user may")],
)
def test_a_folder_by_its_mode(own: Path, mode: int, who: str | None) -> None:
    own.chmod(mode)
    found = who_else_may_write(own)
    assert found is None if who is None else found == f"{own}, which {who} write"
    assert who_else_may_write(own, everybody=True) == found


@pytest.mark.parametrize(("mode", "good"), [(0o755, True), (0o777, False), (0o1777, True), (0o3775, True)])
def test_every_parent_counts_and_a_sticky_one_is_good(own: Path, mode: int, good: bool) -> None:
    own.parent.chmod(mode)
    assert (who_else_may_write(own) is None) == good
    (own / "file").touch()
    assert (who_else_may_write(own / "file") is None) == good
    assert (who_else_may_write(own / "." / ".." / "below" / "file") is None) == good


def test_a_relative_path_is_of_the_working_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    assert who_else_may_write(".") is None and who_else_may_write("../below") is None
    own.parent.chmod(0o777)
    assert who_else_may_write("") == who_else_may_write(own) == f"{own.parent}, which every user may write"


@pytest.mark.parametrize("relative", [True, False])
def test_links_are_followed_through_folders_of_others(own: Path, tmp_path: Path, relative: bool) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to("../own/below" if relative else own)
    (own / "link").symlink_to("../../shared/link" if relative else shared / "link")
    assert who_else_may_write(own / "link") is None
    shared.chmod(0o777)  # who may write there may have the link lead elsewhere
    assert who_else_may_write(own / "link") == f"{shared}, which every user may write"
    shared.chmod(0o755)
    own.chmod(0o777)
    assert who_else_may_write(shared / "link") == f"{own}, which every user may write"


def test_what_is_not_there_and_links_in_a_circle_are_errors(own: Path) -> None:
    with pytest.raises(FileNotFoundError):
        who_else_may_write(own / "missing")
    (own / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="Too many levels"):
        who_else_may_write(own / "circle")


@needs_root
def test_what_belongs_to_another_user(own: Path) -> None:
    os.chown(own.parent, OTHER, OTHER)
    assert who_else_may_write(own) == f"{own.parent}, which belongs to user {OTHER}"
    assert who_else_may_write(own, everybody=True) is None
    own.parent.chmod(0o1777)  # its owner may still exchange what is in it
    assert who_else_may_write(own, everybody=True) == f"{own.parent}, which every user may write"
    os.chown(own.parent, 0, 0)
    assert who_else_may_write(own, everybody=True) is None
    os.chown(own, OTHER, OTHER)  # as one who has made it in /tmp before
    assert who_else_may_write(own, everybody=True) == f"{own}, which belongs to user {OTHER}"
    link = own.parent / "link"
    link.symlink_to("/root")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert who_else_may_write(link, everybody=True) == f"{link}, which belongs to user {OTHER}"


@needs_root
def test_another_user_sees_what_root_and_others_may_change() -> None:
    own = tempfile.mkdtemp(dir="/tmp")
    os.chown(own, OTHER, OTHER)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgid(OTHER)
            os.setuid(OTHER)
            theirs = who_else_may_write("/usr"), who_else_may_write(own), who_else_may_write("/tmp")
            status = 0 if theirs == (None, None, "/tmp, which every user may write") else 2
        finally:
            os._exit(status)
    ended = os.waitpid(child, 0)[1]
    os.rmdir(own)
    assert os.waitstatus_to_exitcode(ended) == 0


@pytest.mark.parametrize(
    ("group", "members", "listed", "good"),
    [("ann", [], False, True), ("ann", ["ann"], False, True), ("ann", ["bob"], False, False), ("lab", [], False, False),
     ("ann", [], True, False)],
)  # fmt: skip
def test_the_group_of_one_user_alone_may_write(
    monkeypatch: pytest.MonkeyPatch, group: str, members: list[str], listed: bool, good: bool
) -> None:
    def getxattr(path: str, name: str) -> bytes:
        if not listed:
            raise OSError
        return b""

    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    monkeypatch.setattr(os, "getxattr", getxattr)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="ann", pw_gid=7))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    found = SimpleNamespace(st_uid=OTHER, st_gid=7, st_mode=stat.S_IFDIR | 0o775)
    said = files._writer("/x", found, is_last=True)  # type: ignore[arg-type]
    assert said == (None if good else f"/x, which the group {group} may write")
    assert files._writer("/x", found, is_last=True, any_group=True) is None  # type: ignore[arg-type]


def test_in_a_rootless_container_owners_that_are_not_mapped_own_parents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped = int(Path("/proc/sys/kernel/overflowuid").read_text())
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    found = SimpleNamespace(st_uid=unmapped, st_gid=unmapped, st_mode=stat.S_IFDIR | 0o1777)
    monkeypatch.setattr(files, "_stands_for_root", lambda uid: uid == unmapped)
    assert files._writer("/tmp", found, is_last=False) is None  # type: ignore[arg-type]
    assert files._writer("/tmp", found, is_last=True) is not None  # type: ignore[arg-type]


def test_folders_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b" / "c")
        make_private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            make_private_folder(path)
