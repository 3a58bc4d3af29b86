"""Devices: what is put on one, and brought to where something else is, is there, and comes behind what made it."""

import importlib
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_on_host import on_new_stream
from raises import raises

from hpcdp.core.arrays import Device, Streams, cpu, from_host, gpu, lie_together, to_device_of
from hpcdp.errors import DeviceError


def of(values):
    return importlib.import_module("cupy").asarray(np.array(values, "f4"))


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_copy_on_another_gpu_comes_behind_what_made_it_and_before_what_changes_it(gpus_on_host, contiguous):
    gpu(1).use()
    x, ones, twos = of([[0, 0], [0, 0]]), of([[1, 1], [1, 1]]), of([[2, 2], [2, 2]])
    x = x if contiguous else x.T
    with on_new_stream(Streams(gpu(1))):
        x[...] = ones
        gpu(2).use()
        there = Streams(gpu(2)).stream()
        with there:
            copy = gpu(2).put(x)
        gpu(1).use()
        x[...] = twos
        there.synchronize()
    assert copy.to_host().tolist() == [[1, 1], [1, 1]] and Device.of(copy) == gpu(2)


def test_a_share_of_memory(gpus_on_host):
    gpu(1).use()
    gpu(2).limit_memory(0.25)
    cpu().limit_memory(0.5)
    assert list(gpus_on_host.limits.values()) == [(2, 0.25)]
    with raises(RuntimeError, operation="limit_memory", where="gpu(1)", expected=[0, 1], got=25):
        gpu(1).limit_memory(25)


def test_a_driver_that_is_too_old_for_cupy_is_told_with_what_to_install(monkeypatch):
    def refused():
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    runtime = SimpleNamespace(getDeviceCount=refused, driverGetVersion=lambda: 12080, runtimeGetVersion=lambda: 13000)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(DeviceError) as caught:
        gpu(0).use()
    assert caught.value.expected == "a driver for CUDA 13.0, which this CuPy needs"
    assert caught.value.got == "a driver for CUDA up to 12.8"
    assert "pip install 'hpcdp[cuda12]', or make with CUDA=cuda12" in caught.value.remedy
    runtime.driverGetVersion = lambda: 0  # there is none
    with raises(DeviceError, operation="device", where="gpu(0)", expected=["NVIDIA", "GPU"]):
        gpu(0).use()


@pytest.mark.parametrize("limit", ["lots", "-1", "50 MB", "%", "1e9", "120%"])
def test_a_limit_of_memory_that_cupy_cannot_read_is_told_by_its_name(limit, gpus_on_host, monkeypatch):
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", limit)
    with raises(DeviceError, operation="device", where="CUPY_GPU_MEMORY_LIMIT", got=limit):
        gpu(0).use()


@pytest.mark.parametrize("limit", ["", "1000000", "50%", "12.5%", "100%", " 50% ", " "])
def test_a_limit_of_memory_is_as_cupy_reads_it(limit, gpus_on_host, monkeypatch):
    """It takes no blanks behind percent, and an empty one for a number."""
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", limit)
    gpu(0).use()
    assert os.environ.get("CUPY_GPU_MEMORY_LIMIT") == (limit.strip() or None)


def test_kernels_of_cupy_that_others_may_write_are_not_loaded(gpus_on_host, monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    with raises(DeviceError, operation="device", where=f"CuPy's kernel cache {tmp_path}/cache") as caught:
        gpu(0).use()
    assert f"kernel cache {tmp_path}/cache" in str(caught.value.where)
    assert caught.value.got == f"{tmp_path}, which every user may write"  # the line may be cut
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    gpu(0).use()


def test_where_cupy_is_not_installed_it_is_told_how(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with raises(
        DeviceError, operation="device", where="gpu(0)", got="CuPy", remedy=["'hpcdp[cuda13]'", "hpcdp.cpu(0)"]
    ):
        gpu(0).use()


def test_what_is_brought_is_where_the_other_is(gpus_on_host):
    gpu(1).use()
    x, y = of([1, 2]), of([3, 4])
    gpu(2).use()
    assert to_device_of(x, y) is x and lie_together(x, y)
    for like in (x, gpu(3).put(x)):
        copies = (
            to_device_of(np.ones(2, "f4"), like),
            from_host(np.ones(2, "f4"), like),
            to_device_of(gpu(4).put(y), like),
        )
        assert all(lie_together(each, like) for each in copies)
    host = to_device_of(x, np.ones(2))
    assert host.tolist() == [1, 2] and lie_together(host, cpu(1).put(x)) and not lie_together(host, x)


def test_numbers_of_devices_may_be_numpys():
    assert cpu(np.int64(1)) == cpu(1) and repr(gpu(np.uint8(2))) == "gpu(2)"
    for wrong in (-1, np.int64(-1), 1.0, True, "0", None):
        with raises(DeviceError, operation="device", expected=0):
            cpu(wrong)
