"""The two experiments of "Dive into Deep Learning", 12.5 and 12.6: devices, ranks and stores compute the same."""

import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from started import EXAMPLES, start

import hpcdp
from hpcdp import data
from hpcdp.comm import thread_comm


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


SCRATCH, CONCISE = module("data_parallel_from_scratch"), module("data_parallel_concise")


def digits(split: str, count: int, image_size: int | None = None, dtype=np.float32) -> data.ArrayDataset:
    x, y = data.load("digits", split, image_size=image_size)[:count]
    return data.ArrayDataset(x.astype(dtype), y)


def devices(number: int) -> list[hpcdp.Device]:
    return [hpcdp.cpu(index) for index in range(number)]


def from_scratch(ranks: int, per_rank: int) -> np.ndarray:
    """Losses and accuracies of all ranks, in float64, where what rounding adds stays below 1e-12."""
    initial = SCRATCH.initial_params
    # Batches of 13, 13 and 2: uneven over any number of devices, and the last one leaves some without samples.
    sets = [digits(split, 28, image_size=28, dtype=np.float64) for split in ("train", "test")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SCRATCH, "initial_params", lambda seed: [param.astype(np.float64) for param in initial(seed)])
        return np.array(
            thread_comm.run(ranks, lambda world: SCRATCH.train(world, devices(per_rank), *sets, 2, 13, 0.05))
        )


@pytest.fixture(scope="module")
def one_device() -> np.ndarray:
    return from_scratch(1, 1)[0]


@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 2), (1, 3), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_lenet_from_scratch_learns_the_same_on_any_devices(ranks: int, per_rank: int, one_device: np.ndarray) -> None:
    for curve in from_scratch(ranks, per_rank):
        np.testing.assert_allclose(curve, one_device, rtol=1e-10)


def concise(ranks: int, per_rank: int, store: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """All learned values of every rank, and every rank's losses and accuracies, after two steps."""
    sets = digits("train", 25), digits("test", 12)
    found = thread_comm.run(ranks, lambda world: CONCISE.train(world, devices(per_rank), *sets, 1, 15, 0.02, store))
    values = [np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()]) for net, _ in found]
    return np.array(values), np.array([curve for _, curve in found])


@pytest.fixture(scope="module", autouse=True)
def thin_resnet18() -> Iterator[None]:
    """The same layers with fewer channels, for speed; tests/nn/test_models.py has those of the document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcdp.nn.models._WIDTHS", (4, 6, 8, 12))
        yield


@pytest.fixture(scope="module")
def two_ranks() -> tuple[np.ndarray, np.ndarray]:
    return concise(2, 1)


def test_resnet18_learns_the_same_on_two_devices_and_on_two_ranks(two_ranks: tuple[np.ndarray, np.ndarray]) -> None:
    values, _ = concise(1, 2)
    for own in two_ranks[0]:
        np.testing.assert_allclose(own, values[0], atol=2e-5)


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
def test_resnet18_learns_the_same_on_a_store(store: str, two_ranks: tuple[np.ndarray, np.ndarray]) -> None:
    values, curve = concise(2, 1, store)
    np.testing.assert_allclose(values, two_ranks[0], atol=2e-5)
    np.testing.assert_allclose(curve, two_ranks[1], rtol=1e-3)


def test_lenet_from_scratch_starts_with_one_command_and_learns() -> None:
    shown = start("data_parallel_from_scratch.py", 1, "--devices", "2", "--epochs", "1")
    said = (
        r"epoch 1: loss \d\.\d{4}, test accuracy (0\.\d{4})\n\d+\.\d s an epoch; 1 rank, each on cpu\(0\), cpu\(1\)\n"
    )
    assert float(re.fullmatch(said, shown)[1]) > 0.8


def test_resnet18_starts_with_one_command(monkeypatch) -> None:
    small = {split: digits(split, 20) for split in ("train", "test")}
    monkeypatch.setattr(data, "load", lambda name, split, image_size: small[split])
    shown = start("data_parallel_concise.py", 1, "--kv-store", "device", "--epochs", "1")
    said = r"epoch 1: test loss \d+\.\d{4}, test accuracy [01]\.\d{4}\n\d+\.\d s an epoch; 1 rank, each on cpu\(0\)\n"
    assert re.fullmatch(said, shown)
