"""A guard on each other host, here by an ssh that stays on this machine: who is named, and that nothing outlives it."""

import contextlib
import fcntl
import json
import os
import pwd
import resource
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from raises import raises

from hpcdp.errors import LaunchError
from hpcdp.launch import guard, hosts
from hpcdp.launch.guard import Guards
from hpcdp.launch.hosts import HostSlots

SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift
echo "$1" >>{log}
case $1 in
  refused*) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
  silent*) exec sleep 60 ;;
  bare) echo "bash: python: command not found" >&2; exit 127 ;;
  n1) cat {log}.says >&2; exit 255 ;;
  chatty) echo "welcome to this host"; echo "please read the news" >&2 ;;
esac
shift
exec sh -c "$*"
"""
MPIRUN = """#!/bin/sh
"$AGENT" -x away "$AWAY"
PMI_RANK=0 sh -c "exec $HERE" &
trap "kill $!; exit 143" TERM
wait $!
"""
LAUNCHER = """
import os, sys
from pathlib import Path
from hpcdp.launch import runner as supervise
from hpcdp.launch import guard as guards
from hpcdp.launch.hosts import HostSlots as Place
from hpcdp.launch.launchers import Job
supervise._FAILED_GRACE_S = 0.5
with guards.Guards([Place("away", 1)], print) as reached:
    reached.begin(2, 0, {"MARK": os.environ["MARK"], "WORD": "it's"}, None, None)
    reached.check("/", sys.executable, None)
    environ = {**os.environ, "AGENT": reached.agent()}
    sys.exit(supervise.supervise([sys.argv[1]], environ, "mpich", Job(("a",), 2), elsewhere=1, guards=reached))
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of an ssh that runs everything here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "log"
    for name, text in {"ssh": SSH.format(log=log), "mpirun": MPIRUN}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


class Job:
    """A launcher, a rank here and one on another host, which do what ``here`` and ``away`` say."""

    def __init__(self, folder: Path, here: str, away: str) -> None:
        shell = guard._shell()
        if subprocess.run([shell, "-c", "exit 0"], capture_output=True).returncode:
            pytest.skip(f"nobody logs in to this account, whose shell is {shell}")
        self.mark = str(uuid.uuid4())
        # Like a daemon, it leaves the shell that started it.
        away = f"(PMI_RANK=1 setsid sh -c {away!r} >/dev/null 2>&1 &)"
        # What a launcher that is killed leaves lies in the test's folder.
        environ = os.environ | {"MARK": self.mark, "HERE": here, "AWAY": away, "TMPDIR": str(folder)}
        command = [sys.executable, "-c", LAUNCHER, str(folder / "bin" / "mpirun")]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if self.mark.encode() in path.read_bytes() else []
        return found

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while self.processes():
            assert time.monotonic() < deadline, "something is left"
            time.sleep(0.05)
        return self.process.returncode, said


