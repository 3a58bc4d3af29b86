"""Asynchronous calls on GPUs: threads of the engine compute on the GPU of the operands, by the caller's stream."""

import numpy as np
import pytest
from gpu_on_host import on_new_stream

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.core.arrays import Device, Streams, gpu

X = np.random.default_rng(3).standard_normal((5, 6)).astype("f4")


def network():
    return nn.models.mlp(6, 4, hidden=(8,), seed=1)


@pytest.mark.parametrize("engine", ["", "synchronous"])
def test_they_go_to_the_gpu_and_the_stream_of_the_caller(gpus_on_host, monkeypatch, engine):
    monkeypatch.setenv("HPCDP_ENGINE", engine)
    gpu(1).use()
    net, there, start = network().to(gpu(1)), gpu(1).put(X), gpu(1).put(np.zeros_like(X))
    wanted = network()
    gpus_on_host.contexts.clear()
    with on_new_stream(Streams(gpu(1))), autograd.asynchronous(threads=2):
        for step in range(3):
            start[...] = there  # given to the stream, which is late
            with autograd.record():
                y = net(start) * 2
                again = net(start) + y
            assert y.data.device.id == 1
            again.backward()
            with autograd.record():
                head = wanted(X + step) * 3
            head.backward()
            np.testing.assert_allclose(again.data.to_host(), head.data, rtol=1e-5, atol=1e-6)
            for mine, param in zip(net.parameters(), wanted.parameters(), strict=True):
                np.testing.assert_allclose(mine.grad.to_host(), param.grad, rtol=1e-4, atol=1e-5)
            there += 1
    assert gpus_on_host.contexts == {1}


def test_calls_on_several_gpus_go_to_each(gpus_on_host):
    gpu(1).use()
    with autograd.asynchronous():
        found = [Tensor(gpu(index).put(X)) * 2 + 1 for index in (1, 2, 1, 3)]
    assert [Device.of(each.data) for each in found] == [gpu(1), gpu(2), gpu(1), gpu(3)]
    for each in found:
        np.testing.assert_array_equal(each.data.to_host(), X * 2 + 1)
