"""The benchmark of pipelines computes what it times."""

import json

import numpy as np
import pytest
from raises import raises

import bench_pipeline as pipeline
import bench_tensor_parallel as tensor_parallel
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError


def test_the_pipeline_and_one_rank_train_alike():
    found = thread_comm.run(3, lambda world: pipeline.measure(world, 12, 8, [1, 5], "1f1b", 2))[0]
    assert found[1]["limit"] == 1 and found[5]["limit"] == pytest.approx(15 / 7)
    for each in found.values():
        assert each["loss_difference"] < 1e-6
        assert min(each["pipeline_s"], each["alone_s"], each["speedup"]) > 0


def test_micro_batches_are_at_most_as_many_as_samples():
    found = thread_comm.run(2, lambda world: pipeline.measure(world, 3, 8, [100], "1f1b", 1))[0]
    assert found[100]["limit"] == 2 * 3 / (3 + 1)


@pytest.mark.parametrize("benchmark", [pipeline, tensor_parallel])
def test_losses_that_are_not_numbers_are_wrong(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "pin_to_own_core", lambda world: 0)
    losses = iter([1.0, 1.0, np.nan, 1.0] + [1.0] * 99)
    monkeypatch.setattr(benchmark, "trainer_of", lambda *_: lambda x, y: next(losses))
    assert benchmark.main(["--batch", "8", "-i", "1"]) == 1


def test_its_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "pin_to_own_core", lambda world: 0)  # other tests need the other cores
    path = tmp_path / "figures.json"
    assert pipeline.main(["--batch", "8", "--width", "8", "--micro-batches", "2", "-i", "1", "--json", str(path)]) == 0
    assert "1 stages of 4 layers of 8, batches of 8" in capsys.readouterr().out
    assert json.loads(path.read_text())["figures"]["2"]["limit"] == 1
    with raises(ConfigError, operation="pipeline --micro-batches"):
        pipeline.main(["--micro-batches", "2,x"])
