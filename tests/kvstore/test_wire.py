"""Messages of asynchronous stores: what is sent arrives, and whatever else arrives is refused and breaks nothing."""

import math
import os
import random

import numpy as np
import pytest
from raises import raises

from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import ENDED
from hpcdp.errors import HpcdpError, MismatchError
from hpcdp.kvstore import server_loop
from hpcdp.kvstore.serve import serve
from hpcdp.kvstore.server_keys import AWAY, BACK, Requests
from hpcdp.kvstore.server_loop import DTYPES, HEADER_NBYTES, REQUESTS, Message, MessageKind, decode, following_nbytes

MESSAGES = 100_000 if os.environ.get("HPCDP_TEST_THOROUGH") else 20_000


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in DTYPES])
def test_what_is_sent_arrives(dtype):
    payload = np.arange(7).astype(dtype)
    sent = Message(
        MessageKind.PUSH, store=3, key=70000, part=2, request=2**40, ticket=5, number=-1, rate=0.25, which=9,
        coded=True,
        payload=payload,
    )  # fmt: skip
    got = decode(*_whole(sent))
    assert got.payload.dtype == payload.dtype and (got.payload == payload).all()
    got.payload = sent.payload = None
    assert got == sent
    assert decode(*_whole(Message.of_text(MessageKind.FAILED, "naïve"))).text() == "naïve"
    assert decode(*_whole(Message(MessageKind.PULL))).payload.size == 0


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda m: m[: HEADER_NBYTES - 1], {"expected": 64, "got": 63}),
        (lambda m: m[:0], {"expected": 64, "got": 0}),
        (lambda m: _with(m, 0, 0), {"expected": 1}),
        (lambda m: _with(m, 4, 9), {"expected": 1, "got": 9}),
        (lambda m: _with(m, 5, 99), {"got": 99}),
        (lambda m: _with(m, 6, 200), {"got": 200}),
        (lambda m: m[:-1], {"expected": "float32", "got": 11}),
    ],
)
def test_what_is_no_message_is_refused(change, fields):
    with raises(MismatchError, operation="key-value store message", **fields):
        decode(change(Message(MessageKind.PUSH, payload=np.ones(3, "f4")).encode()[0]))


@pytest.mark.parametrize("count", [15_343, 15_344, 15_345, 100_003])
def test_a_long_payload_follows_in_pieces(count):
    payload = np.arange(count, dtype="f4")
    first, following = Message(MessageKind.PUSH, payload=payload).encode()
    assert bool(following) == (count > 15_344)  # 60 KB less a header
    assert following_nbytes(first) == sum(piece.nbytes for piece in following) == payload.nbytes * bool(following)
    assert all(piece.nbytes <= 60 << 10 and np.shares_memory(piece, payload) for piece in following)
    rest = np.concatenate(following) if following else None
    assert (decode(first, rest).payload == payload).all()
    if rest is not None:
        for wrong in (None, rest[:-4]):
            with raises(MismatchError, operation="key-value store message", got=payload.nbytes):
                decode(first, wrong)
        assert following_nbytes(_with(first, 58, 0xFF)) == 0  # too much


def _whole(message):
    first, following = message.encode()
    return first, np.concatenate(following) if following else None


def _with(message, place, value):
    message[place] = value
    return message


KEYS = [(4, np.dtype("f4")), (8, np.dtype("f8")), (1, np.dtype("i8"))]


def random_messages(rng, count):
    """Valid messages, some of them changed in a few bytes, cut or made longer; and noise."""
    for _ in range(count):
        key, part, ticket = rng.choices([0, 0, 0, 1, 2, 9], k=3)
        size, dtype = KEYS[key % 3]
        if rng.random() < 0.2:
            size, dtype = rng.randrange(9), rng.choice(DTYPES)
        message = Message(
            rng.choice(list(MessageKind)),
            store=rng.choice([0, 1, 1, 1, 2]),
            key=key,
            part=part,
            request=rng.randrange(2**40),
            ticket=ticket - 1,
            number=rng.choice([0, 1, -5, AWAY, BACK]),
            rate=rng.choice([0.1, math.nan, math.inf, -1.0]),
            which=rng.choice([0, 1, 2**32 - 1]),
            coded=rng.random() < 0.1,
            payload=np.frombuffer(rng.randbytes(size * dtype.itemsize), dtype),
        ).encode()[0]
        kind = rng.randrange(4)
        if kind == 1:
            for _ in range(3):
                message[rng.randrange(message.size)] = rng.randrange(256)
        elif kind == 2:
            message = message[: rng.randrange(message.size + 1)].copy()
        elif kind == 3:
            message = np.frombuffer(rng.randbytes(rng.randrange(200)), np.uint8)
        yield message


