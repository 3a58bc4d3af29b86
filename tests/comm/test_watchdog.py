"""A collective that never ends: what is said, by whom, and that the job ends."""

import importlib.util
import io
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from raises import raises

from hpcdp.collectives import allreduce, iallreduce, recv
from hpcdp.comm import thread_comm, watchdog
from hpcdp.comm.progress import ProgressEngine
from hpcdp.comm.watchdog import DEFAULT_STALL_S, DEFAULT_TIMEOUT_S, OWN, Member, Watchdog, limits_s, look_at, nobody
from hpcdp.engine import Engine
from hpcdp.errors import ConfigError, WorldAborted


def watched(world, timeout_s, reports, stall_s=0):
    reports[world.rank] = io.StringIO()
    world.kept.pop(ProgressEngine, None)
    world.kept.pop(Engine, None)  # with the progress lane
    world.kept[Watchdog] = Watchdog(world, stall_s, timeout_s, reports[world.rank])
    ProgressEngine.of(world)
    return world.kept[Watchdog]


@pytest.mark.parametrize("algorithm", ["shared", "ring", "hierarchical"])
def test_the_first_rank_that_waits_says_for_whom(algorithm):
    reports = {}

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm=algorithm)  # all are there, and kernels are loaded
        watched(world, 0.3, reports)
        if world.rank != 1:
            allreduce(np.ones(5, "f4"), world=world, algorithm=algorithm)

    begin = time.monotonic()
    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank)
    assert time.monotonic() - begin < 20
    missing = f"rank 1 (host {socket.gethostname()}, pid {os.getpid()}) has not come"
    lines = reports[0].getvalue().splitlines()
    assert lines[0] == f"rank 0 of 3: allreduce of 5 float32 has not ended in 0.3 s: {missing}"
    assert "the job ends now" in lines[1]
    assert reports[1].getvalue() == reports[2].getvalue() == "", "one report a cause"


def test_a_repeated_call_is_reported_too():
    """It goes directly to its kernel, and is watched when it waits there."""
    reports = {}

    def rank(world):
        watched(world, 0.5, reports)
        for _ in range(3):
            allreduce(np.ones(5, "f4"), world=world)
        if world.rank != 1:
            allreduce(np.ones(5, "f4"), world=world)

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank)
    assert "rank 0 of 3: allreduce of 5 float32 has not ended in 0.5 s: rank 1 (host" in reports[0].getvalue()


@pytest.mark.parametrize("nodes", [[1, 1, 1], [1, 2]])
def test_a_rank_of_another_node_is_named_and_says_where_it_is(nodes):
    """In no call, so that of itself it has nothing to say."""
    reports, ended = {}, threading.Event()

    def somewhere_else():
        ended.wait(20)

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm="ring")
        watched(world, 1, reports, stall_s=0.4)
        if world.rank == 1:
            somewhere_else()
        try:
            allreduce(np.ones(5, "f4"), world=world, algorithm="ring")
        finally:
            ended.set()

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank, ranks_per_node=nodes)
    host = socket.gethostname()
    missing = rf"rank 1 \(host {host}, pid {os.getpid()}\) has not come\n"
    said = reports[0].getvalue() + reports[2].getvalue()  # of rank 2 where rank 0 comes late to the call
    for limit in ("0.4", "1"):
        found = re.findall(rf"rank [02] of 3: allreduce of 5 float32 has not ended in {limit} s: {missing}", said)
        assert len(found) == 1, said
    own = reports[1].getvalue()
    waits = rf"rank 1 of 3: rank [02] \(host {host}\) waits in allreduce of 5 float32; this rank is here:\n"
    assert re.match(waits, own)
    assert "in somewhere_else\n    ended.wait(20)\n" in own
    assert own.count("this rank is here") == 1  # though asked again, and by others