def test_silent_hosts_are_left_together(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ssh to one goes on for some time, which must not add up."""
    monkeypatch.setattr(guard, "_REACHED_S", 0.2)
    began_s = time.monotonic()
    with (
        raises(LaunchError, operation="reach by ssh", got=["silent0", "0 s"]),
        Guards([HostSlots(f"silent{host}", 1) for host in range(20)], print),
    ):
        pass
    assert time.monotonic() - began_s < 6


@pytest.mark.parametrize(
    ("away", "status", "says"),
    [
        (
            "sleep 0.3; exit 3",
            3,
            "on away) ended with status 3 before the others; mpirun has not ended the others in 0.5",
        ),
        ("sleep 0.3; kill -9 $$", 137, "on away) was killed by SIGKILL; mpirun has not ended the others in 0.5 s"),
    ],
)
def test_a_rank_that_fails_on_another_host_is_named(
    ssh: Path, tmp_path: Path, away: str, status: int, says: str
) -> None:
    code, said = Job(tmp_path, "sleep 60", away).end()
    assert (code, said.count("\n")) == (status, 1), said
    assert said.startswith("hpcdp launch: rank 1 (pid ") and says in said


@pytest.mark.thorough
def test_a_job_that_ends_well_ends_what_it_left(ssh: Path, tmp_path: Path) -> None:
    assert Job(tmp_path, "sleep 0.5", "sleep 60").end() == (0, "")


@pytest.mark.parametrize("whose", ["launcher", "guard"])
@pytest.mark.thorough
def test_nothing_outlives_a_connection(ssh: Path, tmp_path: Path, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, "sleep 60", f"echo $PPID >{tmp_path}/pid-1; sleep 60")
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid-1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    if whose == "launcher":
        job.process.kill()
        assert job.end()[0] == -signal.SIGKILL
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert list(tmp_path.glob("hpcdp-guards-*")), "its own folder is left behind"
        with Guards([HostSlots("next", 1)], print):
            assert len(list(tmp_path.glob("hpcdp-guards-*"))) == 1, "until the next launch"
        assert not list(tmp_path.glob("hpcdp-guards-*"))
    else:
        guards = subprocess.run(
            ["pgrep", "-P", str(job.process.pid), "-f", "guard.main"], capture_output=True, text=True
        ).stdout.split()
        for pid in guards:
            os.kill(int(pid), signal.SIGTERM)
        code, said = job.end()
        assert code == 1 and "hpcdp launch: the guard on away was ended by SIGTERM\n" in said, said


def test_hosts_that_cannot_be_reached_are_named_with_their_reasons(ssh: Path) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught, Guards([HostSlots(name, 1) for name in ("a", "refused", "bare")], print):
        pass
    assert str(caught.value) == (
        f"reach by ssh: expected a login on each host, got bare: no {sys.executable} with hpcdp, "
        "refused: connect to host refused port 22: Connection refused; install hpcdp at the same path on all hosts"
    )
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("ssh: Could not resolve hostname n1: Name or service not known", "correct the host's name"),
        ("ssh: connect to host n1 port 22: Connection refused", "start sshd on n1"),
        ("ssh: connect to host n1 port 22: Connection timed out", "check that n1 is up"),
        ("ssh: connect to host n1 port 22: No route to host", "check that n1 is up"),
        ("ssh: connect to host n1 port 22: Network is unreachable", "check that n1 is up"),
        ("me@n1: Permission denied (publickey,password).", "ssh-copy-id n1"),
        ("No ED25519 host key is known for n1 and you have requested strict checking.\n"
         "Host key verification failed.", "log in once to accept its host key: ssh n1"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R n1"),
        ("kex_exchange_identification: Connection closed by remote host", "find the cause with: ssh n1 true"),
    ],
)  # fmt: skip
def test_what_ssh_says_has_a_remedy(ssh: Path, words: str, remedy: str) -> None:
    Path(f"{ssh}.says").write_text(f"{words}\n")
    with raises(LaunchError, operation="reach by ssh", got=words.splitlines()[-1].removeprefix("ssh: "), remedy=remedy):
        Guards([HostSlots("n1", 1)], print).__enter__()


def test_many_hosts_are_reached_in_waves_and_one_line_says_what_is_wrong(ssh: Path) -> None:
    many = [HostSlots(f"refused-{number}", 1) for number in range(100, 450)]
    with pytest.raises(LaunchError) as caught, Guards(many, print):
        pass
    refused = [f"refused-{number}: connect to host refused port 22: Connection refused" for number in (100, 101, 102)]
    assert caught.value.got == f"{', '.join(refused)} and 61 more (286 more hosts were not tried)"
    assert caught.value.remedy == "start sshd on refused-100, or set its port in ~/.ssh/config"
    assert "\n" not in str(caught.value)
    assert len(ssh.read_text().split()) == 64


@pytest.mark.parametrize("limits", [(64, 900), (300, 900), (900, 900), (64, resource.RLIM_INFINITY)])
def test_a_limit_of_open_files_is_raised_or_named(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [limits]
    monkeypatch.setattr(guard.resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(guard.resource, "setrlimit", lambda _, wanted: now.append(wanted))
    guard._allow_files(300)
    assert now[1:] == ([(856, limits[1])] if limits[0] < 856 else [])
    if limits[1] == 900:
        with raises(LaunchError, operation="launch on 340 other hosts", expected=936, got=900, remedy="-n"):
            guard._allow_files(340)


def test_what_a_login_script_writes_is_not_taken_for_a_guard(ssh: Path) -> None:
    said: list[str] = []
    with Guards([HostSlots("chatty", 2)], said.append) as guards:
        guards.begin(2, 0, {}, None, None)
        with pytest.raises(LaunchError) as caught:
            guards.check("/", "no/such/program", None)
    assert "chatty: there is no program no/such/program; install it at the same path on all hosts" in str(caught.value)
    assert said == [f"chatty is reached, {len(os.sched_getaffinity(0))} cores"]


def test_a_users_file_in_the_home_folder_is_not_taken_for_a_module_of_pythons(
    ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "socket.py").write_text("raise SystemExit('taken for the socket of Python')")
    monkeypatch.chdir(tmp_path)
    with Guards([HostSlots("away", 1)], print) as guards:
        assert guards.cores() == {"away": len(os.sched_getaffinity(0))}


def test_a_host_whose_folder_of_segments_others_may_change_is_named(ssh: Path) -> None:
    folder = Path(f"/dev/shm/hpcdp-segments-{uuid.uuid4().hex}")
    folder.mkdir()
    folder.chmod(0o777)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # or it would be removed first, as one that was left behind
    with Guards([HostSlots("away", 1)], print) as guards:
        guards.begin(2, 0, {}, folder, None)
        with raises(LaunchError, operation="launch", got=folder):
            guards.check("/", sys.executable, None)
    os.close(lock)


def test_programs_for_mpirun_are_not_put_where_others_may_exchange_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    tmp_path.chmod(0o777)
    with raises(LaunchError, operation="launch on other hosts") as caught:
        guard._private_folder(contextlib.ExitStack())
    assert f"a folder that others may change: {tmp_path}, which every user may write" in str(caught.value.got)
    assert not list(tmp_path.glob("hpcdp-*"))


def test_what_a_host_lacks(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch(mode=0o755)
    valid = hosts.to_other_hosts()
    assert guard.problems(str(tmp_path), "./run.sh", *valid[:1] or [None]) == []
    assert guard.problems(str(tmp_path / "x"), sys.executable, None)[0].startswith(f"there is no folder {tmp_path}/x;")
    tmp_path.chmod(0o777)
    assert guard.problems(str(tmp_path), sys.executable, None) == []
    (said,) = guard.problems(str(tmp_path), sys.executable, None, is_copy=True)
    assert said == f"others may change {tmp_path}, which every user may write; give --sync-dst-dir a folder of yours"
    (said,) = guard.problems(None, sys.executable, "ib9")
    assert said == f"no network interface 'ib9'; valid: {', '.join(valid) or 'none is up'}"
    (said,) = guard.problems(None, sys.executable, "lo")
    assert said.startswith("network interface 'lo' reaches no other host; valid: ")


def test_a_user_without_a_home_has_a_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with contextlib.ExitStack() as left_behind:
        assert guard._private_folder(left_behind).is_dir()


def test_the_agent_is_a_private_program_that_hands_on_what_it_is_asked(ssh: Path) -> None:
    with Guards([HostSlots("a", 1)], print) as guards:
        agent = Path(guards.agent())
        assert agent.parent.stat().st_mode & 0o777 == 0o700
        with subprocess.Popen([agent, "-x", "a", "echo", "two  words"]) as asking:
            assert guards._socket is not None
            connection, _ = guards._socket.accept()
            with connection, connection.makefile() as file:
                assert json.loads(file.readline()) == {"host": "a", "command": "echo two  words"}
                connection.sendall(b"7")
            assert asking.wait(10) == 7
    assert not agent.parent.exists()


@pytest.fixture
def of_one_host(monkeypatch: pytest.MonkeyPatch) -> tuple[Guards, SimpleNamespace, list[float]]:
    """Guards that nothing has started, of one host, its channel, and what the clock shows."""
    now = [100.0]
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    away = SimpleNamespace(host="away", is_closed=False, heard_s=100.0, out=1, err=2, send=lambda message: None)
    group = Guards([], print)
    group._channels = {"away": away}
    group._watch = SimpleNamespace(no_more=lambda descriptor: None)
    return group, away, now


@pytest.mark.parametrize(("between_s", "lost"), [(2.5, True), (60.0, False)])
def test_time_in_which_the_launcher_itself_did_not_run_is_no_silence(
    between_s: float, lost: bool, of_one_host: tuple[Guards, SimpleNamespace, list[float]]
) -> None:
    group, _, now = of_one_host
    while now[0] < 140:
        group.beat()
        now[0] += between_s
    group.beat()
    assert bool(group.lost) == lost


def test_a_host_that_is_lost_behind_such_a_time_is_not_missed_later_for_it(
    of_one_host: tuple[Guards, SimpleNamespace, list[float]],
) -> None:
    group, away, now = of_one_host
    group.beat()
    now[0] = away.heard_s = 200.0
    while now[0] < 235:
        group.beat()
        now[0] += 2.5
    assert group.lost


@pytest.mark.parametrize(
    ("between_s", "said", "lost"),
    [
        (1.0, b"", True),
        (60.0, b"", False),
        (1.0, b'{"pause": 0}\n', False),
        (60.0, b'{"pause": 0}\n', False),
        (1.0, b'{"pause": 0}\n{"beat": 0}\n', True),
    ],
)
def test_time_in_which_a_guard_itself_did_not_run_or_its_launcher_is_stopped_is_no_silence(
    between_s: float, said: bytes, lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [100.0], []
    kept = object.__new__(guard.Guard)

    def wait(_: float) -> None:
        now[0] += between_s
        looks.append(now[0])
        kept._is_over = len(looks) == 40

    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(guard, "end_orphans", lambda: None)
    kept._folder, kept._heard_s, kept._is_over = str(tmp_path / "segments"), now[0], False
    kept._interface = None
    kept._watch = SimpleNamespace(wait=wait)
    kept._tell_of_ranks = kept._reap = kept._copy = lambda: None
    if said:
        kept._buffer = b""
        monkeypatch.setattr(guard, "os", SimpleNamespace(read=lambda *_: said))
        monkeypatch.setattr(guard, "tell", lambda message: None)
        kept._read()
    kept.run()
    assert (len(looks) < 40) == lost


def test_a_guard_that_is_killed_closes_its_connection_whatever_it_has_started() -> None:
    started = subprocess.Popen(
        [sys.executable, "-P", "-c", guard._GUARD.format(str(guard._ROOT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert started.stdin and started.stdout and started.stderr
    begin = {"ranks": 1, "elsewhere": 1, "servers": 0, "workers": 1, "environ": {}, "folder": None, "interface": None}
    stays = "trap : TERM; echo $$ >&2; sleep 60 & echo $! >&2; while :; do wait; done"
    for message in ({"begin": begin}, {"start": {"number": 1, "command": f"exec sh -c {stays!r}"}}):
        started.stdin.write(json.dumps(message).encode() + b"\n")
    started.stdin.flush()
    pids = [int(started.stderr.readline()) for _ in range(2)]
    try:
        started.kill()
        started.communicate(timeout=10)  # to the end of both, as sshd reads them
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with started:
            pass
