"""No segment stays in /dev/shm, and none that somebody uses is taken away."""

import fcntl
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from hpcdp.launch import hosts, mpi_library, process_monitor

FAULT = """
import os, signal, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 1:
    print(*(line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/mpich_shm_" in line), flush=True)
    {}
time.sleep(30)
"""


@pytest.mark.skipif(
    mpi_library.find_library().family != "mpich", reason="the MPI library of this environment is not MPICH"
)
@pytest.mark.parametrize(
    "fault", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "os._exit(0)", "MPI.COMM_WORLD.Abort(2)"]
)
def test_mpich_leaves_none_behind(fault: str) -> None:
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "3", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", FAULT.format(fault)], capture_output=True, text=True, timeout=60
    )
    names = set(re.findall(r"/dev/shm/mpich_shm_\w+", done.stdout))
    assert done.returncode != 0 and names, done.stderr
    assert not [name for name in names if Path(name).exists()]


def test_only_new_and_old_ones_that_nobody_uses_are_removed() -> None:
    young, old, unused, mapped, opened, other = paths = [
        Path(f"/dev/shm/{family}_{uuid.uuid4().hex}_0") for family in (*["mpich_shm"] * 5, "other_shm")
    ]
    young.touch()
    old.touch()
    os.utime(old, (time.time() - 70,) * 2)
    holder = mapping = None
    try:
        with process_monitor.files_of_mpich_removed():
            unused.touch()
            other.touch()
            mapped.write_bytes(bytes(4096))
            descriptor = os.open(mapped, os.O_RDWR)
            mapping = mmap.mmap(descriptor, 4096)
            os.close(descriptor)
            holder = opened.open("wb")
            for path in (mapped, opened, other):
                os.utime(path, (time.time() - 70,) * 2)
        assert [path.exists() for path in paths] == [True, False, False, True, True, True]
    finally:
        if holder is not None:
            holder.close()
        if mapping is not None:
            mapping.close()
        for path in paths:
            path.unlink(missing_ok=True)


def test_topologies_of_daemons_that_have_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_monitor, "_TOPOLOGIES", (tmp_path, "hydra_hwloc_xmlfile_*"))
    now = time.time()
    daemon = tmp_path / "hydra_pmi_proxy"
    daemon.symlink_to("/bin/sleep")
    for name, age_s in {"hydra_hwloc_xmlfile_old": 60, "hydra_hwloc_xmlfile_new": 0, "other": 60}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age_s,) * 2)
    with subprocess.Popen([daemon, "60"]) as running:
        try:
            with process_monitor.files_of_mpich_removed():
                pass
            assert sorted(path.name for path in tmp_path.glob("*l*")) == ["hydra_hwloc_xmlfile_new"], "a daemon runs"
        finally:
            running.kill()
    monkeypatch.setattr(hosts, "started_at_s", lambda name: [])  # other jobs' daemons
    with process_monitor.files_of_mpich_removed():
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"hydra_pmi_proxy", "other"}


def test_a_folder_of_the_jobs_own_goes_with_it_unless_the_user_named_one() -> None:
    with process_monitor.own_folder({"A": "b"}) as (environ, folder):
        assert folder is not None
        (folder / "segment").touch()
        assert environ.pop("A") == "b"
        assert len(environ) == 3 and set(environ.values()) == {str(folder)}
    assert not folder.exists()
    with process_monitor.own_folder({"OMPI_MCA_btl_sm_backing_directory": "/mine"}) as (environ, own):
        assert str(own).startswith("/dev/shm/hpcdp-")
        assert environ.pop("OMPI_MCA_btl_sm_backing_directory") == "/mine"
        assert all(value.startswith("/dev/shm/hpcdp-") for value in environ.values())
        environ["OMPI_MCA_btl_sm_backing_directory"] = "/mine"
    with process_monitor.own_folder(environ) as (same, none):
        assert same == environ and none is None


@pytest.mark.skipif(
    mpi_library.find_library().family != "openmpi", reason="the MPI library of this environment is not Open MPI"
)
def test_the_files_of_mpirun_are_in_the_jobs_own_folder() -> None:
    code = "import os; print(os.environ['PMIX_SERVER_TMPDIR'])"
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "1", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("/dev/shm/hpcdp-"), done.stderr
    assert not Path(done.stdout.strip()).parent.exists()


def test_a_folder_is_removed_once_its_launcher_has_gone() -> None:
    left = Path(tempfile.mkdtemp(prefix="hpcdp-segments-", dir="/dev/shm"))
    (left / "sm_segment.0").write_bytes(b"memory")
    with process_monitor.own_folder({}) as (_, first):
        assert first is not None and first.is_dir() and not left.exists()
        (first / "sm_segment.0").touch()
        with process_monitor.own_folder({}) as (_, second):
            assert second not in (None, first) and (first / "sm_segment.0").exists()
        assert not second.exists() and first.exists()
    assert not first.exists()


def test_the_folder_of_a_job_from_another_host_is_removed_with_its_guard_alone() -> None:
    folder = Path(f"/dev/shm/hpcdp-segments-{uuid.uuid4().hex}")
    with process_monitor.same_folder(str(folder)):
        (folder / "sm_segment.1").touch(mode=0o600)
        with process_monitor.own_folder({}):  # a job that is started on that host
            assert (folder / "sm_segment.1").exists()
        with process_monitor.same_folder(str(folder)):  # a second name of one host
            pass
    assert not folder.exists()


def test_a_folder_that_somebody_else_has_made_on_a_host_is_refused() -> None:
    folder = Path(f"/dev/shm/hpcdp-segments-{uuid.uuid4().hex}")
    folder.mkdir()
    folder.chmod(0o777)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # or it would be removed first, as one that was left behind
    with (
        pytest.raises(PermissionError, match=f"others may change: {folder}, which every"),
        process_monitor.same_folder(str(folder)),
    ):
        pass
    os.close(lock)


def test_folders_of_launchers_that_start_at_once_are_never_one(tmp_path: Path) -> None:
    code = """
from hpcdp.launch import process_monitor as segments
for _ in range(300):
    with segments.own_folder({}) as (_, folder):
        (folder / "mine").mkdir()
"""
    jobs = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [job.communicate(timeout=60)[1] for job in jobs] == [""] * 3
