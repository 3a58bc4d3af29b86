"""The benchmark of split layers computes what it times."""

import json

import bench_tensor_parallel as tensor_parallel
from hpcdp.comm import thread_comm


def test_the_split_model_and_that_of_one_rank_train_alike():
    found = thread_comm.run(3, lambda world: tensor_parallel.measure(world, 12, 8, 2))[0]
    assert found["loss_difference"] < 1e-6
    assert found["limit"] == found["alone_s"] / (found["alone_s"] / 3 + found["allreduce_s"])
    assert min(found["split_s"], found["alone_s"], found["allreduce_s"], found["speedup"]) > 0


def test_its_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "pin_to_own_core", lambda world: 0)  # other tests need the other cores
    path = tmp_path / "figures.json"
    assert tensor_parallel.main(["--batch", "8", "5", "--width", "8", "-i", "1", "--json", str(path)]) == 0
    assert "784-8-8-10 split over 1 ranks" in capsys.readouterr().out
    figures = json.loads(path.read_text())["figures"]
    assert list(figures) == ["8", "5"] and figures["8"]["limit"] == 1
