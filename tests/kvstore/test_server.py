"""A rank's end of the exchange with others: what is on its way stays kept."""

from hpcdp.comm import threads
from hpcdp.kvstore.server import Server
from hpcdp.kvstore.wire import Kind, Message


class OnItsWay:
    def test(self):
        return False


class DropsAStore:
    """While it is asked whether it has arrived, garbage collection finds a store, which says that it ends."""

    def __init__(self, server, to):
        self._server, self._to, self._asked = server, to, False

    def test(self):
        if not self._asked:
            self._asked = True
            self._server.tell(self._to, Message(Kind.DONE))
        return True


class SlowCommunicator:
    def __init__(self, comm):
        self._comm, self.sent = comm, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, x, dest, tag):
        self.sent.append(OnItsWay())
        return self.sent[-1]


def test_a_store_that_is_dropped_while_another_sends_loses_no_message():
    def one(world):
        other = 1 - world.rank
        server = Server.of(world, has_servers=False)
        comm = server.comm
        slow = server.comm = SlowCommunicator(comm)
        server.tell(other, Message(Kind.DONE))
        with server._counting:
            server._sending.append(DropsAStore(server, other))
        server.tell(other, Message(Kind.DONE))
        with server._counting:
            kept = list(server._sending)
            server._sending.clear()
            server.comm = comm
        assert len(slow.sent) == 3
        assert set(kept) == set(slow.sent)

    threads.run(2, one, 1)