@pytest.fixture
def table():
    """That of a store of floats of two kinds and a counter, with an optimizer that has a state."""
    found = []

    def one(world):
        store = kvstore.create("dist_async", world, staleness=1)
        store.init([0, 1, 2], [np.zeros(count, dtype) for count, dtype in KEYS])
        store.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
        found.append(store._table)

    thread_comm.run(2, one)
    return found[0]


def test_random_messages(table):
    """Each is refused by an error of ours, is not due yet, or is answered; and values are those of valid pushes."""
    rng, requests = random.Random(11), Requests(table)
    refused = answered = waits = 0
    for message in random_messages(rng, MESSAGES):
        before = message.copy()
        try:
            answer = requests.answer(rng.randrange(2), decode(message))()
        except HpcdpError:
            refused += 1
            continue
        finally:
            assert (message == before).all()
        waits += answer is None
        answered += answer is not None
        assert answer is None or answer.kind is MessageKind.DONE
    assert refused > 0.3 * MESSAGES and answered > 0.01 * MESSAGES and waits > 0
    for item in table.by_number:
        cell = item.cells[0]
        assert cell.flat.dtype == item.dtype and cell.flat.size == item.count
        cell.read(lambda flat: None)  # is whole, and its lock is free


def test_a_server_survives_what_strangers_send():
    """Between noise from a worker, the pushes of another are served."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        store.set_optimizer(optim.SGD(lr=1.0))
        owner = store._table.items["w"].parts[0].server
        if world.rank != owner:
            rng = random.Random(world.rank)
            for message in random_messages(rng, 500):
                try:
                    kind = decode(message).kind
                except MismatchError:
                    kind = None
                may_be_valid = kind in (
                    MessageKind.PUSH,
                    MessageKind.PUSHPULL,
                    MessageKind.WRITE_STATE,
                    MessageKind.COMMAND,
                    MessageKind.LEAVE,
                )
                if not may_be_valid and not following_nbytes(message):  # who announces more must send it
                    store._server.comm.isend(message, owner, REQUESTS).wait()
            for _ in range(10):
                store.push("w", np.full(4, -1.0))
        store.barrier()
        return store.pull("w").wait().tolist()

    assert thread_comm.run(3, one, 1) == [[20.0] * 4] * 3


def test_tags_are_all_different():
    """Servers of their own share a communicator with the message by which workers end."""
    following = [tag + server_loop._FOLLOWING for tag in (server_loop.REQUESTS, server_loop.ANSWERS)]
    assert len({server_loop.REQUESTS, server_loop.ANSWERS, ENDED, *following}) == 5


@pytest.mark.parametrize("ranks_per_node", [1, None])
def test_long_values_reach_servers_of_their_own(ranks_per_node):
    """In pieces, many under way at once."""

    def one(world):
        store = kvstore.create("dist_async", world)
        keys = list(range(4))
        store.init(keys, [np.zeros(100_000, "f4") for _ in keys])
        store.set_optimizer(optim.SGD(lr=1.0))
        for turn in range(3):
            for key in keys:
                store.push(key, np.full(100_000, -(key + 1.0), "f4"))
            found = [np.asarray(each) for each in store.pull(keys)]
            for key, value in zip(keys, found, strict=True):
                assert (value == value[0]).all() and value[0] >= (turn + 1) * (key + 1)
        store.barrier()
        return [float(each[0]) for each in store.pull(keys)]

    found = thread_comm.run(3, one, ranks_per_node, num_servers=2, serve=serve)
    assert found == [[9.0 * (key + 1) for key in range(4)]] * 3
