import math

import pytest
from raises import raises

from hpcdp import optim
from hpcdp.errors import ConfigError


def rates(schedule: optim.Schedule, steps: int) -> list[float]:
    return [schedule.learning_rate(step) for step in range(1, steps + 1)]


TORCH = {
    "step": (optim.StepSchedule(0.4, every=3, factor=0.5), lambda lrs, o: lrs.StepLR(o, 3, 0.5)),
    "multistep": (optim.MultiStepSchedule(0.4, (2, 7), 0.1), lambda lrs, o: lrs.MultiStepLR(o, [2, 7], 0.1)),
    "exponential": (optim.ExponentialSchedule(0.4, 0.9), lambda lrs, o: lrs.ExponentialLR(o, 0.9)),
    "cosine": (optim.CosineSchedule(0.4, 10, 0.1), lambda lrs, o: lrs.CosineAnnealingLR(o, 10, 0.1)),
}


@pytest.mark.parametrize("name", TORCH)
def test_same_rates_as_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: torch's schedules are not compared")
    schedule, make = TORCH[name]
    peer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(torch.optim.lr_scheduler, peer)
    expected = []
    for _ in range(10):
        expected.append(scheduler.get_last_lr()[0])
        peer.step()
        scheduler.step()
    assert rates(schedule, 10) == pytest.approx(expected)


def test_values() -> None:
    assert rates(optim.ConstantSchedule(0.5), 3) == [0.5] * 3
    assert rates(optim.StepSchedule(1.0, 2, 0.5), 5) == [1, 1, 0.5, 0.5, 0.25]
    assert rates(optim.MultiStepSchedule(1.0, [1, 3], 0.5), 5) == [1, 0.5, 0.5, 0.25, 0.25]
    assert rates(optim.ExponentialSchedule(1.0, 0.25, every=2), 3) == pytest.approx([1, 0.5, 0.25])
    cosine = optim.CosineSchedule(1.0, 4, 0.2)
    middle = [0.2 + 0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates(cosine, 7) == pytest.approx([*middle, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    "schedule",
    [*(TORCH[name][0] for name in ("step", "exponential", "cosine")), optim.WarmupSchedule(TORCH["multistep"][0], 5)],
)
@pytest.mark.parametrize("step", [0, -3])
def test_no_update_has_a_number_below_one(schedule: optim.Schedule, step: int) -> None:
    with raises(ConfigError, operation="learning_rate", where="step", expected=1, got=step):
        schedule.learning_rate(step)


def test_warmup_scales_any_schedule_and_keeps_its_steps() -> None:
    inner = optim.StepSchedule(1.0, every=4, factor=0.5)
    assert rates(optim.WarmupSchedule(inner, 4), 9) == pytest.approx([0.25, 0.5, 0.75, 1, 0.5, 0.5, 0.5, 0.5, 0.25])
    assert rates(optim.WarmupSchedule(inner, 2, start=0.5), 3) == pytest.approx([0.75, 1, 1])
    assert optim.WarmupSchedule(inner.config(), 4) == optim.WarmupSchedule(inner, 4)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: optim.ConstantSchedule(-1), {"operation": "ConstantSchedule", "where": "lr"}),
        (lambda: optim.StepSchedule(0.1, 0), {"operation": "StepSchedule", "where": "every", "expected": 1, "got": 0}),
        (lambda: optim.StepSchedule(0.1, 2.5), {"operation": "StepSchedule", "where": "every"}),
        (
            lambda: optim.MultiStepSchedule(0.1, (5, 2)),
            {"operation": "MultiStepSchedule", "where": "milestones", "got": (5, 2)},
        ),
        (
            lambda: optim.MultiStepSchedule(0.1, 5),
            {"operation": "MultiStepSchedule", "where": "milestones", "expected": "list", "got": 5},
        ),
        (lambda: optim.CosineSchedule(0.1, 0), {"operation": "CosineSchedule", "where": "steps"}),
        (lambda: optim.CosineSchedule(0.1, 5, math.nan), {"operation": "CosineSchedule", "where": "final_lr"}),
        (lambda: optim.WarmupSchedule(0.1, 5), {"operation": "schedule", "expected": ["dict", "name"], "got": 0.1}),
        (
            lambda: optim.WarmupSchedule(optim.ConstantSchedule(1), 5, 1.5),
            {"operation": "WarmupSchedule", "where": "start", "expected": "[0, 1]"},
        ),
    ],
)
def test_wrong_values_are_refused(make, fields: dict[str, object]) -> None:
    with raises(ConfigError, **fields):
        make()


def test_a_variant_does_not_replace_what_it_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "_schedules", optim._schedules.copy())

    class Restarted(optim.CosineSchedule):
        def learning_rate(self, step: int) -> float:
            return super().learning_rate((step - 1) % self.steps + 1)

    config = optim.SGD(optim.CosineSchedule(0.5, 10)).config()
    assert type(optim.from_config(config).lr) is optim.CosineSchedule
    varied = optim.SGD(Restarted(0.5, 10))
    assert varied.learning_rate(11) == 0.5
    varied.take_config(config)  # that of its own state, as a checkpoint has it
    assert varied.learning_rate(11) == 0.5


@pytest.mark.parametrize(
    "schedule",
    [
        optim.ExponentialSchedule(1e-6, factor=1.1),
        optim.StepSchedule(1e-6, every=7, factor=3.0),
        optim.MultiStepSchedule(1e-6, tuple(range(1, 400)), factor=10.0),
    ],
)
def test_a_rate_that_grows_beyond_all_numbers_is_refused_by_name(schedule: optim.Schedule) -> None:
    for rate in (schedule, optim.WarmupSchedule(schedule, 5)):
        assert optim.SGD(rate).learning_rate(50) > 1e-6
        with raises(ConfigError, operation="SGD", where="lr", expected=0, got="inf"):
            optim.SGD(rate).learning_rate(100_000)