def test_ranks_of_other_nodes_are_told_apart():
    """One is in a call that this one has left, one as far as this one, and one answers no more."""
    reports = {}

    def rank(world):
        dog = watched(world, 0, reports, stall_s=0.4)
        if world.rank == 3:
            dog._ended.set()
        world.comm.barrier()
        dog.calls += (5, 2, 5, 0)[world.rank]
        if world.rank != 3:
            with dog.watching(f"call of rank {world.rank}"):
                time.sleep(2.5)
        world.comm.barrier()
        dog.end()

    thread_comm.run(4, rank, ranks_per_node=1)
    member = rf"rank {{}} \(host {re.escape(socket.gethostname())}, pid {os.getpid()}\)"
    silent = member.format(3) + " does not answer\n"
    expected = rf"call of rank 0 has not ended in 0.4 s: {member.format(1)} is in an earlier call, {silent}"
    assert re.search(expected, reports[0].getvalue())
    assert reports[2].getvalue() == "", "it waits in the call that rank 0 reports"
    assert re.search(rf"call of rank 1 has not ended in 0.4 s: {silent}", reports[1].getvalue())
    assert re.search(r"rank 0 \(.*\) waits in call of rank 0; this rank is here:\n", reports[1].getvalue())


@pytest.mark.parametrize(
    ("n", "per_node", "late", "silent"),
    [
        (3, 1, [0], []),
        (9, 2, [0, 3], []),
        pytest.param(2, 1, [1], [], marks=pytest.mark.thorough),
        pytest.param(5, 1, [4], [1, 2], marks=pytest.mark.thorough),  # those below them are asked by rank 0
        pytest.param(16, 1, [0, *range(4, 16)], [], marks=pytest.mark.thorough),
        pytest.param(48, 1, [0, 1, 2, 17], [5], marks=pytest.mark.thorough),
        pytest.param(48, 4, [0, 1, 2, 17], [], marks=pytest.mark.thorough),
    ],
)
def test_a_stall_is_one_report_and_its_roll_call_a_few_messages_a_rank(n, per_node, late, silent):
    """Each rank reported it, and asked each of other nodes: n (n - k) questions at once."""
    reports, sent, is_said = {}, [], threading.Event()

    def rank(world):
        dog = watched(world, 0, reports, stall_s=0.3)
        if world.rank in silent:
            with dog._looking:  # and no longer
                dog._ended.set()
        world.comm.barrier()
        if world.rank not in late:
            with dog.watching("a call"):
                deadline = time.monotonic() + 60
                while not is_said.is_set() and time.monotonic() < deadline:
                    time.sleep(0.02)
                    if " has not ended in " in reports[world.rank].getvalue():
                        time.sleep(0.3)  # another one would say it, too
                        is_said.set()
        world.comm.barrier()
        sent.append(dog._roll._comm.traffic.messages)
        dog.end()

    thread_comm.run(n, rank, ranks_per_node=per_node)
    said = [number for number in range(n) if " has not ended in " in reports[number].getvalue()]
    waiting = [number for number in range(n) if number not in late and number not in silent]
    assert said == waiting[:1]
    (line,) = re.findall(r"a call has not ended in 0.3 s: (.*)\n", reports[said[0]].getvalue())
    named = [int(number) for number in re.findall(r"rank (\d+) \(", line)]
    assert named == sorted(late + silent)[:8]
    assert line.endswith(f" and {len(late + silent) - 8} more") == (len(late + silent) > 8)
    assert line.count("does not answer") == len([number for number in named if number in silent])
    assert sum(sent) <= 4 * n * (1 if waiting[0] == 0 else n.bit_length())


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_that_has_left_ends_the_wait_for_it(ranks_per_node, monkeypatch):
    monkeypatch.setattr(watchdog, "_DEATH_S", 0.1)
    reports = {}

    def rank(world):
        dog = watched(world, 2, reports)
        world.comm.barrier()
        with dog.watching("a first call"):
            world.comm.barrier()
        if world.rank == 1:
            dog.end()
        else:
            with dog.watching("a second call"):
                world.comm.barrier()

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank, ranks_per_node=ranks_per_node)
    left = f"rank 1 (host {socket.gethostname()}, pid {os.getpid()}) has left the program; the job ends now"
    assert f"a second call cannot end: {left}\n" in reports[0].getvalue() + reports[2].getvalue()
    assert reports[1].getvalue() == ""


def test_a_rank_that_leaves_after_its_part_of_a_call_may_be_early(monkeypatch):
    monkeypatch.setattr(watchdog, "_DEATH_S", 0.1)
    reports = {}

    def rank(world):
        dog = watched(world, 20, reports, stall_s=2)
        with dog.watching("the last call"):
            if world.rank == 0:
                time.sleep(1)
        dog.end()

    thread_comm.run(2, rank)
    assert "".join(report.getvalue() for report in reports.values()) == ""


