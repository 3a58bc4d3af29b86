"""The character LSTM and ResNet-18 get the same losses here and in PyTorch, from the same weights."""

import importlib.util

import pytest

import bench_train_models as train_models
from hpcdp.comm import thread_comm

HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "batch"), [("char_lstm", 3), ("resnet18", 2)])
def test_against_torch_where_it_is_installed(model: str, batch: int) -> None:
    found = thread_comm.run(1, lambda world: train_models.against_torch(world, model, batch, 1, 0.01))[0]
    assert set(found["samples_s"]) == ({"hpcdp", "torch"} if HAS_TORCH else {"hpcdp"})
    assert min(found["samples_s"].values()) > 0
    if HAS_TORCH:
        assert found["ratio"] > 0
        assert found["loss_difference"] < train_models.LOSS_TOLERANCE
    else:
        assert found["ratio"] is None
