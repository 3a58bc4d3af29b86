"""Ranks that wait for each other in different calls, of which one at least is a step or a push to a store."""

import io
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import hpcdp
from hpcdp import autograd, kvstore, nn, optim
from hpcdp.comm import thread_comm, watchdog
from hpcdp.comm.watchdog import Watchdog
from hpcdp.errors import MismatchError, WorldAborted


@pytest.fixture
def soon(monkeypatch):
    """Calls are compared after 0.3 s."""
    for name, seconds in {"_COMPARE_S": 0.3, "_SHORT_LOOK_S": 0.02, "_LONGEST_LOOK_S": 0.05, "_GRACE_S": 0.3}.items():
        monkeypatch.setattr(watchdog, name, seconds)


def backward(net):
    with autograd.record():
        loss = net(np.ones((3, 4), np.float32)).sum()
    loss.backward()


class Calls:
    """What a rank may call of a world, with all that it needs."""

    def __init__(self, world, stream=None):
        if stream is not None:
            world.kept[Watchdog] = Watchdog(world, 0, 60, stream)
        self.world, self.x = world, np.ones(3, np.float32)
        self.net = nn.Dense(4, 2)
        self.trainer = hpcdp.Trainer(self.net.parameters(), optim.SGD(0.1), world)
        self.other = hpcdp.Trainer(nn.Dense(4, 2).parameters(), optim.SGD(0.1), world)
        self.stored = hpcdp.Trainer(nn.Dense(4, 2).parameters(), optim.SGD(0.1), world, kvstore="dist_sync")
        self.store = kvstore.create("dist_sync", world)
        self.store.init([0, 1], [self.x, self.x])

    def step(self):
        backward(self.net)
        self.trainer.step(3)

    def step_of_another(self):
        self.other.step(0)

    def step_on_a_store(self):
        self.stored.step(0)

    def state(self):
        self.trainer.state_dict()

    def allreduce(self):
        hpcdp.allreduce(self.x, world=self.world)

    def broadcast(self):
        hpcdp.broadcast(self.x, world=self.world)

    def barrier(self):
        self.world.barrier()

    def pushpull(self):
        self.store.pushpull(0, self.x.copy())

    def pushpull_another(self):
        self.store.pushpull(1, self.x.copy())

    def push_and_pull(self):
        self.store.push(0, self.x)
        self.store.pull(0).wait()


STEP = r"Trainer\.step \(the closing exchange of a step\)"
CASES = [
    ("step", "allreduce", STEP, "allreduce of 3 float32"),
    ("step", "barrier", STEP, "barrier"),
    ("barrier", "step", "barrier", STEP),
    ("step", "state", STEP, r"Trainer\.state_dict \(.*\)"),
    ("step", "step_of_another", f"{STEP}, one of the steps of trainer 1,", f"{STEP}, one of the steps of trainer 2,"),
    ("step_on_a_store", "broadcast", STEP, "broadcast of 3 float32"),
    ("step", "pushpull", STEP, "pushpull of key 0"),
    ("pushpull", "broadcast", "pushpull of key 0", "broadcast of 3 float32"),
    ("pushpull", "pushpull_another", "pushpull of key 0", "pushpull of key 1"),
    ("push_and_pull", "barrier", "wait for pull of 0", "barrier"),
]


@pytest.mark.parametrize(("first", "second", "expected", "got"), CASES)
def test_ranks_of_a_node_get_the_same_error(first, second, expected, got, soon):
    def rank(world):
        calls = Calls(world, io.StringIO())
        for _ in range(20):  # from then on calls are compared in memory
            calls.allreduce()
        calls.step()
        world.barrier()
        with pytest.raises(MismatchError) as caught:
            getattr(calls, first if world.rank < 2 else second)()
        return str(caught.value)

    texts = thread_comm.run(3, rank)
    match = rf"^\S+: expected {expected} as on ranks 0, 1, got {got} on rank 2; call the same on all ranks"
    assert re.match(match, texts[0]), texts
    assert set(texts) == {texts[0]}


