"""Where the ranks of ``hpcdp train`` compute."""

import threading

import pytest
from raises import raises
from rows_on_gpus import reference_kernels

from hpcdp import cli, kernels
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import cpu
from hpcdp.errors import ConfigError
from hpcdp.train import run
from hpcdp.train.config import TrainConfig
from hpcdp.train.run import choose_device, described

A, B = (Gpu(i, f"NVIDIA {'AB'[i]}", f"0000:{i:02x}:00.0", str(i)) for i in range(2))


def chosen(n, **settings):
    return [repr(each) for each in thread_comm.run(n, lambda world: choose_device(TrainConfig(**settings), world))]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ["gpu(0)", "gpu(1)", "gpu(0)"]),
        ({"device": "gpu"}, ["gpu(0)", "gpu(1)", "gpu(0)"]),
        ({"device": "cpu"}, ["cpu(0)"] * 3),
        ({"reproducible": True}, ["cpu(0)"] * 3),
        ({"work_load": "measured"}, ["cpu(0)"] * 3),
    ],
)
def test_ranks_take_the_gpus_that_there_are(gpus_on_host, monkeypatch, settings, wanted):
    monkeypatch.setattr(comm_world, "visible", lambda: (A, B))
    assert chosen(3, **settings) == wanted


def test_all_ranks_compute_on_the_host_where_one_has_no_gpu(gpus_on_host, monkeypatch):
    monkeypatch.setattr(comm_world, "device_of", lambda place: cpu() if place == 2 else comm_world.gpu(place))
    assert chosen(3) == ["cpu(0)"] * 3
    with raises(ConfigError, operation="setting device", expected=["GPU", "CuPy"]):
        chosen(3, device="gpu")


@pytest.mark.parametrize(("seen", "setting", "share"), [((A,), None, 0.3), ((A,), "50%", None), ((A, B), None, 0.45)])
def test_ranks_that_share_a_gpu_share_its_memory(gpus_on_host, monkeypatch, seen, setting, share):
    monkeypatch.setattr(comm_world, "visible", lambda: seen)
    monkeypatch.setattr(run.os, "getpid", threading.get_ident)  # thread ranks are one process, with one pool
    if setting:
        monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", setting)
    chosen(3)
    by_gpu = sorted(gpus_on_host.limits.values())
    wanted = {0.3: [(0, 0.3)] * 3, 0.45: [(0, 0.45)] * 2, None: []}[share]
    assert by_gpu == [(index, pytest.approx(part)) for index, part in wanted]


@pytest.mark.parametrize("settings", [{"reproducible": True}, {"work_load": "measured"}])
def test_what_gpus_cannot_do_is_named(settings):
    with raises(ConfigError, operation="setting device", got="gpu"):
        TrainConfig(device="gpu", **settings)


def test_the_report_names_each_gpu_once(gpus_on_host, monkeypatch):
    monkeypatch.setattr(comm_world, "visible", lambda: (A, B))
    assert thread_comm.run(3, lambda world: described(world.device, world)) == ["1 x NVIDIA A, 1 x NVIDIA B"] * 3
    assert thread_comm.run(2, lambda world: described(cpu(), world)) == [None] * 2


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(comm_world, "visible", lambda: ())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "mlp", "--device", "gpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "got no GPU visible to CUDA's driver; use a machine with a GPU, or --device cpu" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [{}, {"kv_store": "device"}], ids=str)
def test_a_whole_run_on_a_gpu(gpus_on_host, monkeypatch, tmp_path, capsys, settings):
    monkeypatch.setattr(comm_world, "visible", lambda: (A,))
    monkeypatch.setattr(kernels, "_for_cuda", reference_kernels)  # CUDA's are tested for themselves, and slow here
    monkeypatch.chdir(tmp_path)

    def one(world):
        monkeypatch.setattr(run, "init", lambda: world)
        return run.run(
            TrainConfig(
                model="mlp", epochs=1, warmup_epochs=0.0, batch_size=200, device="gpu", hybridize=False, **settings
            )
        )

    (result,) = thread_comm.run(1, one)
    assert result["test_accuracy"] > 0.15
    assert "GPUs           1 x NVIDIA A" in capsys.readouterr().out
