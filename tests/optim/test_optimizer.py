import json

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import optim
from hpcdp.errors import ArrayMixError, ConfigError, UnsupportedError

ALL = [
    optim.SGD(0.1),
    optim.SGD(0.1, momentum=0.9, weight_decay=1e-4),
    optim.SGD(0.1, momentum=0.9, nesterov=True),
    optim.Adam(),
    optim.AdamW(optim.WarmupSchedule(optim.CosineSchedule(0.1, 50), 5)),
]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: f"{optimizer.name}-{optimizer.state_names()}")
def test_any_split_gives_the_same_bits(optimizer: optim.Optimizer) -> None:
    rng = np.random.default_rng(3)
    whole = rng.standard_normal(1009).astype(np.float32)
    cut = whole.copy()
    whole_state, cut_state = optimizer.init_state(whole), optimizer.init_state(cut)
    for step in range(1, 5):
        grad = rng.standard_normal(1009).astype(np.float32)
        optimizer.update(whole, grad, whole_state, step=step, scale=1 / 3)
        for start, stop in ((0, 3), (3, 3), (3, 340), (340, 1009)):
            pieces = {name: value[start:stop] for name, value in cut_state.items()}
            optimizer.update(cut[start:stop], grad[start:stop], pieces, step=step, scale=1 / 3)
    assert whole.tobytes() == cut.tobytes()
    assert all(whole_state[name].tobytes() == cut_state[name].tobytes() for name in whole_state)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: f"{optimizer.name}-{optimizer.state_names()}")
def test_a_device_gets_the_same_bits_in_place(optimizer: optim.Optimizer, dtype: type) -> None:
    rng = np.random.default_rng(4)
    host = rng.standard_normal(33).astype(dtype)
    buffer = standin.asarray(np.concatenate([host, host]))
    device = buffer[33:]
    host_state, device_state = optimizer.init_state(host), optimizer.init_state(device)
    untouched = host.copy()
    for step in range(1, 4):
        grad = rng.standard_normal(33).astype(dtype)
        optimizer.update(host, grad, host_state, step=step, scale=0.3)
        optimizer.update(device, standin.asarray(grad), device_state, step=step, scale=0.3)
    both = buffer.to_host()
    assert both[33:].tobytes() == host.tobytes() and both[:33].tobytes() == untouched.tobytes()
    assert list(device_state) == list(host_state)
    for name, value in device_state.items():
        assert value.to_host().tobytes() == host_state[name].tobytes()


def test_host_and_device_do_not_mix() -> None:
    param = standin.asarray(ones(3))
    with pytest.raises(ArrayMixError):
        optim.SGD(0.1).update(param, ones(3), {}, step=1)
    with pytest.raises(ArrayMixError):
        optim.SGD(0.1).update(ones(3), param, {}, step=1)
    with raises(UnsupportedError, operation="sgd.update", expected=(3,), got=(4,)):
        optim.SGD(0.1).update(param, standin.asarray(ones(4)), {}, step=1)


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: f"{optimizer.name}-{optimizer.state_names()}")
def test_config_travels_as_json(optimizer: optim.Optimizer) -> None:
    config = json.loads(json.dumps(optimizer.config()))
    again = optim.from_config(config)
    assert again == optimizer and type(again) is type(optimizer)
    name = config.pop("name")
    assert optim.create(name, **config) == optimizer


def test_numbers_of_numpy_become_plain_ones() -> None:
    optimizer = optim.SGD(np.float32(0.5), momentum=np.float64(0.25))
    assert json.dumps(optimizer.config()) == json.dumps(optim.SGD(0.5, 0.25).config())


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(0.25), np.int64(2)])
def test_numbers_of_numpy_that_are_assigned_travel_as_json(value: np.generic) -> None:
    optimizer = optim.SGD(optim.StepSchedule(0.5, every=3), momentum=0.25)
    optimizer.momentum = optimizer.lr.lr = optimizer.lr.every = value
    assert json.loads(json.dumps(optimizer.config()))["momentum"] == value
    optimizer.lr = value
    assert json.dumps(optimizer.config()["lr"]) == json.dumps(value.item())


