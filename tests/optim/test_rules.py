"""The rules' numbers: against torch.optim where it is installed, always against the papers' formulas in float64."""

import numpy as np
import pytest
from raises import raises

from hpcdp import optim

CASES = {
    "sgd": (optim.SGD(0.1), {"lr": 0.1}),
    "decay": (optim.SGD(0.1, weight_decay=0.01), {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (
        optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "nesterov": (
        optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "adam": (
        optim.Adam(0.01, beta1=0.8, beta2=0.99, weight_decay=0.1),
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    ),
    "adamw": (optim.AdamW(0.01, weight_decay=0.3), {"lr": 0.01, "weight_decay": 0.3}),
}


def run(optimizer: optim.Optimizer, dtype: type, steps: int = 12, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(5)
    param = rng.standard_normal(257).astype(dtype)
    state = optimizer.init_state(param)
    for step in range(1, steps + 1):
        grad = rng.standard_normal(257).astype(dtype)
        optimizer.update(param, grad, state, step=step, scale=scale)
    return param


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_torch(case: str, dtype: type) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: the numbers of torch.optim are not compared")
    optimizer, args = CASES[case]
    rng = np.random.default_rng(5)
    param = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(257).astype(dtype)))
    peer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(case, torch.optim.SGD)([param], **args)
    for _ in range(12):
        param.grad = torch.from_numpy(0.25 * rng.standard_normal(257).astype(dtype))
        peer.step()
    ours = run(optimizer, dtype, scale=0.25)
    np.testing.assert_allclose(ours, param.detach().numpy(), rtol=2e-6 if dtype == np.float32 else 1e-13, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_the_formulas(case: str) -> None:
    optimizer, args = CASES[case]
    rng = np.random.default_rng(5)
    p = rng.standard_normal(257)
    lr, decay = args["lr"], args.get("weight_decay", 0.0)
    m, v, mu = np.zeros(257), np.zeros(257), args.get("momentum", 0.0)
    for t in range(1, 13):
        g = 0.25 * rng.standard_normal(257)
        if case.startswith("adam"):
            b1, b2 = args.get("betas", (0.9, 0.999))
            if case == "adamw":
                p = p - lr * decay * p
            else:
                g = g + decay * p
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            p = p - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        else:
            g = g + decay * p
            m = mu * m + g
            p = p - lr * (g + mu * m if args.get("nesterov") else m)
    np.testing.assert_allclose(run(optimizer, np.float64, scale=0.25), p, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(run(optimizer, np.float32, scale=0.25), p, rtol=1e-4, atol=1e-5)


def test_scale_comes_before_momentum_and_decay() -> None:
    param, grad = np.array([2.0]), np.array([8.0])
    optimizer = optim.SGD(1.0, momentum=0.5, weight_decay=0.25)
    state = optimizer.init_state(param)
    optimizer.update(param, grad, state, step=1, scale=0.125)
    assert state["momentum"][0] == 8.0 * 0.125 + 0.25 * 2.0
    assert param[0] == 2.0 - 1.5


def test_state_is_named_flat_and_zero() -> None:
    param = np.ones(3, np.float32)
    assert optim.SGD(0.1).init_state(param) == {}
    for optimizer, names in ((optim.SGD(0.1, 0.9), ["momentum"]), (optim.AdamW(), ["m", "v"])):
        state = optimizer.init_state(param)
        assert list(state) == names
        for value in state.values():
            assert value.shape == (3,) and value.dtype == np.float32 and not value.any()


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: optim.SGD(-0.1), {"operation": "SGD", "where": "lr", "expected": 0, "got": -0.1}),
        (lambda: optim.SGD(float("nan")), {"operation": "SGD", "where": "lr", "got": "nan"}),
        (lambda: optim.SGD(float("inf")), {"operation": "SGD", "where": "lr", "got": "inf"}),
        (lambda: optim.SGD("0.1"), {"operation": "SGD", "where": "lr", "got": "'0.1'"}),
        (lambda: optim.SGD(True), {"operation": "SGD", "where": "lr", "got": True}),
        (lambda: optim.SGD(10**400), {"operation": "SGD", "where": "lr"}),
        (lambda: optim.SGD([0.1]), {"operation": "SGD", "where": "lr"}),
        (lambda: optim.SGD(0.1, momentum=9), {"operation": "SGD", "where": "momentum", "expected": [0, 1], "got": 9}),
        (lambda: optim.SGD(0.1, nesterov=True), {"operation": "SGD", "where": "nesterov", "expected": 0}),
        (lambda: optim.SGD(0.1, weight_decay=-1), {"operation": "SGD", "where": "weight_decay", "got": -1}),
        (lambda: optim.Adam(beta2=1.0), {"operation": "Adam", "where": "beta2"}),
        (lambda: optim.AdamW(eps=-1.0), {"operation": "AdamW", "where": "eps"}),
    ],
)
def test_wrong_values_are_refused(make, fields: dict[str, object]) -> None:
    from hpcdp.errors import ConfigError

    with raises(ConfigError, **fields):
        make()
