import socket
import subprocess
import sys

import pytest

from hpcdp.core.environment import keep_to_interface, kept_to_interface

LISTENER = """
import socket
listening = [socket.create_server(("", 0)), socket.create_server(("::", 0), family=socket.AF_INET6)]
listening += [socket.create_server(("127.0.0.1", 0))]
print(flush=True)
input()
for each in listening:
    print(each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16))
"""


def device(of: socket.socket) -> bytes:
    return of.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_what_is_opened_meanwhile_is_bound() -> None:
    with socket.create_server(("", 0)) as before:
        with kept_to_interface("lo"):
            inside, one, other = socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)), socket.socket()
        assert [device(each) for each in (before, inside, one, other)] == [b"", b"lo", b"", b""]
        with socket.create_connection(("127.0.0.1", inside.getsockname()[1])), inside, one, other:
            inside.accept()[0].close()


def test_the_sockets_of_a_child_are_bound() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    child = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    keep_to_interface("lo", child.pid)
    output, _ = child.communicate("\n", timeout=30)
    assert output.splitlines() == [repr(b"lo\0"), repr(b"lo\0"), repr(b"")]
    keep_to_interface("lo", child.pid)  # it has ended