@pytest.mark.each_value
@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize(("first", "second", "expected", "got"), [CASES[0], CASES[4], CASES[8]])
def test_ranks_of_several_nodes_are_ended(first, second, expected, got, per_node, soon):
    reports = [io.StringIO() for _ in range(3)]

    def rank(world):
        calls = Calls(world, reports[world.rank])
        world.barrier()
        getattr(calls, first if world.rank < 2 else second)()

    with pytest.raises((WorldAborted, MismatchError)) as caught:
        thread_comm.run(3, rank, ranks_per_node=per_node)
    said = "".join(each.getvalue() for each in reports) + str(caught.value)
    assert re.search(rf"expected {expected} as on (rank [01]|ranks 0, 1), got {got} on rank 2; call", said), said


@pytest.mark.parametrize("per_node", [None, 1])
def test_a_rank_that_computes_is_waited_for(per_node, soon):
    """Also one of whose other threads waits for ranks that wait for the first thread."""
    reports = [io.StringIO() for _ in range(2)]

    def rank(world):
        calls = Calls(world, reports[world.rank])
        world.barrier()
        for call in ("step", "pushpull"):
            if world.rank:
                time.sleep(0.6)
            getattr(calls, call)()
        thread = threading.Thread(target=calls.push_and_pull)
        if world.rank:
            thread.start()
            time.sleep(0.6)
        calls.barrier()
        if not world.rank:
            thread.start()
        thread.join()
        return True

    assert thread_comm.run(2, rank, ranks_per_node=per_node) == [True] * 2
    assert [each.getvalue() for each in reports] == [""] * 2


def job(tmp_path, n, body, **environment):
    """Run ``body`` on real ranks; its output, exit status and seconds since the last line that begins with "at"."""
    script = tmp_path / "different.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        sys.path.insert(0, {tests!r})
        import hpcdp
        from hpcdp.errors import MismatchError
        from comm.test_different_calls import CASES, Calls
        world = hpcdp.init()
        """).format(tests=os.path.dirname(os.path.dirname(__file__)))
        + textwrap.dedent(body)
    )
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(n), "--", sys.executable, str(script)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=120)
    begun = [float(at) for at in re.findall(r"^at (\S+)$", done.stdout, re.MULTILINE)]
    return done.stdout + done.stderr, done.returncode, time.time() - max(begun, default=0)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 3])
def test_real_ranks_of_a_node_get_the_same_error(n, tmp_path):
    body = """
        for first, second, *_ in CASES[:2] + CASES[7:9]:
            calls = Calls(world.split(0))
            for _ in range(20):
                calls.allreduce()
            world.barrier()
            begun = time.time()
            try:
                getattr(calls, second if world.rank == world.size - 1 else first)()
            except MismatchError as error:
                print(f"rank {world.rank}: {time.time() - begun:.1f}: {error}", flush=True)
            world.barrier()
        """
    said, status, _ = job(tmp_path, n, body)
    assert status == 0, said
    found = re.findall(r"rank (\d): (\S+): (.*)", said)
    assert len(found) == 4 * n, said
    assert max(float(seconds) for _, seconds, _ in found) < 10, said
    for _, _, expected, got in CASES[:2] + CASES[7:9]:
        match = [rank for rank, _, text in found if re.search(rf"expected {expected} as .*, got {got} on rank", text)]
        assert sorted(match) == [str(rank) for rank in range(n)], said


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "case"), [(2, 0), (3, 8)])
def test_real_ranks_of_several_nodes_are_ended(n, case, tmp_path):
    body = f"""
        calls = Calls(world)
        calls.step()
        world.barrier()
        print("at", time.time(), flush=True)
        getattr(calls, CASES[{case}][world.rank == 1])()
        """
    said, status, seconds = job(tmp_path, n, body, HPCDP_RANKS_PER_NODE="1")
    _, _, expected, got = CASES[case]
    assert status != 0
    assert re.search(
        rf"expected {expected} as on rank 0, got {got} on rank 1; call the same .*; the job ends now", said
    )
    assert seconds < 20, said