def test_started_operations_are_watched_while_they_are_waited_for():
    reports = {}

    def rank(world):
        iallreduce(np.ones(3), world=world, algorithm="ring").wait()
        watched(world, 0.3, reports)
        if world.rank == 0:
            request = iallreduce(np.ones(3), world=world, algorithm="ring")
            time.sleep(0.8)  # not waiting: nothing to say
            assert reports[0].getvalue() == ""
            request.wait()

    with pytest.raises(WorldAborted):
        thread_comm.run(2, rank)
    assert "wait for iallreduce of 3 float64 has not ended in 0.3 s: rank 1 (host" in reports[0].getvalue()


def test_the_sender_that_does_not_come_is_named():
    reports = {}

    def rank(world):
        watched(world, 0.3, reports)
        if world.rank == 2:
            recv(source=1, world=world)

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank, 1)
    assert "recv from rank 1 has not ended in 0.3 s: rank 1 (host" in reports[2].getvalue()


@pytest.mark.parametrize("pause_s", [0.0, 0.15])
def test_started_operations_are_watched_while_they_are_asked_for(pause_s):
    """Two in turn, and other things between."""
    reports = {}

    def rank(world):
        iallreduce(np.ones(3), world=world, algorithm="ring").wait()
        watched(world, 0.5, reports)
        if world.rank == 0:
            requests = [iallreduce(np.ones(3), world=world, algorithm="ring") for _ in range(2)]
            while not all([request.test() for request in requests]):
                time.sleep(pause_s)

    with pytest.raises(WorldAborted):
        thread_comm.run(2, rank)
    assert "wait for iallreduce of 3 float64 has not ended in 0.5 s: rank 1 (host" in reports[0].getvalue()


@pytest.mark.alone
def test_calls_that_end_are_no_hang_however_many():
    reports = {}

    def rank(world):
        allreduce(np.ones(1), "min", world)
        dog = watched(world, 1, reports)
        begin = time.monotonic()
        last = False
        while not last:
            last = allreduce(np.array([time.monotonic() - begin > 1.2], "i4"), "min", world)[0] == 1
        dog.end()

    thread_comm.run(2, rank)
    assert [report.getvalue() for report in reports.values()] == ["", ""]


@pytest.mark.alone
def test_a_stall_is_reported_once_and_the_job_goes_on():
    reports = {}

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm="ring")
        dog = watched(world, 30, reports, stall_s=0.3)
        for _ in range(2):
            if world.rank == 1:
                time.sleep(1.2)  # four times as long
            allreduce(np.ones(5), world=world, algorithm="ring")
        time.sleep(0.1)  # until the watchdog has seen the end
        dog.end()

    thread_comm.run(2, rank)
    first, after, *rest = (line for line in reports[0].getvalue().splitlines() if line.startswith("rank"))
    assert "allreduce of 5 float64 has not ended in 0.3 s: rank 1 (host" in first
    assert "the job goes on, until 30 s have passed" in reports[0].getvalue()
    took = re.fullmatch(r"rank 0 of 2: allreduce of 5 float64 has ended after (.*) s, and the job goes on", after)
    assert took is not None
    assert 0.8 < float(took[1]) < 3
    assert len(rest) == 2  # each call is told of by itself
    assert reports[1].getvalue() == ""


def test_the_end_of_a_stall_is_reported_with_its_own_duration():
    reports = {}

    def rank(world):
        dog = watched(world, 60, reports, stall_s=2)
        with dog._looking:
            dog.tested = SimpleNamespace(call=("wait for a", None), waited_s=3.0)
            dog._look()
            dog._look()
            dog.tested = SimpleNamespace(call=("wait for b", None), waited_s=0.0)  # begins before the watchdog looks
            dog._look()
        dog.end()

    thread_comm.run(1, rank)
    assert "wait for a has not ended in 2 s" in reports[0].getvalue()
    assert re.search(r"wait for a has ended after 3\.\d s, and the job goes on", reports[0].getvalue())


