"""Which way a node's ranks sum on their GPUs follows from what all of them offer, and is alike on all."""

import os
from dataclasses import replace

import pytest
from raises import raises

from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets import transport
from hpcdp.comm.gpu_buckets.transport import GpuTransport, Offer, choose
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import cpu, gpu
from hpcdp.errors import DeviceError

A, B = Offer("0000:3b:00.0", "a", 22501), Offer("0000:af:00.0", "b", 22501)


@pytest.mark.parametrize(
    ("found", "way", "why"),
    [
        ([A], GpuTransport.ALONE, "one rank"),
        ([A, B], GpuTransport.NCCL, "a GPU of its own"),
        ([A, Offer()], GpuTransport.HOST, "local rank 1 has no GPU"),
        ([A, replace(B, nccl=0)], GpuTransport.HOST, "local rank 1 has no NCCL; pip install"),
        ([A, replace(B, nccl=22304)], GpuTransport.HOST, "different versions of NCCL, 22304 and 22501"),
        ([A, replace(B, shares_memory=False)], GpuTransport.HOST, "share no host memory"),
        ([A, B, replace(A, pid=8)], GpuTransport.GROUPS, "CUDA IPC among the ranks of each GPU, NCCL between the GPUs"),
        ([A, replace(B, nccl=0), replace(A, pid=8)], GpuTransport.HOST, "local rank 1 has no NCCL"),
        ([A, B, A], GpuTransport.HOST, "its ranks are threads of one process"),
        ([A, B, replace(A, uuid="c", pid=8)], GpuTransport.HOST, "local ranks 0 and 2 have instances of one GPU (MIG)"),
        ([A, replace(A, pid=8), replace(A, pid=9)], GpuTransport.CUDA_IPC, "all ranks share one GPU"),
        ([A, replace(A, pid=8), A], GpuTransport.HOST, "its ranks are threads of one process"),
        ([A, replace(A, uuid="c")], GpuTransport.HOST, "local ranks 0 and 1 have instances of one GPU (MIG)"),
    ],
)
def test_what_is_chosen_and_why(found, way, why):
    chosen, said = choose(found)
    assert chosen is way and why in said


def test_ranks_on_one_gpu_are_refused_to_nccl_by_its_place_on_the_bus():
    transport.refuse_shared([A, B])
    with raises(DeviceError, operation="NCCL", where="GPU 0000:3b:00.0", expected="GPU", got=["ranks 0", 2]):
        transport.refuse_shared([A, B, A])


def test_ranks_that_slurm_has_bound_to_one_gpu_each_have_different_ones(gpus_on_host, monkeypatch):
    def visible():
        rank = gpus_on_host.process()[-1]
        return (Gpu(0, "NVIDIA A", f"0000:0{rank}:00.0", rank),)

    monkeypatch.setattr(comm_world, "visible", visible)

    def rank(world):
        found = transport.offers(world.node_comm, transport.own_offer(gpu(0), shares_memory=True))
        return [each.bus_id for each in found], choose(found)[0]

    assert thread_comm.run(2, rank) == [(["0000:00:00.0", "0000:01:00.0"], GpuTransport.NCCL)] * 2


def test_who_computes_on_the_cpu_offers_nothing(monkeypatch):
    assert transport.own_offer(cpu(0), shares_memory=True) == Offer()


def test_ranks_that_are_threads_of_one_process_have_one_number(gpus_on_host, monkeypatch):
    monkeypatch.setattr(comm_world, "visible", lambda: (Gpu(0, "NVIDIA A", "0000:00:00.0", "a"),))
    monkeypatch.setattr(transport, "getpid", os.getpid)

    def rank(world):
        return choose(transport.offers(world.node_comm, transport.own_offer(gpu(0), shares_memory=True)))[0]

    assert thread_comm.run(2, rank) == [GpuTransport.HOST] * 2