def test_a_schedule_drives_the_rate() -> None:
    optimizer = optim.SGD(optim.StepSchedule(1.0, every=2, factor=0.5))
    param = np.zeros(1)
    moved = []
    for step in range(1, 6):
        before = param[0]
        optimizer.update(param, np.ones(1), {}, step=step)
        moved.append(before - param[0])
    assert moved == [1.0, 1.0, 0.5, 0.5, 0.25]
    optimizer.lr = 3.0
    assert optimizer.learning_rate(99) == 3.0
    optimizer.lr = float("nan")
    with raises(ConfigError, operation="SGD", where="lr"):
        optimizer.update(param, np.ones(1), {}, step=6)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda: optim.create("sdg", lr=1), {"operation": "optimizer", "got": "sdg"}),
        (
            lambda: optim.create("sgd", lr=1, moment=0.9),
            {"operation": "optimizer", "where": "sgd", "expected": "weight_decay", "got": "moment"},
        ),
        (lambda: optim.create("sgd"), {"operation": "optimizer", "where": "sgd", "expected": "argument"}),
        (lambda: optim.from_config({"lr": 1.0}), {"operation": "optimizer", "expected": ["dict", "name"]}),
        (lambda: optim.from_config(["sgd"]), {"operation": "optimizer", "expected": ["dict", "name"]}),
        (
            lambda: optim.from_config({"name": ["sgd"]}),
            {"operation": "optimizer", "expected": "adam", "got": "['sgd']"},
        ),
        (lambda: optim.from_config({"name": "sgd", "lr": {"name": "cos"}}), {"operation": "schedule", "got": "cos"}),
    ],
)
def test_errors_list_what_is_valid(call, fields: dict[str, object]) -> None:
    with raises(ConfigError, **fields) as caught:
        call()
    assert "\n" not in str(caught.value)


def ones(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("param", "grad", "fields"),
    [
        (
            ones(4, dtype=np.float16),
            ones(4, dtype=np.float16),
            {"where": "dtype", "expected": ["float32", "float64"], "got": "float16"},
        ),
        (ones(4), ones(4, dtype=np.float64), {"expected": "float32", "got": [(4,), "float64"]}),
        (ones(4), ones(5), {"expected": (4,), "got": (5,)}),
        (ones(2, 2), ones(2, 2), {"got": (2, 2)}),
        (ones(8)[::2], ones(4), {"got": (8,)}),
        (ones(4), ones(8)[::2], {"got": (8,)}),
    ],
)
def test_arrays_that_cannot_be_updated_are_refused_untouched(
    param: np.ndarray, grad: np.ndarray, fields: dict[str, object]
) -> None:
    state = {"momentum": np.zeros(param.shape, param.dtype)}
    with raises(UnsupportedError, operation="sgd.update", **fields):
        optim.SGD(0.1, momentum=0.9).update(param, grad, state, step=1)
    assert (param == 1).all() and not state["momentum"].any()


def test_other_faults_of_a_call() -> None:
    with raises(ConfigError, operation="sgd.update", where="state", expected="momentum", got=["m", "v"]):
        optim.SGD(0.1, momentum=0.9).update(ones(2), ones(2), {"m": ones(2), "v": ones(2)}, step=1)
    with raises(ConfigError, operation="adam.update", where="step", expected=1, got=0):
        optim.Adam().update(ones(2), ones(2), {"m": ones(2), "v": ones(2)}, step=0)
    with pytest.raises(ArrayMixError):
        optim.SGD(0.1).update([1.0], [2.0], {}, step=1)


def test_a_large_state_begins_with_a_cache_line() -> None:
    param = np.ones(1 << 18, np.float32)
    states = [optim.Adam().init_state(param) for _ in range(2)]
    arrays = [array for state in states for array in state.values()]
    assert all(array.ctypes.data % 64 == 0 and not array.any() for array in arrays)
    arrays[0][...] = 1
    assert not any(array.any() for array in arrays[1:])