def test_what_is_waited_for_is_named_by_who_knows():
    """Not by the number of calls, but as the caller says; ranks that have stopped or are gone are said so."""
    reports = {}

    def rank(world):
        dog = watched(world, 0, reports, stall_s=0.3)
        if world.rank == 0:
            dog.calls += 100
            gone, stopped = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
            try:
                os.kill(stopped.pid, signal.SIGSTOP)
                dog._visible = [
                    dog._everyone[2]._replace(pid=gone.pid, born=look_at(gone.pid)[1]),
                    dog._everyone[3]._replace(pid=stopped.pid, born=look_at(stopped.pid)[1]),
                ]
                gone.kill()
                gone.wait()
                with dog.watching("update", lambda: "bucket 3 (a, b; 12 bytes)", lambda: [0, 1]):
                    deadline = time.monotonic() + 30
                    while "\n" not in reports[0].getvalue() and time.monotonic() < deadline:
                        time.sleep(0.01)
            finally:
                for each in (gone, stopped):
                    each.kill()
                    each.wait()
        world.comm.barrier()
        dog.end()

    thread_comm.run(4, rank)
    host = socket.gethostname()
    assert (
        reports[0]
        .getvalue()
        .startswith(
            f"rank 0 of 4: update of bucket 3 (a, b; 12 bytes) has not ended in 0.3 s: "
            f"rank 1 (host {host}, pid {os.getpid()}) has not come, rank 2 (host {host}, pid "
        )
    )
    assert re.search(
        r"rank 2 \(host .*, pid \d+\) is gone, rank 3 \(host .*, pid \d+\) is stopped\n", reports[0].getvalue()
    )


def test_what_is_watched_goes_on_to_be_after_a_collective_within_it():
    def rank(world):
        dog = Watchdog.of(world)
        with dog.watching("more than a collective"):
            around = dog.call
            allreduce(np.ones(2), world=world)
            assert dog.call is around
        assert dog.call is None

    thread_comm.run(2, rank)


@pytest.mark.parametrize("per_node", [None, 1])
def test_a_call_of_all_ranks_ends_the_job_when_one_has_gone(per_node, monkeypatch):
    """Long before its limit; what needs no other rank goes on."""
    monkeypatch.setattr(watchdog, "_LONGEST_LOOK_S", 0.02)
    monkeypatch.setattr(watchdog, "_DEATH_S", 0.1)
    reports, went_on = {}, []

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm="ring")
        dog = watched(world, 600, reports)
        dog._visible = [dog._everyone[1]._replace(born="another process")]
        with dog.watching("pull of key 'w'", behind=nobody):
            time.sleep(0.5)
        went_on.append(world.rank)
        if world.rank != 1:
            allreduce(np.ones(5, "f4"), world=world, algorithm="ring")

    with pytest.raises(WorldAborted):
        thread_comm.run(2, rank, per_node)
    assert sorted(went_on) == [0, 1]
    gone = f"rank 1 (host {socket.gethostname()}, pid {os.getpid()}) is gone"
    assert reports[0].getvalue() == f"rank 0 of 2: allreduce of 5 float32 cannot end: {gone}; the job ends now\n"


@pytest.mark.parametrize("name", ["HPCDP_STALL_S", "HPCDP_TIMEOUT_S"])
@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan", "1e-9", "0.0999"])
def test_a_limit_that_is_none_is_refused(text, name, monkeypatch):
    monkeypatch.setenv(name, text)
    with raises(ConfigError, operation=name, expected=[0.1, 0], got=text):
        limits_s()


def test_the_limits_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("HPCDP_STALL_S", raising=False)
    monkeypatch.delenv("HPCDP_TIMEOUT_S", raising=False)
    assert limits_s() == (DEFAULT_STALL_S, DEFAULT_TIMEOUT_S)
    monkeypatch.setenv("HPCDP_STALL_S", "0")
    monkeypatch.setenv("HPCDP_TIMEOUT_S", "2.5")
    assert limits_s() == (0, 2.5)
    monkeypatch.setenv("HPCDP_STALL_S", "0.1")
    assert limits_s() == (0.1, 2.5)


def test_a_rank_that_misses_a_first_call_is_told():
    reports = {}

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm="ring")
        watched(world, 0.3, reports)
        if world.rank != 1:
            allreduce(np.ones(9, "f4"), world=world)  # of a size for which nothing was chosen yet

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank)
    assert re.search(r"rank 1 \(host .*\) has not come", reports[0].getvalue())


def test_a_rank_that_does_not_come_to_be_split_off_is_told():
    reports = {}

    def rank(world):
        watched(world, 0.3, reports)
        if world.rank != 1:
            world.split(0)

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank)
    assert re.match(r"rank 0 of 3: split has not ended in .* rank 1 \(host .*\) has not come", reports[0].getvalue())


