"""GPUs are asked of CUDA's driver, here of a library that takes its place; each rank has one, in turn."""

import importlib.util
import shutil
import subprocess
from dataclasses import replace

import pytest
from gpu_on_host import cuda_driver
from raises import raises

from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Driver, Gpu
from hpcdp.core.arrays import cpu, gpu
from hpcdp.errors import DeviceError

TWO = "0000:3B:00.0 NVIDIA H200;0000:AF:00.0 NVIDIA H200 NVL"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc, which makes the library that takes the driver's place")
    return str(cuda_driver.build(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def seen(monkeypatch):
    """Let this process see so many GPUs, or be without CuPy."""

    def see(count, cupy=True):
        found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", f"{i:032x}") for i in range(count))
        monkeypatch.setattr(comm_world, "visible", lambda: found)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy else None)

    return see


def test_the_driver_tells_each_gpu(library, monkeypatch):
    monkeypatch.setenv(cuda_driver.GPUS, TWO)
    driver = Driver(library)
    assert driver.version() == "12.8"
    assert driver.gpus() == (
        Gpu(0, "NVIDIA H200", "0000:3b:00.0", "64" * 16),
        Gpu(1, "NVIDIA H200 NVL", "0000:af:00.0", "65" * 16),
    )


def test_a_driver_without_gpus(library, monkeypatch):
    monkeypatch.setenv(cuda_driver.GPUS, "")
    assert Driver(library).gpus() == ()


def test_a_driver_that_does_not_start_says_why(library, monkeypatch):
    monkeypatch.setenv(cuda_driver.GPUS, "broken")
    with raises(DeviceError, operation="CUDA's driver", where="cuInit", got=999):
        Driver(library)


def test_no_driver_is_no_gpu(monkeypatch):
    with raises(DeviceError, operation="CUDA's driver", expected="libnone.so", got="libnone.so"):
        Driver("libnone.so.1")
    monkeypatch.setattr(comm_world, "LIBRARY", "libnone.so.1")
    assert comm_world.visible.__wrapped__() == ()


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char* to, unsigned room) { strncpy(to, "580.65.06", room); return 0; }
"""
OF_THE_KERNEL = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  Thu Jan 23\n",
)


@pytest.mark.parametrize(("text", "release"), [*zip(OF_THE_KERNEL, ["535.104.05", "570.86.15"], strict=True)])
def test_the_release_of_the_driver_itself(tmp_path, monkeypatch, text, release):
    monkeypatch.setattr(comm_world, "MANAGEMENT_LIBRARY", "libnone.so.1")
    monkeypatch.setattr(comm_world, "KERNEL_MODULE", tmp_path / "version")
    assert comm_world.driver_release() == "unknown"
    (tmp_path / "version").write_text(text)
    assert comm_world.driver_release() == release
    if shutil.which("gcc"):
        library = tmp_path / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=NVML, text=True, check=True)
        monkeypatch.setattr(comm_world, "MANAGEMENT_LIBRARY", str(library))
        assert comm_world.driver_release() == "580.65.06"


@pytest.mark.parametrize(
    ("count", "devices"),
    [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])],
    ids=["one a rank", "fewer than ranks", "each rank bound to its own"],
)
def test_the_ranks_of_a_machine_take_the_gpus_in_turn(count, devices, seen):
    seen(count)
    assert thread_comm.run(4, lambda world: world.device) == [gpu(index) for index in devices]
    assert thread_comm.run(4, lambda world: world.device, ranks_per_node=2) == [gpu(index) for index in devices]


def test_parts_of_a_world_keep_their_gpus(seen):
    seen(4)

    def rank(world):
        part = world.split(world.rank % 2)
        return world.device, part.device, part.split(part.rank).device

    for number, found in enumerate(thread_comm.run(4, rank)):
        assert found == (gpu(number),) * 3


def test_without_gpus_or_without_cupy_ranks_compute_on_the_cpu(seen):
    for settings in ((0, True), (2, False)):
        seen(*settings)
        assert thread_comm.run(2, lambda world: world.device) == [cpu(0)] * 2


def test_nobody_asks_before_a_device_is_wanted(monkeypatch):
    monkeypatch.setattr(comm_world, "visible", pytest.fail)
    thread_comm.run(2, lambda world: replace(world, rank=0).barrier())


@pytest.mark.mpi
def test_real_ranks_know_their_place_on_the_machine(monkeypatch):
    import hpcdp

    world = hpcdp.init()
    assert sorted(world.comm.allgather_json(world.place)) == list(range(world.size))
    assert world.split(world.rank % 2).place == world.place
