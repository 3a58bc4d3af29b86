"""What Open MPI's mpirun says of a host that it has lost is heard, and copied on."""

import contextlib
import os
import signal
import subprocess

import pytest

from hpcdp.launch.watch import Watch
from hpcdp.launch.words import Words

SAID = """\
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node1-28@0,0] on node node1
  Remote daemon: [prterun-node1-28@0,{}] on node {}

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
"""


@pytest.mark.parametrize("hosts", [(), ("node2",), ("node2", "node7.site")])
def test_a_lost_host_is_heard(hosts: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    text = "a rank's own words\n" + "".join(SAID.format(rank, host) for rank, host in enumerate(hosts, 1))
    words = Words()
    shell = 'for word in "$@"; do printf %s "$word" >&2; done'
    with contextlib.closing(Watch(os.getpid(), 0, {signal.SIGUSR2})) as watch:
        with subprocess.Popen(["sh", "-c", shell, "sh", *text], stderr=words.end):
            words.attach(watch)
            watch.wait(0.2)
            watch.wait(0.2)
        assert words.lost() == [f"mpirun has lost {host}" for host in hosts]
    assert capfd.readouterr().err == text
