"""Messages between two ranks, and objects."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import time
import uuid
import zoneinfo
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp.comm import thread_comm
from hpcdp.comm.node_messages import Mailbox
from hpcdp.core.state import hold_together
from hpcdp.errors import ConfigError, HpcdpError, MismatchError, UnsupportedError


@pytest.mark.parametrize("nodes", [None, 1])
def test_receives_end_in_the_order_of_the_sends_whichever_is_waited_for_first(nodes):
    def rank(world):
        n, me = world.size, world.rank
        right, left = (me + 1) % n, (me - 1) % n
        receives = [hpcdp.irecv(None, left, world=world) for _ in range(4)]
        shapes = [(3, 0), (50_000,), (), (2, 2)]
        sends = [hpcdp.isend(np.full(shape, 10 * me + i, "f4"), right, world=world) for i, shape in enumerate(shapes)]
        for i in (3, 1, 0, 2):
            got = receives[i].wait()
            assert got.shape == shapes[i] and got.dtype == np.float32 and (got == 10 * left + i).all()
        for operation in sends:
            operation.wait()

    for n in (2, 3, 4):
        thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize("count", [5, 100_000])
def test_a_ring_of_long_and_short_messages(count):
    def rank(world):
        n, me = world.size, world.rank
        x, out = np.arange(count) + me, np.zeros(count, int)
        assert hpcdp.sendrecv(x, (me + 1) % n, (me - 1) % n, out, world=world) is out
        np.testing.assert_array_equal(out, np.arange(count) + (me - 1) % n)
        started = [hpcdp.isendrecv(x + 10 * i, (me + 1) % n, (me - 1) % n, tag=7, world=world) for i in range(3)]
        for i in (2, 0, 1):
            np.testing.assert_array_equal(started[i].wait(), np.arange(count) + (me - 1) % n + 10 * i)

    for n in (1, 2, 3):
        thread_comm.run(n, rank)


def receive_from_any_rank(world):
    """Every rank sends short and long arrays to the last one, which takes them in the order of their arrival."""
    n, me, last = world.size, world.rank, world.size - 1
    shapes = [(3,), (50_000,), (0, 2), (2, 40_000)]
    if me < last:
        for i, shape in enumerate(shapes):
            hpcdp.isend(np.full(shape, 10 * me + i), last, 5, world)
        hpcdp.send_object({"from": me}, last, 6, world)
    else:
        seen = {rank: 0 for rank in range(last)}
        for _ in range(len(shapes) * last):
            got, source = hpcdp.recv(None, None, 5, world)
            number = seen[source]
            assert got.shape == shapes[number] and (got == 10 * source + number).all()
            seen[source] += 1
        assert set(seen.values()) <= {len(shapes)}
        told = [hpcdp.recv_object(None, 6, world) for _ in range(last)]
        assert sorted(source for _, source in told) == list(range(last))
        assert all(value == {"from": source} for value, source in told)
    x, out = np.full(5, me), np.zeros(5, int)
    received, source = hpcdp.sendrecv(x, (me + 1) % n, None, out, 9, world)
    assert received is out and source == (me - 1) % n and (out == source).all()


def test_a_receive_from_any_rank_tells_the_sender():
    for n in (1, 2, 3, 5):
        thread_comm.run(n, receive_from_any_rank)


@pytest.mark.mpi
def test_real_ranks_receive_from_any_rank():
    receive_from_any_rank(hpcdp.init())


def test_a_message_goes_to_the_first_receive_that_fits_and_holds_up_no_other():
    def rank(world):
        if world.rank:
            hpcdp.recv(None, 0, 1, world)
            for value in range(2 if world.rank == 1 else 1):
                hpcdp.send(np.full(40_000, 10 * world.rank + value), 0, 0, world)
            return None
        from_1 = hpcdp.irecv(None, 1, world=world)
        from_any = [hpcdp.irecv(None, None, world=world) for _ in range(2)]
        hpcdp.send(np.zeros(1), 2, 1, world)
        first = from_any[0].wait()  # rank 1 has not sent yet
        hpcdp.send(np.zeros(1), 1, 1, world)
        second = from_any[1].wait()
        return int(first[0][0]), first[1], int(from_1.wait()[0]), int(second[0][0]), second[1]

    assert thread_comm.run(3, rank)[0] == (20, 2, 10, 11, 1)


def test_receives_of_several_threads_share_the_messages():
    def rank(world):
        if world.rank == 0:
            for value in range(40):
                hpcdp.send(np.full(1 + 40_000 * (value % 2), value), 1, 0, world)
            return None
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda _: hpcdp.recv(None, None, 0, world)[0], range(40)))
        assert all((x == x[0]).all() and x.size == 1 + 40_000 * (x[0] % 2) for x in got)
        return sorted(int(x[0]) for x in got)

    assert thread_comm.run(2, rank)[1] == list(range(40))


@pytest.mark.parametrize("count", [5, 100_000])
@pytest.mark.parametrize("out", [np.zeros(4), np.zeros(5, "f4"), np.zeros((5, 1))])
def test_an_array_of_another_shape_or_dtype_is_refused_and_the_next_one_comes(count, out):
    def rank(world):
        if world.rank == 0:
            hpcdp.isend(np.ones(count), 1, 7, world)
            hpcdp.isend(np.full(2, 3.0), 1, 7, world)
            return None
        with pytest.raises(MismatchError) as caught:
            hpcdp.recv(out, 0, 7, world)
        assert caught.value.where == "out" and not out.any()
        return hpcdp.recv(None, 0, 7, world).tolist()

    assert thread_comm.run(2, rank)[1] == [3.0, 3.0]


@pytest.mark.parametrize("count", [3, 100_000])
def test_an_object_is_not_received_as_an_array_nor_an_array_as_an_object(count):
    def rank(world):
        if world.rank == 0:
            for _ in range(2):  # the second time both kinds are known
                hpcdp.isend_object([7] * count, 1, 7, world)
                hpcdp.isend(np.ones(count), 1, 7, world)
                hpcdp.send_object({"a": 1}, 1, 7, world)
                hpcdp.send(np.full(2, 3), 1, 7, world)
            return
        for _ in range(2):
            with raises(MismatchError, operation="recv", got="an object", remedy="recv_object()"):
                hpcdp.recv(None, 0, 7, world)
            with raises(MismatchError, operation="irecv_object", got=["an array", count, "float64"], remedy="recv()"):
                hpcdp.irecv_object(None, 7, world).wait()
            assert hpcdp.recv_object(0, 7, world) == {"a": 1}
            assert hpcdp.recv(None, 0, 7, world).tolist() == [3, 3]

    thread_comm.run(2, rank)


def test_messages_do_not_disturb_collectives_and_tags_are_apart():
    def rank(world):
        me = world.rank
        if me == 0:
            for tag in (0, 31, 32, 16383):
                hpcdp.isend(np.full(2, tag), 1, tag, world)
        assert hpcdp.allreduce(np.ones(10), world=world, algorithm="ring").sum() == 10 * world.size
        if me == 1:
            for tag in (16383, 0, 32, 31):
                assert hpcdp.recv(None, 0, tag, world).tolist() == [tag, tag]

    thread_comm.run(3, rank, 1)
    with pytest.raises(ConfigError) as caught:
        thread_comm.run(1, lambda world: hpcdp.send(np.zeros(1), 0, 16384, world))
    assert caught.value.where == "tag"
    with pytest.raises(UnsupportedError) as refused:
        thread_comm.run(2, lambda world: hpcdp.send(np.zeros(1), 2, world=world))
    assert refused.value.where == "dest"


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    values: np.ndarray


class Color(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    ONE = 1


@dataclasses.dataclass
class Unset:
    a: int
    b: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Table(dict):
    """Not made by ``object.__new__``, as receivers make dataclasses."""

    a: int = 0


@dataclasses.dataclass
class Failing:
    """Its field cannot be read, and the error cannot be printed."""

    a: int

    def __getattribute__(self, name):
        if name == "a":
            raise Unprintable
        return super().__getattribute__(name)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


class FailingKey:
    def __repr__(self):
        raise RecursionError("too deep")


class FailingList(list):
    def __len__(self):
        raise OSError("no length")


Pair = collections.namedtuple("Pair", "first second")


class Sum(Pair):
    def __new__(cls, total):
        return super().__new__(cls, total, 0)


THINGS = {
    "plain": [1, 2.5, None, True, "ü\ud800", float("inf"), -(2**70), 10**5000],
    "nested": (1, (2, [3]), {1, 2}, frozenset(["a"])),
    "keys": {3: 4, (1, 2): "k", None: [np.arange(3)]},
    "byte order": [np.arange(4, dtype=">f4")[::2], np.array(["ab"], ">U2"), np.array(3, ">i8")],
    "arrays": [np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.complex64), np.array(["ab", "c"]), np.array(True)],
    "scalars": [np.float32(2.5), np.int64(-3), np.bool_(True), np.datetime64("2020-01-02")],
    "dtypes": [np.dtype("f4"), np.dtype("<i8")],
    "paths": [pathlib.Path("/tmp/ü"), pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/a")],
    "times": [
        datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.UTC), datetime.date(2020, 1, 2), datetime.time(1, 2, 3),
        datetime.timedelta(-1, 2, 3), datetime.UTC, datetime.timezone(datetime.timedelta(hours=-1), "here"),
        datetime.datetime(2020, 10, 25, 2, 30, tzinfo=zoneinfo.ZoneInfo("UTC"), fold=1),
        datetime.time(1, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
    ],
    "bytes": [b"\0\1", bytearray(b"abc"), 1 + 2j],
    "numbers": [fractions.Fraction(1, 3), decimal.Decimal("1.10"), uuid.UUID(int=7)],
    "flags": [Mode.READ, Mode.READ | Mode.WRITE, Mode(0), ~Mode.READ, Bits(1 << 70 | 1), Sum(3)],
    "classes": [Point(1, np.ones(2)), Color.RED, Pair(1, np.ones(1)), collections.OrderedDict(b=1, a=2)],
}  # fmt: skip


def is_same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Point):
        return a.x == b.x and is_same(a.values, b.values)
    if isinstance(a, (datetime.datetime, datetime.time)) and (a.fold != b.fold or repr(a.tzinfo) != repr(b.tzinfo)):
        return False
    return a == b


@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("kind", THINGS)
def test_objects_arrive_as_they_were(kind, nodes):
    thing = THINGS[kind]

    def rank(world):
        n, me = world.size, world.rank
        assert is_same(hpcdp.broadcast_object(thing if me == n - 1 else me, n - 1, world), thing)
        assert is_same(hpcdp.allgather_object([me, thing], world), [[other, thing] for other in range(n)])
        gathered = hpcdp.gather_object((me, thing), 1, world)
        assert is_same(gathered, [(other, thing) for other in range(n)] if me == 1 else None)
        parts = [{"rank": other, "thing": thing} for other in range(n)]
        assert is_same(hpcdp.scatter_object(parts if me == 0 else None, 0, world), parts[me])
        if me == 0:
            hpcdp.send_object(thing, 1, world=world)
        if me == 1:
            assert is_same(hpcdp.recv_object(0, world=world), thing)
        started = [
            hpcdp.ibroadcast_object(thing if me == 0 else me, 0, world),
            hpcdp.iallgather_object([me, thing], world),
            hpcdp.igather_object((me, thing), 1, world),
            hpcdp.iscatter_object(parts if me == 0 else None, 0, world),
            hpcdp.isend_object(thing, (me + 1) % n, 3, world),
            hpcdp.irecv_object((me - 1) % n, 3, world),
        ]
        ends = [started[number].wait() for number in (5, 3, 0, 4, 2, 1)]
        wanted = [thing, parts[me], thing, None, gathered, [[other, thing] for other in range(n)]]
        assert all(map(is_same, ends, wanted))

    thread_comm.run(3, rank, nodes)


def recursive():
    made = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    "value",
    [
        object(), {"a": [1, print]}, np.array([object()]), recursive(), Exception("x"), Point, [np.ma.array([1.0])],
        (3, Unset(1)), Table(), Failing(1), {FailingKey(): 1}, np.matrix,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_sent_is_an_error_on_every_rank_that_names_its_rank(value):
    def rank(world):
        for culprit, call in (
            (1, lambda: hpcdp.broadcast_object(value if world.rank == 1 else None, 1, world)),
            (2, lambda: hpcdp.allgather_object(value if world.rank == 2 else 3, world)),
            (0, lambda: hpcdp.scatter_object([1, value, 2] if world.rank == 0 else None, 0, world)),
            (0, lambda: hpcdp.scatter_object([1, 2] if world.rank == 0 else None, 0, world)),
            (0, lambda: hpcdp.scatter_object(FailingList() if world.rank == 0 else None, 0, world)),
            (1, lambda: hpcdp.ibroadcast_object(value if world.rank == 1 else None, 1, world).wait()),
            (1, lambda: hpcdp.iallgather_object(value if world.rank == 1 else 3, world).wait()),
        ):
            with pytest.raises(UnsupportedError) as caught:
                call()
            where = str(caught.value.where)
            assert where.startswith("value") and where.endswith(f" on rank {culprit}")
        return hpcdp.allgather_object(world.rank, world)

    assert thread_comm.run(3, rank) == [[0, 1, 2]] * 3


def test_the_error_of_an_object_is_named():
    def rank(world):
        me = world.rank
        labelled = Point(1, 2)
        object.__setattr__(labelled, "label", "x")
        for value, got in (
            (Unset(1), "no attribute 'b'"), (Failing(1), "Unprintable"), (Point, "the class Point"),
            (labelled, "label"), (np.dtype([("a", "i4")]), "a"), (np.dtype("V4"), "V4"),
            (collections.deque([1]), "a deque"), (range(3), "a range"), (collections.Counter("ab"), "a Counter"),
        ):  # fmt: skip
            with pytest.raises(UnsupportedError, match=got):
                hpcdp.broadcast_object([me, value] if me == 1 else me, 1, world)
            with pytest.raises(UnsupportedError, match=got):
                hpcdp.send_object(value, 1 - me, world=world)
        return hpcdp.allgather_object(me, world)

    assert thread_comm.run(2, rank) == [[0, 1]] * 2


def test_what_cannot_be_gathered_is_an_error_on_its_rank_and_the_root():
    def rank(world):
        for call in (
            lambda: hpcdp.gather_object(print if world.rank == 2 else 3, 1, world),
            lambda: hpcdp.igather_object(print if world.rank == 2 else 3, 1, world).wait(),
        ):
            if world.rank == 0:
                assert call() is None
                continue
            with pytest.raises(UnsupportedError) as caught:
                call()
            assert str(caught.value.where).endswith(" on rank 2") and not caught.value.is_on_every_rank
        return hpcdp.allgather_object(world.rank, world)

    assert thread_comm.run(3, rank) == [[0, 1, 2]] * 3


def test_a_class_that_the_receiver_has_not_imported_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    from hpcdp.collectives.objects import decoded, encoded

    message = encoded(Point(1, np.ones(1)))
    text = message.tobytes().replace(__name__.encode(), b"os".ljust(len(__name__)))
    with pytest.raises(UnsupportedError):
        decoded(np.frombuffer(text, np.uint8).copy())
    for name in ("system", "environ", "path.join"):
        replaced = encoded(Point(1, np.ones(1))).tobytes()
        document = replaced.replace(b'"Point"', f'"{name}"'.encode().ljust(7)[:7])
        with pytest.raises((UnsupportedError, ValueError)):
            decoded(np.frombuffer(document, np.uint8).copy())


def send_more_than_a_queue_holds(world):
    """Every rank sends short arrays of two tags to every rank before anyone receives, more than there is room for."""
    n, me, count = world.size, world.rank, 170
    for _ in range(20):  # these are compared by messages, and later ones in memory
        hpcdp.barrier(world)
    for i in range(count):
        for dest in range(n):
            hpcdp.send(np.full(150 + i, 1000 * me + i), dest, i % 2, world)
    if world.num_nodes == 1:
        hpcdp.barrier(world)
    for tag in (1, 0):
        for i in range(tag, count, 2):
            for source in reversed(range(n)):
                got = hpcdp.recv(None, source, tag, world)
                assert got.shape == (150 + i,) and (got == 1000 * source + i).all()
    sums = hpcdp.allreduce(np.ones(3), world=world)
    assert (sums == n).all()


@pytest.mark.parametrize("nodes", [None, 2])
def test_messages_without_room_arrive_in_order_also_while_their_receiver_waits_in_a_barrier(nodes):
    for n in (1, 2, 3):
        thread_comm.run(n, send_more_than_a_queue_holds, nodes)


@pytest.mark.mpi
def test_real_ranks_send_more_than_a_queue_holds():
    send_more_than_a_queue_holds(hpcdp.init())


def test_more_long_arrays_than_slots_are_under_way_at_once():
    def rank(world):
        other, count = 1 - world.rank, 300
        arrays = [np.full(8400 + i, 10.0 * i + world.rank) for i in range(count)]
        sends = [hpcdp.isend(x, other, 3, world) for x in arrays]
        for i in range(count):
            got = hpcdp.recv(None, other, 3, world)
            assert got.shape == (8400 + i,) and (got == 10.0 * i + other).all()
        for operation in sends:
            operation.wait()

    thread_comm.run(2, rank)


def repeated_messages(world):
    """Messages of the same kinds again and again, so that kernels receive them, among others that do not fit."""
    n, me = world.size, world.rank
    right, left = (me + 1) % n, (me - 1) % n
    for i in range(40):
        for count in (1, 700, 9000):
            out = np.zeros(count)
            x = np.arange(count) + 100.0 * i + me
            got, source = hpcdp.sendrecv(x, right, None if i % 3 == 0 else left, out, 5, world), left
            if i % 3 == 0:
                got, source = got
            assert got is out and source == left
            np.testing.assert_array_equal(out, np.arange(count) + 100.0 * i + left)
        if i % 5 == 0:  # another tag first, another shape, another dtype
            hpcdp.isend(np.arange(3), right, 6, world).wait()
            hpcdp.isend(np.full((2, 2), me, "c8"), right, 5, world).wait()
            assert (hpcdp.recv(None, left, 5, world) == np.full((2, 2), left, "c8")).all()
            assert hpcdp.recv(np.zeros(3, int), left, 6, world).tolist() == [0, 1, 2]
            hpcdp.isend(np.full(4, me), right, 7, world).wait()
            with pytest.raises(MismatchError):
                hpcdp.recv(np.zeros(4), left, 7, world)
        hpcdp.isend(np.full((i % 2, 3), me, "i2"), right, 8, world).wait()
        assert hpcdp.recv(None, left, 8, world).shape == (i % 2, 3)


@pytest.mark.parametrize("nodes", [None, 2])
def test_repeated_messages(nodes):
    for n in (1, 2, 3) if nodes is None else (3, 4):
        thread_comm.run(n, repeated_messages, nodes)


@pytest.mark.mpi
def test_real_ranks_repeat_messages():
    repeated_messages(hpcdp.init())


@pytest.mark.mpi(min_size=2)
def test_real_ranks_keep_both_parts_of_a_message_together():
    """Two threads send and receive at once, and a receive that ends at Ctrl-C loses its own message alone."""
    part, count = hpcdp.init().split(0), 25_000
    part.kept.pop(Mailbox)  # as between hosts

    def send(first, several=60):
        for i in range(several):
            hpcdp.send(np.full(count, first + i, "i4"), 1, world=part)

    def receive(several=60):
        received = [hpcdp.recv(np.empty(count, "i4"), 0, world=part) for _ in range(several)]
        assert all((x == x[0]).all() for x in received)
        return [int(x[0]) for x in received]

    with ThreadPoolExecutor(2) as pool:
        if part.rank == 0:
            send(-3, 3)
            list(pool.map(send, (0, 60)))
            time.sleep(0.2)
            send(-4, 4)
        elif part.rank == 1:
            assert receive(3) == [-3, -2, -1]
            both = [pool.submit(receive) for _ in range(2)]
            assert sorted(both[0].result() + both[1].result()) == list(range(120))
            quick = part.kept["short messages"]["recv", 0, 0, (count,), np.dtype("i4")]
            usual = quick._wait

            def ends_when_it_is_here(requests, x):
                while not requests[0].test():
                    pass
                raise KeyboardInterrupt

            quick._wait = ends_when_it_is_here
            with pytest.raises(KeyboardInterrupt):
                receive(1)
            quick._wait = usual
            assert receive(3) == [-3, -2, -1]
    part.close()


def test_a_receive_of_a_world_that_has_been_closed_is_refused():
    def rank(world):
        part = world.split(0)
        for _ in range(3):
            hpcdp.sendrecv(np.zeros(2), 1 - part.rank, 1 - part.rank, np.zeros(2), world=part)
        part.close()
        with pytest.raises(ConfigError):
            hpcdp.send(np.zeros(2), 0, world=part)
        with pytest.raises(ConfigError):
            hpcdp.recv(np.zeros(2), 0, world=part)

    thread_comm.run(2, rank)


def test_a_receive_into_memory_that_ranks_share_is_refused_also_when_repeated():
    def rank(world):
        other = 1 - world.rank
        memory = world.node_memory.alloc((8,), np.float64)
        for _ in range(2):
            hpcdp.sendrecv(np.zeros(8), other, other, np.zeros(8), world=world)
        if world.rank == 0:
            hold_together(memory, 2)
        hpcdp.barrier(world)
        hpcdp.send(np.zeros(8), other, world=world)
        with pytest.raises(HpcdpError):
            hpcdp.recv(memory[:], other, world=world)
        hpcdp.recv(None, other, world=world)
        hpcdp.barrier(world)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("count", [0, 3, 15_351, 15_355, 15_356, 15_360, 16_384, 30_000, 40_000])
def test_messages_between_nodes_are_sent_again_and_others_come_between(count):
    def rank(world):
        me, other = world.rank, 1 - world.rank
        x, out, small = np.arange(count, dtype=np.float32) + me, np.empty(count, np.float32), np.empty(2, np.int64)
        expected = np.arange(count) + other
        for call in range(4):
            for sends in (me == 0, me == 1):
                if sends:
                    hpcdp.send(x, other, 1, world)
                    hpcdp.send(np.full(2, call), other, 1, world)
                else:
                    assert (hpcdp.recv(out, other, 1, world) == expected).all()
                    assert (hpcdp.recv(small, other, 1, world) == call).all()
            out.fill(0)
            assert (hpcdp.sendrecv(x, other, other, out, 2, world) == expected).all()
        hpcdp.send(np.full(2, 7), other, 1, world)
        hpcdp.send(x, other, 1, world)
        with pytest.raises(MismatchError, match="out"):
            hpcdp.recv(out, other, 1, world)  # of another shape than the messages before
        with pytest.raises(MismatchError, match="out"):
            hpcdp.recv(small, other, 1, world)
        with pytest.raises(MismatchError, match=r"^sendrecv"):
            if me == 0:
                hpcdp.send(small, other, 2, world)
                hpcdp.sendrecv(small, other, other, small, 2, world)
            else:
                hpcdp.sendrecv(x, other, other, out, 2, world)
                hpcdp.send(x, other, 2, world)
        small, out = np.empty(2, np.int64), np.empty(count, np.float32)
        assert (hpcdp.sendrecv(x, other, other, out, 1, world) == expected).all()

    thread_comm.run(2, rank, 1)
