"""Operators that return at once: how long that takes, what runs side by side, and how much memory waits.

    python examples/asynchronous.py --size 1500 --number 12

Three experiments: calls one after the other against calls that return at once; results copied out while the next ones
are computed; and the memory of what is under way, with a bound and with a wait in each turn. More cores help more.
"""

import os
import time

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdp import autograd
from hpcdp.autograd import Tensor
from hpcdp.launch.parser import Program, at_least


def product(x):
    """About as long as a layer."""
    return (x @ x).tanh()


def know_shapes(x):
    """The first call of each kind waits; afterwards shapes are known."""
    autograd.waitall()
    product(x).sum().wait_to_read()


def seconds(call):
    """Of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def queue_and_wait(xs):
    """Until the calls have returned, and until they are computed, in seconds; calls one after the other beside."""
    one_by_one = seconds(lambda: [product(x).wait_to_read() for x in xs])
    with autograd.asynchronous():
        know_shapes(xs[0])
        began = time.perf_counter()
        results = [product(x).sum() for x in xs]
        queued = time.perf_counter() - began
        total = sum(result.item() for result in results)
        return one_by_one, queued, time.perf_counter() - began, total


def copy_meanwhile(xs, outs):
    """All computed, then copied; and each copied while the next ones are computed; in seconds."""
    with autograd.asynchronous(threads=1):
        know_shapes(xs[0])

        def first_all():
            results = [product(x) for x in xs]
            autograd.waitall()
            for result, out in zip(results, outs, strict=True):
                np.copyto(out, result.data)

        def as_they_come():
            for result, out in zip([product(x) for x in xs], outs, strict=True):
                np.copyto(out, result.data)

        return seconds(first_all), seconds(as_they_come)


def most_under_way(x, number, bound, wait):
    """How many MB of results that nobody has read lay in memory at most."""
    with autograd.asynchronous(threads=1, max_inflight=bound):
        know_shapes(x)
        under_way, most = [], 0
        for _ in range(number):
            under_way.append(product(x))
            if wait:
                autograd.waitall()
            under_way = [result for result in under_way if result.call.computed is None]
            most = max(most, len(under_way))
        return most * x.data.nbytes / 1e6


def main(size, number):
    """Print the figures."""
    xs = [Tensor(np.random.default_rng(i).normal(size=(size, size)).astype(np.float32)) for i in range(number)]
    one_by_one, queued, done, total = queue_and_wait(xs)
    print(f"{number} products, waiting for each: {one_by_one:.3f} s")
    print(f"asynchronous: all calls have returned after {queued:.3f} s, all results are computed after {done:.3f} s")
    print(f"the sum of all results is {total:.3f}")
    all_first, meanwhile = copy_meanwhile(xs, [np.empty_like(x.data) for x in xs])
    print(f"all computed, then copied: {all_first:.3f} s; each copied while others are computed: {meanwhile:.3f} s")
    for bound, wait in ((64, False), (4, False), (64, True)):
        said = "waiting after each call" if wait else f"max_inflight={bound}"
        print(f"most memory of unfinished results, {said}: {most_under_way(xs[0], number, bound, wait):.1f} MB")


if __name__ == "__main__":
    parser = Program(description="three measurements of asynchronous operators")
    parser.add_argument("--size", type=at_least(1), default=1000, help="rows of each square matrix")
    parser.add_argument("--number", type=at_least(1), default=20, help="number of products")
    with parser.settings() as args, threadpool_limits(1):
        print(f"{len(os.sched_getaffinity(0))} cores, one BLAS thread")
        main(args.size, args.number)