def test_a_rank_of_a_group_is_named_as_all_know_it():
    reports = {}

    def rank(world):
        group = world.split(world.rank % 2)
        if world.rank == 1:
            return
        watched(group, 0.3, reports)
        if group.rank == 0:
            group.barrier()

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank)
    assert "rank 1 of the group, 2 of all (host" in reports[0].getvalue()


@pytest.mark.parametrize("per_node", [None, 1])
def test_ranks_in_calls_of_different_worlds_are_a_hang(per_node, monkeypatch):
    """Those of one world are compared. A rank that waits in one world answers for the other."""
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.1)
    reports, reports_of_part = {}, {}

    def rank(world):
        part = world.split(0)
        for each in (world, part):  # kernels are loaded
            allreduce(np.ones(7), "max", each, "ring")
        watched(part, 1, reports_of_part, stall_s=0.3)
        watched(world, 1, reports, stall_s=0.3)
        if world.rank:
            part.barrier()
        allreduce(np.ones(7), "max", world, "ring")

    with pytest.raises(WorldAborted):
        thread_comm.run(2, rank, per_node)
    member = rf"rank {{}} \(host {re.escape(socket.gethostname())}, pid {os.getpid()}\)"
    late = rf"allreduce of 7 float64 has not ended in 0.3 s: {member.format(1)} has not come\n"
    assert re.match("rank 0 of 2: " + late, reports[0].getvalue())
    late = rf"barrier has not ended in 0.3 s: {member.format(0)} has not come\n"
    assert re.search("rank 1 of 2: " + late, reports_of_part[1].getvalue())
    assert "the job ends now" in reports[0].getvalue() + reports_of_part[1].getvalue()


def test_each_rank_reports_a_call_of_its_own():
    """Stages of a pipeline wait for one another: only the report of the last one names who is late."""
    reports = {}

    def rank(world):
        dog = watched(world, 0, reports, stall_s=0.3)
        if world.rank < 2:
            call = f"wait of rank {world.rank}", None, lambda: [world.rank + 1], OWN
            dog.enter(call)
            time.sleep(0.8)
            dog.leave(call)
        world.comm.barrier()
        dog.end()

    thread_comm.run(3, rank)
    for number in range(2):
        said = f"rank {number} of 3: wait of rank {number} has not ended in 0.3 s: rank {number + 1} (host"
        assert reports[number].getvalue().startswith(said)


@pytest.mark.thorough  # as those of test_faults
@pytest.mark.parametrize(
    "call",
    ["if world.rank: time.sleep(60)", "world.rank and part.barrier()"],  # calls of one world are compared
)
def test_real_ranks_end_within_the_limit(call, tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        textwrap.dedent(f"""
        import time, numpy, hpcdp
        world = hpcdp.init()
        part = world.split(0)
        hpcdp.allreduce(numpy.ones(4))
        hpcdp.allreduce(numpy.ones(7), "max", algorithm="ring")
        {call}
        hpcdp.allreduce(numpy.ones(7), "max", algorithm="ring")
        """)
    )
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    begin = time.monotonic()
    done = subprocess.run(
        command, env=environment | {"HPCDP_TIMEOUT_S": "1"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "rank 0 of 2: allreduce of 7 float64 has not ended in 1 s" in done.stderr + done.stdout
    assert "hang.py" in done.stderr + done.stdout  # the stack
    assert time.monotonic() - begin < 30


def test_a_rank_shows_that_it_waits_for_others_to_start(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from hpcdp.comm import startup
        startup._LONG_START_S = 0.5
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            time.sleep(4)
        startup.init()
        """)
    )
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    done = subprocess.run(
        command, env=environment | {"HPCDP_STALL_S": "0.5"}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert re.match(r"Timeout .*\n.*\n.* in _init_mpi_with_all_ranks\n(.*\n)* .*late\.py", done.stderr), done.stderr


def test_the_packages_in_which_ranks_wait_exist():
    """In an unknown package a waiting rank would count as computing."""
    assert all(importlib.util.find_spec(package.rstrip(".")) for package in watchdog._WAITS_IN)


def test_without_a_descriptor_to_look_no_rank_is_gone():
    """Else a rank with too many open files would end the job, and blame all others."""
    own = look_at(os.getpid())
    member = Member(0, "a", os.getpid(), own[1], False)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        state = member.state
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (state, member._replace(born="1").state) == ("?", "X")
