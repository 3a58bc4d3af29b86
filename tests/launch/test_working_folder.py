"""The working folder on other hosts, by rsync and an ssh that stays on this machine."""

import os
import shutil
from pathlib import Path

import pytest
from raises import raises

from hpcdp.errors import LaunchError
from hpcdp.launch.launchers import mpirun

SSH = """#!/bin/sh
while :; do case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
case $1 in
  refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
  silent) exec sleep 60 ;;
  bare) echo "bash: line 1: rsync: command not found" >&2; exit 127 ;;
esac
shift
exec sh -c "$*"
"""
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a project"
    for path in (".git/HEAD", ".venv-mpich/x", "env/pyvenv.cfg", "__pycache__/a.pyc", "src/train.py", "run.sh"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("host", ["node2", "localhost"])
def test_what_the_program_needs_is_copied_and_what_was_there_stays(project: Path, tmp_path: Path, host: str) -> None:
    target = tmp_path / "it's there; really"
    for _ in range(2):
        mpirun.copy_folder([host], str(target))
        (target / "older").touch()
    assert files(target) == ["older", "run.sh", "src/train.py"]


@pytest.mark.parametrize("host", ["node2", "localhost"])
def test_the_mode_of_a_folder_that_is_there_stays(project: Path, tmp_path: Path, host: str) -> None:
    target = tmp_path / "shared"
    target.mkdir()
    target.chmod(0o3775)
    project.chmod(0o700)
    (project / "run.sh").chmod(0o700)
    (project / "src").chmod(0o750)
    mpirun.copy_folder([host], str(target))
    assert target.stat().st_mode & 0o7777 == 0o3775
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o700
    (project / "run.sh").chmod(0o644)
    mpirun.copy_folder([host], str(target))
    assert not (target / "run.sh").stat().st_mode & 0o111


def test_a_copy_that_every_user_may_change_is_refused(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared"
    target.mkdir()
    target.chmod(0o777)
    with raises(LaunchError, operation="copy the working folder", where=target, got=["this machine", target]):
        mpirun.copy_folder(["localhost"], str(target))


def test_a_folder_is_not_copied_onto_itself(project: Path) -> None:
    assert mpirun.copy_commands(["localhost"], str(project)) == []


def test_hosts_that_cannot_be_copied_to_are_named_with_their_reasons(project: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        mpirun.copy_folder(["node2", "refused", "bare"], str(tmp_path / "copy"))
    said = str(caught.value)
    assert "\n" not in said and f"copy the working folder [{tmp_path / 'copy'}]" in said
    assert "refused: ssh: connect to host refused port 22: Connection refused" in said
    assert "bare: rsync is not installed there" in said and "node2" not in said


def test_a_host_that_falls_silent_is_not_waited_for_for_ever(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpirun, "_SILENT_S", 1)
    with raises(LaunchError, operation="copy the working folder", where=tmp_path / "copy", got="silent") as caught:
        mpirun.copy_folder(["node2", "silent"], str(tmp_path / "copy"))
    assert "node2" not in str(caught.value)


def test_without_rsync_here(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with raises(LaunchError, operation="launch --sync-dst-dir", expected="rsync"):
        mpirun.copy_folder(["node2"], str(tmp_path / "copy"))


@pytest.mark.parametrize("folder", ["/", "//", "/tmp/.."])
def test_nothing_is_copied_over_the_root_of_all(project: Path, folder: str) -> None:
    with raises(LaunchError, operation="launch --sync-dst-dir", got=folder):
        mpirun.copy_commands(["node2"], folder)
